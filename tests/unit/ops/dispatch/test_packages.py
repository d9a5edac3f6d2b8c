"""Version guards: the exact message for every version of a package, and the generated table."""

import importlib.util
import re
import types

import pytest
import torch

from megatron_dsa.extras import cli
from megatron_dsa.extras.info import support_table
from megatron_dsa.ops import OPERATIONS
from megatron_dsa.ops.dense_attention import flash2
from megatron_dsa.ops.dense_attention.spec import DENSE_ATTENTION
from megatron_dsa.ops.dispatch import Policy, packages
from megatron_dsa.ops.dispatch.operation import forget_choices
from megatron_dsa.ops.dispatch.packages import CUDNN, FLASH_ATTENTION_4, FLASH_MLA
from megatron_dsa.ops.dispatch.support import OpCall
from megatron_dsa.ops.sparse_attention.spec import FORWARD

INSTALL = "pip install 'nvidia-cudnn-frontend[cutedsl]>=1.30'"
WRONG = {
    "1.25": "before 1.25: no indexer kernels on Hopper; ",
    "1.26": "before 1.26: indexer masks aligned to the bottom right, global index ids by default; ",
    "1.27": "before 1.27: gradients around 1e11 on Hopper when heads are no multiple of 64; ",
    "1.29": "before 1.29: -1 ids, empty rows and topk_length wrong on Hopper: writes out of "
    "bounds; ",
    "1.30": "before 1.30: race in the indexer's key gradient on Hopper",
}


def op_call(operation="sparse_attention_backward", capability=(9, 0)):
    index = operation.startswith("indexer") or operation == "sparse_indexer_loss"
    dims = {"heads": 64, "qk_dim": 128, "v_dim": 0} if index else {}
    dims = dims or {"heads": 64, "qk_dim": 576, "v_dim": 512}
    device = "cpu" if capability is None else "cuda"
    return OpCall(device, capability, torch.bfloat16, topk=2048, **dims)


def cudnn(operation="sparse_attention_backward"):
    return next(c for c in OPERATIONS[operation].candidates if c.name == "cudnn")


@pytest.fixture
def install(monkeypatch):
    """Imitate an environment with exactly these distributions."""

    def pretend(**versions):
        versions = {name.replace("_", "-"): version for name, version in versions.items()}
        monkeypatch.setattr(packages, "installed_version", versions.get)
        monkeypatch.setattr(importlib.util, "find_spec", lambda _name: types.SimpleNamespace())
        monkeypatch.setattr(packages, "import_error", lambda _module: None)

    return pretend


def expected_for(version: str) -> str:
    minor = int(version.split(".")[1])
    wrong = "".join(text for fix, text in WRONG.items() if int(fix.split(".")[1]) > minor)
    return f"too old: nvidia-cudnn-frontend {version} found, >= 1.30 needed ({wrong}); {INSTALL}"


@pytest.mark.parametrize("version", ["1.24.0", "1.25.0", "1.26.1", "1.27.0", "1.28.0", "1.29.0"])
def test_old_cudnn_says_what_was_wrong_with_it(install, version):
    install(nvidia_cudnn_frontend=version, nvidia_cutlass_dsl="9.9")
    assert cudnn().reason(op_call()) == expected_for(version)


@pytest.mark.parametrize("version", ["1.30.0", "1.31.0", "1.32.0", "1.40.0"])
def test_new_cudnn_is_taken(install, version):
    install(nvidia_cudnn_frontend=version, nvidia_cutlass_dsl="4.8.0")
    for operation in OPERATIONS:
        names = [c.name for c in OPERATIONS[operation].candidates]
        if "cudnn" not in names or operation in ("dense_indexer_loss", "indexer_topk"):
            continue
        assert cudnn(operation).reason(op_call(operation)) is None, operation
    remark = CUDNN.untested()
    assert (remark is None) == (version != "1.40.0")
    assert remark is None or "doctor" in remark


