"""LoRA adapters in PEFT's format, and weights with adapters merged into them.

``base_model.model.<released linear>.lora_A.weight`` is ``[rank, in]``, ``lora_B`` ``[out, rank]``.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_dsa.config.model import (
    LORA_A,
    is_adapter_parameter,
    linears_with_adapters,
    options_of,
    uses_csa,
)
from megatron_dsa.config.rules.lora import existing_linears, rank_and_alpha
from megatron_dsa.errors import ConfigError, require
from megatron_dsa.extras.huggingface.files import read_json, read_safetensors, write_safetensors
from megatron_dsa.extras.huggingface.names import Names
from megatron_dsa.extras.huggingface.ranks import ParallelRank, global_name
from megatron_dsa.training.files.whole import WholeFiles

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: PEFT settings that change an adapter's function -> the only supported value.
_PLAIN: dict[str, Any] = {
    "use_rslora": False,
    "use_dora": False,
    "fan_in_fan_out": False,
    "bias": "none",
    "lora_bias": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layer_replication": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "alora_invocation_tokens": None,
    "use_qalora": False,
    "use_bdlora": None,
    "arrow_config": None,
    "kasa_config": None,
    "monteclora_config": None,
    "megatron_config": None,
}
#: Values of ``init_lora_weights`` that leave the base weights unchanged.
_KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
#: PEFT settings that other checks cover, or that affect only training.
_NO_MATTER = {
    *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path"),
    *("revision", "inference_mode", "r", "lora_alpha", "lora_dropout", "init_lora_weights"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("megatron_core", "runtime_config", "velora_config", "qalora_group_size"),
    "ensure_weight_tying",
    # PEFT ignores these settings unless init_lora_weights names their method.
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
}


@dataclass(frozen=True)
class Factor:
    """A parameter of an adapter: PEFT's tensor name and Megatron's weight name."""

    name: str
    weight: str
    is_mtp: bool


def factor_of(name: str, names: Names, num_layers: int) -> Factor:
    module, _, leaf = name.rpartition(".")
    part, letter = leaf[: -len(LORA_A)], leaf[-1]
    weight = f"{module}.weight"
    linears = [hf.removesuffix(".weight") for hf in names.match(weight, num_layers).hf]
    linear = next(x for x in linears if x.rpartition(".")[2] == part)
    full = f"base_model.model.{linear}.lora_{letter}.weight"
    return Factor(full, weight, name.startswith("mtp."))


def adapter_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        if is_adapter_parameter(name):
            yield name, parameter


def merged(
    model: torch.nn.Module, values: Callable[[str], torch.Tensor], name: str, like: torch.Tensor
) -> torch.Tensor:
    """Merge a linear's adapters in fp32 or wider, then round to ``like``'s dtype."""
    module_name, _, leaf = name.rpartition(".")
    linear: Any = model.get_submodule(module_name)
    adapted: tuple[str, ...] = getattr(linear, "adapted", ())
    if leaf != "weight" or not adapted:
        return values(name).to(like.dtype)
    wide = torch.promote_types(like.dtype, torch.float32)
    total = values(name).to(wide, copy=True)
    for part, rows in zip(linear.parts, total.chunk(len(linear.parts)), strict=True):
        if part in adapted:
            down, up = (values(f"{module_name}.{part}_lora_{x}").to(wide) for x in "AB")
            rows.addmm_(up, down, alpha=linear.scale)
    return total.to(like.dtype)


def export_adapter(
    model: torch.nn.Module,
    directory: str | Path,
    names: Names,
    base: str | None = None,
    values: Callable[[str, torch.Tensor], torch.Tensor] = lambda _name, tensor: tensor.detach(),
) -> int:
    """Write the adapters of an unsplit Megatron GPT model in PEFT's format.

    Args:
        model: unwrapped ``GPTModel`` with all layers.
        base: path or name of the base model for PEFT.
        values: reads a parameter that the model does not hold.

    Returns:
        Number of tensors left out (multi-token prediction).
    """
    config: Any = model.config
    folder = Path(directory)
    found = [
        (factor_of(name, names, config.num_layers), name, tensor)
        for name, tensor in adapter_parameters(model)
    ]
    require(found, "the model has no adapters: it was built without --lora-rank")
    _check_family(config, "--adapter", "export merged weights, without it")
    for file in (CONFIG, WEIGHTS):
        require(
            not os.path.lexists(folder / file),
            f"{folder} holds an adapter already ({file}): choose another directory",
        )
    tensors = {x.name: values(name, tensor) for x, name, tensor in found if not x.is_mtp}
    text = json.dumps(_peft_config(config, base), indent=2, sort_keys=True) + "\n"
    with WholeFiles(folder) as files:
        write_safetensors(files.path(WEIGHTS), tensors)
        files.path(CONFIG).write_text(text)
    return len(found) - len(tensors)


def _check_family(config: Any, flag: str, instead: str) -> None:
    require(
        not uses_csa(config),
        f"{flag} is not supported with DeepSeek-V4: PEFT goes by the linears of transformers, "
        "where V4's have other names than in released checkpoints, and attn.wo_a, one product per "
        f"group, is no linear that PEFT's adapters fit: {instead}",
    )


def _peft_config(config: Any, base: str | None) -> dict[str, Any]:
    rank, alpha = rank_and_alpha(options_of(config))
    return _PLAIN | {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": 0.0,
        "target_modules": _target_modules(config),
    }


def _target_modules(config: Any) -> list[str]:
    """Return the last part of each adapted linear's name, or the full name if ambiguous."""
    adapted = linears_with_adapters(config)
    others = set(existing_linears(config, options_of(config))) - set(adapted)
    taken = {name.rpartition(".")[2] for name in others}
    words = ((name, name.rpartition(".")[2]) for name in adapted)
    return sorted({name if word in taken else word for name, word in words})


