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


def _unsupported(module: str):
    """Return the ``unsupported`` function of ``megatron_dsa.ops.<module>``, imported when asked."""
    return lambda problem: _load(module, "unsupported")()(problem)


for _operation, _name, _module in (
    ("dense_attention", "sdpa", "dense_attention.sdpa"),
    ("sparse_attention_forward", "flash_mla", "sparse_attention.flash_mla"),
):
    register(_operation, Candidate(_name, True, _unsupported(_module), _load(_module, "forward")))

for _operation, _module, _name in (
    ("indexer_topk", "indexer_topk.unfused", "indexer_topk"),
    ("sparse_attention_forward", "sparse_attention.unfused", "forward"),
    ("sparse_attention_backward", "sparse_attention.unfused", "backward"),
    ("sparse_attention_probabilities", "sparse_attention.unfused", "probabilities"),
    ("dense_attention", "dense_attention.unfused", "forward"),
    ("sparse_indexer_loss", "indexer_loss.unfused", "sparse"),
    ("dense_indexer_loss", "indexer_loss.unfused", "dense"),
):
    register(_operation, Candidate("torch", False, _always, _load(_module, _name)))