@pytest.mark.parametrize(
    ("version", "wrong"),
    [
        ("1.30.0", "before 1.31: top-k cannot break ties by index; "),
        ("1.31.0", ""),
    ],
)
def test_an_operation_may_need_more_than_the_package(install, version, wrong):
    install(nvidia_cudnn_frontend=version, nvidia_cutlass_dsl="4.8.0")
    last = "before 1.32: no deterministic top-k, no workspace with the fp32 key gradient on Hopper"
    assert cudnn("indexer_topk").reason(op_call("indexer_topk")) == (
        f"too old: nvidia-cudnn-frontend {version} found, >= 1.32 needed ({wrong}{last}); "
        "pip install 'nvidia-cudnn-frontend[cutedsl]>=1.32'"
    )


@pytest.mark.parametrize(
    ("version", "dsl", "message"),
    [
        ("1.30.0", "4.6.1", "needs nvidia-cutlass-dsl >= 4.6.2, found 4.6.1"),
        ("1.32.0", "4.7.0", "needs nvidia-cutlass-dsl >= 4.8.0, found 4.7.0"),
        ("1.32.0", None, "needs nvidia-cutlass-dsl >= 4.8.0, found none"),
    ],
)
def test_what_the_package_itself_needs(install, version, dsl, message):
    install(nvidia_cudnn_frontend=version, **({"nvidia_cutlass_dsl": dsl} if dsl else {}))
    assert cudnn().reason(op_call()) == (
        f"incomplete: nvidia-cudnn-frontend {version} {message}; {INSTALL}"
    )


def test_missing_unknown_and_wrong_gpu(install, monkeypatch):
    install()
    assert cudnn().reason(op_call()) == (
        "unknown version: cudnn can be imported but nvidia-cudnn-frontend is not installed as a "
        f"distribution, so its version cannot be compared; {INSTALL}"
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert cudnn().reason(op_call()) == f"missing: cudnn is not installed; {INSTALL}"
    flashmla = FORWARD.candidates[0]
    assert flashmla.reason(op_call()) == f"missing: flash_mla is not installed; {FLASH_MLA.install}"
    for capability, words in (((8, 0), "a GPU of compute capability 8.0"), (None, "the CPU")):
        assert cudnn().reason(op_call(capability=capability)) == (
            f"wrong GPU: this is {words}, cudnn has kernels for compute capability 9.0, 10.0"
        )


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """Install modules with these sources, on a machine with a GPU."""

    def write(**sources):
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source)

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    packages.import_error.cache_clear()
    forget_choices()
    yield write
    packages.import_error.cache_clear()
    forget_choices()


@pytest.mark.parametrize("error", ["ImportError('undefined symbol: x')", "OSError('no libz3')"])
def test_a_package_that_does_not_import_is_left_out(error, broken, caplog):
    """As kernels that were built for another torch; the log names the error."""
    broken(flash_mla=f"raise {error}")
    kind, text = error[:-2].split("('")
    flashmla = next(c for c in FORWARD.candidates if c.name == "flashmla")
    assert flashmla.reason(op_call()) == (
        f"broken: flash_mla cannot be imported ({kind}: {text}); reinstall it: {FLASH_MLA.install}"
    )
    choice = FORWARD.choose(op_call(), Policy(workspace_bytes=2**21))
    assert choice.candidate.name != "flashmla"
    assert f"{kind}: {text}" in caplog.text


def test_flash_attention_2_that_does_not_import_is_left_out(broken, monkeypatch):
    broken(flash_attn="raise ImportError('undefined symbol: x')", flash_attn_2_cuda="")
    monkeypatch.setattr(flash2, "installed_version", lambda _name: "2.8.3")
    (candidate,) = (c for c in DENSE_ATTENTION.candidates if c.name == "flash2")
    call = OpCall("cuda", (9, 0), torch.bfloat16, heads=16, qk_dim=128, v_dim=128)
    assert candidate.reason(call) == (
        "broken: flash_attn cannot be imported (ImportError: undefined symbol: x); reinstall it"
    )


def test_the_table_lists_every_implementation(capsys):
    assert cli.main(["info", "--support-table"]) == 0
    page = capsys.readouterr().out
    assert page == support_table() + "\n"
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## )", page, re.M | re.S))
    assert list(sections) == list(OPERATIONS)
    for name, operation in OPERATIONS.items():
        names = re.findall(r"^\| (\w[\w-]*) \|", sections[name], re.M)
        assert names == ["implementation", *(c.name for c in operation.candidates)]
    for package in (CUDNN, FLASH_ATTENTION_4, FLASH_MLA):
        assert f"**{package.module}**: " in page
