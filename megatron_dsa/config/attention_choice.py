"""Attention of a configuration and division among its ranks: decided once for all layers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron_dsa.config.model import has_dense_loss, options_of, uses_csa
from megatron_dsa.config.options import TPMode
from megatron_dsa.ops.attention_costs import PairDims, attention_costs, expansion_ps
from megatron_dsa.ops.dispatch import Operation, describe_call
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
    calls = LayerCalls(config, device)
    if options_of(config).stage == "sparse":
        masks, reason, limit = _masks_selected(calls)
        if not masks:
            return AttentionChoice("sparse", reason, limit, sparse_mode)
        way: Way = "masked" if config.context_parallel_size == 1 else "masked_latents"
        return AttentionChoice(way, reason, limit, _select_mode(config))
    masks, reason, limit = _masks_visible(calls)
    if masks:
        return AttentionChoice("visible", reason, limit)
    return AttentionChoice(
        "dense_latents" if _exchanges_latents(config) else "dense", reason, limit
    )


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


def _masks_selected(calls: LayerCalls) -> tuple[bool, str, int | None]:
    """Decide whether selected keys get a mask: asked for, or fused and cheaper.

    Returns the decision, its reason, and the longest sequence for which a mask is cheaper.
    """
    config, options = calls.config, options_of(calls.config)
    asked, length = options.selected_attention, options.sequence_length
    topk: int = config.dsa_indexer_topk
    if asked != "masked" and by_sequence(config) and _select_mode(config) != "select":
        return False, "tensor-parallel ranks attend by sequence", None
    if asked == "sparse":
        return False, "asked for", None
    call = calls.masked_attention(topk)
    if asked == "auto":
        for operation in MASKED_OPERATIONS:
            reason = operation.why_not_fused(call, options.policy)
            if reason is not None:
                return False, f"{operation.name} is not fused here: {reason}", None
    latent, ranks = config.kv_lora_rank, config.context_parallel_size
    dims = PairDims(call.qk_dim + call.v_dim, 2 * latent + config.qk_pos_emb_head_dim)
    expansion = (ranks - 1) * expansion_ps(latent, config.qk_head_dim + config.v_head_dim)
    costs = attention_costs(query_heads(config), options.interleaved_sequences, dims, expansion)
    crossover = costs.crossover(topk)
    if asked == "masked":
        return True, "asked for", crossover
    if length is None:
        return False, "no sequence length is given", crossover
    reason = f"sequences of {length} tokens, {call.heads} heads on a rank"
    if ranks > 1:
        reason += f", which makes keys of the latents of {ranks}"
    return costs.masked_is_cheaper(length, topk), reason, crossover


def _masks_visible(calls: LayerCalls) -> tuple[bool, str, int | None]:
    """Decide whether visible keys get a mask, whose kernels are faster and copy no keys or values.

    Returns the decision, its reason, and the largest microbatch that gets one: bits are kept.
    """
    config, options = calls.config, options_of(calls.config)
    if config.context_parallel_size > 1:
        return False, "context-parallel ranks exchange keys or latents", None
    if (name := options.policy.named_for("dense_attention")) is not None:
        return False, f"dense_attention={name} was asked for", None
    for operation, call in calls.visible_attention():
        reason = operation.why_not_fused(call, options.policy)
        if reason is not None:
            return False, f"{operation.name} is not fused here: {reason}", None
    if options.interleaved_sequences > 1:
        # Every tile would hold all of them, and be computed for one.
        return False, "sequences of a microbatch alternate", MOST_KEPT
    if options.sequence_length is None:
        return False, "no sequence length is given", MOST_KEPT
    tokens = options.sequence_length * options.packed_sequences
    return tokens <= MOST_KEPT, f"{tokens} tokens of a microbatch", MOST_KEPT


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
    if config.context_parallel_size == 1:
        return False
    if options.cp_exchange != "auto":
        return options.cp_exchange == "latents"
    rope = config.qk_pos_emb_head_dim
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    expanded = heads * (config.qk_head_dim + rope + config.v_head_dim)
    return config.kv_lora_rank + rope < expanded
