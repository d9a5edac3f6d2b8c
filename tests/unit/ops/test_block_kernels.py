"""Attention to one block: arguments of each implementation's kernel, and the choice.

Ranks are threads of one process. Without a GPU, torch functions with the real signatures, shapes
and habits replace kernels.
"""

import queue
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatron_dsa.errors import ImplementationError
from megatron_dsa.ops.dense_attention import torch as torch_block
from megatron_dsa.ops.dense_attention import torch_cudnn
from megatron_dsa.ops.dense_attention.blocks import BLOCK_KERNELS, choose
from megatron_dsa.ops.dense_attention.ring.attention import attend, gradients
from megatron_dsa.ops.dense_attention.ring.exchange import KeysAndValues, Latent, Ring
from megatron_dsa.ops.dense_attention.sequences import Dense, Packed
from megatron_dsa.ops.dense_attention.spec import DENSE_ATTENTION
from megatron_dsa.ops.dispatch import describe_call
from megatron_dsa.ops.dispatch.support import OpCall
from tests.cases.ring import CUTS, PACKED, WEIGHTS, WHOLE, Case, expected, together
from tests.helpers import no_synchronisation, relative_error

DECLARED = {candidate.name: candidate for candidate in DENSE_ATTENTION.candidates}
FUSED = [name for name, candidate in DECLARED.items() if candidate.fused]
#: Kernels with values narrower than keys.
NARROW = ("torch-cudnn", "flash4")
BATCHES = {
    "sbhd": {},
    "sbhd, two sequences": {"batch": 2},
    "packed": {"real": WHOLE},
    "packed, with padding": PACKED,
    **CUTS,
}
LARGE = {
    "sbhd": {"length": 1024},
    "sbhd, two sequences": {"length": 512, "batch": 2},
    "packed": {"real": (304, 0, 8, 136, 576)},
    "packed, with padding": {
        "real": (300, 0, 17, 0, 129, 500),
        "padded": (304, 0, 64, 8, 136, 512),
        "tail": 16,
    },
    "contiguous": {"length": 512, "batch": 2, "cut": "contiguous"},
    "contiguous, packed": {"real": (301, 0, 9, 130, 557), "tail": 27, "cut": "contiguous"},
    "rows, with padding": {
        "real": (300, 0, 17, 0, 129, 500),
        "padded": (305, 0, 63, 8, 136, 502),
        "tail": 10,
        "cut": "zigzag_rows",
    },
}


class Mail:
    """An exchange between threads; fails if a sent buffer is written before the wait."""

    def __init__(self, boxes, rank, kind, checked):
        self._checked = checked
        cp = len(boxes)
        self._mine, self._next = (
            boxes[r].setdefault(kind, queue.Queue()) for r in (rank, (rank + 1) % cp)
        )

    def start(self, send, receive):
        self._send, self._copy, self._receive = send, send.clone(), receive
        receive.fill_(float("nan"))
        self._next.put(self._copy)

    def wait(self):
        assert not self._checked or torch.equal(self._send, self._copy)
        self._receive.copy_(self._mine.get(timeout=100))


