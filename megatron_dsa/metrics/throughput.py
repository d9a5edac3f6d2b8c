"""Megatron's throughput log with this package's operation counts and MFU."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch

from megatron_dsa.config.model import trains_main
from megatron_dsa.layers.required_ops import Keys
from megatron_dsa.metrics.flops import TOKEN, Work, flops, flops_by_part, model_work
from megatron_dsa.metrics.tags import MFU, operation_metrics, write
from megatron_dsa.ops.dispatch.operation import TIMES

#: GPU name in torch -> dense bf16 TFLOP/s, half of the figure with sparsity in NVIDIA's data sheet.
PEAKS = {
    "NVIDIA H100 80GB HBM3": 989.0,
    "NVIDIA H200": 989.0,
    "NVIDIA B200": 2250.0,
    "NVIDIA GB200": 2500.0,
}


def peak_tflops(config: Any, device: str) -> float | None:
    """Return the GPU's peak in TFLOP/s for MFU, ``None`` if unknown.

    fp8 products also relate to the bf16 peak.
    """
    return PEAKS.get(device) if config.params_dtype in (torch.bfloat16, torch.float16) else None


def describe(config: Any, work: list[Work], length: int, device: str = "") -> str:
    parts = flops_by_part(work, lambda keys: keys.pairs(length))
    peak = peak_tflops(config, device)
    reference = "no MFU, the peak of this GPU and precision is not known"
    if peak is not None:
        reference = f"MFU of {peak:g} TFLOP/s ({device}, dense bf16)"
    main = "" if trains_main(config) else ", of the main model the forward pass only"
    return (
        f"megatron_dsa counts {sum(parts.values()) / length / 1e9:.4g} GFLOP per token in "
        f"sequences of {length} tokens{main} (docs/guide/throughput.md): {shares(parts)}; "
        f"{reference}"
    )


def shares(parts: dict[str, int]) -> str:
    total = sum(parts.values())
    return ", ".join(f"{part} {100 * count / total:.1f} %" for part, count in parts.items())


class MegatronFunctions(NamedTuple):
    """Megatron's original functions, which replacements call."""

    consume: Callable[[], tuple]
    track: Callable[..., None]
    print_first: Callable[[str], None]
    print_last: Callable[[str], None]


class Throughput:
    """Operation counter, whose methods replace Megatron's functions."""

    def __init__(self, config: Any, megatron: MegatronFunctions, device: str = ""):
        self.config, self.megatron, self.device = config, megatron, device
        self._kinds = sorted({TOKEN} | {work.keys for work in model_work(config, vocabulary=1)})
        self._lengths: list[torch.Tensor] = []
        self._pairs: dict[Keys, int] | None = None
        self._announced = False
        self._logged: int | None = None

    def count_documents(self, offsets: torch.Tensor) -> None:
        """Add a packed microbatch with document bounds ``offsets [n + 1]``, without sync."""
        self._lengths.append(offsets.diff().long())

    def consume_documents(self) -> tuple[float | None, float | None]:
        """Sum document lengths and squared lengths over all ranks, or return ``(None, None)``."""
        self._pairs = None
        if not self._lengths:
            return self.megatron.consume()
        lengths = torch.cat(self._lengths)
        self._lengths.clear()
        sums = torch.stack(
            [keys.pairs(lengths).sum() for keys in self._kinds] + [lengths.square().sum()]
        )
        copies = 1
        if torch.distributed.is_initialized():
            from megatron.core import mpu

            torch.distributed.all_reduce(sums)
            copies = (
                mpu.get_tensor_model_parallel_world_size()
                * mpu.get_context_parallel_world_size()
                * mpu.get_pipeline_model_parallel_world_size()
            )
        *pairs, squares = (count // copies for count in sums.tolist())
        self._pairs = dict(zip(self._kinds, pairs, strict=True))
        return self._pairs[TOKEN], squares

    def operations(
        self,
        args: Any,
        batch_size: int,
        seqlen_squared_sum_in_batch: float | None = None,
        total_real_tokens_in_batch: float | None = None,
    ) -> int:
        """Return the operations of a global batch, like ``num_floating_point_operations``.

        Documents that were not counted are assumed equally long.
        """
        work = model_work(self.config, args.padded_vocab_size)
        if not self._announced:
            self._announced = True
            said = describe(self.config, work, args.seq_length, self.device)
            self.megatron.print_first("> " + said)
        tokens, squares = total_real_tokens_in_batch, seqlen_squared_sum_in_batch
        if tokens is None:
            return batch_size * flops(work, lambda keys: keys.pairs(args.seq_length))
        if self._pairs is not None:
            return flops(work, self._pairs.__getitem__)
        if tokens == 0:
            return 0
        assert squares is not None
        length = max(round(squares / tokens), 1)
        return round(tokens / length * flops(work, lambda keys: keys.pairs(length)))

    def track(self, log_throughput: bool = False, throughput: float | None = None) -> None:
        self.megatron.track(log_throughput, throughput)
        from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer

        args = get_args()
        iteration = args.curr_iteration + 1
        steps = 1 if self._logged is None else max(iteration - self._logged, 1)
        self._logged = iteration
        times = {name: value / steps for name, value in TIMES.take().items()}
        # Replays of CUDA graphs dispatch no operations.
        graphed = self.config.cuda_graph_impl != "none"
        metrics = {} if graphed else operation_metrics(times)
        peak = peak_tflops(self.config, self.device)
        if log_throughput and throughput is not None and peak is not None:
            share = throughput / peak
            self.megatron.print_last(f"> iteration {iteration}: MFU {100 * share:.1f} %")
            if args.log_timers_to_tensorboard:
                metrics[MFU] = share
        write(metrics, iteration, get_tensorboard_writer(), get_wandb_writer())


def installed(training_module: ModuleType | None = None) -> Throughput | None:
    training = training_module or sys.modules.get("megatron.training.training")
    counts = getattr(training, "num_floating_point_operations", None)
    owner = getattr(counts, "__self__", None)
    return owner if isinstance(owner, Throughput) else None


def install_throughput(config: Any, training_module: ModuleType | None = None) -> None:
    training: Any = training_module or sys.modules.get("megatron.training.training")
    before = installed(training_module)
    if training is None or (before is not None and before.config is config):
        return  # another pipeline stage installed the counter
    if before is None:
        megatron = MegatronFunctions(
            training.consume_seqlen_stats_in_iteration,
            training.one_logger_utils.track_e2e_metrics,
            training.print_rank_0,
            training.print_rank_last,
        )
    else:
        megatron = before.megatron
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    ours = Throughput(config, megatron, device)
    training.num_floating_point_operations = ours.operations
    training.consume_seqlen_stats_in_iteration = ours.consume_documents
    training.one_logger_utils.track_e2e_metrics = ours.track
