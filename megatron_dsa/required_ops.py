"""The operations that a layer calls in a training step: one declaration, read by all who need it.

Start-up chooses and compiles them (:mod:`.modules.warm_up`), ``info`` and the planner list them,
FLOP counts add them up (:mod:`.metrics.flops`). A test compares them with the calls of real steps,
for every stage and preset. Which attention selected keys get and which all visible ones, and what
tensor-parallel ranks divide, is decided here, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_dsa.config import (
    TPMode,
    by_sequence,
    computes_topk,
    indexer_is_trained,
    loss_is_sparse,
    options_of,
    query_heads,
    selects_by_sequence,
    shares_indices,
    uses_csa,
    uses_indexer,
)
from megatron_dsa.config_rules import CSA_RATIO
from megatron_dsa.dispatch import Operation, Policy, describe_call
from megatron_dsa.dispatch.support import OpCall
from megatron_dsa.ops.attention_costs import PairDims, attention_costs, expansion_ps
from megatron_dsa.ops.indexer_topk.api import selection_calls
from megatron_dsa.ops.masked_attention import declaration as masked
from megatron_dsa.ops.masked_attention.visible import MOST_KEPT, describe_visible_call
from megatron_dsa.ops.sparse_attention.declaration import BACKWARD, FORWARD, gives_teacher


@dataclass(frozen=True, order=True)
class Keys:
    """Which keys a query has: the query at position ``t`` (from 0) ``(t + 1) // ratio`` of them.

    Attributes:
        ratio: positions per key; 1 if they are not compressed.
        limit: no query has more; 0 for no limit.
    """

    ratio: int = 1
    limit: int = 0

    def pairs(self, length) -> Any:
        """Return how many pairs of a query and a key sequences have.

        Args:
            length: of a sequence, an ``int`` or an integer tensor of any shape.
        """
        free = length  # queries whose number of keys the limit does not touch
        if self.limit:
            most = self.ratio * self.limit - 1
            free = (length + most - abs(length - most)) // 2  # the smaller, also of tensors
        last = free // self.ratio
        # Every number of keys below the last is that of `ratio` queries.
        pairs = self.ratio * (last * (last - 1) // 2) + last * (free - self.ratio * last + 1)
        return pairs + (length - free) * self.limit


@dataclass(frozen=True)
class RequiredOp:
    """An operation that a layer calls.

    Attributes:
        operation: its name in :data:`megatron_dsa.ops.OPERATIONS`.
        call: the description of the call on a rank.
        keys: the keys that every query has to do with, one kind after the other.
        in_training: whether training steps call it; else evaluation passes alone do.
        unless_from: attention whose teacher makes the call superfluous.
    """

    operation: str
    call: OpCall
    keys: tuple[Keys, ...] = ()
    in_training: bool = True
    unless_from: Operation | None = None


def required_ops(
    config: Any, layer_number: int, is_mtp: bool = False, device: str | None = None
) -> list[RequiredOp]:
    """Return the operations that a layer calls, forward and backward.

    Args:
        config: a validated transformer configuration of this package.
        layer_number: of the layer, from 1.
        is_mtp: whether it is a layer of multi-token prediction.
        device: ``cuda`` or ``cpu``; by default the one that training would use here.
    """
    declare = _csa_ops if uses_csa(config) else _dsa_ops
    return list(declare(_Calls(config, device or _default_device()), layer_number, is_mtp))


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
        device: as of :func:`required_ops`.
    """
    options = options_of(config)
    if options.stage != "sparse":
        return SelectedAttention(False, f"nothing is selected in stage {options.stage}")
    if uses_csa(config):
        return SelectedAttention(False, "V4's layers attend to lists of keys")
    asked, length, topk = options.selected_attention, options.sequence_length, _topk(config)
    if asked != "masked" and by_sequence(config) and not selects_by_sequence(config):
        return SelectedAttention(False, "tensor-parallel ranks attend by sequence")
    if asked == "sparse":
        return SelectedAttention(False, "asked for")
    call = _Calls(config, device or _default_device()).masked_attention(topk)
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
        device: as of :func:`required_ops`.
    """
    options = options_of(config)
    if uses_csa(config) or options.stage == "sparse":
        return VisibleAttention(False, "keys are selected")
    if config.context_parallel_size > 1:
        return VisibleAttention(False, "context-parallel ranks exchange keys or latents")
    if (name := options.policy.named_for("dense_attention")) is not None:
        return VisibleAttention(False, f"dense_attention={name} was asked for")
    for operation, call in _Calls(config, device or _default_device()).visible_attention():
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
        config, device: as of :func:`required_ops`.
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


#: What masked dense attention calls.
MASKED_OPERATIONS = (masked.KEY_BITS, masked.FORWARD, masked.BACKWARD, masked.PROBABILITIES)


def _topk(config: Any) -> int:
    topk: int = config.dsa_indexer_topk
    return topk


def _default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def called_ops(ops: list[RequiredOp], policy: Policy) -> Iterator[tuple[str, OpCall]]:
    """Yield ``(operation, call)`` for what is called on this machine under ``policy``."""
    for op in ops:
        attention = op.unless_from
        asked = replace(op.call, teacher=attention is BACKWARD)
        if attention is None or not gives_teacher(attention, asked, policy):
            yield op.operation, op.call


def selects_keys(config: Any, layer_number: int, is_mtp: bool = False) -> bool:
    """Whether a layer of V3.2's attention has an indexer of its own in the sparse stage."""
    return is_mtp or not shares_indices(config) or computes_topk(config, layer_number)


