"""The operations and their implementations.

One folder per operation. ``reference.py`` is the plain, slow statement of what it computes;
``unfused.py`` is the memory-bounded torch implementation that runs everywhere; every other file is
one fused implementation. This file is the list of all of them: dispatch tries the fused ones of an
operation in the order given here.
"""

from megatron_dsa.dispatch import Candidate, register


def _always(problem) -> None:
    """The torch implementations take every problem."""


def _load(module: str, name: str):
    """Return a loader that imports ``megatron_dsa.ops.<module>`` when the candidate first runs."""

    def load():
        import importlib

        return getattr(importlib.import_module(f"megatron_dsa.ops.{module}"), name)

    return load


def _sdpa_unsupported(problem):
    from megatron_dsa.ops.dense_attention import sdpa

    return sdpa.unsupported(problem)


register(
    "dense_attention",
    Candidate("sdpa", True, _sdpa_unsupported, _load("dense_attention.sdpa", "forward")),
)

for _operation, _module, _name in (
    ("indexer_topk", "indexer_topk.unfused", "indexer_topk"),
    ("sparse_attention_forward", "sparse_attention.unfused", "forward"),
    ("sparse_attention_backward", "sparse_attention.unfused", "backward"),
    ("dense_attention", "dense_attention.unfused", "forward"),
    ("sparse_indexer_loss", "indexer_loss.unfused", "sparse"),
    ("dense_indexer_loss", "indexer_loss.unfused", "dense"),
):
    register(_operation, Candidate("torch", False, _always, _load(_module, _name)))
