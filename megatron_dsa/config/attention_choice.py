"""Choice of the attention method and its sharding, common to all layers.

========  =============================  =======================  ==========================
stage     on one context-parallel rank   on several               a bit mask is used
========  =============================  =======================  ==========================
sparse    sparse, masked                 sparse, masked_latents   :func:`_mask_of_selected`
others    dense, visible                 dense, dense_latents     :func:`_mask_of_visible`
V4        sparse                         sparse                   never
========  =============================  =======================  ==========================
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from megatron_dsa.config.model import has_dense_loss, options_of, selected_tokens, uses_csa
from megatron_dsa.config.options import TPMode
from megatron_dsa.ops.attention_costs import PairDims, attention_costs, expansion_ps
from megatron_dsa.ops.dispatch import Operation, Policy, describe_call
from megatron_dsa.ops.dispatch.support import OpCall
from megatron_dsa.ops.masked_attention import spec as masked
from megatron_dsa.ops.masked_attention.api import MOST_KEPT, describe_visible_call

#: Operations of masked attention to selected keys.
MASKED_OPERATIONS = (masked.KEY_BITS, masked.FORWARD, masked.BACKWARD, masked.PROBABILITIES)
#: Heads per tile of the attention kernels.
FULL_TILE = 64

Way = Literal["sparse", "masked", "masked_latents", "visible", "dense", "dense_latents"]


@dataclass(frozen=True)
class AttentionChoice:
    """Attention method of all layers.

    Attributes:
        way: method. For selected keys: ``sparse`` reads lists, ``masked`` runs plain MLA under a
            bit mask, ``masked_latents`` does so on gathered latents. For all visible keys:
            ``visible`` uses a bit mask, ``dense`` a ring of ranks, ``dense_latents`` gathers.
        reason: why a bit mask is used or not, in one clause.
        masked_up_to: tokens of the longest masked sequence (``visible``: microbatch), if any.
        tp_mode: sharding over tensor-parallel ranks. ``heads``: local heads, replicated indexer;
            ``sequence``: local tokens; ``select``: select for local tokens, attend by local heads.
    """

    way: Way
    reason: str
    masked_up_to: int | None = None
    tp_mode: TPMode = "heads"

    @property
    def masked(self) -> bool:
        return self.way in ("masked", "masked_latents", "visible")

    @property
    def shares_latents(self) -> bool:
        """Return True if a rank attends to latents of all ranks."""
        return self.way in ("sparse", "masked_latents", "dense_latents")

    def describe(self) -> str:
        limit = self.masked_up_to
        if self.way in ("sparse", "masked", "masked_latents"):
            name = "masked dense attention" if self.masked else "sparse attention"
            line = f"selected keys: {name} ({self.reason})"
            if limit is None:
                return line
            tokens = f"{limit // 1000}k" if limit >= 10_000 else f"{limit}"
            return f"{line}; masked is cheaper up to about {tokens} tokens"
        name = "masked dense attention" if self.masked else "dense attention"
        line = f"visible keys: {name} ({self.reason})"
        return line if limit is None else f"{line}; masked up to {limit} tokens"


def attention_of(config: Any, device: str | None = None) -> AttentionChoice:
    """Return the attention method of all layers in the configured stage.

    ``config`` is validated; ``device``: ``cuda`` or ``cpu``, by default this machine's.
    """
    sparse_mode: TPMode = "sequence" if by_sequence(config) else "heads"
    if uses_csa(config):
        reason = "V4's layers attend to lists of keys"
        return AttentionChoice("sparse", reason, tp_mode=sparse_mode)
    calls, several = LayerCalls(config, device), config.context_parallel_size > 1
    if options_of(config).stage == "sparse":
        rule = _first(_mask_of_selected(calls))
        if not rule.masks:
            return AttentionChoice("sparse", rule.reason, rule.limit, sparse_mode)
        way: Way = "masked_latents" if several else "masked"
        return AttentionChoice(way, rule.reason, rule.limit, _select_mode(config))
    rule = _first(_mask_of_visible(calls))
    way = "dense_latents" if several and _exchanges_latents(config) else "dense"
    return AttentionChoice("visible" if rule.masks else way, rule.reason, rule.limit)


class LayerCalls:
    """Operations that a model's layers call on a device."""

    def __init__(self, config: Any, device: str | None = None):
        self.config = config
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")

    def of(self, heads: int, qk_dim: int, v_dim: int = 0, **more) -> OpCall:
        dtype = more.pop("dtype", self.config.params_dtype)
        return describe_call(
            self.device, dtype=dtype, heads=heads, qk_dim=qk_dim, v_dim=v_dim, **more
        )

    def indexer(self, topk: int | None = None) -> OpCall:
        config = self.config
        return self.of(
            config.dsa_indexer_n_heads, config.dsa_indexer_head_dim, topk=topk,
            relu=config.dsa_indexer_scoring_relu,
        )  # fmt: skip

    def masked_attention(self, topk: int | None = None) -> OpCall:
        config = self.config
        key = config.qk_head_dim + config.qk_pos_emb_head_dim
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        return self.of(
            heads, key, config.v_head_dim, rope_dim=config.qk_pos_emb_head_dim, topk=topk
        )

    def visible_attention(self) -> Iterator[tuple[Operation, OpCall]]:
        yield masked.VISIBLE_BITS, describe_visible_call(self.device)
        for operation in (masked.FORWARD, masked.BACKWARD):
            yield operation, self.masked_attention()


