"""Indexer loss in the model's backward and in Megatron's log."""

import functools
import inspect
import logging
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from megatron.core.transformer.cuda_graphs import is_graph_capturing, is_graph_warmup
from megatron.core.utils import log_single_rank

from megatron_dsa.config.hybrid import logged_layers
from megatron_dsa.config.model import has_indexers, indexer_is_trained, options_of
from megatron_dsa.metrics.quality import Mean
from megatron_dsa.metrics.tags import EVALUATION, FIGURES, layer_tag, write
from megatron_dsa.ops.common.autograd import once_differentiable
from megatron_dsa.ops.common.capture import capturing
from megatron_dsa.ops.common.scaling import Scaled, add_to_mean

logger = logging.getLogger(__name__)


class LossScale:
    """Megatron's factor of auxiliary losses, one per model configuration.

    After every forward, schedules set it to ``loss_scale * cp / num_microbatches``, or to
    ``loss_scale`` with per-token loss. Once read, it is updated in place, for CUDA graphs.
    """

    def __init__(self):
        self.value: torch.Tensor | float = 1.0

    def __call__(self, scale: torch.Tensor) -> None:
        if isinstance(self.value, torch.Tensor) and self.value.device == scale.device:
            self.value.copy_(scale.detach().reshape(self.value.shape))
        else:
            self.value = scale.detach().clone()

    def on(self, device: torch.device) -> torch.Tensor:
        if not isinstance(self.value, torch.Tensor):
            # A copy from the host would synchronise.
            self.value = torch.full((1,), self.value, device=device)
        return self.value.to(device).reshape(-1)[0]


def install_loss_scale(config) -> LossScale:
    """Register a :class:`LossScale` on ``config`` for Megatron's schedules (once)."""
    if not isinstance(config.experimental_attention_variant_loss_scale_func, LossScale):
        config.experimental_attention_variant_loss_scale_func = LossScale()
    return config.experimental_attention_variant_loss_scale_func


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, loss, scale):
        ctx.scale = scale
        ctx.loss_like = (loss.shape, loss.dtype, loss.device)
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        # Megatron sets the loss scale after the forward.
        shape, dtype, device = ctx.loss_like
        return grad_output, ctx.scale.on(device).to(dtype).expand(shape), None


def attach_loss(output: torch.Tensor, loss: torch.Tensor, scale: LossScale) -> torch.Tensor:
    """Return ``output``, whose backward also starts the backward of ``loss`` (a scalar)."""
    return _Attach.apply(output, loss, scale)


NAMES = tuple(FIGURES)


@dataclass
class _State:
    # Metric sums and counts ``[2, layers, metrics]``.
    sums: torch.Tensor | None = None
    sampled: set[int] = field(default_factory=set)
    # Metric -> sum and count since the last log line.
    line: dict[str, tuple[float, int]] = field(default_factory=dict)


