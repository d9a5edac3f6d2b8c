"""Rules of DeepSeek-V4's attention."""

from collections.abc import Iterator
from typing import Any

from megatron_dsa.config.rules.cuda_graphs import graphs_attention
from megatron_dsa.config.rules.model import attention_rules, host_rules, indexer_rules
from megatron_dsa.config.rules.table import Must, Not, check_rows

_CASE = "with --csa-compress-ratios"
_COMPRESSOR_NORM = "the keys of V4's indexer are normalised by its compressor"
_ROPE = "V4's rope has no concentration factor and rotates all of --qk-pos-emb-head-dim"
_V4 = (
    Must(
        "recompute", Not(("latent_output",)),
        "V4's keys are not expanded, so nothing is absorbed; give queries, or drop it",
        "--dsa-recompute",
    ),
    Must("q_lora_rank", True, "queries come from a normalised latent"),
    Must("qk_layernorm", True, "queries come from a normalised latent"),
    Must("normalization", "RMSNorm", "V4 has no other norm"),
    Must(
        "latent_norm_epsilon", None, "V4's norms all have that of --norm-epsilon",
        "--dsa-latent-norm-epsilon",
    ),
    Must("mscale", 1, _ROPE),
    Must("mscale_all_dim", 0, _ROPE),
    Must("rotary_percent", 1, _ROPE),
    Must("dsa_indexer_k_norm_epsilon", None, _COMPRESSOR_NORM),
    Must("dsa_indexer_k_norm_fp32", False, _COMPRESSOR_NORM),
    Must("dsa_indexer_topk_freq", 1, "V4's layers do not share selections"),
)  # fmt: skip
#: Rules with ``--dsa-recompute queries``.
_IN_BLOCKS = (
    Must("fp8", None, "the linear is not called, so its weight would not be quantised"),
    Must("fp4", None, "the linear is not called, so its weight would not be quantised"),
    Must(
        "delay_wgrad_compute", False,
        "Megatron would wait for the weight gradient of a linear that is not called",
    ),
    Must(
        "evaluate_indexer", False, "evaluation passes would hold all queries",
        "--dsa-evaluate-indexer",
    ),
    Must("quant_recipe", None, "the linear is not called, so no recipe would quantise it"),
)  # fmt: skip
_INTERLEAVED = Must("dsa_indexer_rope_interleaved", True, "V4's indexer pairs neighbouring dims")
#: Compression ratio of CSA layers, which select among overlapping groups.
CSA_RATIO = 4


def csa_rules(config: Any, options: Any) -> Iterator[tuple[Any, str]]:
    yield from _pattern_rules(config)
    yield from check_rows(_V4, config, options, _CASE)
    yield from _shape_rules(config)
    yield from attention_rules(config)
    yield from host_rules(config, options)
    if options.stage != "dense" and CSA_RATIO in (config.csa_compress_ratios or ()):
        yield from indexer_rules(config, options)
        yield _INTERLEAVED.check(config, case=_CASE)


def recompute_rules(config: Any, options: Any, has_dense_loss: bool) -> Iterator[tuple[Any, str]]:
    """Yield the rules of ``--dsa-recompute queries``."""
    if options.recompute != "queries":
        return
    case = "with --dsa-recompute queries"
    yield from check_rows(_IN_BLOCKS, config, options, case)
    yield (
        not graphs_attention(config),
        f"--cuda-graph-impl must not capture attention {case}, whose backward runs a backward of "
        "its own; drop one of the two",
    )
    yield (
        not has_dense_loss or CSA_RATIO not in (config.csa_compress_ratios or ()),
        "--dsa-recompute must not be queries with an indexer loss over all visible keys, which "
        "reads all queries; add --dsa-indexer-use-sparse-loss in stage sparse, or drop it",
    )


def _pattern_rules(config):
    ratios = config.csa_compress_ratios
    layers = config.num_layers + (config.mtp_num_layers or 0)
    yield (
        ratios is not None and len(ratios) == layers,
        "--csa-compress-ratios must hold one ratio per layer, multi-token prediction included "
        f"({layers}), got {ratios if ratios is None else len(ratios)}",
    )
    yield (
        1 not in (ratios or ()),
        "--csa-compress-ratios must be 0 or at least 2, got a 1: groups of one token compress "
        "nothing; give 0",
    )
    compresses = any(ratios or ())
    yield (
        not compresses or (config.csa_compress_rotary_base or 0) > 0,
        "--csa-compress-rotary-base is required with compressed layers: public sources disagree on "
        "it, take it from the model's own configuration",
    )


def _shape_rules(config):
    rope = config.qk_pos_emb_head_dim
    yield (
        config.qk_head_dim + rope == config.v_head_dim,
        f"--v-head-dim ({config.v_head_dim}) must be --qk-head-dim ({config.qk_head_dim}) plus "
        f"--qk-pos-emb-head-dim ({rope}): the key is the value",
    )
    yield (
        config.o_groups >= 1 and config.num_attention_heads % config.o_groups == 0,
        f"--o-groups ({config.o_groups}) must divide --num-attention-heads "
        f"({config.num_attention_heads})",
    )
    yield (
        config.o_groups % config.tensor_model_parallel_size == 0,
        f"--o-groups ({config.o_groups}) must be a multiple of --tensor-model-parallel-size "
        f"({config.tensor_model_parallel_size}): a group's heads stay on one rank",
    )
