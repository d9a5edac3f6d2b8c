"""Low-rank adapters (LoRA; Hu et al. 2021) on the frozen weights of parallel linears.

``y = W x + alpha / rank * B A x``, with ``A [rank, in]`` random and ``B [out, rank]`` zero. Where
``W`` is sharded along dim 0, ``B`` is; along dim 1, ``A``. The other factor is replicated. Code
that uses a weight directly calls :func:`megatron_dsa.layers.linears.weight_of`.
"""

import functools
import math
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.training import print_rank_0

from megatron_dsa.config.model import (
    LORA_A,
    LORA_B,
    is_adapter_parameter,
    linears_with_adapters,
    options_of,
)
from megatron_dsa.config.rules.lora import modules_of_linears, rank_and_alpha
from megatron_dsa.layers.linears import ReplicatedLinear, replicated_draws

#: Sharded dim of the weight: 0, 1 or none.
Split = Literal["rows", "columns", "none"]


class AdaptedLinear:
    """Mixin for linears of Megatron or this package.

    Attributes:
        parts: released linears of equal size that this linear stacks.
        adapted: the parts with adapters.
        ranks: size of ``adapter_group``, the tensor-parallel group.
    """

    parts: tuple[str, ...]
    adapted: tuple[str, ...]
    split: Split
    ranks: int
    scale: float
    adapter_group: Any
    weight: torch.Tensor

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out, bias = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        down, up = self._factors()
        inner = self._shared(torch.nn.functional.linear(x, down))
        tokens = out.reshape(-1, out.shape[-1])
        tokens = torch.addmm(tokens, inner.reshape(-1, inner.shape[-1]), up.t(), alpha=self.scale)
        return tokens.view_as(out), bias

    def _factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``A [n rank, in]`` and ``B [out, n rank]`` of all adapters."""
        down = [getattr(self, part + LORA_A) for part in self.adapted]
        if len(self.parts) == 1:
            return down[0], getattr(self, self.parts[0] + LORA_B)
        rows = self.weight.shape[0] // len(self.parts)
        nothing = down[0].new_zeros(rows, 0)
        up = [getattr(self, part + LORA_B, nothing) for part in self.parts]
        return torch.cat(down), torch.block_diag(*up)

    def _shared(self, inner: torch.Tensor) -> torch.Tensor:
        """Gather or reduce-scatter ``A x [..., n rank]`` under sequence parallelism."""
        if self.ranks == 1 or self.split == "none":
            return inner
        if self.split == "rows":
            return gather_from_sequence_parallel_region(inner, group=self.adapter_group)
        return reduce_scatter_to_sequence_parallel_region(inner, group=self.adapter_group)

    def with_adapters(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the local part of ``weight + scale * B A``, rounded once."""
        down, up = self._factors()
        return torch.addmm(weight, up, down, alpha=self.scale)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets=(), metadata=None) -> dict:
        parameters = dict(self.named_parameters(recurse=False))  # type: ignore[attr-defined]
        adapters = {name: x for name, x in parameters.items() if is_adapter_parameter(name)}
        # torch's linears lack this method.
        describe = getattr(super(), "sharded_state_dict", None)
        state, others = {}, parameters
        if describe is not None:
            state = describe(prefix, sharded_offsets, metadata)
            others = adapters
        axes = {
            name: x.partition_dim
            for name, x in adapters.items()
            if getattr(x, "tensor_model_parallel", False)
        }
        return state | make_sharded_tensors_for_checkpoint(
            others,
            prefix,
            axes,
            sharded_offsets,
            tp_group=self.adapter_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


@functools.cache
def _adapted_class(kind: type) -> type:
    return type(f"Adapted{kind.__name__}", (AdaptedLinear, kind), {"__module__": __name__})


def add_adapters(model: torch.nn.Module, config: Any, prefix: str = "") -> None:
    """Add the configured adapters to a model; ``prefix``: its path in a layer."""
    adapted = linears_with_adapters(config)
    if not adapted:
        return
    parts: dict[str, list[str]] = {}
    for linear, where in modules_of_linears(config).items():
        parts.setdefault(where, []).append(linear)
    for path, module in list(model.named_modules()):
        for where, linears in parts.items():
            named = [linear for linear in linears if linear in adapted]
            if named and f".{prefix}{path}".endswith(f".{where}"):
                adapt(module, linears, named, config)


def adapt(linear: Any, parts: list[str], adapted: list[str], config: Any) -> None:
    """Add adapters to a linear, in place.

    ``parts``: released linears that it stacks; ``adapted``: parts that get adapters.
    """
    (rank, alpha), split = rank_and_alpha(options_of(config)), _split_of(linear)
    ranks = config.tensor_model_parallel_size
    rows, columns = linear.weight.shape
    marks = {
        name: value
        for name in ("sequence_parallel", "average_gradients_across_tp_domain")
        if (value := getattr(linear.weight, name, None)) is not None
    }
    kind: Any = type(linear)
    linear.__class__ = _adapted_class(kind)
    linear.parts, linear.adapted = map(_last_words, (parts, adapted))
    linear.split, linear.ranks, linear.scale = split, ranks, alpha / rank
    # Unsplit linears lack ``tp_group``.
    group = getattr(linear, "tp_group", None)
    linear.adapter_group = (
        parallel_state.get_tensor_model_parallel_group() if group is None else group
    )
    for part in linear.adapted:
        down = _new_down(linear, rank, columns, config)
        up = torch.nn.Parameter(
            torch.zeros(
                rows // len(parts), rank, dtype=config.params_dtype, device=linear.weight.device
            )
        )
        _mark(down, up, split, config.sequence_parallel, marks)
        linear.register_parameter(part + LORA_A, down)
        linear.register_parameter(part + LORA_B, up)


def _mark(down: Any, up: Any, split: Split, by_sequence: bool, marks: dict[str, Any]) -> None:
    if split == "none":
        for factor in (down, up):
            for name, value in marks.items():
                setattr(factor, name, value)
        return
    (shared, axis), replicated = ((up, 0), down) if split == "rows" else ((down, 1), up)
    set_tensor_model_parallel_attributes(shared, True, axis, 1)
    replicated.sequence_parallel = by_sequence


def _last_words(names: list[str]) -> tuple[str, ...]:
    return tuple(name.rpartition(".")[2] for name in names)


def _split_of(linear: Any) -> Split:
    if isinstance(linear, ReplicatedLinear):
        return "none"
    if isinstance(linear, ColumnParallelLinear):
        return "rows"
    if isinstance(linear, RowParallelLinear):
        return "columns"
    split: dict[str | None, Split] = {"column": "rows", "row": "columns", None: "none"}
    return split[linear.parallel_mode]


def _new_down(linear: Any, rank: int, columns: int, config: Any) -> torch.nn.Parameter:
    """Draw the same ``A`` on all ranks; return this rank's shard."""
    device, shards = linear.weight.device, linear.ranks if linear.split == "columns" else 1
    whole = torch.empty(rank, columns * shards, dtype=config.params_dtype, device=device)
    if not whole.is_meta:
        with replicated_draws(device):
            torch.nn.init.kaiming_uniform_(whole, a=math.sqrt(5))
    if shards > 1:
        number = torch.distributed.get_rank(linear.adapter_group)
        whole = whole.chunk(shards, dim=1)[number].contiguous()
    return torch.nn.Parameter(whole)


def print_adapters(models: list[Any], config: Any) -> None:
    """Print the numbers of trained and frozen parameters; collective."""
    counts = {True: 0, False: 0}
    for model in models:
        for parameter in model.parameters():
            expert = not getattr(parameter, "allreduce", True)
            ranks = config.expert_model_parallel_size if expert else 1
            if getattr(parameter, "tensor_model_parallel", False):
                ranks *= (
                    config.expert_tensor_parallel_size
                    if expert
                    else config.tensor_model_parallel_size
                )
            # Skip the copy of a tied embedding.
            if not getattr(parameter, "shared", False):
                counts[parameter.requires_grad] += ranks * parameter.numel()
    group = parallel_state.get_pipeline_model_parallel_group()
    stages: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(stages, counts, group)
    trained, frozen = (sum(stage[kind] for stage in stages) for kind in (True, False))
    rank, alpha = rank_and_alpha(options_of(config))
    print_rank_0(
        f"> megatron_dsa adapters of rank {rank}, scale {alpha / rank:g}: {trained:,} parameters "
        f"are trained, {frozen:,} are frozen; on {', '.join(linears_with_adapters(config))}"
    )
