"""One of several tensor-parallel ranks on one GPU, with sequence parallelism; the others are
absent.

The rank has its part of the weights and ``1 / ranks`` of the tokens. Stand-ins replace collectives
by local copies: an all-gather repeats the local part, a reduce-scatter keeps its part of the input,
an all-to-all returns its input, an all-reduce does nothing. Shapes and kernel times are right.
Stand-ins take about as long as writing the results (``step/collectives``); ``sent_bytes`` counts
the bytes of the collectives.

Key bits differ: other ranks' tokens see other keys. Their gather returns bits of random lists of
visible keys, drawn in advance, with the rank's own bits inserted. Selections that return from the
rank that scored some of this rank's tokens are real: the rank is the first of the second half, and
its scores for others precede its tokens.

Down projections take local tokens, as with transformer-engine; Megatron's own layers split their
columns and gather hidden states.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.attention.lists import causal_lists
from benchmarks.layer.peers import dense_module, require_fused, with_weights
from benchmarks.megatron_layer import SEED, Layer, LayerSpec
from benchmarks.process_groups import one_of
from benchmarks.ranks.traffic import replaced
from megatron_dsa.layers.linears import ReplicatedLinear
from megatron_dsa.ops.dispatch import DEFAULT_WORKSPACE_BYTES
from megatron_dsa.ops.masked_attention import torch as in_torch
from megatron_dsa.ops.masked_attention.api import gather_tokens
from megatron_dsa.ops.masked_attention.spec import KeyBitsInputs

#: Way -> attention and division of work.
WAYS: dict[str, dict[str, str]] = {
    "sparse-rank": {"selected_attention": "sparse", "tp_mode": "sequence"},
    "masked-rank": {"selected_attention": "masked", "tp_mode": "select"},
    "dense-rank": {},
}
#: Builds a layer with a remark, see :func:`benchmarks.layer.peers.build`.
Build = Callable[[str, LayerSpec, torch.device], tuple[Layer, str]]


@contextlib.contextmanager
def one_rank_of(ranks: int) -> Iterator[Build]:
    """Act as one of ``ranks``; yields the builder of its layers.

    The builder takes the specification of all ranks together, without the number of ranks.
    """
    rank = ranks // 2
    bits = KeyBits(ranks, rank)
    with one_of(ranks, rank), contextlib.ExitStack() as stack:
        # Modules bind collectives on import, and would keep the stand-ins.
        importlib.import_module("megatron_dsa.specs")
        for name, copy in STAND_INS.items():
            original = getattr(torch.distributed, name)
            stack.enter_context(replaced(original, _stand_in(original, copy)))
        stack.enter_context(replaced(gather_tokens, bits.gather))
        yield functools.partial(_build, bits)


def _build(bits: KeyBits, way: str, spec: LayerSpec, device: torch.device) -> tuple[Layer, str]:
    spec = dataclasses.replace(spec, tp=bits.ranks, **WAYS[way])
    layer, remarks = Layer(spec, device), [f"rank {bits.rank} of {bits.ranks}"]
    replicate_down_projections(layer.module)
    if way == "dense-rank":
        module, remark = dense_module(layer.config, device)
        replicate_down_projections(module)
        layer.module = with_weights(module.to(device).bfloat16().train(), layer.module)
        remarks += [remark] if remark else []
    elif device.type == "cuda":
        require_fused(layer.config, f"{spec.selected_attention}_attention")
    if way == "masked-rank":
        bits.draw(spec.tokens, layer.config.dsa_indexer_topk, device)
    return layer, "; ".join(remarks)


def replicate_down_projections(module: Any) -> None:
    """Make a module's down projections take local tokens; redraws their weights."""
    config = module.config
    generator = torch.Generator(module.linear_proj.weight.device).manual_seed(SEED)
    widths = {
        "linear_q_down_proj": config.q_lora_rank,
        "linear_kv_down_proj": config.kv_lora_rank + config.qk_pos_emb_head_dim,
    }
    for name, width in widths.items():
        like = getattr(module, name).weight
        linear = ReplicatedLinear(
            config.hidden_size, width, config=config, init_method=config.init_method
        ).to(like)
        with torch.no_grad():
            linear.weight.normal_(std=config.hidden_size**-0.5, generator=generator)
        setattr(module, name, linear)


class KeyBits:
    """Bits of all tokens of a causal sequence, over all ranks.

    ``ranks``: how many; ``rank``: this one.
    """

    def __init__(self, ranks: int, rank: int):
        self.ranks, self.rank = ranks, rank
        self._bits: torch.Tensor | None = None
        self._shifts = torch.zeros(ranks, dtype=torch.int64)

    def draw(self, tokens: int, topk: int, device: torch.device) -> None:
        """Draw lists of visible keys for a sequence, and keep their bits for :meth:`gather`."""
        lists = causal_lists("random", tokens, topk, device)
        ranks = torch.arange(self.ranks, device=device)
        self._shifts = (ranks - self.rank) * (tokens // self.ranks)
        self._bits = in_torch.key_bits(
            KeyBitsInputs(lists.indices, lists.length, tokens, DEFAULT_WORKSPACE_BYTES)
        )

    def gather(self, x: torch.Tensor, group: Any) -> torch.Tensor:
        """Replace :func:`~megatron_dsa.ops.masked_attention.api.gather_tokens`."""
        gathered = gather_tokens(x, group)  # counts bytes, and costs time and memory
        if group is None:  # compilation while a layer is built
            return gathered
        assert self._bits is not None
        with _as_collective():
            if x.dim() == 1:  # sampled tokens: the same ones of every rank's part
                parts = gathered.view(self.ranks, -1)
                parts += self._shifts.to(x)[:, None]
            else:
                gathered.copy_(self._bits)
                gathered.chunk(self.ranks)[self.rank].copy_(x)
        return gathered


def _all_gather(output_tensor, input_tensor, group=None, **_rest) -> None:
    ranks = torch.distributed.get_world_size(group)
    output_tensor.view(ranks, -1).copy_(input_tensor.reshape(-1))


def _reduce_scatter(output, input, op=None, group=None, **_rest) -> None:
    rank, ranks = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    output.copy_(input.reshape(ranks, *output.shape)[rank])


def _all_to_all(output, input, *_rest, **_named) -> None:
    output.copy_(input.view(output.shape))


def _all_reduce(tensor, *_rest, **_named) -> None:
    pass


STAND_INS = {
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
    "all_reduce": _all_reduce,
}


def _as_collective() -> contextlib.AbstractContextManager:
    """Attribute kernels inside to ``step/collectives`` in a profiled step."""
    return torch.profiler.record_function("megatron_dsa.collectives.copies")


class _Done:
    """The handle of a finished collective."""

    def wait(self) -> bool:
        return True


def _stand_in(original: Callable, copy: Callable) -> Callable:
    """Return the replacement of a collective, with its signature."""

    @functools.wraps(original)
    def collective(*args, async_op=False, **kwargs):
        with _as_collective():
            copy(*args, **kwargs)
        return _Done() if async_op else None

    return collective
