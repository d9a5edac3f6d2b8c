"""A module on one and on several tensor-parallel ranks, processes over gloo on the CPU."""

from __future__ import annotations

import importlib
import os
import tempfile
from dataclasses import dataclass, field

import torch

from tests.helpers import relative_error


@dataclass(frozen=True)
class Case:
    """A self-attention module and the rows it is run on.

    Attributes:
        config: name of a function of :mod:`tests.host`, with ``arguments`` and ``changes``.
        selector: the module of the package whose ``indexer_topk`` selects.
        by_rows, by_columns: parts of parameter names: how a rank's part is cut out of a weight.
            All others are replicated.
        rows, batch: of the hidden states; ``lengths`` packs the rows.
    """

    config: str
    selector: str
    by_rows: tuple[str, ...]
    by_columns: tuple[str, ...]
    arguments: tuple = ()
    changes: dict = field(default_factory=dict)
    rows: int = 64
    batch: int = 1
    lengths: tuple[int, ...] | None = None

    def part(self, name: str, full: torch.Tensor, rank: int, world: int) -> torch.Tensor:
        """Return what a rank holds of a full weight or gradient."""
        names = name.split(".")
        if set(names) & set(self.by_rows):
            return full.chunk(world)[rank]
        if set(names) & set(self.by_columns):
            return full.chunk(world, dim=1)[rank]
        return full


def run(cases: dict[str, Case], world: int, folder) -> list[dict[str, dict]]:
    """Run forward and backward of every case on ``world`` ranks; return each rank's results.

    Gradients that Megatron sums over tensor-parallel ranks are summed; others are as computed.
    """
    handle, store = tempfile.mkstemp(dir=folder)
    os.close(handle)
    os.unlink(store)
    torch.multiprocessing.spawn(_worker, (world, store, str(folder), cases), nprocs=world)
    return [torch.load(f"{folder}/{world}-{rank}.pt") for rank in range(world)]


def _worker(rank, world, store, folder, cases):
    from megatron_dsa import cpu_host

    if cpu_host.needed():
        cpu_host.activate()
    torch.set_num_threads(1)
    from megatron.core import parallel_state, tensor_parallel

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world
    )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    from tests import host

    host.start = lambda: torch.device("cpu")
    results = {name: _run_case(host, case, rank, world) for name, case in cases.items()}
    torch.save(results, f"{folder}/{world}-{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _run_case(host, case: Case, rank: int, world: int) -> dict:
    config = getattr(host, case.config)(
        *case.arguments,
        tensor_model_parallel_size=world,
        sequence_parallel=world > 1,
        use_cpu_initialization=True,
        **case.changes,
    )
    module = host.attention_module(
        config, full=lambda name, weight: case.part(name, weight, rank, world)
    ).train()
    selector = importlib.import_module(f"megatron_dsa.{case.selector}")
    original, seen = selector.indexer_topk, []
    selector.indexer_topk = lambda *a, **k: seen.append(original(*a, **k)) or seen[-1]
    x = host.hidden_like(module, case.rows, case.batch).detach()
    x = x.chunk(world)[rank].requires_grad_()
    packing = host.packed(*case.lengths) if case.lengths is not None else None
    out, _ = module(x, None, packed_seq_params=packing)
    out.square().sum().backward()
    selector.indexer_topk = original
    gradients, averaged = {}, []
    for name, parameter in module.named_parameters():
        gradients[name] = parameter.grad
        if getattr(parameter, "sequence_parallel", False) and world > 1:
            torch.distributed.all_reduce(parameter.grad)
        if getattr(parameter, "average_gradients_across_tp_domain", False):
            averaged.append(name)
    return {
        "indices": [indices for indices, _ in seen],
        "out": out.detach(),
        "dx": x.grad,
        "gradients": gradients,
        "averaged": averaged,
    }


def compare(case: Case, one: dict, several: list[dict], tolerance: float = 1e-12) -> None:
    """Check that the ranks together computed what one process did."""
    world = len(several)
    for rank in several:
        # Trap 17: the selection is the same on every rank, to the last index.
        assert len(rank["indices"]) == len(one["indices"])
        assert all(map(torch.equal, rank["indices"], one["indices"]))
    for what in ("out", "dx"):
        assert relative_error(torch.cat([r[what] for r in several]), one[what]) < tolerance, what
    for name, full in one["gradients"].items():
        assert full.norm() > 0, name
        parts = [rank["gradients"][name] for rank in several]
        for rank, part in enumerate(parts):
            expected = case.part(name, full, rank, world)
            assert relative_error(part, expected) < tolerance, (name, rank)
        if name in several[0]["averaged"]:
            # Megatron averages these: what is the same already stays so to the last bit.
            assert all(part.equal(parts[0]) for part in parts), name
