"""The operations and their implementations.

One folder per operation. ``reference.py`` is the plain, slow statement of what it computes;
``torch.py`` is the memory-bounded torch implementation that runs everywhere (that of the dense
indexer loss is ``torch_dense.py``); files and folders named after a package hold fused ones. This
file declares all of them, once: dispatch tries the fused ones of an operation in the order given
here.
"""

from __future__ import annotations

import importlib

import torch

from megatron_dsa.dispatch import Candidate, register
from megatron_dsa.dispatch.packages import CUDNN, FLASH_MLA, TILELANG, TRITON
from megatron_dsa.dispatch.support import Support

AMPERE, ADA, HOPPER, BLACKWELL = (8, 0), (8, 9), (9, 0), (10, 0)
_BF16, _HALF = (torch.bfloat16,), (torch.bfloat16, torch.float16)
_LATENT = ((576, 512), (512, 512))
#: Sums in an order that varies, unless torch's deterministic mode is on.
_ATOMIC_SUMS = {"deterministic": False, "deterministic_mode": True}
_CUDNN_ATTENTION = {"package": CUDNN, "dims": _LATENT}
_TILELANG = {
    "package": TILELANG,
    "capabilities": (AMPERE, ADA, HOPPER, BLACKWELL),
    "not_run": (AMPERE, ADA, BLACKWELL),
    "dtypes": _BF16,
    "dims": _LATENT,
    "heads": (1, 128),
    # Where a tile holds several queries.
    "fastest": (1, 32),
}
_TILELANG_INDEXER = {
    "package": TILELANG,
    "capabilities": (HOPPER,),
    "dims": ((128, 0),),
    "heads": (1, 64),
}
_CUDNN_INDEXER = {
    "package": CUDNN,
    "capabilities": (HOPPER,),
    "dtypes": _BF16,
    "dims": ((128, 0),),
    "heads": (1, 64),
    "without_relu": False,
}


def _load(module: str, name: str):
    """Return a loader that imports ``megatron_dsa.ops.<module>`` when the candidate first runs."""
    return lambda: getattr(importlib.import_module(f"megatron_dsa.ops.{module}"), name)


def _load_instance(module: str, name: str):
    return lambda: _load(module, name)()()


def _probe(module: str):
    """Return the ``probe`` of ``megatron_dsa.ops.<module>``, imported when it is asked."""
    return lambda problem: _load(module, "probe")()(problem)


def _fused(operation: str, name: str, load, **support) -> None:
    register(operation, Candidate(name, True, Support(**support), load))


def _torch(operation: str, load, covers: str, **support) -> None:
    register(operation, Candidate("torch", False, Support(covers=covers, **support), load))


_fused(
    "sparse_attention_forward",
    "flashmla",
    _load("sparse_attention.flashmla", "forward"),
    covers="out, lse",
    package=FLASH_MLA,
    capabilities=(HOPPER, BLACKWELL),
    dtypes=_BF16,
    dims=_LATENT,
    heads=(1, 128),
    bridged="heads padded to 64 or 128, K to 128; lengths clamped; lse of empty rows",
    probe=_probe("sparse_attention.flashmla"),
)
_fused(
    "sparse_attention_forward",
    "tilelang",
    _load("sparse_attention.tilelang.launch", "forward"),
    covers="out, lse",
    **_TILELANG,
)
_fused(
    "sparse_attention_backward",
    "cudnn",
    _load("sparse_attention.cudnn", "backward"),
    covers="dq, dkv, dsink",
    **_CUDNN_ATTENTION,
    capabilities=(HOPPER, BLACKWELL),
    dtypes=_HALF,
    heads=(2, 128),
    deterministic=False,
    bridged="K in buckets; fp32 dkv from the workspace (Hopper, from 1.32; else rounded)",
)
_fused(
    "sparse_attention_backward",
    "tilelang",
    _load("sparse_attention.tilelang.launch", "backward"),
    covers="dq, dkv, dsink, p_sum",
    **_TILELANG,
    gives_teacher=True,
    fastest_with_teacher=(1, 128),
    **_ATOMIC_SUMS,
)
_fused(
    "sparse_attention_probabilities",
    "cudnn",
    _load("sparse_attention.cudnn", "probabilities"),
    covers="p_sum from q, kv, lse",
    **_CUDNN_ATTENTION,
    capabilities=(HOPPER,),
    dtypes=_BF16,
    heads=(1, 128),
    bridged="heads padded to 8, 16, 32 or 64, K in buckets; row normalisation undone",
)
_fused(
    "indexer_scores",
    "tilelang",
    _load_instance("indexer_topk.tilelang.launch", "Scores"),
    covers="scores of a block of queries, where they are seen; with and without relu",
    **_TILELANG_INDEXER,
    dtypes=(torch.bfloat16, torch.float8_e4m3fn),
    bridged="heads padded to 16, 32 or 64",
)
_fused(
    "indexer_scores",
    "cudnn",
    _load_instance("indexer_topk.cudnn", "Scores"),
    covers="scores of a block of queries",
    **_CUDNN_INDEXER,
    bridged="S x S buffer avoided block by block; heads padded to 16, 32 or 64; ratio 1",
)
_fused(
    "indexer_topk",
    "tilelang",
    _load_instance("indexer_topk.tilelang.launch", "Selection"),
    covers="selection from a block of scores, read once",
    package=TILELANG,
    capabilities=(HOPPER,),
    topk=(1, 4096),
    dtypes=(*_HALF, torch.float32),
)
_fused(
    "indexer_topk",
    "cudnn",
    _load_instance("indexer_topk.cudnn", "Selection"),
    covers="selection from a block of scores",
    package=CUDNN,
    minimum="1.32",
    capabilities=(HOPPER,),
    topk=(1, 2048),
    dtypes=_BF16,
    packed=False,
    bridged="-0 and +0 made equal; ties to the smallest slot",
)
_fused(
    "sparse_indexer_loss",
    "tilelang",
    _load("indexer_loss.tilelang.launch", "sparse"),
    covers="value and gradients in one kernel, or value and student",
    **_TILELANG_INDEXER,
    dtypes=_BF16,
    topk=(1, 2048),
    without_relu=False,
    gradients=True,
    **_ATOMIC_SUMS,
)
_fused(
    "sparse_indexer_loss",
    "cudnn",
    _load("indexer_loss.cudnn", "sparse"),
    covers="value and student",
    **_CUDNN_INDEXER,
    bridged="heads padded to 8, 16, 32 or 64, K in buckets",
)
_fused(
    "indexer_backward",
    "cudnn",
    _load("indexer_loss.cudnn", "backward"),
    covers="dq, dk, dweights of the sparse loss",
    **_CUDNN_INDEXER,
    deterministic=False,
    bridged="heads padded to 64, K in buckets; teacher copied; underflowed students kept",
)
_fused(
    "dense_indexer_loss",
    "cudnn",
    lambda: None,
    covers="value and gradients",
    package=CUDNN,
    declined="cuDNN's needs S x S fp32 scores",
)
_fused(
    "dense_attention",
    "sdpa",
    _load("dense_attention.sdpa", "forward"),
    covers="forward and backward (torch's flash, cuDNN or efficient kernels)",
    dtypes=_HALF,
    packed=False,
    **_ATOMIC_SUMS,
    probe=_probe("dense_attention.sdpa"),
)


