"""What ranks send to each other: bytes counted, bytes expected, and time with nothing else to do.

A byte counts where it leaves a rank, as in a ring: of ``P`` ranks, each sends its part of an
all-gather ``P - 1`` times, as much for a reduce-scatter, and twice ``(P - 1) / P`` of an
all-reduce. Counting (:func:`counted`) and formula (:func:`formula_bytes`) share these rules, so
that any difference is a collective too many, or too few, or of another size.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

# Rules


def gather(part: float, ranks: int) -> float:
    """Bytes that a rank sends in an all-gather of ``part`` bytes per rank."""
    return (ranks - 1) * part


#: A reduce-scatter sends as much, with ``part`` the bytes of one rank's result.
reduce = gather


def exchange(whole: float, ranks: int) -> float:
    """Bytes that a rank sends in an all-to-all of ``whole`` bytes: all but its own part."""
    return (ranks - 1) * whole / ranks


def leaving(whole: float, splits: list[int], given: dict) -> float:
    """Bytes that a rank sends in an all-to-all of parts of different sizes."""
    own = splits[torch.distributed.get_rank(given.get("group"))]
    return whole * (1 - own / sum(splits)) if own else whole


def sum_everywhere(whole: float, ranks: int) -> float:
    """Bytes that a rank sends in an all-reduce of ``whole`` bytes."""
    return 2 * (ranks - 1) * whole / ranks


# Counting


@dataclass
class Traffic:
    """Collectives of this rank: name and bytes sent, in order."""

    calls: list[tuple[str, float]] = field(default_factory=list)

    @property
    def bytes(self) -> float:
        return sum(sent for _, sent in self.calls)


#: Collective -> the argument whose size counts, and the rule.
COLLECTIVES = {
    "all_gather_into_tensor": ("input_tensor", gather),
    "reduce_scatter_tensor": ("output", reduce),
    "all_to_all_single": ("input", exchange),
    "all_reduce": ("tensor", sum_everywhere),
}


@contextlib.contextmanager
def counted() -> Iterator[Traffic]:
    """Count what is sent by torch's collectives, from any thread, while this is active."""
    traffic = Traffic()
    with contextlib.ExitStack() as stack:
        for name, rule in COLLECTIVES.items():
            original = getattr(torch.distributed, name)
            counting = _counting(original, name, *rule, traffic)
            stack.enter_context(replaced(original, counting))
        yield traffic


@contextlib.contextmanager
def replaced(original, other) -> Iterator[None]:
    """Let every name of a collective in torch.distributed, Megatron and this package be ``other``.

    Megatron binds some of them to names of its own when it is imported.
    """
    bound = [
        (module, alias)
        for name, module in list(sys.modules.items())
        if name.startswith(("torch.distributed", "megatron"))
        for alias, value in list(vars(module).items())
        if value is original
    ]
    for module, alias in bound:
        setattr(module, alias, other)
    try:
        yield
    finally:
        for module, alias in bound:
            setattr(module, alias, original)


def _counting(original, name: str, counts: str, rule, traffic: Traffic):
    inside = threading.local()

    def collective(*args, **kwargs):
        # Under a torch function mode a collective calls itself once more, by its (new) name.
        if getattr(inside, "yes", False):
            return original(*args, **kwargs)
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        tensor, ranks = given[counts], torch.distributed.get_world_size(given.get("group"))
        if ranks > 1:
            size = tensor.numel() * tensor.element_size()
            splits = given.get("input_split_sizes")
            traffic.calls.append(
                (name, rule(size, ranks) if splits is None else leaving(size, splits, given))
            )
        inside.yes = True
        try:
            return original(*args, **kwargs)
        finally:
            inside.yes = False

    return collective


# What the design says


