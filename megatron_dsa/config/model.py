"""Model fields and properties of transformer configurations; imports no Megatron."""

# Do not import ``annotations`` from ``__future__``: flags come from field types.
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from megatron_dsa.config.fields import option
from megatron_dsa.config.hybrid import attention_layers, attention_number
from megatron_dsa.config.options import DSAOptions
from megatron_dsa.config.rules.csa import CSA_RATIO, csa_rules, recompute_rules
from megatron_dsa.config.rules.hash_routing import hash_rules
from megatron_dsa.config.rules.hybrid import hybrid_rules
from megatron_dsa.config.rules.hyper_connections import hyper_connection_rules
from megatron_dsa.config.rules.kda import kda_rules
from megatron_dsa.config.rules.lora import adapted_linears, adapts_indexer, lora_rules
from megatron_dsa.config.rules.model import dsa_rules, masked_rules, sink_rules, tp_mode_rules
from megatron_dsa.config.rules.ranges import option_rules
from megatron_dsa.config.rules.table import uses_csa
from megatron_dsa.errors import require

#: Name suffixes of adapter parameters.
LORA_A, LORA_B = "_lora_A", "_lora_B"


@dataclass
class StreamFields:
    """Fields of hyper-connections, hash routing and KDA."""

    hc_mult: int = option(
        1,
        "--hc-mult",
        "Residual streams of DeepSeek-V4's hyper-connections, around any attention; 1 is a plain "
        "residual. DeepSeek-V4 has 4.",
    )
    hc_sinkhorn_iters: int = option(
        20,
        "--hc-sinkhorn-iters",
        "Iterations that make the matrix by which streams are mixed doubly stochastic.",
    )
    hc_eps: float = option(
        1e-6,
        "--hc-eps",
        "Added to the weights of hyper-connections and to the sums that divide them.",
    )
    hc_collapse: Literal["learned", "mean"] = option(
        "learned",
        "--hc-collapse",
        "How streams become one after the last layer: summed with weights of every token "
        "(DeepSeek-V4), or their mean (GLM-5.3), from which multi-token prediction goes on with "
        "plain residuals.",
    )
    moe_hash_layers: int = option(
        0,
        "--moe-hash-layers",
        "First layers whose experts are looked up in a table by token id. DeepSeek-V4 has 3.",
    )
    moe_hash_seed: int = option(
        0,
        "--moe-hash-seed",
        "Seed of these tables in a new model; a checkpoint has its own.",
    )
    #: Padded vocabulary size, set by the model builder.
    moe_hash_vocab_size: int | None = None
    kda_gate_lower_bound: float = option(
        -5.0,
        "--kda-gate-lower-bound",
        "Least log decay of a step in layers of Kimi Delta Attention (--linear-attention-freq).",
    )


@dataclass
class CSAFields(StreamFields):
    """Fields of DeepSeek-V4's attention, named as on Megatron's development branch."""

    csa_compress_ratios: list[int] | None = option(
        None,
        "--csa-compress-ratios",
        "One ratio per layer, multi-token prediction layers last: 0 window only; 4 CSA, window and "
        "selected compressed keys; more: HCA, window and all compressed keys. Gives the layers "
        "DeepSeek-V4's attention.",
    )
    csa_window_size: int = option(
        128,
        "--csa-window-size",
        "Latest positions that every query sees, its own included.",
    )
    csa_compress_rotary_base: float | None = option(
        None,
        "--csa-compress-rotary-base",
        "Rotary base of layers with compression, to which alone YaRN applies; required, take it "
        "from the model. --rotary-base is that of the others.",
    )
    o_groups: int = option(
        8, "--o-groups", "Groups of heads with a low-rank output projection each."
    )
    o_lora_rank: int = option(1024, "--o-lora-rank", "Rank of a group's output projection.")

    @property
    def head_dim(self: Any) -> int:
        return self.v_head_dim

    def ratio(self: Any, layer_number: int, is_mtp: bool = False) -> int:
        """Return the compression ratio of a layer; layers count from 1."""
        assert self.csa_compress_ratios is not None
        return self.csa_compress_ratios[layer_number - 1 + (self.num_layers if is_mtp else 0)]


def options_of(config: Any) -> DSAOptions:
    return getattr(config, "dsa", None) or DSAOptions()


def uses_streams(config: Any) -> bool:
    return getattr(config, "hc_mult", 1) > 1


def has_learned_head(config: Any) -> bool:
    return uses_streams(config) and config.hc_collapse == "learned"


def uses_sinks(config: Any) -> bool:
    """Return True if V3.2's attention has learned sinks (Hy4)."""
    return getattr(config, "softmax_type", None) == "learnable"


