"""Operations of a layer's training step, for start-up, planner and FLOP counts."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_dsa.config.attention_choice import LayerCalls, attention_of, query_heads
from megatron_dsa.config.model import (
    has_learned_head,
    indexer_is_trained,
    loss_is_sparse,
    options_of,
    selected_keys,
    selected_tokens,
    selects_keys,
    shares_teacher,
    uses_csa,
    uses_indexer,
    uses_sinks,
    uses_streams,
)
from megatron_dsa.config.rules.csa import CSA_RATIO
from megatron_dsa.config.rules.kda import is_kda_layer
from megatron_dsa.ops.dispatch import Operation, Policy
from megatron_dsa.ops.dispatch.policy import EXACT
from megatron_dsa.ops.dispatch.support import OpCall
from megatron_dsa.ops.hyper_connections.spec import HEAD, READ, WRITE
from megatron_dsa.ops.indexer_topk.api import selection_calls
from megatron_dsa.ops.kda import spec as kda
from megatron_dsa.ops.masked_attention import spec as masked
from megatron_dsa.ops.sparse_attention.spec import BACKWARD, FORWARD, gives_teacher


@dataclass(frozen=True, order=True)
class Keys:
    """Key count of a query at position ``t`` (from 0): ``(t + 1) // ratio``, at most ``limit``."""

    ratio: int = 1
    limit: int = 0

    def pairs(self, length) -> Any:
        """Return the number of query-key pairs per sequence; ``length`` is an int or tensor."""
        free = length
        if self.limit:
            most = self.ratio * self.limit - 1
            free = (length + most - abs(length - most)) // 2
        last = free // self.ratio
        # For each ``k`` from 1 to ``last - 1``, ``ratio`` queries see ``k`` keys.
        pairs = self.ratio * (last * (last - 1) // 2) + last * (free - self.ratio * last + 1)
        return pairs + (length - free) * self.limit


@dataclass(frozen=True)
class RequiredOp:
    """Operation of a layer's training step.

    Attributes:
        keys: kinds of keys that each query reads.
        in_training: False for calls in evaluation only.
        share: share of the query tokens in training.
        unless_from: attention that may return the teacher and replace this call.
    """

    operation: str
    call: OpCall
    keys: tuple[Keys, ...] = ()
    in_training: bool = True
    share: float = 1.0
    unless_from: Operation | None = None


def required_ops(
    config: Any, layer_number: int, is_mtp: bool = False, device: str | None = None
) -> list[RequiredOp]:
    """Return the forward and backward operations of layer ``layer_number`` (from 1).

    ``device``: ``cuda`` or ``cpu``, by default this machine's.
    """
    if not is_mtp and is_kda_layer(config, layer_number - 1):
        return kda_ops(config, device)
    declare = _csa_ops if uses_csa(config) else _dsa_ops
    return list(declare(LayerCalls(config, device), layer_number, is_mtp))


def stream_ops(config: Any, device: str | None = None, head: bool = False) -> list[RequiredOp]:
    """Return the operations on a layer's streams, or of the model's ``head`` on streams."""
    if not (has_learned_head(config) if head else uses_streams(config)):
        return []
    call = LayerCalls(config, device).of(config.hc_mult, config.hidden_size)
    return [RequiredOp(each.name, call) for each in ((HEAD,) if head else (READ, WRITE))]


def kda_ops(config: Any, device: str | None = None) -> list[RequiredOp]:
    heads, dim = config.linear_num_value_heads, config.linear_value_head_dim
    heads //= config.tensor_model_parallel_size
    calls = LayerCalls(config, device)
    convolution, of_heads = calls.of(1, heads * dim, heads * dim), calls.of(heads, dim, dim)
    return [
        RequiredOp(kda.CONVOLUTION.name, convolution),
        RequiredOp(kda.ATTENTION.name, of_heads),
        RequiredOp(kda.NORM.name, of_heads),
    ]


def called_ops(ops: list[RequiredOp], policy: Policy) -> Iterator[tuple[str, OpCall]]:
    for op in ops:
        attention = op.unless_from
        asked = replace(op.call, teacher=attention is BACKWARD)
        if attention is None or not gives_teacher(attention, asked, policy):
            yield op.operation, op.call


def _dsa_ops(calls: LayerCalls, layer_number: int, is_mtp: bool) -> Iterator[RequiredOp]:
    config, options = calls.config, options_of(calls.config)
    heads, visible, rope = query_heads(config), Keys(), config.qk_pos_emb_head_dim
    indexer = uses_indexer(config) and selects_keys(config, layer_number, is_mtp)
    taught = indexer or shares_teacher(config, layer_number, is_mtp)
    masks = attention_of(config, calls.device).masked
    if indexer:
        rotates = rope > 0 or config.dsa_indexer_rotate_activation
        if rotates:
            head = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim
            yield RequiredOp("index_rotation", calls.of(*head))
        of_keys = "index_rotation" if options.indexer_pool_size == 1 else "compressor"
        if rotates or of_keys == "compressor":
            yield RequiredOp(of_keys, calls.of(1, config.dsa_indexer_head_dim))
    if options.stage != "sparse":
        call = calls.of(heads, config.qk_head_dim + rope, config.v_head_dim)
        if masks:
            yield from visible_ops(config, calls.device)
        else:
            yield from _ropes(calls, heads)
            yield RequiredOp("dense_attention", call, (visible,))
        if indexer:
            yield from _loss(calls, visible, visible, [], call.qk_dim)
        return
    selected, latent = Keys(limit=selected_tokens(config)), config.kv_lora_rank
    if indexer:
        yield from _selection(calls, Keys(options.indexer_pool_size))
    if masks:
        yield from _masked_ops(calls, indexer, taught, visible, selected)
        return
    yield from _ropes(calls, heads)
    attention = calls.of(
        heads, latent + rope, latent, topk=selected_tokens(config), sink=uses_sinks(config)
    )
    teaches = taught and _all_are_taught(config)
    yield RequiredOp("sparse_attention_forward", attention, (selected,))
    backward = replace(attention, teacher=teaches)
    yield RequiredOp("sparse_attention_backward", backward, (selected,))
    teachers = []
    if taught and loss_is_sparse(config):
        teachers = _teachers(config, attention, selected, indexer)
    if indexer:
        yield from _loss(calls, visible, selected, teachers, config.qk_head_dim + rope)
    else:
        yield from teachers


def visible_ops(config: Any, device: str | None = None) -> Iterator[RequiredOp]:
    calls = LayerCalls(config, device)
    yield from _ropes(calls, calls.masked_attention().heads)
    for operation, call in calls.visible_attention():
        keys = () if operation is masked.VISIBLE_BITS else (Keys(),)
        yield RequiredOp(operation.name, call, keys)


def _ropes(calls: LayerCalls, heads: int) -> Iterator[RequiredOp]:
    rope = calls.config.qk_pos_emb_head_dim
    if rope > 0:
        yield RequiredOp("rotate", calls.of(heads, calls.config.qk_head_dim + rope))
        yield RequiredOp("rotate", calls.of(1, rope))


def _masked_ops(
    calls: LayerCalls, indexer: bool, taught: bool, visible: Keys, selected: Keys
) -> Iterator[RequiredOp]:
    config, call = calls.config, calls.masked_attention(selected_tokens(calls.config))
    yield from _ropes(calls, call.heads)
    yield RequiredOp("key_bits", calls.of(1, 0, dtype=torch.int32, topk=call.topk))
    yield RequiredOp("masked_attention_forward", call, (visible,))
    yield RequiredOp("masked_attention_backward", call, (visible,))
    teachers = []
    if taught and loss_is_sparse(config):
        name = "masked_attention_probabilities"
        if indexer_is_trained(config):
            teaching = _teaching(config, call)
            teachers.append(RequiredOp(name, teaching, (visible,), share=_share(config)))
        if indexer and options_of(config).evaluate_indexer:
            teachers.append(RequiredOp(name, call, (visible,), in_training=False))
    if indexer:
        yield from _loss(calls, visible, selected, teachers, call.qk_dim)
    else:
        yield from teachers


def _csa_ops(calls: LayerCalls, layer_number: int, is_mtp: bool) -> Iterator[RequiredOp]:
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
        yield RequiredOp("index_rotation", calls.of(*head))
        if config.dsa_indexer_rotate_activation and options.indexer_numerics != EXACT:
            yield RequiredOp("index_rotation", calls.of(1, config.dsa_indexer_head_dim))
        yield RequiredOp("rotate", calls.of(1, config.dsa_indexer_head_dim))
    if selects:
        yield from _selection(calls, visible)
    attention = calls.of(heads, dim, dim, topk=topk, sink=True)
    alone = options.csa_teacher == "compressed"
    teaches = selects and _all_are_taught(config) and not alone
    yield RequiredOp("sparse_attention_forward", attention, keys)
    yield RequiredOp("sparse_attention_backward", replace(attention, teacher=teaches), keys)
    if not indexer:
        return
    trained, share = indexer_is_trained(config), _share(config)
    if loss_is_sparse(config) and alone:
        # Teacher ``compressed`` is a softmax over selected keys, without window and sink.
        call = replace(attention, topk=config.dsa_indexer_topk, sink=False)
        again = RequiredOp("sparse_attention_forward", call, (selected,), trained, share)
        after = replace(again, operation="sparse_attention_probabilities", unless_from=FORWARD)
        teachers = [again, after]
    elif loss_is_sparse(config):
        teachers = _teachers(config, attention, selected)
    elif alone:
        teachers = []
    else:
        # The teacher's softmax includes the window's log-sum-exp.
        call = replace(attention, topk=config.csa_window_size, sink=False)
        teachers = [RequiredOp("sparse_attention_forward", call, keys[:1], trained)]
    yield from _loss(calls, visible, selected, teachers, dim)


def _selection(calls: LayerCalls, visible: Keys) -> Iterator[RequiredOp]:
    config = calls.config
    call = calls.indexer(selected_keys(config))
    for name, each in selection_calls(call, options_of(config).policy):
        yield RequiredOp(name, each, (visible,))


def _loss(
    calls: LayerCalls, visible: Keys, selected: Keys, teachers: list[RequiredOp], teacher_dim: int
) -> Iterator[RequiredOp]:
    """Yield operations of indexer loss and teacher; ``teacher_dim``: attention's query dims."""
    config = calls.config
    if not (indexer_is_trained(config) or options_of(config).evaluate_indexer):
        return
    trained = indexer_is_trained(config)
    yield from teachers
    if not loss_is_sparse(config):
        call = replace(calls.indexer(), teacher_dim=teacher_dim)
        yield RequiredOp("dense_indexer_loss", call, (visible,), trained, _share(config))
        return
    size = options_of(config).indexer_pool_size
    if size > 1:
        selected = Keys(size, selected_keys(config))
    call = calls.indexer(selected_keys(config))
    yield RequiredOp("sparse_indexer_loss", call, (selected,), trained, _share(config))


def _teachers(
    config: Any, attention: OpCall, keys: Keys, evaluates: bool = True
) -> list[RequiredOp]:
    """Return the teacher's operations for a sparse loss, unless attention computes the teacher."""
    name, teachers = "sparse_attention_probabilities", []
    if indexer_is_trained(config):
        every = BACKWARD if _all_are_taught(config) else None
        call = _teaching(config, attention)
        teachers.append(RequiredOp(name, call, (keys,), True, _share(config), every))
    if evaluates and options_of(config).evaluate_indexer:
        teachers.append(RequiredOp(name, attention, (keys,), False, unless_from=FORWARD))
    return teachers


def _all_are_taught(config: Any) -> bool:
    """Return True if attention's backward computes the teacher."""
    return indexer_is_trained(config) and loss_is_sparse(config) and _share(config) == 1


def _teaching(config: Any, attention: OpCall) -> OpCall:
    parts = options_of(config).head_parts
    heads = attention.heads if parts == 1 else config.num_attention_heads // parts
    return replace(attention, heads=heads)


def _share(config: Any) -> float:
    return options_of(config).indexer_loss_queries