@dataclass(frozen=True)
class _Calls:
    """The calls of a layer, from its configuration."""

    config: Any
    device: str

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
        """Yield what masked dense attention to all visible keys calls."""
        yield masked.VISIBLE_BITS, describe_visible_call(self.device)
        for operation in (masked.FORWARD, masked.BACKWARD):
            yield operation, self.masked_attention()

    def selection(self, visible: Keys) -> Iterator[RequiredOp]:
        topk, policy = self.config.dsa_indexer_topk, options_of(self.config).policy
        for name, call in selection_calls(self.indexer(topk), policy):
            yield RequiredOp(name, call, (visible,))

    def loss(self, visible: Keys, selected: Keys, teachers: list[RequiredOp], teacher_dim: int):
        """Yield the indexer's loss, with what forms the teacher of a sparse one.

        ``teacher_dim``: dims of the attention's queries.
        """
        config = self.config
        if not (indexer_is_trained(config) or options_of(config).evaluate_indexer):
            return
        trained = indexer_is_trained(config)
        yield from teachers
        if not loss_is_sparse(config):
            call = replace(self.indexer(), teacher_dim=teacher_dim)
            yield RequiredOp("dense_indexer_loss", call, (visible,), trained)
            return
        call = self.indexer(config.dsa_indexer_topk)
        yield RequiredOp("sparse_indexer_loss", call, (selected,), trained)


def _dsa_ops(calls: _Calls, layer_number: int, is_mtp: bool) -> Iterator[RequiredOp]:
    config, options = calls.config, options_of(calls.config)
    heads, visible, rope = query_heads(config), Keys(), config.qk_pos_emb_head_dim
    indexer = uses_indexer(config) and selects_keys(config, layer_number, is_mtp)
    if options.stage != "sparse":
        call = calls.of(heads, config.qk_head_dim + rope, config.v_head_dim)
        if visible_attention(config, calls.device).masked:
            yield from visible_ops(config, calls.device)
        else:
            yield from _ropes(calls, heads)
            yield RequiredOp("dense_attention", call, (visible,))
        if indexer:
            yield from calls.loss(visible, visible, [], call.qk_dim)
        return
    selected, latent = Keys(limit=config.dsa_indexer_topk), config.kv_lora_rank
    if indexer:
        yield from calls.selection(visible)
    if selected_attention(config, calls.device).masked:
        yield from _masked_ops(calls, indexer, visible, selected)
        return
    yield from _ropes(calls, heads)
    attention = calls.of(heads, latent + rope, latent, topk=config.dsa_indexer_topk)
    teaches = indexer and indexer_is_trained(config) and loss_is_sparse(config)
    yield RequiredOp("sparse_attention_forward", attention, (selected,))
    backward = replace(attention, teacher=teaches)
    yield RequiredOp("sparse_attention_backward", backward, (selected,))
    if indexer:
        teachers = []
        if loss_is_sparse(config):
            teachers = _teachers(attention, selected, teaches, options.evaluate_indexer)
        yield from calls.loss(visible, selected, teachers, attention.qk_dim)


def visible_ops(config: Any, device: str | None = None) -> Iterator[RequiredOp]:
    """Yield what masked dense attention to all visible keys calls, whether it is chosen or not.

    Args:
        config, device: as of :func:`required_ops`.
    """
    calls = _Calls(config, device or _default_device())
    yield from _ropes(calls, calls.masked_attention().heads)
    for operation, call in calls.visible_attention():
        keys = () if operation is masked.VISIBLE_BITS else (Keys(),)
        yield RequiredOp(operation.name, call, keys)


