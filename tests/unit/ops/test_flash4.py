"""FlashAttention 4: rejected calls with reasons, and on a GPU results against float64.

On the CPU a made-up package is installed: metadata and the called functions.
"""

import importlib
import re
import sys

import pytest
import torch

from megatron_dsa.dsa_kernels import dense_attention
from megatron_dsa.errors import ImplementationError
from megatron_dsa.extras import cli
from megatron_dsa.extras.info import collect_info
from megatron_dsa.ops.dense_attention import flash4
from megatron_dsa.ops.dense_attention.spec import DENSE_ATTENTION
from megatron_dsa.ops.dispatch import Policy, describe_call, packages, report, reset_report
from megatron_dsa.ops.dispatch.packages import import_error
from megatron_dsa.ops.dispatch.support import OpCall
from megatron_dsa.ops.layout.layout import bshd_layout, packed_layout
from megatron_dsa.versions import is_before, module_exists, optional_version
from tests.cases.ring import Case, expected
from tests.helpers import relative_error

(FLASH4,) = (c for c in DENSE_ATTENTION.candidates if c.name == "flash4")
NAMED = Policy(named=(("dense_attention", "flash4"),))
INSTALL = packages.FLASH_ATTENTION_4.install.format(floor="4.0.0b36")
FORWARD = (
    "def _flash_attn_fwd(q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, "
    "max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None, causal=False, return_lse=False): ..."
)
BACKWARD = (
    "def _flash_attn_bwd(q, k, v, out, dout, lse, softmax_scale=None, causal=False, "
    "cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, "
    "deterministic=False): ..."
)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs a made-up package with that version and source."""

    def forget():
        importlib.invalidate_caches()
        flash4._import_problem.cache_clear()
        import_error.cache_clear()

    def pretend(version="4.0.0b36", source=f"{FORWARD}\n{BACKWARD}", dsl="4.8.1"):
        for name, found in (("flash_attn_4", version), ("nvidia_cutlass_dsl", dsl)):
            if found is not None:
                folder = tmp_path / f"{name}-{found}.dist-info"
                folder.mkdir()
                name = name.replace("_", "-")
                text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {found}\n"
                (folder / "METADATA").write_text(text)
        package = tmp_path / "flash_attn" / "cute"
        package.mkdir(parents=True)
        # Imports are counted: looking for the package must not import its parent.
        (package.parent / "__init__.py").write_text("import sys\nsys.flash_attn_imported = True\n")
        (package / "__init__.py").write_text("")
        (package / "interface.py").write_text(source)
        for name in [x for x in sys.modules if x.split(".")[0] == "flash_attn"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(sys, "flash_attn_imported", False, raising=False)
        monkeypatch.syspath_prepend(tmp_path)
        forget()

    yield pretend
    for name in [x for x in sys.modules if x.split(".")[0] == "flash_attn"]:
        del sys.modules[name]
    forget()


def hopper(**changes):
    given = {"capability": (9, 0), "heads": 16, "qk_dim": 192, "v_dim": 128}
    return OpCall("cuda", **given | {"dtype": torch.bfloat16} | changes)


@pytest.mark.parametrize("version", ["4.0.0b36", "4.0.0b100", "4.0.0rc1", "4.0.0", "4.1.0b1"])
def test_new_versions_are_taken(install, version):
    install(version)
    for call in (
        hopper(), hopper(packed=True), hopper(dtype=torch.float16), hopper(deterministic=True),
        hopper(qk_dim=256, v_dim=256), hopper(capability=(10, 0)),
    ):  # fmt: skip
        assert FLASH4.reason(call) is None, call


@pytest.mark.parametrize("version", ["4.0.0b9", "4.0.0b35", "4.0.0a40", "3.9.9"])
def test_old_versions_are_refused(install, version):
    """As text b9 comes after b36, and as numeric releases all betas are equal."""
    install(version)
    assert FLASH4.reason(hopper()) == (
        f"too old: flash-attn-4 {version} found, >= 4.0.0b36 needed; {INSTALL}"
    )


def test_betas_count_only_where_the_floor_is_one():
    assert is_before("4.0.0b35", "4.0.0b36") and not is_before("4.0.0b36+cu13", "4.0.0b36")
    assert not is_before("1.30.0rc1", "1.30") and is_before("1.29.9", "1.30")
    assert is_before("3.9-odd", "4.0.0b36") and not is_before("4.0.0-odd", "4.0.0b36")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": torch.float32}, "needs bf16 or fp16"),
        ({"qk_dim": 100, "v_dim": 100}, "needs dims 192/128 or 256/256 or 128/128"),
        ({"capability": (8, 0)}, "wrong GPU: this is a GPU of compute capability 8.0"),
        ({"capability": (12, 0)}, "wrong GPU: this is a GPU of compute capability 12.0"),
    ],
    ids=str,
)
def test_calls_that_it_has_no_kernels_for(install, changes, words):
    install()
    assert words in FLASH4.reason(hopper(**changes))
    assert not sys.flash_attn_imported


def test_a_missing_package_and_what_it_needs(install, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(packages, "module_exists", lambda _name: False)
        assert FLASH4.reason(hopper()) == (f"missing: flash_attn.cute is not installed; {INSTALL}")
    install(dsl="4.6.1")
    assert FLASH4.reason(hopper()) == (
        "incomplete: flash-attn-4 4.0.0b36 needs nvidia-cutlass-dsl >= 4.6.2, found 4.6.1; "
        f"{INSTALL}"
    )
    assert module_exists("flash_attn.cute") and not module_exists("flash_attn.cut")
    assert not module_exists("no_such_package.cute") and not module_exists("json.decoder.x")
    assert optional_version("flash-attn-4") == "4.0.0b36" and not sys.flash_attn_imported


BROKEN = {
    "raise ImportError('no lib\\nmore')": r"broken: .* cannot be imported \(ImportError: no lib\)$",
    FORWARD: "changed: flash_attn.cute.interface has no _flash_attn_bwd; pip install "
    "'flash-attn-4==4.0.0b36'",
    f"{FORWARD}\n{BACKWARD.replace('deterministic=False', 'det=False')}": "changed: "
    "_flash_attn_bwd of flash_attn.cute.interface has no deterministic; pip install",
}


@pytest.mark.parametrize("source", BROKEN, ids=["raises", "no backward", "renamed argument"])
def test_a_package_that_does_not_work_is_not_called(install, source):
    install(source=source)
    with pytest.raises(ImplementationError, match=f"cannot run here: {BROKEN[source][:9]}"):
        DENSE_ATTENTION.choose(hopper(heads=15), NAMED)
    reason = FLASH4.reason(hopper())
    assert re.search(BROKEN[source], reason), reason
    # It comes last, and other implementations do not import it.
    automatic = DENSE_ATTENTION.choose(hopper(packed=True, heads=14), Policy()).candidate.name
    assert automatic != "flash4"


@pytest.mark.parametrize(
    ("version", "source", "words"),
    [
        ("4.0.0b35", "", "4.0.0b35, not used: too old: flash-attn-4 4.0.0b35 found"),
        ("4.0.0b36", "import no_such_part", "4.0.0b36, not used: broken: "),
        ("4.0.0b36", f"{FORWARD}\n{BACKWARD}", "4.0.0b36 - dense attention where --dsa-impl"),
    ],
    ids=["old", "broken", "right"],
)
def test_info_says_why_an_installed_package_is_not_used(install, capsys, version, source, words):
    install(version, source)
    assert cli.main(["info"]) == 0
    assert f"  flash-attn-4: {words}" in capsys.readouterr().out
    assert (collect_info()["flash_attention_4_unused"] is None) == ("not used" not in words)


def test_it_is_never_the_first_choice(install):
    install()
    names = [c.name for c in DENSE_ATTENTION.candidates]
    assert names[-2:] == ["flash4", "torch"] and not DENSE_ATTENTION.first
    for more in ({}, {"deterministic": True}, {"packed": True}):
        call = hopper(heads=13, **more)
        others = [c for c in DENSE_ATTENTION.candidates[:-2] if c.reason(call) is None]
        chosen = DENSE_ATTENTION.choose(call, Policy()).candidate.name
        assert chosen == (others[0].name if others else "flash4")
        assert DENSE_ATTENTION.choose(call, NAMED).candidate.name == "flash4"


#: Lengths that no tile divides, empty and one-token documents, tokens after the last document.
BATCHES = {
    "one sequence": {"length": 1000},
    "two sequences": {"length": 333, "batch": 2},
    "packed": {"real": (301, 0, 1, 130, 557)},
    "rows behind": {"real": (129, 1, 0, 300), "tail": 70},
}
DIMS = [(4, 192, 128, 64, 512), (3, 256, 256, 64, 512), (2, 128, 128, 64, 512)]


def run(case):
    """Run the operation with the named kernel: out, lse and gradients."""
    given = {name: x.cuda() for name, x in case.inputs().items()}
    dout = given.pop("dout")
    leaves = {name: x.requires_grad_() for name, x in given.items()}
    if case.real is None:
        layout = bshd_layout(case.length, case.batch, torch.device("cuda"))
    else:
        cu = torch.tensor((0, *case.real)).cumsum(0).int().cuda()
        layout = packed_layout(cu, case.total, max(case.real))
    out, lse = dense_attention(*leaves.values(), layout, softmax_scale=case.scale, policy=NAMED)
    out.backward(dout)
    return {"out": out, "lse": lse, **{f"d{name}": x.grad for name, x in leaves.items()}}


def skip_unless_it_runs(case):
    shape = {"heads": case.dims[0], "qk_dim": case.dims[1], "v_dim": case.dims[2]}
    call = describe_call("cuda", dtype=case.dtype, packed=case.real is not None, **shape)
    if (reason := FLASH4.reason(call)) is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.gpu
def test_against_float64(dims, batch, dtype):
    case = Case(dtype=dtype, dims=dims, **BATCHES[batch])
    skip_unless_it_runs(case)
    reset_report()
    found = run(case)
    assert report()["dense_attention"] == {"flash4": 1}
    for what, right in expected(case).items():
        finite = right.isfinite()
        assert found[what].isfinite().cpu().equal(finite), what
        bound = 1e-4 if what == "lse" else 8e-3
        assert relative_error(found[what].cpu()[finite], right[finite]) < bound, what


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.gpu
def test_deterministic_mode_gives_equal_bits(dims, batch):
    case = Case(dtype=torch.bfloat16, dims=dims, **BATCHES[batch])
    skip_unless_it_runs(case)
    torch.use_deterministic_algorithms(True)
    try:
        found, *again = (run(case) for _ in range(4))
    finally:
        torch.use_deterministic_algorithms(False)
    for other in again:
        assert all(torch.equal(found[what], other[what]) for what in found)
    right = expected(case)
    for what in ("dq", "dk", "dv"):
        assert relative_error(found[what].cpu(), right[what]) < 8e-3, what
