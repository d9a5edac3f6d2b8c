"""Import from Hugging Face reads JSON and safetensors only: no file can run code."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[4] / "megatron_dsa/extras/huggingface"
#: Modules that unpickle objects of any class.
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "joblib", "marshal", "shelve", "cloudpickle", "yaml"}
UNSAFE_CALLS = {
    "torch.load", "numpy.load", "np.load", "eval", "exec", "compile", "__import__",
    "importlib.import_module", "torch.jit.load", "torch.package.PackageImporter",
}  # fmt: skip
#: transformers' methods that may run code of a folder.
UNSAFE_METHODS = {"from_pretrained"}


def unsafe(source: str) -> list[str]:
    """Return a source's calls that may run code of files."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            method = node.func.attr if isinstance(node.func, ast.Attribute) else None
            if name in UNSAFE_CALLS or method in UNSAFE_METHODS:
                found.append(name)
            continue
        else:
            continue
        found += [m for m in modules if m.split(".")[0] in UNSAFE_MODULES or m in UNSAFE_CALLS]
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.stem)
def test_no_module_reads_pickles(path):
    assert unsafe(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import load",
        "import torch\ntorch.load('x', weights_only=True)",
        "from torch import load",
        "import numpy as np\nnp.load('x')",
        "AutoConfig.from_pretrained('x', trust_remote_code=True)",
        "eval('1')",
    ],
)
def test_the_check_finds_them(source):
    assert unsafe(source)