@dataclass(frozen=True)
class Design:
    """What a step's traffic follows from.

    Attributes:
        config: of the layer; ratio: its compression ratio, ``None`` for DSA.
        rows: that a rank holds.
        tp, cp: ranks.
        runs: runs of neighbouring rows that a rank holds.
    """

    config: object
    ratio: int | None
    rows: int
    tp: int
    cp: int
    runs: int

    @property
    def ranks(self) -> int:
        return self.tp * self.cp

    @property
    def by_sequence(self) -> bool:
        from megatron_dsa.config import by_sequence

        return by_sequence(self.config)

    @property
    def narrow(self) -> int:
        """Bytes of an activation; sums of gradients over ranks are formed in fp32."""
        return self.config.params_dtype.itemsize


WIDE = 4


def formula_bytes(d: Design) -> float:
    """Bytes that a rank sends in a training step (forward, backward) of an attention layer."""
    own = _dsa_bytes(d) if d.ratio is None else _hybrid_bytes(d)
    return own + _tensor_parallel_bytes(d)


def hidden_bytes(d: Design) -> float:
    """Bytes that a rank would send if hidden states were gathered instead of keys.

    All ranks then project the keys of all rows: an all-gather in the forward, and in the backward
    the reduce-scatter that autograd makes of it, in the activations' dtype. A second gather for the
    weights' gradient, where gathered states are not kept, would come on top.
    """
    part = d.rows * d.config.hidden_size * d.narrow
    return gather(part, d.ranks) + reduce(part, d.ranks)


def _summed_keys(d: Design, rows: float, dim: int, ranks: int) -> float:
    """Keys gathered in the forward, their fp32 gradients reduced in the backward."""
    return gather(rows * dim * d.narrow, ranks) + reduce(rows * dim * WIDE, ranks)


def _index_keys(d: Design, rows: float) -> float:
    """Like any keys; by heads, the ranks of one row group form the same gradient."""
    part = rows * d.config.dsa_indexer_head_dim
    back = d.ranks if d.by_sequence else d.cp
    return gather(part * d.narrow, d.ranks) + reduce(part * WIDE, back)


def _index_queries(d: Design) -> float:
    """By heads every rank scores the rows of its group: it needs their latents and weights."""
    c = d.config
    if d.by_sequence:
        return 0.0
    return gather(d.rows * (c.q_lora_rank + c.dsa_indexer_n_heads) * d.narrow, d.tp) + (
        sum_everywhere(d.rows * d.tp * c.dsa_indexer_topk * WIDE, d.tp)  # the teacher
    )


def _balanced_selection(d: Design) -> float:
    """Where ranks see unequally many keys, but many: another one scores half of a rank's rows.

    Index queries and weights leave, selected keys come back. (Of an odd number of parts, the rank
    in the middle keeps its rows.)
    """
    from megatron_dsa.config import options_of
    from megatron_dsa.parallel.balanced_topk import VISIBLE_TO_TOPK

    c, rows = d.config, d.rows if d.by_sequence else d.rows * d.tp
    contiguous = d.cp > 1 and options_of(c).cp_layout == "contiguous"
    visible = d.rows * d.ranks / 2 / (d.ratio or 1)
    if not (contiguous or d.by_sequence) or visible < VISIBLE_TO_TOPK * c.dsa_indexer_topk:
        return 0.0
    query = c.dsa_indexer_n_heads * (c.dsa_indexer_head_dim + 1) * d.narrow
    return rows / 2 * (query + c.dsa_indexer_topk * WIDE)


def _dsa_bytes(d: Design) -> float:
    c = d.config
    latent = c.kv_lora_rank + c.qk_pos_emb_head_dim
    total = _summed_keys(d, d.rows, latent, d.ranks) + _index_keys(d, d.rows) + _index_queries(d)
    total += _balanced_selection(d)
    # megatron-core's own layers split the down projections by columns, so hidden states are
    # gathered (again for the weight's gradient) and so are the latents, which then are cut again.
    total += 2 * 3 * gather(d.rows * c.hidden_size * d.narrow, d.tp)
    total += 2 * gather(d.rows * (c.q_lora_rank + latent) * d.narrow, d.tp)
    if (
        d.by_sequence
    ):  # the absorbed up projection of keys and values, gathered again in the backward
        weight = c.num_attention_heads * (c.qk_head_dim + c.v_head_dim) * c.kv_lora_rank / d.tp
        total += 2 * gather(weight * d.narrow, d.tp) + reduce(weight * WIDE, d.tp)
    return total