class IndexerLog:
    """Per-layer metrics of an iteration, reduced over all ranks.

    Every rank creates the buffers: a stage without indexers must join the reduction.
    """

    _state = _State()

    @classmethod
    def create(cls, num_layers: int, device) -> None:
        cls._state.sampled.clear()
        if cls._state.sums is None or cls._state.sums.shape[1] != num_layers:
            cls._state.sums = torch.zeros(2, num_layers, len(NAMES), device=device)

    @classmethod
    def is_on(cls) -> bool:
        """Return True inside Megatron's training loop."""
        return cls._state.sums is not None

    @classmethod
    def samples_selection(cls, layer_index: int) -> bool:
        """Return True if this call, one per layer and iteration, samples the selection.

        Sampling a selection launches about a hundred small kernels.
        """
        if not cls.is_on() or layer_index in cls._state.sampled:
            return False
        cls._state.sampled.add(layer_index)
        return True

    @classmethod
    def record(cls, layer_index: int, metrics: Mapping[str, torch.Tensor | Scaled | Mean]) -> None:
        """Add one microbatch's metrics of a layer; layer indices start at 0.

        A scalar has weight 1, a :class:`Mean` its count, which excludes padding.
        """
        sums = cls._state.sums
        if sums is None or _rehearses_capture():
            return
        for name, value in metrics.items():
            layer_sum, layer_count = sums[:, layer_index, NAMES.index(name)].unbind()
            if isinstance(value, Scaled):
                add_to_mean(layer_sum, layer_count, value)
                continue
            total, count = value if isinstance(value, Mean) else (value, 1)
            layer_sum.add_(total.detach().float())
            layer_count.add_(count)

    @classmethod
    def reduce(cls) -> dict[str, Mean]:
        """Sum metrics over all ranks, clear them, and return sums and counts ``[layers]``.

        A layer that recorded nothing has count 0; one that recorded NaN has sum NaN.
        """
        cls._state.sampled.clear()
        assert cls._state.sums is not None
        both = cls._state.sums.clone()
        cls._state.sums.zero_()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(both)
        return {name: Mean(*both[:, :, i]) for i, name in enumerate(NAMES)}

    @classmethod
    def log(
        cls, iteration: int, total_loss_dict: dict, skipped: bool, writer=None, wandb_writer=None
    ) -> None:
        """Write the metrics to Megatron's log line, TensorBoard and W&B.

        The log line holds means over layers, microbatches and iterations that were not ``skipped``;
        the writers get every iteration and layer.
        """
        if not cls.is_on():
            return
        metrics, written, of_line = cls.reduce(), {}, {}
        table = torch.stack([torch.stack(mean) for mean in metrics.values()]).tolist()
        for name, (totals, counts) in zip(metrics, table, strict=True):
            layers = enumerate(zip(totals, counts, strict=True), 1)
            recorded = {layer: total / count for layer, (total, count) in layers if count}
            if not recorded:
                continue
            mean = sum(recorded.values()) / len(recorded)
            if name == EVALUATION:
                # Evaluation metrics belong to no training iteration.
                _print_once(f"> {name} (before iteration {iteration}): {mean:.6E}")
            else:
                of_line[name] = mean
            if not math.isfinite(mean):
                wrong = ", ".join(str(i) for i, x in recorded.items() if not math.isfinite(x))
                _print_once(f"> {name} is not finite in layer(s) {wrong} (iteration {iteration})")
            written[FIGURES[name]] = mean
            for layer, value in recorded.items():
                written[layer_tag(FIGURES[name], layer)] = value
        cls._add_to_line(of_line, total_loss_dict, skipped)
        write(written, iteration, writer, wandb_writer)

    @classmethod
    def _add_to_line(cls, metrics: dict[str, float], total_loss_dict: dict, skipped: bool) -> None:
        line = cls._state.line
        advanced = total_loss_dict.get("advanced iterations", 0)
        if advanced + total_loss_dict.get("skipped iterations", 0) == 0:
            line.clear()
        if not skipped:
            advanced += 1
            for name, value in metrics.items():
                total, count = line.get(name, (0.0, 0))
                line[name] = (total + value, count + 1)
        for name in NAMES:
            if name in line:
                total, count = line[name]
                total_loss_dict[name] = torch.tensor(total / count * max(1, advanced))
            elif name in total_loss_dict:
                # Megatron would print 0 for a metric without values.
                total_loss_dict[name] = torch.tensor(float("nan"))


def _rehearses_capture() -> bool:
    """Return True if Megatron runs a layer on zeros before CUDA graph capture."""
    return is_graph_warmup() or (is_graph_capturing() and not capturing())


def _print_once(line: str) -> None:
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(line, flush=True)


class TrainingLog:
    """Megatron's ``training_log`` with this package's metrics.

    Megatron's hook needs a positive coefficient and omits skipped iterations. Megatron 0.19.2 also
    logs the first step twice with ``--log-interval 1``.
    """

    def __init__(self, megatron: Callable):
        self.megatron, self._signature = megatron, inspect.signature(megatron)

    def __call__(self, *args, **kwargs):
        from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer

        bound = self._signature.bind(*args, **kwargs)
        call = bound.arguments
        skipped, line = bool(call["skipped_iter"]), call["total_loss_dict"]
        if not skipped:
            for name in call["loss_dict"]:
                line.setdefault(name, 0.0)
        IndexerLog.log(
            call["iteration"], line, skipped, get_tensorboard_writer(), get_wandb_writer()
        )
        if call.get("is_first_iteration"):
            call["is_first_iteration"] = call["iteration"] % get_args().log_interval != 0
        return self.megatron(*bound.args, **bound.kwargs)


def install_logging(config, device=None, training_module: ModuleType | None = None) -> None:
    if has_indexers(config):
        if device is None:
            device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        IndexerLog.create(logged_layers(config), device)
    training: Any = training_module or sys.modules.get("megatron.training.training")
    if training is not None and not isinstance(training.training_log, TrainingLog):
        training.training_log = TrainingLog(training.training_log)


def say_how_trained(config) -> None:
    if not has_indexers(config):
        return
    if indexer_is_trained(config):
        _log_once(logging.INFO, options_of(config).describe_loss())
    else:
        _log_once(logging.WARNING, "indexer frozen: --dsa-indexer-loss-coeff 0")


@functools.cache
def _log_once(level: int, line: str) -> None:
    log_single_rank(logger, level, line)