def emulate(case, cp, kernel, device="cpu", checked=True):
    """Return a function that runs all ranks forward and backward, and returns their results.

    It can be called twice, each time with new layouts.
    """
    inputs = {name: x.to(device) for name, x in case.inputs().items()}
    mine = [case.local_rows(cp, rank).to(device) for rank in range(cp)]
    local = [{n: x if n in WEIGHTS else x[m] for n, x in inputs.items()} for m in mine]
    unused = [[case.describe(cp, rank, device) for rank in range(cp)] for _ in range(2)]

    def run():
        boxes, rows = [{} for _ in range(cp)], unused.pop()

        def work(rank):
            x, settings = local[rank], (kernel, case.scale)
            kinds = iter(range(9))
            ring = Ring(lambda: Mail(boxes, rank, next(kinds), checked), cp, rank)
            names = ("k", "v") if case.mode == "ring" else ("latent", *WEIGHTS)
            contents = (KeysAndValues if case.mode == "ring" else Latent)(*(x[n] for n in names))
            out, lse = attend(x["q"], contents, rows[rank], ring, *settings)
            contents = type(contents)(*(x[n] for n in names))
            dq, own = gradients(x["dout"], x["q"], out, lse, contents, rows[rank], ring, *settings)
            if case.mode == "ring":
                found = contents.split(own)
            else:
                weights = (contents.dw_uk, contents.dw_uv)
                found = (own, *(d.view(x[n].shape) for d, n in zip(weights, WEIGHTS, strict=True)))
            found = {f"d{name}": d for name, d in zip(names, found, strict=True)}
            return {"out": out, "lse": lse, "dq": dq, **found}

        with ThreadPoolExecutor(cp) as pool:
            return list(pool.map(work, range(cp)))

    return run


def check(case, several, tolerance):
    several = [{name: x.cpu() for name, x in rank.items()} for rank in several]
    for what, right in expected(case).items():
        found, finite = together(case, several, what), right.isfinite()
        assert torch.equal(found.isfinite(), finite), what
        assert relative_error(found[finite], right[finite]) < tolerance, what


def _sequences(q, cu_q, cu_k, max_q, max_k):
    if cu_q is None:
        return Dense(q.shape[0])
    for cu, longest in ((cu_q, max_q), (cu_k, max_k)):
        # Real kernels skip tokens past the longest length, and outside of sequences.
        lengths = cu.diff()
        assert cu.dtype == torch.int32 and cu[0] == 0
        assert lengths.min() >= 0 and lengths.max() <= longest
    return Packed(cu_q, cu_k, max_q)


def _flat(x, cu):
    return x if cu is not None else x.transpose(0, 1).flatten(0, 1)


def _batched(x, cu, like):
    return x if cu is not None else x.unflatten(0, (-1, len(like))).transpose(0, 1)


def kernel_forward(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, nothing=float("inf")):
    """Compute ``[b, s, H, D]`` or packed tokens; lse heads first; ``nothing`` is the lse without
    keys.
    """
    sequences = _sequences(q, cu_q, cu_k, max_q, max_k)
    out, lse = torch_block.forward(*(_flat(x, cu_q) for x in (q, k, v)), causal, scale, sequences)
    if cu_q is not None:
        assert cu_q[-1] == len(q) and cu_k[-1] == len(k)
        lse = lse.masked_fill(lse == float("-inf"), nothing).t()
    else:
        lse = lse.unflatten(0, (-1, len(q))).permute(1, 2, 0)
    return _batched(out, cu_q, q), lse.contiguous(), None, None


def kernel_backward(dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, causal, scale):
    assert lse.is_contiguous()
    sequences = _sequences(q, cu_q, cu_k, max_q, max_k)
    lse = lse.t() if cu_q is not None else lse.permute(2, 0, 1).flatten(0, 1)
    rows = [_flat(x, cu_q) for x in (dout, q, k, v, out)]
    found = torch_block.backward(*rows, lse, causal, scale, sequences)
    return [_batched(x, cu_q, q) for x in found]