def _ropes(calls: _Calls, heads: int) -> Iterator[RequiredOp]:
    """Yield the rotations of MLA: of queries, and of the rope key."""
    rope = calls.config.qk_pos_emb_head_dim
    yield RequiredOp("rotate", calls.of(heads, calls.config.qk_head_dim + rope))
    yield RequiredOp("rotate", calls.of(1, rope))


def _masked_ops(calls: _Calls, indexer: bool, visible: Keys, selected: Keys):
    """Yield masked dense attention, which reads all visible keys, and the indexer's loss."""
    config, call = calls.config, calls.masked_attention(_topk(calls.config))
    yield from _ropes(calls, call.heads)
    yield RequiredOp("key_bits", calls.of(1, 0, dtype=torch.int32, topk=call.topk))
    yield RequiredOp("masked_attention_forward", call, (visible,))
    yield RequiredOp("masked_attention_backward", call, (visible,))
    if not indexer:
        return
    teachers = []
    if loss_is_sparse(config):
        trained = indexer_is_trained(config)
        name = "masked_attention_probabilities"
        teachers.append(RequiredOp(name, call, (visible,), trained))
    yield from calls.loss(visible, selected, teachers, call.qk_dim)


def _csa_ops(calls: _Calls, layer_number: int, is_mtp: bool) -> Iterator[RequiredOp]:
    config, options = calls.config, options_of(calls.config)
    heads, dim = query_heads(config), config.head_dim
    ratio = config.ratio(layer_number, is_mtp)
    indexer = ratio == CSA_RATIO and uses_indexer(config)
    selects = indexer and options.stage == "sparse"
    visible = selected = Keys(ratio)
    topk = config.csa_window_size
    keys: tuple[Keys, ...] = (Keys(limit=topk),)
    if selects:
        selected = Keys(ratio, config.dsa_indexer_topk)
        topk += config.dsa_indexer_topk
    if ratio:
        keys += (selected,)
        yield RequiredOp("compressor", calls.of(1, dim))
    yield RequiredOp("norm_rope", calls.of(heads, dim))
    yield RequiredOp("rotate", calls.of(heads, dim))
    yield RequiredOp("rotate", calls.of(1, dim))
    yield RequiredOp("key_lists", calls.of(1, 0, dtype=torch.int32))
    if indexer:
        yield RequiredOp("compressor", calls.of(1, config.dsa_indexer_head_dim))
        head = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
        yield RequiredOp("rotate", calls.of(*head))
        yield RequiredOp("rotate", calls.of(1, config.dsa_indexer_head_dim))
    if selects:
        yield from calls.selection(visible)
    attention = calls.of(heads, dim, dim, topk=topk, sink=True)
    alone = options.csa_teacher == "compressed"
    teaches = selects and indexer_is_trained(config) and loss_is_sparse(config) and not alone
    yield RequiredOp("sparse_attention_forward", attention, keys)
    yield RequiredOp("sparse_attention_backward", replace(attention, teacher=teaches), keys)
    if not indexer:
        return
    trained, evaluated = indexer_is_trained(config), options.evaluate_indexer
    if loss_is_sparse(config) and alone:
        # A softmax over the selected keys alone is computed again, without window and sink.
        call = replace(attention, topk=config.dsa_indexer_topk, sink=False)
        again = RequiredOp("sparse_attention_forward", call, (selected,), trained)
        teachers = [again, _probabilities(call, selected, FORWARD, trained)]
    elif loss_is_sparse(config):
        teachers = _teachers(attention, selected, teaches, evaluated)
    elif alone:
        teachers = []
    else:
        # The mass of the window in the teacher's softmax.
        call = replace(attention, topk=config.csa_window_size, sink=False)
        teachers = [RequiredOp("sparse_attention_forward", call, keys[:1], trained)]
    yield from calls.loss(visible, selected, teachers, dim)


def _teachers(attention: OpCall, keys: Keys, trained: bool, evaluated: bool) -> list[RequiredOp]:
    """Return the calls that form the teacher of a sparse loss where attention does not."""
    teachers = []
    if trained:
        teachers.append(_probabilities(attention, keys, BACKWARD, True))
    if evaluated:
        teachers.append(_probabilities(attention, keys, FORWARD, False))
    return teachers


def _probabilities(call: OpCall, keys: Keys, attention: Operation, in_training: bool) -> RequiredOp:
    name = "sparse_attention_probabilities"
    return RequiredOp(name, call, (keys,), in_training, unless_from=attention)