def _load_block(kernel: str):
    """Return a loader of what calls an attention over blocks with that kernel."""

    def load():
        from megatron_dsa.ops.dense_attention.blocks import block_kernel

        def attend(attention, workspace_bytes: int, *args, **options):
            return attention(*args, block=block_kernel(kernel, workspace_bytes), **options)

        return attend

    return load


def _probe_block(kernel: str):
    def probe(problem):
        from megatron_dsa.ops.dense_attention.blocks import block_kernel

        return block_kernel(kernel, 0).reason(problem)

    return probe


for _kernel, _covers in (
    ("torch-cudnn", "torch's cuDNN kernels; values as wide as they are"),
    ("flash2", "FlashAttention 2; values padded inside"),
    ("torch-flash", "torch's flash kernels; values padded inside"),
):
    _fused(
        "ring_attention", _kernel, _load_block(_kernel), covers=_covers, dtypes=_HALF,
        probe=_probe_block(_kernel), **_ATOMIC_SUMS,
    )  # fmt: skip

_TRITON = {
    "package": TRITON,
    "capabilities": (AMPERE, ADA, HOPPER, BLACKWELL),
    "not_run": (AMPERE, ADA, BLACKWELL),
}
for _operation, _module, _name, _covers in (
    ("compressor", "compressor.triton.launch", "compress", "pooled keys; values, scores, ape"),
    ("norm_rope", "rope.triton", "norm_rope", "in place; q"),
    ("rotate", "rope.triton", "rotate", "any rotated dims"),
    ("key_lists", "key_lists.triton", "build", "one launch for any ratio"),
):
    _types = {} if _operation == "key_lists" else {"dtypes": (*_HALF, torch.float32)}
    _fused(
        _operation, "triton", _load(_module, _name), covers=_covers, **_TRITON,
        **_types,
    )  # fmt: skip
    _torch(_operation, _load(f"{_module.partition('.')[0]}.torch", _name), "any shape")

_fused(
    "indexer_listed_scores",
    "triton",
    _load("indexer_topk.triton", "scores"),
    covers="scores of listed keys",
    **_TRITON,
    dtypes=_HALF,
    dims=tuple((dim, 0) for dim in (16, 32, 64, 128, 256)),
    heads=(1, 128),
)
_torch("indexer_listed_scores", _load("indexer_topk.listed", "scores"), "any shape")
_torch("indexer_scores", _load_instance("indexer_topk.torch", "Scores"), "any shape")
_torch("indexer_topk", _load_instance("indexer_topk.torch", "Selection"), "any shape")
_torch("sparse_attention_forward", _load("sparse_attention.torch", "forward"), "any shape; p_sum")
_torch(
    "sparse_attention_backward",
    _load("sparse_attention.torch", "backward"),
    "any shape; p_sum",
    gives_teacher=True,
    **_ATOMIC_SUMS,
)
_torch(
    "sparse_attention_probabilities",
    _load("sparse_attention.torch", "probabilities"),
    "any shape",
)
_torch(
    "sparse_indexer_loss",
    _load("indexer_loss.torch", "sparse"),
    "any shape; gradients along with the value",
    gradients=True,
    **_ATOMIC_SUMS,
)
_torch(
    "indexer_backward",
    _load("indexer_loss.torch", "sparse_backward"),
    "any shape",
    **_ATOMIC_SUMS,
)
_fused(
    "dense_indexer_loss",
    "triton",
    _load("indexer_loss.triton.dense", "dense"),
    covers="value and gradients; teachers of any head dim",
    **_TRITON,
    dtypes=_BF16,
    dims=((128, 0),),
    heads=(1, 64),
)
_torch("dense_indexer_loss", _load("indexer_loss.torch_dense", "dense"), "any shape")
_torch("dense_attention", _load("dense_attention.torch", "forward"), "any shape")
_torch("ring_attention", _load_block("torch"), "any shape")