def _hybrid_bytes(d: Design) -> float:
    c, total = d.config, 0.0
    queries, rows = (d.ranks, d.rows) if d.by_sequence else (d.cp, d.rows * d.tp)
    if not d.by_sequence:
        total += _summed_keys(d, d.rows, c.head_dim, d.tp)
    window = min(rows, d.runs * (c.csa_window_size - 1))
    total += _summed_keys(d, window, c.head_dim, queries)
    if d.by_sequence:  # the sinks
        total += 2 * gather(c.num_attention_heads / d.tp * WIDE, d.tp)
    if not d.ratio:
        return total
    overlap = 2 if d.ratio == 4 else 1
    reach = d.ratio * overlap - 1
    halo = min(d.rows, d.runs * reach)
    slots = (d.rows + d.runs * reach) // d.ratio

    def compressor(dim: int) -> float:
        """Values and scores of the halo, and their gradients."""
        return 2 * gather(halo * 2 * dim * overlap * d.narrow, d.ranks)

    total += compressor(c.head_dim) + _summed_keys(d, slots, c.head_dim, d.ranks)
    if d.ratio == 4:
        total += compressor(c.dsa_indexer_head_dim) + _index_keys(d, slots) + _index_queries(d)
        total += _balanced_selection(d)
    return total


def _tensor_parallel_bytes(d: Design) -> float:
    """Up and output projection under sequence parallelism, and rows for heads and back."""
    c = d.config
    hybrid = d.ratio is not None
    up = 3 * gather(d.rows * c.q_lora_rank * d.narrow, d.tp)  # forward, again backward, gradient
    out = 2 * gather(d.rows * c.hidden_size * d.narrow, d.tp)
    if not d.by_sequence:
        return up + out
    query = c.v_head_dim if hybrid else c.qk_head_dim + c.qk_pos_emb_head_dim
    swapped = d.rows * c.num_attention_heads * (query + c.v_head_dim) * d.narrow
    return up + out + 2 * exchange(swapped, d.tp)


# Exposed communication

STEP = "benchmarks.ranks step"


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the same points of time as disjoint intervals in order."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        elif end > begin:
            joined.append((begin, end))
    return joined


def length(intervals: Iterable[tuple[float, float]]) -> float:
    """Total length of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)


def outside(intervals, others) -> float:
    """Length of what ``intervals`` cover and ``others`` do not."""
    others = list(others)
    return length(union([*intervals, *others])) - length(union(others))


def communication_shares(events: Iterable[dict]) -> dict:
    """Shares of a traced step in which NCCL runs, and in which nothing but NCCL does.

    The step is the range :data:`STEP`, up to the end of its last kernel. NCCL's kernels also wait
    for other ranks, so what one rank does slower than the others is in these shares.
    """
    events = [event for event in events if event.get("ph") == "X"]
    begins = [e["ts"] for e in events if e["name"] == STEP and e.get("cat") == "user_annotation"]
    if not begins:
        raise RuntimeError(f"the profiler recorded no range {STEP!r}")
    ours, others = [], []
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and event["ts"] >= begins[0]:
            end = event["ts"] + event["dur"]
            (ours if event["name"].startswith("nccl") else others).append((event["ts"], end))
    if not others:
        raise RuntimeError("the profiler recorded no kernels")
    span = max(end for _, end in ours + others) - min(begin for begin, _ in ours + others)
    return {
        "communication_share": length(union(ours)) / span,
        "exposed_share": outside(ours, others) / span,
    }