def fake_kernel(name, patch, seen):
    """Replace the kernels of a kernel; ``seen`` collects their dims."""

    def torch_flash(q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, causal, debug, *, scale):
        seen.add((q.shape[-1], v.shape[-1]))
        return kernel_forward(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale)

    def torch_flash_backward(
        dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout_p, causal, rng, unused, *, scale
    ):
        seen.add((q.shape[-1], v.shape[-1], out.shape[-1], dout.shape[-1]))
        return kernel_backward(dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, causal, scale)

    def cudnn(q, k, v, bias, with_lse, dropout_p, causal, debug, *, scale):
        seen.add((q.shape[-1], v.shape[-1]))
        x = [t.transpose(1, 2) for t in (q, k, v)]
        out, lse, *rest = kernel_forward(*x, None, None, 0, 0, causal, scale)
        return out.transpose(1, 2), lse.unsqueeze(-1), *rest

    def cudnn_backward(
        dout, q, k, v, out, lse, seed, offset, bias, cu_q, cu_k, max_q, max_k, dropout_p, causal,
        *, scale,
    ):  # fmt: skip
        assert lse.dim() == 4 and (max_q, max_k) == (q.shape[2], k.shape[2])
        x = [t.transpose(1, 2) for t in (dout, q, k, v, out)]
        found = kernel_backward(*x, lse[..., 0], None, None, 0, 0, causal, scale)
        return [t.transpose(1, 2) for t in found]

    def flash2(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
        alibi_slopes, return_softmax,
    ):  # fmt: skip
        seen.add((q.shape[-1], v.shape[-1]))
        return kernel_forward(q, k, v, None, None, 0, 0, causal, softmax_scale)

    def flash2_packed(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
        return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None,
    ):  # fmt: skip
        seen.add((q.shape[-1], v.shape[-1]))
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return kernel_forward(q, k, v, *lengths, causal, softmax_scale)

    def flash2_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,
        window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        none = (None, None, 0, 0)
        found = kernel_backward(dout, q, k, v, out, softmax_lse, *none, causal, softmax_scale)
        for x, given in zip((dq, dk, dv), found, strict=True):
            x.copy_(given)

    def flash2_packed_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
        softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        found = kernel_backward(dout, q, k, v, out, softmax_lse, *lengths, causal, softmax_scale)
        for x, given in zip((dq, dk, dv), found, strict=True):
            x.copy_(given)

    def flash4(
        q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
        return_lse,
    ):  # fmt: skip
        assert return_lse
        seen.add((q.shape[-1], v.shape[-1]))
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return *kernel_forward(q, k, v, *lengths, causal, softmax_scale), None

    def flash4_backward(
        q, k, v, out, dout, lse, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        softmax_scale, causal, deterministic,
    ):  # fmt: skip
        assert deterministic is False
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return kernel_backward(dout, q, k, v, out, lse, *lengths, causal, softmax_scale)

    if name == "torch-flash":
        patch.setattr(torch.ops.aten, "_flash_attention_forward", torch_flash)
        patch.setattr(torch.ops.aten, "_flash_attention_backward", torch_flash_backward)
    elif name == "torch-cudnn":
        patch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", cudnn)
        backward = "_scaled_dot_product_cudnn_attention_backward"
        patch.setattr(torch.ops.aten, backward, cudnn_backward)
        patch.setattr(torch_cudnn, "_lse_dims", lambda device: 4)
    elif name == "flash4":
        interface = types.SimpleNamespace(_flash_attn_fwd=flash4, _flash_attn_bwd=flash4_backward)
        patch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    else:
        interface = types.SimpleNamespace(
            _flash_attn_forward=flash2, _flash_attn_varlen_forward=flash2_packed,
            _flash_attn_backward=flash2_backward,
            _flash_attn_varlen_backward=flash2_packed_backward,
        )  # fmt: skip
        package = types.SimpleNamespace(flash_attn_interface=interface)
        patch.setitem(sys.modules, "flash_attn", package)


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", FUSED)
def test_kernels_are_called_right(name, batch, cp, monkeypatch):
    """Only a kernel that must pads values."""
    case, seen, kernel = Case(**BATCHES[batch]), set(), BLOCK_KERNELS[name]
    if name == "torch-cudnn" and case.real is not None:
        pytest.skip("unpacked batches only")
    fake_kernel(name, monkeypatch, seen)
    check(case, emulate(case, cp, kernel)(), 1e-11)
    dims = (12, 8) if name in NARROW else (12, 12)
    assert {pair[:2] for pair in seen} == {dims}
    assert all(len(set(pair)) == 1 for pair in seen if len(pair) > 2)


