"""Attention of a configuration and division among its ranks: decided once for all layers.

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

#: What masked dense attention to selected keys calls.
MASKED_OPERATIONS = (masked.KEY_BITS, masked.FORWARD, masked.BACKWARD, masked.PROBABILITIES)
#: Heads that fill the tiles of the attention kernels.
FULL_TILE = 64

Way = Literal["sparse", "masked", "masked_latents", "visible", "dense", "dense_latents"]


@dataclass(frozen=True)
class AttentionChoice:
    """Attention of all layers of a configuration.

    Attributes:
        way: to selected keys: ``sparse``, by lists of them; ``masked``, by plain MLA under a bit
            mask; ``masked_latents``, the same with keys made of the latents of all
            context-parallel ranks. To all visible keys: ``visible``, under a bit mask; ``dense``,
            by dense attention, over a ring of ranks; ``dense_latents``, with keys made of the
            latents of all ranks.
        reason: for or against a bit mask, in one clause.
        masked_up_to: longest sequence (of selected keys) or microbatch (of visible ones) for which
            a bit mask is taken; ``None`` where it cannot be.
        tp_mode: what tensor-parallel ranks divide. ``heads``: a rank attends for all tokens with
            its local heads, and repeats the indexer's work. ``sequence``: it does everything for
            its local tokens, with all heads. ``select``: it selects keys and trains the indexer for
            its local tokens, and attends for all tokens with its local heads.
    """

    way: Way
    reason: str
    masked_up_to: int | None = None
    tp_mode: TPMode = "heads"

    @property
    def masked(self) -> bool:
        """Return whether plain MLA runs under a bit mask."""
        return self.way in ("masked", "masked_latents", "visible")

    @property
    def shares_latents(self) -> bool:
        """Return whether a rank's keys are the latents of all ranks, read by a plain weight."""
        return self.way in ("sparse", "masked_latents", "dense_latents")

    def describe(self) -> str:
        """One line: which attention, why, and up to which length it is masked."""
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
    """Decide how the layers of a configuration attend in its stage.

    Args:
        config: a validated transformer configuration of this package.
        device: ``cuda`` or ``cpu``; by default the one that training would use here.
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
    """Describes the calls of a configuration's layers on a device."""

    def __init__(self, config: Any, device: str | None = None):
        self.config = config
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")

    def of(self, heads: int, qk_dim: int, v_dim: int = 0, **more) -> OpCall:
        """Return a call with ``heads`` heads on a rank, in the dtype of the parameters."""
        dtype = more.pop("dtype", self.config.params_dtype)
        return describe_call(
            self.device, dtype=dtype, heads=heads, qk_dim=qk_dim, v_dim=v_dim, **more
        )

    def indexer(self, topk: int | None = None) -> OpCall:
        """Return a call with the indexer's dims; ``topk``: keys that it selects."""
        config = self.config
        return self.of(
            config.dsa_indexer_n_heads, config.dsa_indexer_head_dim, topk=topk,
            relu=config.dsa_indexer_scoring_relu,
        )  # fmt: skip

    def masked_attention(self, topk: int | None = None) -> OpCall:
        """Return masked dense attention's call; ``topk``: keys that are selected, if they are."""
        config = self.config
        key = config.qk_head_dim + config.qk_pos_emb_head_dim
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        return self.of(
            heads, key, config.v_head_dim, rope_dim=config.qk_pos_emb_head_dim, topk=topk
        )

    def visible_attention(self) -> Iterator[tuple[Operation, OpCall]]:
        """Yield what masked dense attention to all visible keys calls."""
        yield masked.VISIBLE_BITS, describe_visible_call(self.device)
        for operation in (masked.FORWARD, masked.BACKWARD):
            yield operation, self.masked_attention()


class _Rule(NamedTuple):
    """Rule for or against a bit mask; the first one that applies decides."""

    applies: bool
    masks: bool
    reason: str
    limit: int | None = None  # see AttentionChoice.masked_up_to


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
    """Yield the rules for visible keys: masked kernels are faster, and copy no keys or values."""
    config, options = calls.config, options_of(calls.config)
    several = config.context_parallel_size > 1
    yield _Rule(several, False, "context-parallel ranks exchange keys or latents")
    name = options.policy.named_for("dense_attention")
    yield _Rule(name is not None, False, f"dense_attention={name} was asked for")
    yield from _rules_of_fusion(calls.visible_attention(), options.policy)
    # Every tile would hold all of them, and be computed for one.
    alternate = options.interleaved_sequences > 1
    yield _Rule(alternate, False, "sequences of a microbatch alternate", MOST_KEPT)
    length = options.sequence_length
    yield _Rule(length is None, False, "no sequence length is given", MOST_KEPT)
    assert length is not None
    tokens = length * options.packed_sequences  # bits are kept for the backward
    yield _Rule(True, tokens <= MOST_KEPT, f"{tokens} tokens of a microbatch", MOST_KEPT)


def _rules_of_fusion(calls: Iterable[tuple[Operation, OpCall]], policy: Policy) -> Iterator[_Rule]:
    for operation, call in calls:
        reason = operation.why_not_fused(call, policy)
        yield _Rule(reason is not None, False, f"{operation.name} is not fused here: {reason}")


def by_sequence(config: Any) -> bool:
    """Return whether ranks of TP attend for local tokens with all heads, unless it is masked.

    Only lists of selected keys make tokens independent of each other: stages with dense attention
    go by heads.
    """
    ranks, mode = config.tensor_model_parallel_size, options_of(config).tp_mode
    dense = options_of(config).stage != "sparse" and not uses_csa(config)
    if ranks == 1 or not config.sequence_parallel or dense or mode in ("heads", "select"):
        return False
    return mode == "sequence" or config.num_attention_heads // ranks < FULL_TILE


def query_heads(config: Any) -> int:
    """Return how many heads attention has on a rank, unless it is masked: then, the local ones."""
    ranks = 1 if by_sequence(config) else config.tensor_model_parallel_size
    return config.num_attention_heads // ranks


def _select_mode(config: Any) -> TPMode:
    """Masked attention: select for local tokens, or by heads.

    A dense loss goes by heads: its teacher needs the queries of all heads.
    """
    mode, several = options_of(config).tp_mode, config.tensor_model_parallel_size > 1
    if not (several and config.sequence_parallel) or has_dense_loss(config):
        return "heads"
    return "select" if mode in ("auto", "select") else "heads"


def _exchanges_latents(config: Any) -> bool:
    """Dense stages: exchange latents instead of keys and values across context-parallel ranks.

    A latent is gathered once and expanded on every rank, which costs less than sending what it
    expands to wherever it is narrower: from two local heads on in DeepSeek's shapes.
    """
    options = options_of(config)
    if options.cp_exchange != "auto":
        return options.cp_exchange == "latents"
    rope = config.qk_pos_emb_head_dim
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    expanded = heads * (config.qk_head_dim + rope + config.v_head_dim)
    return config.kv_lora_rank + rope < expanded