class _Rule(NamedTuple):
    """Rule for or against a bit mask; the first applicable rule decides."""

    applies: bool
    masks: bool
    reason: str
    limit: int | None = None


def _first(rules: Iterable[_Rule]) -> _Rule:
    return next(rule for rule in rules if rule.applies)


def _mask_of_selected(calls: LayerCalls) -> Iterator[_Rule]:
    config, options = calls.config, options_of(calls.config)
    asked, length = options.selected_attention, options.sequence_length
    by_lists = asked != "masked" and by_sequence(config) and _select_mode(config) != "select"
    yield _Rule(by_lists, False, "tensor-parallel ranks attend by sequence")
    yield _Rule(asked == "sparse", False, "asked for")
    topk = selected_tokens(config)
    call = calls.masked_attention(topk)
    if asked == "auto":
        yield from _rules_of_fusion(((each, call) for each in MASKED_OPERATIONS), options.policy)
    latent, ranks = config.kv_lora_rank, config.context_parallel_size
    dims = PairDims(call.qk_dim + call.v_dim, 2 * latent + config.qk_pos_emb_head_dim)
    expansion = (ranks - 1) * expansion_ps(latent, config.qk_head_dim + config.v_head_dim)
    costs = attention_costs(
        query_heads(config), options.interleaved_sequences, dims, expansion,
        options.indexer_loss_queries,
    )  # fmt: skip
    limit = costs.crossover(topk)
    yield _Rule(asked == "masked", True, "asked for", limit)
    yield _Rule(length is None, False, "no sequence length is given", limit)
    assert length is not None
    reason = f"sequences of {length} tokens, {call.heads} heads on a rank"
    if ranks > 1:
        reason += f", which makes keys of the latents of {ranks}"
    yield _Rule(True, costs.masked_is_cheaper(length, topk), reason, limit)


def _mask_of_visible(calls: LayerCalls) -> Iterator[_Rule]:
    """Yield the rules for a bit mask in attention to all visible keys."""
    config, options = calls.config, options_of(calls.config)
    several = config.context_parallel_size > 1
    yield _Rule(several, False, "context-parallel ranks exchange keys or latents")
    name = options.policy.named_for("dense_attention")
    yield _Rule(name is not None, False, f"dense_attention={name} was asked for")
    yield from _rules_of_fusion(calls.visible_attention(), options.policy)
    # A kernel tile would mix tokens of all sequences in the batch.
    alternate = options.interleaved_sequences > 1
    yield _Rule(alternate, False, "sequences of a microbatch alternate", MOST_KEPT)
    length = options.sequence_length
    yield _Rule(length is None, False, "no sequence length is given", MOST_KEPT)
    assert length is not None
    tokens = length * options.packed_sequences  # the backward reads the mask's bits
    yield _Rule(True, tokens <= MOST_KEPT, f"{tokens} tokens of a microbatch", MOST_KEPT)


def _rules_of_fusion(calls: Iterable[tuple[Operation, OpCall]], policy: Policy) -> Iterator[_Rule]:
    for operation, call in calls:
        reason = operation.why_not_fused(call, policy)
        yield _Rule(reason is not None, False, f"{operation.name} is not fused here: {reason}")


def by_sequence(config: Any) -> bool:
    """Return True if unmasked attention runs on local tokens with all heads.

    Tokens are independent only with lists of selected keys.
    """
    ranks, mode = config.tensor_model_parallel_size, options_of(config).tp_mode
    dense = options_of(config).stage != "sparse" and not uses_csa(config)
    if ranks == 1 or not config.sequence_parallel or dense or mode in ("heads", "select"):
        return False
    return mode == "sequence" or config.num_attention_heads // ranks < FULL_TILE


def query_heads(config: Any) -> int:
    ranks = 1 if by_sequence(config) else config.tensor_model_parallel_size
    return config.num_attention_heads // ranks


def _select_mode(config: Any) -> TPMode:
    """Return the ``tp_mode`` of masked attention."""
    mode, several = options_of(config).tp_mode, config.tensor_model_parallel_size > 1
    if not (several and config.sequence_parallel) or has_dense_loss(config):
        return "heads"
    return "select" if mode in ("auto", "select") else "heads"


def _exchanges_latents(config: Any) -> bool:
    """Return True if dense stages exchange latents, by default if latents are narrower than keys.

    DeepSeek's latents are narrower than the keys of two local heads.
    """
    options = options_of(config)
    if options.cp_exchange != "auto":
        return options.cp_exchange == "latents"
    rope = config.qk_pos_emb_head_dim
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    expanded = heads * (config.qk_head_dim + rope + config.v_head_dim)
    return config.kv_lora_rank + rope < expanded