def import_adapter(
    model: torch.nn.Module,
    directory: str | Path,
    names: Names,
    parallel_rank: ParallelRank = ParallelRank(),
) -> int:
    """Fill the adapters of a GPT model, or of one pipeline stage, from a PEFT directory.

    Returns:
        Number of unfilled parameters (multi-token prediction).

    Raises:
        ConfigError: rank, scale, kind, shape or linears differ; or the model is a DeepSeek-V4.
    """
    config: Any = model.config
    _check_family(config, "--lora-load", "start from a checkpoint with adapters, by --load")
    folder = Path(directory)
    _check_peft_config(read_json(folder / CONFIG), folder, config)
    stored = read_safetensors(folder / WEIGHTS)
    kept, adapted = 0, linears_with_adapters(config)
    linears = "|".join(map(re.escape, adapted))
    known = re.compile(rf"base_model\.model\.model\.layers\.(\d+)\.({linears})\.lora_[AB]\.weight")
    for name in stored:
        layer = known.fullmatch(name)
        require(
            layer and int(layer[1]) < config.num_layers,
            f"{folder}: {name} is of no linear that --lora-targets names in a model of "
            f"{config.num_layers} layers ({', '.join(adapted)}): name it, or take the adapter of "
            "this model",
        )
    with torch.no_grad():
        for name, parameter in adapter_parameters(model):
            factor = factor_of(global_name(name, parallel_rank), names, config.num_layers)
            if factor.is_mtp:
                kept += 1
                continue
            require(
                factor.name in stored,
                f"{folder} has no tensor {factor.name}: --lora-targets names linears that the "
                "adapter does not have; name those of its adapter_config.json",
            )
            parameter.copy_(_part(stored[factor.name], parameter, factor.name, parallel_rank))
    return kept


def _part(
    full: torch.Tensor, parameter: Any, name: str, parallel_rank: ParallelRank
) -> torch.Tensor:
    rank, ranks = parallel_rank.tensor
    wanted, axis = list(parameter.shape), None
    if ranks > 1 and getattr(parameter, "tensor_model_parallel", False):
        axis = parameter.partition_dim
        wanted[axis] *= ranks
    require(
        list(full.shape) == wanted,
        f"{name} is {tuple(full.shape)}, the model wants {tuple(wanted)}: it is the adapter of "
        "another model",
    )
    return full if axis is None else full.chunk(ranks, dim=axis)[rank]


def _check_peft_config(given: dict[str, Any], folder: Path, config: Any) -> None:
    where = f"{folder / CONFIG}:"
    kind = given.get("peft_type")
    require(kind == "LORA", f"{where} peft_type must be LORA, got {kind!r}: take a LoRA adapter")
    for name, value in given.items():
        ours = _PLAIN.get(name)
        # Later PEFT versions write new settings, with values that disable them.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        same = (value or None) == (ours or None) and (name in _PLAIN or not is_number)
        if name not in _NO_MATTER and not same:
            raise ConfigError(
                f"{where} {name} must be {ours!r}, got {value!r}: such adapters are not supported"
                if name in _PLAIN
                else f"{where} {name} = {value!r} is not understood, and may change what the "
                "adapter means: merge it with PEFT and import the result with import-hf"
            )
    _check_initial_values(given.get("init_lora_weights", True), where)
    rank, alpha = rank_and_alpha(options_of(config))
    for key, flag, value in (("r", "--lora-rank", rank), ("lora_alpha", "--lora-alpha", alpha)):
        found = given.get(key)
        require(found == value, f"{flag} must be {found}, as {where[:-1]} says, got {value:g}")


def _check_initial_values(method: Any, where: str) -> None:
    name = str(method).lower()
    if method in _KEEPS_BASE or name in _KEEPS_BASE:
        return
    convert = (
        "convert it with PEFT: model.save_pretrained(directory, "
        "path_initial_model_for_weight_conversion=the adapter before training)"
    )
    if not name.startswith(("pissa", "olora", "corda", "lora_ga")):
        convert = "merge it with PEFT into the base that it was trained on, and import that"
    raise ConfigError(
        f"{where} init_lora_weights = {method!r}: adapters of this method go with a base whose "
        f"weights it changed, and are wrong on the released one; {convert}"
    )
