"""One rank of more tensor-parallel ranks than there are GPUs: the attention core without its layer.

By heads a rank has ``H / TP`` heads of all rows, and scores, selects and trains the indexer for all
rows. By sequence it has all heads of ``S / TP`` rows, and of the indexer those rows; where the package
balances selection, it scores as many, half of them another rank's. The rank that is simulated is
the last one: its rows see most keys. The bulk of what the ranks of only one mode send is exchanged
for real, in the same number of bytes per rank, by the GPUs that there are: by sequence queries and
outputs, and index queries and selections where they are balanced, all-to-all; by heads the
indexer's teacher, all-reduced. (Left out: by sequence the absorbed weights, by heads the indexer's
query latents.)
"""

from __future__ import annotations

import dataclasses
import gc
import time

import torch

from benchmarks.cases import PRESETS
from benchmarks.cases import Preset as Shape
from benchmarks.ranks_cases import Case
from benchmarks.ranks_layer import PREPARE_ROWS, SEED
from benchmarks.ranks_timing import measured, timed
from benchmarks.ranks_traffic import WIDE, exchange, sum_everywhere
from benchmarks.timing import Clock
from megatron_dsa.dispatch import Policy
from megatron_dsa.dsa_kernels import (
    IndexerInputs,
    IndexerTraining,
    indexer_topk,
    sparse_attention,
)
from megatron_dsa.parallel.balanced_topk import halves, worthwhile_swap
from megatron_dsa.parallel.groups import gather_keys
from megatron_dsa.sequence.layout import Layout, bshd_layout
from megatron_dsa.sequence.sharding import (
    KeyOwnership,
    Sharding,
    global_positions_of,
    sharded_layout,
)

#: Dims of a head's query (128 and rope's 64) and of its output, which travel before absorption.
TRAVELLING = {"v3.2": (192, 128), "tiny": (20, 10)}


def rank_layouts(case: Case, device: torch.device) -> tuple[Layout, tuple[Layout, ...]]:
    """Return the layouts of the query rows of the simulated rank, and of those that it scores."""
    everything = bshd_layout(case.rows, 1, device)
    if case.tp_mode == "heads" or case.simulated == 1:
        return everything, (everything,)
    sharding = Sharding(sp=case.simulated, sp_rank=case.simulated - 1)
    places = global_positions_of(sharding, case.rows, device)
    own = sharded_layout(everything, sharding, KeyOwnership(sharding, places, 1))
    swap = worthwhile_swap(own, PRESETS[case.preset].topk, 1, sharding)
    return own, (own,) if swap is None else halves(own, swap, 1)