def hash_layers(config: Any) -> int:
    return getattr(config, "moe_hash_layers", 0)


def uses_indexer(config: Any) -> bool:
    return options_of(config).stage != "dense"


def has_indexers(config: Any) -> bool:
    if not uses_indexer(config):
        return False
    return not uses_csa(config) or CSA_RATIO in config.csa_compress_ratios


def indexer_is_trained(config: Any) -> bool:
    """Return True if an indexer loss is computed, under LoRA only if indexers have adapters."""
    if has_adapters(config) and not adapts_indexer(config, options_of(config)):
        return False
    return uses_indexer(config) and bool(config.dsa_indexer_loss_coeff)


def has_adapters(config: Any) -> bool:
    return options_of(config).lora_rank is not None


def linears_with_adapters(config: Any) -> tuple[str, ...]:
    return adapted_linears(config, options_of(config))


def loss_is_sparse(config: Any) -> bool:
    return options_of(config).stage == "sparse" and config.dsa_indexer_use_sparse_loss


def has_dense_loss(config: Any) -> bool:
    """Return True if training or evaluation computes an indexer loss over all visible keys."""
    computed = indexer_is_trained(config) or options_of(config).evaluate_indexer
    return uses_indexer(config) and computed and not loss_is_sparse(config)


def selected_keys(config: Any) -> int:
    """Return the maximum number of keys or pools that an indexer selects."""
    return config.dsa_indexer_topk // options_of(config).indexer_pool_size


def selected_tokens(config: Any) -> int:
    """Return the maximum number of keys per query in V3.2's attention."""
    return config.dsa_indexer_topk + options_of(config).indexer_pool_size - 1


def computes_topk(config: Any, layer_number: int) -> bool:
    """Return True if attention ``layer_number`` (from 1) selects keys.

    The first ``dsa_indexer_skip_topk_offset`` layers do, then one in ``dsa_indexer_topk_freq``.
    """
    first = max(config.dsa_indexer_skip_topk_offset, 1)
    return layer_number <= first or (layer_number - first) % config.dsa_indexer_topk_freq == 0


def shares_indices(config: Any) -> bool:
    return options_of(config).stage == "sparse" and config.dsa_indexer_topk_freq > 1


def selects_keys(config: Any, layer_number: int, is_mtp: bool = False) -> bool:
    """Return True if a layer of V3.2's attention selects keys in stage sparse."""
    number = attention_number(config, layer_number)
    return is_mtp or not shares_indices(config) or computes_topk(config, number)


def ends_group(config: Any, layer_number: int) -> bool:
    """Return True if no later layer reuses this layer's selection."""
    behind = [number for number in attention_layers(config) if number > layer_number]
    return not behind or selects_keys(config, behind[0])


def shares_teacher(config: Any, layer_number: int, is_mtp: bool = False) -> bool:
    """Return True if several layers' attention trains one indexer."""
    if options_of(config).indexer_teacher == "own" or is_mtp or not shares_indices(config):
        return False
    alone = selects_keys(config, layer_number) and ends_group(config, layer_number)
    return not alone and loss_is_sparse(config) and indexer_is_trained(config)


def validate(config: Any) -> None:
    """Raise :class:`ConfigError` for an unsupported configuration."""
    options = options_of(config)
    rules: Iterable[tuple[Any, str]] = dsa_rules(config, options)
    if uses_csa(config):
        rules = chain(option_rules(CSAFields, config), csa_rules(config, options))
        rules = chain(rules, recompute_rules(config, options, has_dense_loss(config)))
    elif isinstance(config, StreamFields):
        rules = chain(option_rules(StreamFields, config), rules)
    rules = chain(rules, hyper_connection_rules(config), hash_rules(config))
    rules = chain(rules, kda_rules(config, options))
    rules = chain(rules, hybrid_rules(config, options, functools.partial(selects_keys, config)))
    rules = chain(rules, masked_rules(config, options), lora_rules(config, options))
    rules = chain(rules, tp_mode_rules(config, options, has_dense_loss(config)))
    rules = chain(rules, sink_rules(config, options, has_dense_loss(config)))
    complaints = [f"  - {message}" for ok, message in rules if not ok]
    require(not complaints, "\n".join(["unsupported configuration:", *complaints]))


def is_indexer_parameter(name: str) -> bool:
    return ".indexer." in name


def is_adapter_parameter(name: str) -> bool:
    return name.endswith((LORA_A, LORA_B))


def trains_main(config) -> bool:
    options = options_of(config)
    return options.stage != "warmup" or not options.freeze_main
