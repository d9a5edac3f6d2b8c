"""transformer-engine that is installed but fails to import: commands report it and go on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import python_path

REPOSITORY = Path(__file__).resolve().parents[3]
#: Failure -> the broken files of the installation, and the message.
BROKEN = {
    "a library is missing": (
        {"transformer_engine/__init__.py": "raise OSError('libnccl.so.2: cannot open')",
         "transformer_engine_torch.py": ""},
        "transformer-engine cannot be imported (OSError: libnccl.so.2: cannot open)",
    ),
    "built for another torch": (
        {"transformer_engine/pytorch/__init__.py": "import transformer_engine_torch",
         "transformer_engine_torch.py": "raise ImportError('undefined symbol: x')"},
        "transformer-engine cannot be imported (ImportError: undefined symbol: x)",
    ),
    "the meta package alone": (
        {"transformer_engine/__init__.py": "raise RuntimeError('Found empty meta package')"},
        "transformer-engine without its PyTorch extension",
    ),
    "without the extension": (
        {"transformer_engine/pytorch/__init__.py": "raise FileNotFoundError('no shared object')"},
        "transformer-engine without its PyTorch extension",
    ),
}  # fmt: skip
#: As with a GPU: consumers of transformer-engine are imported.
ON_GPU = """
import torch
torch.cuda.is_available = lambda: True
# megatron-core 0.20 reads both when it is imported.
torch.cuda.get_device_name = lambda *_: "a GPU"
torch.cuda.get_device_capability = lambda *_: (9, 0)
from megatron_dsa.patches import cpu_host
cpu_host.hide_unusable_transformer_engine()
from megatron_dsa.versions import why_not_transformer_engine
import megatron.core.optimizer.clip_grads
import megatron.core.models.gpt.gpt_layer_specs
from megatron.core import fp8_utils
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import mlp
from megatron.core.transformer.moe import moe_utils
print(fp8_utils.HAVE_TE, layers.HAVE_TE, mlp.HAVE_TE, moe_utils.HAVE_TE)
print(why_not_transformer_engine(True))
"""


@pytest.fixture(params=BROKEN.values(), ids=list(BROKEN))
def broken(request, tmp_path):
    """Return the environment with such an installation, and its message."""
    files, said = request.param
    empty = {"transformer_engine/__init__.py": "", "transformer_engine/pytorch/__init__.py": ""}
    metadata = "Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.20.2\n"
    files = empty | {"transformer_engine-2.20.2.dist-info/METADATA": metadata} | files
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return os.environ | {"PYTHONPATH": python_path(tmp_path)}, said


def run(arguments, environment):
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=REPOSITORY, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip


def test_megatron_runs_without_it_on_a_gpu(broken):
    """Megatron handles only a missing package."""
    environment, said = broken
    result = run(["-c", ON_GPU], environment)
    assert result.returncode == 0, result.stderr
    seen, reason = result.stdout.splitlines()[-2:]
    assert seen == "False False False False"
    assert reason.startswith(said)


def test_a_dry_run_without_a_gpu_does_not_import_it(broken):
    """The planner imports Megatron, which would."""
    environment, _ = broken
    job = (
        "-m megatron_dsa.pretrain --dsa-dry-run --dsa-dry-run-gpu h100 --dsa-model v3.2-tiny "
        "--vocab-size 257 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 "
        "--global-batch-size 1 --train-iters 1 --lr 1e-3 --bf16"
    )
    result = run(job.split(), environment | {"CUDA_VISIBLE_DEVICES": ""})
    assert result.returncode == 0, result.stderr
    assert "plan for 1 x" in result.stdout