class Core:
    """Inputs of the core of one rank."""

    def __init__(self, case: Case, device: torch.device, workspace_mib: int):
        self.shape: Shape = PRESETS[case.preset]
        p = self.shape
        self.layout, self.scored = rank_layouts(case, device)
        self.heads = p.heads // case.simulated if case.tp_mode == "heads" else p.heads
        self.policy = Policy(workspace_bytes=workspace_mib * 2**20)
        generator = torch.Generator(device).manual_seed(SEED)
        rows = self.layout.num_queries

        def normal(*shape) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.bfloat16, device=device, generator=generator)

        # Rows that see the same keys of one buffer select alike, by sequence and by heads.
        self.kv = normal(case.rows, 1, p.qk_dim).requires_grad_()
        weights = normal(rows, p.index_heads) * (p.index_heads * p.index_dim) ** -0.5
        self.indexer = IndexerInputs(
            normal(rows, p.index_heads, p.index_dim).requires_grad_(),
            normal(case.rows, p.index_dim).requires_grad_(),
            weights.requires_grad_(),
        )
        self.q = normal(rows, self.heads, p.qk_dim).requires_grad_()
        self.gradient = normal(rows, self.heads, p.v_dim)
        self.kl = None

    def forward(self) -> torch.Tensor:
        """Select and attend; the indexer is trained in the backward."""
        p = self.shape
        keys, grad_proxy = gather_keys(self.kv, None)
        indices, length = self.select()
        training = IndexerTraining(
            self.indexer, self.layout, lambda: 1.0, lambda kl_sum: setattr(self, "kl", kl_sum)
        )
        return sparse_attention(
            self.q, keys, indices, softmax_scale=p.softmax_scale, v_dim=p.v_dim,
            topk_length=length, kv_grad=grad_proxy, in_order=True, indexer=training,
            policy=self.policy,
        ).out  # fmt: skip

    def select(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Select for as many rows as the rank holds; which ones is the same to the attention."""
        p, found, first = self.shape, [], 0
        for layout in self.scored:
            rows = slice(first, first + layout.num_queries)
            inputs = dataclasses.replace(
                self.indexer, q=self.indexer.q[rows], weights=self.indexer.weights[rows]
            )
            found.append(indexer_topk(inputs, layout, p.topk, policy=self.policy))
            first = rows.stop
        indices, lengths = zip(*found, strict=True)
        if len(found) == 1:
            return indices[0], lengths[0]
        return torch.cat(indices), torch.cat(lengths)

    def step(self) -> None:
        self.forward().backward(self.gradient)


def measure_core(case: Case, device: torch.device, settings: dict) -> dict:
    """Measure the core of a simulated rank."""
    clock = Clock(device)
    begin = time.perf_counter()
    core = Core(case, device, settings["workspace_mib"])
    core.step()
    clock.wait()
    warm_up = time.perf_counter() - begin
    if core.kl is None or not core.kl.isfinite():
        raise RuntimeError(f"the backward formed no indexer loss, but {core.kl}")
    gc.collect()
    result = {"heads": core.heads, "warm_up_s": warm_up}
    return result | measured(core.forward, core.step, clock, device, settings)


def prepare_core(case: Case, device: torch.device, settings: dict) -> None:
    """Run a short step, so that the kernels are compiled."""
    case = dataclasses.replace(case, rows=min(case.rows, PREPARE_ROWS))
    Core(case, device, settings["workspace_mib"]).step()


def exchanges(case: Case) -> list[tuple[str, float]]:
    """Return the collectives of a step of the simulated rank: name and bytes that it sends."""
    p, ranks = PRESETS[case.preset], case.simulated
    if case.tp_mode == "heads":
        return [("all_reduce", sum_everywhere(case.rows * p.topk * WIDE, ranks))]
    part = case.rows // ranks * p.heads * 2
    query, out = TRAVELLING[case.preset]
    both = [("all_to_all", exchange(part * dim, ranks)) for dim in (query, out)]
    both += both  # forward, and gradients backward
    if len(rank_layouts(case, torch.device("cpu"))[1]) > 1:
        row = p.index_heads * (p.index_dim + 1) * 2 + p.topk * 4
        both.append(("all_to_all", case.rows // ranks // 2 * row))
    return both


def measure_exchange(case: Case, device: torch.device, settings: dict) -> dict:
    """Time these collectives over all ranks of this process' group, as many bytes sent by each."""
    clock, ranks = Clock(device), torch.distributed.get_world_size()
    calls, total = [], sum(sent for _, sent in exchanges(case))
    if ranks == 1:  # nobody to send to
        return {"times": {"exchange": [0.0]}, "bytes": total}
    for name, sent in exchanges(case):
        if name == "all_reduce":
            x = torch.zeros(round(sent / sum_everywhere(WIDE, ranks)), device=device)
            calls.append(lambda x=x: torch.distributed.all_reduce(x))
            continue
        count = round(sent / exchange(2, ranks)) // ranks * ranks
        x = torch.zeros(count, dtype=torch.bfloat16, device=device)
        y = torch.empty_like(x)
        calls.append(lambda x=x, y=y: torch.distributed.all_to_all_single(y, x))

    def everything() -> None:
        for call in calls:
            call()

    everything()
    times = timed(everything, clock, device, settings["repeats"], settings["budget"])
    return {"times": {"exchange": times}, "bytes": total}
