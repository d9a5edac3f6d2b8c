"""A module on one and on several ranks (tensor and context parallel)."""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from megatron_dsa.ops.indexer_loss.sample import QuerySample
from tests.helpers import relative_error
from tests.processes import run_ranks


@dataclass(frozen=True)
class Case:
    """A self-attention module and its batch.

    Attributes:
        config: name of a function of :mod:`tests.host`, with ``arguments`` and ``changes``.
        by_sequence, by_columns: parts of names of sharded parameters; others are replicated.
        rows, batch: of the hidden states; ``lengths`` packs them, ``padded`` includes padding.
        cp_layout: division of tokens over context-parallel ranks.
        fused: operations whose torch implementation counts as fused.
        sampled_parts: parts by heads of a sample of a third of the tokens; 0: all tokens.
    """

    config: str
    by_sequence: tuple[str, ...]
    by_columns: tuple[str, ...]
    arguments: tuple = ()
    changes: dict = field(default_factory=dict)
    rows: int = 64
    batch: int = 1
    lengths: tuple[int, ...] | None = None
    padded: tuple[int, ...] | None = None
    cp_layout: str = "zigzag"
    fused: tuple[str, ...] = ()
    sampled_parts: int = 0

    def part(self, name: str, full: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        """Return a tensor-parallel rank's shard of a full weight or gradient."""
        names = name.split(".")
        if set(names) & set(self.by_sequence):
            return full.chunk(ranks)[rank]
        if set(names) & set(self.by_columns):
            return full.chunk(ranks, dim=1)[rank]
        return full

    def global_positions(self, cp: int) -> list[list[int]]:
        """Return the indices in dim 0 of every context-parallel rank's tokens, in order."""
        if self.cp_layout == "contiguous":
            size = self.rows // cp
            return [list(range(r * size, (r + 1) * size)) for r in range(cp)]
        lengths = [self.rows]
        if self.lengths is not None and self.cp_layout == "zigzag":
            lengths = list(self.padded or self.lengths)
            lengths.append(self.rows - sum(lengths))
        ranks: list[list[int]] = [[] for _ in range(cp)]
        first = 0
        for length in lengths:
            chunk, rest = divmod(length, 2 * cp)
            assert rest == 0
            for r in range(cp):
                for c in (r, 2 * cp - 1 - r):
                    ranks[r] += range(first + c * chunk, first + (c + 1) * chunk)
            first += length
        return ranks

    def held_by(self, tp: int, cp: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the token indices of each rank's tensor-parallel group, and its local ones."""
        groups = [torch.tensor(held) for held in self.global_positions(cp)]
        return [(tokens, tokens.chunk(tp)[rank]) for tokens in groups for rank in range(tp)]

    def sample(self, total: int, rank: int, tp: int, cp: int) -> Any:
        """Return the sample of a rank with ``total`` query tokens."""
        rows = next(x for x in self.held_by(tp, cp)[rank] if len(x) * self.batch == total)
        tokens = torch.arange(total).view(-1, self.batch)
        parts = [
            tokens[(rows % 3 == 1) & (rows // 3 % self.sampled_parts == part)].flatten()
            for part in range(self.sampled_parts)
        ]
        return _Third(torch.cat(parts), total, self.sampled_parts, len(parts[0]))


class _Third(QuerySample):
    factor = 3.0

    def spread(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Spread in torch: the kernel requires tiles."""
        return [
            x.new_zeros(self.total, *x.shape[1:]).index_copy_(0, self.tokens, x) for x in tensors
        ]


def run(
    cases: dict[str, Case], tp: int, folder, cp: int = 1, backend: str = "gloo"
) -> list[dict[str, dict]]:
    """Run forward and backward of every case on ``tp * cp`` ranks; return each rank's results.

    Gradients are summed over ranks like Megatron does.
    """
    return spawn(_run_case, cases, tp, folder, cp, backend)


def spawn(
    run_case: Callable, cases: dict, tp: int, folder, cp: int = 1, backend: str = "gloo"
) -> list[dict[str, dict]]:
    """Return each rank's ``{name: run_case(case, tp, cp)}``, with all tensors on the CPU.

    Runs on the CPU (``gloo``), or on a GPU per rank (``nccl``), where tests with too few GPUs are
    skipped.
    """
    if backend == "nccl" and torch.cuda.device_count() < tp * cp:
        import pytest  # not in ranks

        pytest.skip(f"needs {tp * cp} GPUs, {torch.cuda.device_count()} here")
    # On the CPU even with a GPU: NCCL needs one GPU per rank. cuBLAS needs the other variable in
    # deterministic mode.
    variables = (
        {"CUDA_VISIBLE_DEVICES": ""}
        if backend == "gloo"
        else {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    )
    handle, store = tempfile.mkstemp(dir=folder)
    os.close(handle)
    os.unlink(store)
    arguments = (tp, cp, store, str(folder), run_case, cases, backend)
    with mock.patch.dict(os.environ, variables):
        run_ranks(_worker, arguments, tp * cp)
    files = [f"{folder}/{tp}-{cp}-{rank}.pt" for rank in range(tp * cp)]
    return [torch.load(file, map_location="cpu") for file in files]


def _worker(rank, tp, cp, store, folder, run_case, cases, backend):
    from megatron_dsa.patches import cpu_host

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        _cut_as_on_a_cpu()
    elif cpu_host.needed():
        cpu_host.activate()
    torch.set_num_threads(1)
    from megatron.core import parallel_state, tensor_parallel

    torch.distributed.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=tp * cp
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, context_parallel_size=cp
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    from tests import host

    host.start = lambda: device
    results = {name: run_case(case, tp, cp) for name, case in cases.items()}
    torch.save(results, f"{folder}/{tp}-{cp}-{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _cut_as_on_a_cpu() -> None:
    """Make a small workspace divide absorbed attention in blocks smaller than a GPU."""
    from megatron_dsa.ops.sparse_attention import blocks

    blocks._wave = lambda heads, device: 0


def build(case: Case, tp: int = 1, cp: int = 1):
    """Return the module of a case, its local input, and its packing."""
    from megatron.core import parallel_state

    from tests import host

    config = getattr(host, case.config)(
        *case.arguments,
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        sequence_parallel=tp > 1,
        use_cpu_initialization=True,
        **case.changes,
    )
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    cp_rank = parallel_state.get_context_parallel_rank()
    module = host.attention_module(
        config, full=lambda name, weight: case.part(name, weight, tp_rank, tp)
    ).train()
    x = host.hidden_like(module, case.rows, case.batch).detach()
    x = x[case.global_positions(cp)[cp_rank]].chunk(tp)[tp_rank].requires_grad_()
    packing = None
    if case.lengths is not None:
        packing = host.packed(*case.lengths, padded_lengths=case.padded)
    return module, x, packing


def build_two(case: Case, tp: int = 1, cp: int = 1):
    """Return :func:`build`'s results with a second layer, and an empty log."""
    from megatron.core import parallel_state

    from tests import host
    from tests.cases.log import empty_log

    first, x, packing = build(case, tp, cp)
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    second = host.attention_module(
        first.config, 2, 4, lambda name, weight: case.part(name, weight, tp_rank, tp)
    ).train()
    empty_log(2, x.device)
    return first, second, x, packing


def summed_gradients(module: torch.nn.Module, tp: int, cp: int = 1) -> dict[str, torch.Tensor]:
    """Return the gradients of trained parameters, summed over ranks like Megatron's."""
    from megatron.core import parallel_state

    gradients = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        gradients[name] = parameter.grad
        if getattr(parameter, "sequence_parallel", False) and tp > 1:
            group = parallel_state.get_tensor_model_parallel_group()
            torch.distributed.all_reduce(parameter.grad, group=group)
        if cp > 1:
            group = parallel_state.get_context_parallel_group()
            torch.distributed.all_reduce(parameter.grad, group=group)
    return gradients


def _run_case(case: Case, tp: int, cp: int) -> dict:
    from megatron_dsa.layers import core
    from megatron_dsa.layers.core import CoreAttention
    from megatron_dsa.ops.dispatch import report, reset_report
    from megatron_dsa.ops.indexer_loss import training
    from tests.cases.log import empty_log, logged_of_first

    seen, original = [], CoreAttention.topk

    def recorded(core, inputs, layout, ranks, compressed=None):
        indices, length = original(core, inputs, layout, ranks, compressed)
        seen.append(_slots(indices, layout if compressed is None else compressed.layout))
        return indices, length

    def sample(total, _share, device, *_, **__):
        found = case.sample(total, torch.distributed.get_rank(), tp, cp)
        return dataclasses.replace(found, tokens=found.tokens.to(device))

    with contextlib.ExitStack() as patches:
        patches.enter_context(_fused(case.fused))
        patches.enter_context(mock.patch.object(CoreAttention, "topk", recorded))
        if case.sampled_parts:
            for module in (core, training):
                patches.enter_context(mock.patch.object(module, "draw_sample", sample))
        module, x, packing = build(case, tp, cp)
        empty_log(1, x.device)
        reset_report()
        out, _ = module(x, None, packed_seq_params=packing)
        out.square().sum().backward()
    averaged = [
        name
        for name, parameter in module.named_parameters()
        if getattr(parameter, "average_gradients_across_tp_domain", False)
    ]
    return {
        "slots": seen, "out": out.detach(), "dx": x.grad, "averaged": averaged, "report": report(),
        "loss": logged_of_first().get("indexer loss"),
        "gradients": summed_gradients(module, tp, cp),
    }  # fmt: skip


@contextlib.contextmanager
def _fused(names: tuple[str, ...]):
    """Make torch's implementation of operations count as fused."""
    from megatron_dsa.ops import OPERATIONS
    from megatron_dsa.ops.dispatch import Candidate, Support, forget_choices

    with contextlib.ExitStack() as stack:
        for operation in (OPERATIONS[name] for name in names):
            mine = Candidate("mine", operation.candidates[-1].kernel, Support("any shape"))
            candidates = (mine, *operation.candidates)
            stack.enter_context(mock.patch.object(operation, "candidates", candidates))
        forget_choices()
        yield
    forget_choices()


def _slots(indices: torch.Tensor, layout) -> torch.Tensor:
    """Return the selection as positions, independent of the number of ranks."""
    if layout.key_indices is None:
        return indices.clone()
    slots = torch.argsort(layout.key_indices)[indices.clamp_min(0).long()]
    return torch.where(indices < 0, -1, slots).int()


def compare(case: Case, one: dict, several: list[dict], tolerance=1e-12, tp=1, cp=1) -> None:
    """Check that the ranks together equal one process in the step of :func:`run`."""
    check_parts(case, one, several, tolerance, tp, cp)
    element = torch.arange(case.batch)
    for rank, (tokens, local) in zip(several, case.held_by(tp, cp), strict=True):
        # The selection does not depend on ranks.
        for got, want in zip(rank["slots"], one["slots"], strict=True):
            held = tokens if len(got) == len(tokens) * case.batch else local
            assert got.equal(want[(held[:, None] * case.batch + element).flatten()])
        if rank["loss"] is not None or one["loss"] is not None:
            # Printed in fp32.
            assert abs(rank["loss"] - one["loss"]) <= max(tolerance, 1e-6) * one["loss"]
    for name in several[0]["averaged"]:
        # Megatron averages these, which keeps equal values to the bit.
        parts = [rank["gradients"][name] for rank in several]
        assert all(part.equal(parts[0]) for part in parts), name


def check_parts(case: Case, one: dict, several: list[dict], tolerance, tp=1, cp=1) -> None:
    """Check output, input gradient and all parameter gradients of ranks against one process."""
    assert len(several) == tp * cp
    for index, (_, local) in enumerate(case.held_by(tp, cp)):
        rank = several[index]
        for what in ("out", "dx"):
            error = relative_error(rank[what], one[what][local])
            assert error < tolerance, (what, index, error)
        for name, full in one["gradients"].items():
            assert full.norm() > 0, name
            expected = case.part(name, full, index % tp, tp)
            error = relative_error(rank["gradients"][name], expected)
            assert error < tolerance, (name, index, error)
