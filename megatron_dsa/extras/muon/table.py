"""Table of parameters and their optimizer under ``--optimizer muon``."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.training import print_rank_0

from megatron_dsa.extras.muon.optimizer import is_left_to_adamw
from megatron_dsa.layers.weight_blocks import block_rows, is_sharded


def full_shape(parameter: Any, ranks: int) -> tuple[int, ...]:
    shape = list(parameter.shape)
    if is_sharded(parameter):
        shape[parameter.partition_dim] *= ranks
    return tuple(shape)


def number_of_blocks(parameter: Any, ranks: int) -> int:
    pattern = block_rows(parameter)
    if pattern is None:
        return 1
    return len(pattern) * (full_shape(parameter, ranks)[0] // sum(pattern))


@dataclass(frozen=True, order=True)
class Kind:
    """Parameters that differ only in their layer or expert.

    Attributes:
        name: without numbers and model wrappers.
        shape: over all tensor-parallel ranks.
        blocks: matrices that Muon orthogonalises per parameter.
        block_rows: dim-0 sizes of consecutive blocks; empty for one matrix.
    """

    optimizer: str
    name: str
    shape: tuple[int, ...]
    blocks: int = 1
    block_rows: tuple[int, ...] = ()


def kinds_of(
    models: Iterable[torch.nn.Module], tensor_ranks: int, expert_ranks: int = 1
) -> Counter[Kind]:
    """Count the trained parameters of this pipeline rank, over tensor and expert ranks."""
    found: Counter[Kind] = Counter()
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                expert = not getattr(parameter, "allreduce", True)
                kind = _kind(name, parameter, tensor_ranks)
                found[kind] += expert_ranks if expert else 1
    return found


def _kind(name: str, parameter: Any, ranks: int) -> Kind:
    name = re.sub(r"^(module\.)+", "", name)
    name = re.sub(r"\.\d+\.", ".*.", re.sub(r"(weight|bias)\d+$", r"\1*", name))
    shape = full_shape(parameter, ranks)
    if is_left_to_adamw(parameter):
        return Kind("AdamW", name, shape)
    rows = block_rows(parameter) or ()
    return Kind("Muon", name, shape, number_of_blocks(parameter, ranks), rows)


def table_of(kinds: Counter[Kind]) -> list[str]:
    vectors = {kind: count for kind, count in kinds.items() if len(kind.shape) < 2}
    matrices = sorted(kind for kind in kinds if kind not in vectors)
    table = [("optimizer", "parameters", "shape", "number", "orthogonalised as")]
    if vectors:
        names = sorted({_short(kind.name) for kind in vectors})
        table.append(("AdamW", ", ".join(names), "vectors", str(sum(vectors.values())), ""))
    for kind in matrices:
        shape = f"[{', '.join(map(str, kind.shape))}]"
        table.append((kind.optimizer, kind.name, shape, str(kinds[kind]), _blocks(kind)))
    # Entries of vectors may exceed the column width.
    widths = [max(len(row[column]) for row in table if row[2] != "vectors") for column in range(4)]
    return [
        "  ".join(f"{text:{width}}" for text, width in zip(row, [*widths, 0], strict=True)).rstrip()
        for row in table
    ]


def _short(name: str) -> str:
    module, _, leaf = name.rpartition(".")
    return module.rpartition(".")[2] if leaf == "weight" else leaf


def _blocks(kind: Kind) -> str:
    if kind.optimizer == "AdamW":
        return ""
    if not kind.block_rows:
        return "one matrix"
    rows = " and ".join(map(str, kind.block_rows))
    return f"{kind.blocks} blocks of {rows} rows"


def print_optimizer_table(models: list[Any], config: Any) -> None:
    """Print the table over all pipeline stages; collective."""
    local = kinds_of(models, config.tensor_model_parallel_size, config.expert_model_parallel_size)
    group = parallel_state.get_pipeline_model_parallel_group()
    stages: list[Counter[Kind] | None] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(stages, local, group)
    print_rank_0("> megatron_dsa parameters by optimizer:")
    for line in table_of(sum(filter(None, stages), Counter[Kind]())):
        print_rank_0(f">   {line}")