@pytest.mark.parametrize("name", ["torch-cudnn", "torch-flash"])
@pytest.mark.parametrize("batch", [1, 2])
def test_arguments_fit_torch(name, batch):
    kernel = BLOCK_KERNELS[name]
    meta = {"device": "meta", "dtype": torch.bfloat16}
    q, v = torch.empty(64, 4, 192, **meta), torch.empty(64, 4, 128, **meta)
    cu = torch.empty(5, dtype=torch.int32, device="meta")
    for sequences in (Dense(batch), Packed(cu, cu, 64)):
        if name == "torch-cudnn" and isinstance(sequences, Packed):
            continue
        out, lse = kernel.forward(q, q, v, True, 0.1, sequences)
        assert out.shape == v.shape and lse.shape == (64, 4) and lse.dtype == torch.float32
        found = kernel.backward(v, q, q, v, out, lse, True, 0.1, sequences)
        assert [x.shape for x in found] == [q.shape, q.shape, v.shape]


def _hopper(**changes):
    shape = {"heads": 16, "qk_dim": 192, "v_dim": 128, "dtype": torch.bfloat16, **changes}
    return OpCall(device="cuda", capability=(9, 0), **shape)


def test_dims_are_compared_before_anything_is_padded():
    """Padding values first would turn 192/128 into 192/192, which native kernels reject."""
    order = list(DECLARED)
    assert order.index("torch-cudnn") < order.index("flash2") < order.index("torch-flash")
    assert order[-1] == "torch"
    available = [DECLARED[name] for name in ("torch-cudnn", "torch-flash", "torch")]
    assert next(x.name for x in available if x.reason(_hopper()) is None) == "torch-cudnn"
    packed = [x.name for x in available if x.reason(_hopper(packed=True)) is None]
    assert packed == ["torch-flash", "torch"]
    wide = _hopper(packed=True, qk_dim=128, v_dim=192)
    assert choose(wide).name == "torch"
    assert "no wider" in DECLARED["torch-flash"].reason(wide)


def test_reasons_say_what_is_missing():
    cpu = describe_call("cpu", dtype=torch.bfloat16, heads=4, qk_dim=192, v_dim=128)
    assert choose(cpu).name == "torch"
    assert all("this is the CPU" in DECLARED[name].reason(cpu) for name in FUSED)
    for name in {*FUSED} - {"flash4"}:  # its declaration names dims: test_flash4.py
        assert "needs bf16 or fp16" in DECLARED[name].reason(_hopper(dtype=torch.float32))
        assert "multiples of 8" in DECLARED[name].reason(_hopper(qk_dim=100, v_dim=100))
    assert "deterministic" in DECLARED["torch-cudnn"].reason(_hopper(deterministic=True))
    with pytest.raises(ImplementationError, match=r"cannot run .*: needs a CUDA GPU"):
        choose(cpu, "flash2")


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("mode", ["ring", "latent"])
@pytest.mark.parametrize("batch", LARGE)
@pytest.mark.parametrize("name", BLOCK_KERNELS)
@pytest.mark.parametrize("dims", [(4, 192, 128, 64, 512), (4, 128, 128, 64, 512)], ids=str)
@pytest.mark.gpu
def test_ranks_on_one_gpu(name, batch, mode, cp, dims):
    case = Case(mode=mode, dtype=torch.bfloat16, dims=dims, **LARGE[batch])
    shape = {"heads": dims[0], "qk_dim": dims[1], "v_dim": dims[2]}
    packed = case.real is not None
    reason = DECLARED[name].reason(
        describe_call("cuda", dtype=case.dtype, packed=packed, **shape)
    )  # fmt: skip
    if reason is not None:
        pytest.skip(reason)
    run = emulate(case, cp, BLOCK_KERNELS[name], "cuda", checked=False)
    check(case, run(), 1.2e-2)
    torch.cuda.synchronize()
    with no_synchronisation():
        several = run()
    check(case, several, 1.2e-2)
