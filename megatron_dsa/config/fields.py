"""Configuration fields that have flags."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal, get_args, get_origin


@dataclass(frozen=True)
class Option:
    """Flag of a configuration field; choices come from types, ranges from :mod:`.rules.ranges`.

    Attributes:
        flag: a boolean field's flag reverses the default.
        help: text of ``--help-dsa``, which appends the default.
        unit: factor from the flag's number to the field's, for example bytes per MiB.
        parse: converts the words after the flag; its second argument is the flag, for messages.
    """

    flag: str
    help: str
    metavar: str | None = None
    unit: int = 1
    parse: Callable[[list[str], str], Any] | None = None

    @property
    def dest(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")


def option(default: Any, flag: str, help: str, **settings: Any) -> Any:
    """Return a dataclass field with a flag; ``settings``: further :class:`Option` fields."""
    return field(default=default, metadata={"option": Option(flag, help, **settings)})


def option_fields(config_class: type) -> Iterator[tuple[dataclasses.Field, Option]]:
    for each in dataclasses.fields(config_class):
        if "option" in each.metadata:
            yield each, each.metadata["option"]


def choices_of(each: dataclasses.Field) -> tuple[str, ...] | None:
    return get_args(each.type) if get_origin(each.type) is Literal else None


def given_values(words: list[str], flag: str) -> list[str]:
    """Return a flag's values, given as ``FLAG VALUE`` or ``FLAG=VALUE``."""
    values = []
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == flag:
            values += [value] if equals else words[index + 1 : index + 2]
    return values


#: Configuration field -> Megatron's flag, if the names differ.
_NAMES = {
    "layernorm_epsilon": "--norm-epsilon",
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "fp8_param": "--fp8-param-gather",
    "fp4_param": "--fp4-param-gather",
    "quant_recipe": "--te-precision-config-file",
    "gtp_weight_remat_size": "--tensor-parallel-num-weight-shards",
    "num_moe_experts": "--num-experts",
    "original_max_position_embeddings": "--yarn-original-max-position-embeddings",
    "beta_fast": "--yarn-beta-fast",
    "beta_slow": "--yarn-beta-slow",
    "gated_linear_unit": "--swiglu",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
    "microbatch_group_size_per_vp_stage": "--microbatch-group-size-per-virtual-pipeline-stage",
}
#: Configuration fields that other flags or Megatron's defaults imply.
_LEFT_OUT = {"activation_func", "dsa_indexer_scoring_relu"}
#: Per-layer lists, which Megatron parses as Python expressions.
_PATTERNS = {"moe_layer_freq", "linear_attention_freq"}
_NEGATIVE = {
    "add_bias_linear": "--disable-bias-linear",
    "bias_activation_fusion": "--no-bias-swiglu-fusion",
    "dsa_indexer_rotate_activation": "--no-dsa-indexer-rotate-activation",
}


def flag_of(name: str) -> str:
    return _NAMES.get(name, "--" + name.replace("_", "-"))


def said(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def flag_words(name: str, value: Any) -> list[str]:
    """Return the command-line words that set a field, empty for ``None``."""
    if value is None or name in _LEFT_OUT:
        return []
    flag = flag_of(name)
    if value is True:
        return [flag]
    if value is False:
        return [_NEGATIVE[name]] if name in _NEGATIVE else []
    if name in _PATTERNS and isinstance(value, list):  # format ([0]*3+[1]*58)
        runs = [f"[{kind}]*{len(list(group))}" for kind, group in groupby(value)]
        return [flag, f"({'+'.join(runs)})"]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return [flag, str(value)]
