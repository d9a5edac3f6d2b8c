"""Packaging of megatron-dsa; everything but the dependencies is in pyproject.toml's tools."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(
    r'__version__ = "([^"]+)"', (HERE / "megatron_dsa" / "__init__.py").read_text()
).group(1)

REPORT = ["tensorboard>=2.18", "matplotlib>=3.9", "jinja2>=3"]
DATA = ["pyarrow>=17", "transformers>=5", "jinja2>=3"]
TEST = [
    *(
        "build>=1",
        "hypothesis>=6",
        "mypy>=1.15",
        "pytest>=8",
        "pytest-xdist>=3",
        "pyyaml>=6",
        "ruff>=0.6",
    ),
    "safetensors>=0.6",
    *REPORT,
]

setup(
    name="megatron-dsa",
    version=VERSION,
    description="DeepSeek sparse attention for released Megatron-Core wheels",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["megatron_dsa", "megatron_dsa.*"]),
    package_data={
        "megatron_dsa": ["py.typed"],
        "megatron_dsa.extras.report": ["page.html"],
        "": ["README.md"],
    },
    entry_points={"console_scripts": ["megatron-dsa = megatron_dsa.__main__:main"]},
    python_requires=">=3.12",
    install_requires=["torch>=2.6", "numpy", "packaging"],
    extras_require={
        # The operations, eager or registered (megatron_dsa.extras.torch_library), without a host.
        "torch": ["torch>=2.6"],
        # The host: Megatron-Core with its training loop.
        "train": ["megatron-core>=0.19,<0.21", "omegaconf>=2.3", "psutil", "pyyaml>=6"],
        # Megatron's fused linears and norms.
        "te": ["transformer-engine[pytorch]>=2.6"],
        # cuDNN's sparse-attention kernels (Hopper and Blackwell).
        "cudnn": ["nvidia-cudnn-frontend[cutedsl]>=1.30"],
        # This package's own Hopper kernels.
        "tilelang": ["tilelang>=0.1.15"],
        # FlashAttention 4, for dense attention where it is named (with CUDA 13: also
        # flash-attn-4[cu13]).
        "flash-attention-4": ["flash-attn-4>=4.0.0b36"],
        # Kernels of Kimi Delta Attention.
        "kda": ["fla-core>=0.6"],
        # --optimizer muon.
        "muon": ["emerging-optimizers>=0.3,<1"],
        # Checkpoints of Hugging Face.
        "hf": ["safetensors>=0.6"],
        # Tokenizers of Hugging Face, chat templates (--sft), and parquet files for prepare-data.
        "data": DATA,
        # --wandb-project.
        "wandb": ["wandb>=0.18"],
        # The command report.
        "report": REPORT,
        "test": TEST,
    },
    classifiers=[
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
