"""Rules of KDA layers (``linear_attention_freq``)."""

from collections.abc import Iterator
from typing import Any

from megatron_dsa.config.fields import flag_of
from megatron_dsa.config.rules.ranges import range_rules
from megatron_dsa.config.rules.table import Must, check_rows

_FLAG = "--linear-attention-freq"
_APART = "they were not run together"
_ROWS = (
    Must("csa_compress_ratios", None, "KDA layers stand between DSA layers; drop one of them"),
    Must(
        "is_hybrid_model", False, "hybrid stacks have no slot for KDA layers; build a GPT",
        "--hybrid-layer-pattern",
    ),
    Must(
        "context_parallel_size", 1,
        "a state would have to travel from rank to rank; use tensor parallelism",
    ),
    Must("moe_hash_layers", 0, _APART),
    Must("fp8", None, "gates and states need --bf16"),
    Must("fp4", None, "gates and states need --bf16"),
    Must("lora_rank", None, "KDA's linears have no adapters; train all weights"),
    Must("cuda_graph_impl", "none", _APART),
    Must("overlap_moe_expert_parallel_comm", False, _APART),
)  # fmt: skip
_NUMBERS = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim",
)  # fmt: skip


def uses_kda(config: Any) -> bool:
    return getattr(config, "linear_attention_freq", None) is not None


def is_kda_layer(config: Any, index: int) -> bool:
    """Return True if decoder layer ``index`` (from 0) has KDA, by Megatron's pattern."""
    pattern = getattr(config, "linear_attention_freq", None)
    if pattern is None:
        return False
    return (index + 1) % pattern != 0 if isinstance(pattern, int) else bool(pattern[index])


def kda_rules(config: Any, options: Any) -> Iterator[tuple[Any, str]]:
    if not uses_kda(config):
        return
    pattern, layers = config.linear_attention_freq, config.num_layers
    if isinstance(pattern, list):
        fits = len(pattern) == layers and 0 in pattern and set(pattern) <= {0, 1}
    else:
        fits = 1 <= pattern <= layers
    yield (
        fits,
        f"{_FLAG} must be a number (one in so many layers is DSA) up to --num-layers ({layers}), "
        f"or a list of 0 (DSA, at least one) and 1 (KDA) for each layer, got {pattern}",
    )
    yield from check_rows(_ROWS, config, options, f"with {_FLAG}")
    yield from range_rules({name: getattr(config, name) for name in _NUMBERS})
    heads, dim = config.linear_num_value_heads, config.linear_value_head_dim
    for name, value in (("linear_num_key_heads", heads), ("linear_key_head_dim", dim)):
        other = flag_of(name.replace("key", "value"))
        given = getattr(config, name)
        yield (
            given == value,
            f"{flag_of(name)} ({given}) must equal {other} ({value}): a head's state has as many "
            "keys as values",
        )
    ranks = config.tensor_model_parallel_size
    yield (
        heads is not None and heads % ranks == 0,
        f"--linear-num-value-heads ({heads}) must be a multiple of --tensor-model-parallel-size "
        f"({ranks}): ranks hold whole heads",
    )
