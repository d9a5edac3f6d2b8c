"""One of several tensor-parallel ranks on one GPU, with sequence parallelism; others are absent.

The rank has its part of the weights and ``1 / ranks`` of the tokens. A stand-in takes the place of
each collective: it copies what this rank has to where the other ranks' parts belong. An all-gather
repeats the rank's own part, a reduce-scatter keeps its own part of the input, an all-to-all returns
what is sent, an all-reduce does nothing. All shapes are right and so is the time of the kernels.
Stand-ins take about as long as it takes to write the results: the row ``step/collectives``. What
the collectives would send is the metric ``sent_bytes``.

Key bits are the exception: those of other ranks would be of this rank's tokens, which see other
keys. The stand-in of their gather returns bits of random lists of visible keys, drawn before the
measurement, and the rank's own bits at their place. Selections that come back from the rank that
scored some of this rank's tokens are real as well: the rank is the first one of the second half,
and what it scores for others lies before its own tokens.

Down projections take the rank's own tokens, as with transformer-engine; torch's own layers of
Megatron split their columns and gather hidden states.
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

#: Way -> how its layer attends, and what ranks divide.
WAYS: dict[str, dict[str, str]] = {
    "sparse-rank": {"selected_attention": "sparse", "tp_mode": "sequence"},
    "masked-rank": {"selected_attention": "masked", "tp_mode": "select"},
    "dense-rank": {},
}
#: Builds a layer and says what is special in it, as :func:`benchmarks.layer.peers.build`.
Build = Callable[[str, LayerSpec, torch.device], tuple[Layer, str]]


@contextlib.contextmanager
def one_rank_of(ranks: int) -> Iterator[Build]:
    """Be one of ``ranks`` while this lasts; yields what builds its layers.

    The builder takes the specification of all ranks together, without the number of ranks.
    """
    rank = ranks // 2
    bits = KeyBits(ranks, rank)
    with one_of(ranks, rank), contextlib.ExitStack() as stack:
        # Modules bind collectives when they are imported, and would keep the stand-ins.
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
    """Let a module's down projections take the tokens of its rank; their weights are drawn anew."""
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
    """Bits of all tokens of a causal sequence, as the ranks together would have them.

    Args:
        ranks: how many; rank: of this process.
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
        """Stand in for :func:`~megatron_dsa.ops.masked_attention.api.gather_tokens`."""
        gathered = gather_tokens(x, group)  # counts what is sent, and takes its time and memory
        if group is None:  # kernels are compiled, when a layer is built
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


# Stand-ins of collectives, with the names of torch's arguments


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
    """Let a profiled step count kernels inside as ``step/collectives``."""
    return torch.profiler.record_function("megatron_dsa.collectives.copies")


class _Done:
    """The handle of a collective that is over."""

    def wait(self) -> bool:
        return True


def _stand_in(original: Callable, copy: Callable) -> Callable:
    """Return what copies in place of a collective; its signature is the collective's."""

    @functools.wraps(original)
    def collective(*args, async_op=False, **kwargs):
        with _as_collective():
            copy(*args, **kwargs)
        return _Done() if async_op else None

    return collective
