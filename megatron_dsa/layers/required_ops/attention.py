"""Which attention a configuration takes, and what its tensor-parallel ranks divide.

One decision for all layers, read by layers, start-up, ``info`` and the planner.
"""

from dataclasses import dataclass
from typing import Any

from megatron_dsa.config.model import (
    by_sequence,
    options_of,
    query_heads,
    selects_by_sequence,
    uses_csa,
)
from megatron_dsa.config.options import TPMode
from megatron_dsa.layers.required_ops.calls import calls_of
from megatron_dsa.ops.attention_costs import PairDims, attention_costs, expansion_ps
from megatron_dsa.ops.masked_attention import spec as masked
from megatron_dsa.ops.masked_attention.api import MOST_KEPT

#: What masked dense attention calls.
MASKED_OPERATIONS = (masked.KEY_BITS, masked.FORWARD, masked.BACKWARD, masked.PROBABILITIES)


@dataclass(frozen=True)
class SelectedAttention:
    """How a configuration attends to selected keys.

    Attributes:
        masked: by masked dense attention; else by sparse attention, or nothing is selected.
        reason: why, in one clause.
        crossover: the longest sequence for which masked dense attention is cheaper, where it can
            run.
    """

    masked: bool
    reason: str
    crossover: int | None = None

    @property
    def masked_runs(self) -> bool:
        """Whether masked dense attention could be taken for other sequences."""
        return self.crossover is not None

    def describe(self) -> str:
        """One line: which, why, and for which sequences masked dense attention is cheaper."""
        name = "masked dense attention" if self.masked else "sparse attention"
        line = f"selected keys: {name} ({self.reason})"
        if self.crossover is None:
            return line
        most = self.crossover
        tokens = f"{most // 1000}k" if most >= 10_000 else f"{most}"
        return f"{line}; masked is cheaper up to about {tokens} tokens"


def selected_attention(config: Any, device: str | None = None) -> SelectedAttention:
    """Decide how a configuration attends to selected keys; the same for all its layers.

    Masked dense attention has to be asked for, or to run fused on the device and be cheaper for the
    longest sequence of the configuration.

    Args:
        config: a validated transformer configuration of this package.
        device: see :func:`.layers.required_ops.required_ops`.
    """
    options = options_of(config)
    if options.stage != "sparse":
        return SelectedAttention(False, f"nothing is selected in stage {options.stage}")
    if uses_csa(config):
        return SelectedAttention(False, "V4's layers attend to lists of keys")
    asked, length = options.selected_attention, options.sequence_length
    topk: int = config.dsa_indexer_topk
    if asked != "masked" and by_sequence(config) and not selects_by_sequence(config):
        return SelectedAttention(False, "tensor-parallel ranks attend by sequence")
    if asked == "sparse":
        return SelectedAttention(False, "asked for")
    call = calls_of(config, device).masked_attention(topk)
    if asked == "auto":
        for operation in MASKED_OPERATIONS:
            reason = operation.why_not_fused(call, options.policy)
            if reason is not None:
                return SelectedAttention(False, f"{operation.name} is not fused here: {reason}")
    latent, ranks = config.kv_lora_rank, config.context_parallel_size
    dims = PairDims(call.qk_dim + call.v_dim, 2 * latent + config.qk_pos_emb_head_dim)
    expansion = (ranks - 1) * expansion_ps(latent, config.qk_head_dim + config.v_head_dim)
    interleaved = options.interleaved_sequences
    costs = attention_costs(query_heads(config), interleaved, dims, expansion)
    crossover = costs.crossover(topk)
    if asked == "masked":
        return SelectedAttention(True, "asked for", crossover)
    if length is None:
        return SelectedAttention(False, "no sequence length is given", crossover)
    cheaper = costs.masked_is_cheaper(length, topk)
    reason = f"sequences of {length} tokens, {call.heads} heads on a rank"
    if ranks > 1:
        reason += f", which makes keys of the latents of {ranks}"
    return SelectedAttention(cheaper, reason, crossover)


@dataclass(frozen=True)
class VisibleAttention:
    """How a configuration attends to all visible keys, in stages ``dense`` and ``warmup``.

    Attributes:
        masked: by masked dense attention under the bits of these keys; else by the operation
            ``dense_attention``, or keys are selected.
        reason: why, in one clause.
        longest: tokens of a microbatch up to which it is masked, where that can run.
    """

    masked: bool
    reason: str
    longest: int | None = None

    @property
    def masked_runs(self) -> bool:
        """Whether masked dense attention could be taken for other sequences."""
        return self.longest is not None

    def describe(self) -> str:
        """One line: which, why, and for which microbatches masked dense attention is taken."""
        name = "masked dense attention" if self.masked else "dense attention"
        line = f"visible keys: {name} ({self.reason})"
        return line if self.longest is None else f"{line}; masked up to {self.longest} tokens"


def visible_attention(config: Any, device: str | None = None) -> VisibleAttention:
    """Decide how a configuration attends to all visible keys; the same for all its layers.

    Masked dense attention copies neither keys nor values, and its kernels are the faster ones. It
    is taken where they run on the device, a rank holds whole sequences, and the bits of a
    microbatch are small; unless an implementation of ``dense_attention`` is named.

    Args:
        config: a validated transformer configuration of this package.
        device: see :func:`.layers.required_ops.required_ops`.
    """
    options = options_of(config)
    if uses_csa(config) or options.stage == "sparse":
        return VisibleAttention(False, "keys are selected")
    if config.context_parallel_size > 1:
        return VisibleAttention(False, "context-parallel ranks exchange keys or latents")
    if (name := options.policy.named_for("dense_attention")) is not None:
        return VisibleAttention(False, f"dense_attention={name} was asked for")
    for operation, call in calls_of(config, device).visible_attention():
        reason = operation.why_not_fused(call, options.policy)
        if reason is not None:
            return VisibleAttention(False, f"{operation.name} is not fused here: {reason}")
    longest = MOST_KEPT
    if options.interleaved_sequences > 1:
        # Every tile would hold all of them, and be computed for one.
        return VisibleAttention(False, "sequences of a microbatch alternate", longest)
    if options.sequence_length is None:
        return VisibleAttention(False, "no sequence length is given", longest)
    tokens = options.sequence_length * options.packed_sequences
    return VisibleAttention(tokens <= longest, f"{tokens} tokens of a microbatch", longest)


#: How keys are attended to: those that are selected, or all visible ones.
AttentionChoice = SelectedAttention | VisibleAttention


def attention_of(config: Any, device: str | None = None) -> AttentionChoice:
    """Decide how the layers of a configuration attend to keys in its stage.

    Args:
        config, device: see :func:`.layers.required_ops.required_ops`.
    """
    selects = uses_csa(config) or options_of(config).stage == "sparse"
    return (selected_attention if selects else visible_attention)(config, device)


def tensor_parallel_mode(config: Any, attention: AttentionChoice | None = None) -> TPMode:
    """Decide what tensor-parallel ranks divide; the same for all layers of a configuration.

    * ``heads``: a rank attends for all tokens with its own heads, and repeats the indexer's work.
    * ``sequence``: it does everything for its own tokens, with all heads.
    * ``select``: it selects keys and trains the indexer for its own tokens, and attends for all
      tokens with its own heads.

    Args:
        config: a validated transformer configuration.
        attention: what :func:`attention_of` decides, if it is known.
    """
    attention = attention_of(config) if attention is None else attention
    if isinstance(attention, VisibleAttention):
        return "heads"
    if attention.masked:
        return "select" if selects_by_sequence(config) else "heads"
    return "sequence" if by_sequence(config) else "heads"
