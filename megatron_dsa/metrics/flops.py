"""Floating-point operations of a training step with DSA or V4's attention.

Each matrix product that the mathematics requires counts once, with two operations per multiply-add.
Not counted are repeated products (scores in a backward pass, recomputed layers, keys that several
ranks expand), masked parts of tiles, and elementwise work (norms, rope, softmax, convolutions).
Divided by time and peak, the count is the model FLOPs utilization of PaLM (appendix B).

* A product with a trained weight counts three times: forward and two gradients. Those in the
  indexer count twice, because its inputs are detached, and in a frozen main model once. Under
  LoRA, products with frozen weights add only the input's gradient; adapters are not counted.
* The indexer scores all visible keys in the forward. Its loss adds two gradients of these scores,
  for selected keys (sparse loss) or all visible keys (dense loss).
* Attention counts the keys that it attends to, forward and backward. A dense loss on top of sparse
  attention adds attention's scores of all visible keys, forward only.
* Masked dense attention counts all visible keys, because it computes them.
* A KDA layer counts its recurrence: per token and head, two reads and one write of the state.
* Other layers of hybrid models (Mamba, gated delta net) are not counted.

A frozen ``warmup`` counts no gradient of the main model.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from megatron_dsa.config.hybrid import ATTENTION, EXPERTS, KDA, MLP, parts_of_layer
from megatron_dsa.config.model import (
    has_adapters,
    has_learned_head,
    indexer_is_trained,
    options_of,
    selects_keys,
    trains_main,
    uses_csa,
    uses_indexer,
    uses_streams,
)
from megatron_dsa.config.rules.csa import CSA_RATIO
from megatron_dsa.layers.required_ops import Keys, RequiredOp, required_ops


class Work(NamedTuple):
    """Matrix products of one model part.

    Attributes:
        part: model part, for reports.
        keys: keys per query; the products run once per query-key pair.
        forward, backward: multiply-adds per pair.
    """

    part: str
    keys: Keys
    forward: int
    backward: int = 0


def flops(work: Iterable[Work], pairs: Callable[[Keys], int]) -> int:
    """Return the floating-point operations of ``work``; ``pairs`` counts query-key pairs."""
    return 2 * sum((w.forward + w.backward) * pairs(w.keys) for w in work)


def flops_by_part(work: Iterable[Work], pairs: Callable[[Keys], int]) -> dict[str, int]:
    parts: dict[str, list[Work]] = {}
    for each in work:
        parts.setdefault(each.part, []).append(each)
    counts = {part: flops(items, pairs) for part, items in parts.items()}
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def model_work(config: Any, vocabulary: int) -> list[Work]:
    """Return the matrix products of a model.

    Args:
        config: a validated transformer configuration of this package.
        vocabulary: size of the output layer, including padding.
    """
    main = _weight_gradients(config)
    logits = config.hidden_size * vocabulary
    work = [_linear("logits", logits, main), *_head(config)]
    # Prediction projects the embedding, and the hidden state or each residual stream.
    projections = (1 + (config.hc_mult if has_learned_head(config) else 1)) * config.hidden_size**2
    for number in range(1, config.num_layers + 1):
        work += layer_work(config, number)
    for number in range(1, (config.mtp_num_layers or 0) + 1):
        work += [*layer_work(config, number, is_mtp=True), *_head(config)]
        work.append(_linear("multi-token prediction", projections, main))
        # Detached output heads compute no weight gradient.
        work.append(_linear("logits", logits, min(main, 1) if config.mtp_detach_heads else main))
    return _merged(work)


def layer_work(config: Any, number: int, is_mtp: bool = False) -> list[Work]:
    """Return the matrix products of decoder or MTP layer ``number`` (from 1)."""
    work: list[Work] = []
    for part in parts_of_layer(config, number, is_mtp):
        if part == ATTENTION:
            weights = _csa_weights if uses_csa(config) else _dsa_weights
            work += [*weights(config, number, is_mtp), *_pair_work(config, number, is_mtp)]
        elif part == KDA:
            work += _kda_work(config)
        elif part in MLP + EXPERTS:
            work += _mlp_work(config, part == EXPERTS)
    return [*work, *_streams(config, is_mtp)]


def _streams(config, is_mtp: bool) -> Iterator[Work]:
    if has_learned_head(config) if is_mtp else uses_streams(config):
        outputs = config.hc_mult * (2 + config.hc_mult)
        products = 2 * _projection(config, outputs)
        yield _linear("hyper-connections", products, _weight_gradients(config))


def _head(config) -> Iterator[Work]:
    """Yield the hyper-connection's projection before the output layer."""
    if has_learned_head(config):
        products = _projection(config, config.hc_mult)
        yield _linear("hyper-connections", products, _weight_gradients(config))


def _projection(config, outputs: int) -> int:
    return outputs * config.hc_mult * config.hidden_size


def _dsa_weights(config, number: int, is_mtp: bool) -> list[Work]:
    main, heads, hidden = _weight_gradients(config), config.num_attention_heads, config.hidden_size
    latent, rope = config.kv_lora_rank, config.qk_pos_emb_head_dim
    query = heads * (config.qk_head_dim + rope)
    if config.q_lora_rank is None:
        queries = hidden * query
    else:
        queries = config.q_lora_rank * (hidden + query)
    outputs = 2 if options_of(config).output_gate else 1
    down_and_output = hidden * (latent + rope) + outputs * heads * config.v_head_dim * hidden
    # Absorption needs as many products as expansion of the latents.
    up = latent * heads * (config.qk_head_dim + config.v_head_dim)
    work = [
        _linear("projections", queries + down_and_output, main),
        _linear("W_uk, W_uv", up, main),
    ]
    if uses_indexer(config) and selects_keys(config, number, is_mtp):
        gated = 2 if options_of(config).indexer_pool_size > 1 else 1
        work.append(_indexer_weights(config, gated * hidden * config.dsa_indexer_head_dim))
    return work


def _csa_weights(config, number: int, is_mtp: bool) -> list[Work]:
    main, heads, hidden = _weight_gradients(config), config.num_attention_heads, config.hidden_size
    dim, ratio = config.head_dim, config.ratio(number, is_mtp)
    queries = config.q_lora_rank * (hidden + heads * dim)
    output = heads * dim * config.o_lora_rank + config.o_groups * config.o_lora_rank * hidden
    work = [_linear("projections", queries + hidden * dim + output, main)]
    if not ratio:
        return work
    # The compressor projects values and scores; overlapping groups double the channels.
    compressor = 2 * hidden * (2 if ratio == CSA_RATIO else 1)
    work.append(_linear("compressor", compressor * dim, main))
    if ratio == CSA_RATIO and uses_indexer(config):
        work.append(_indexer_weights(config, compressor * config.dsa_indexer_head_dim))
    return work


def _kda_work(config) -> list[Work]:
    hidden, heads, dim = (
        config.hidden_size,
        config.linear_num_value_heads,
        config.linear_value_head_dim,
    )
    width = heads * dim
    # Projections of queries, keys, values and output, low-rank gates, and beta.
    weights = hidden * (4 * width + heads) + 2 * dim * (hidden + width)
    state = 3 * width * dim  # KDA reads its state twice and writes it once
    return [
        _linear("projections", weights, _weight_gradients(config)),
        _linear("delta rule", state, _main_gradients(config)),
    ]


def _indexer_weights(config, keys: int) -> Work:
    """Return the indexer's projections; ``keys``: multiply-adds of the key projection."""
    index = config.dsa_indexer_n_heads * config.dsa_indexer_head_dim
    queries = (config.q_lora_rank or config.hidden_size) * index
    weights = config.hidden_size * config.dsa_indexer_n_heads
    gradients = int(indexer_is_trained(config) and not has_adapters(config))
    return _linear("indexer's projections", queries + keys + weights, gradients)


def _pair_work(config, number: int, is_mtp: bool) -> Iterator[Work]:
    """Yield the matrix products of each operation's first training call."""
    ops: dict[str, RequiredOp] = {}
    for op in required_ops(config, number, is_mtp):
        if op.in_training:
            ops.setdefault(op.operation, op)
    main, heads = _main_gradients(config), config.num_attention_heads
    dense_loss = ops.get("dense_indexer_loss")
    for name in ("dense_attention", "sparse_attention_forward", "masked_attention_forward"):
        if name not in ops:
            continue
        call, kinds = ops[name].call, ops[name].keys
        parts = ("window attention", "attention") if uses_csa(config) else ("attention",)
        for part, attended in zip(parts, kinds, strict=False):
            of_all = 0
            if dense_loss is not None and part == "attention":
                of_all = round(dense_loss.share * heads * call.qk_dim)
                yield Work(part, dense_loss.keys[0], of_all)
            products = heads * (call.qk_dim + call.v_dim)
            yield Work(part, attended, products - of_all, main * products)
    losses = [ops[name] for name in ("sparse_indexer_loss", "dense_indexer_loss") if name in ops]
    # Without a selection, the dense loss computes the index scores.
    for op in [ops["indexer_scores"]] if "indexer_scores" in ops else losses:
        yield _share(op, Work("index scores", op.keys[0], op.call.heads * op.call.qk_dim))
    for op in losses:
        yield _share(op, Work("indexer loss", op.keys[0], 0, 2 * op.call.heads * op.call.qk_dim))


def _share(op: RequiredOp, work: Work) -> Work:
    forward, backward = (round(op.share * x) for x in (work.forward, work.backward))
    return work._replace(forward=forward, backward=backward)


def _mlp_work(config, moe: bool) -> list[Work]:
    main, hidden = _weight_gradients(config), config.hidden_size
    matrices = 3 if config.gated_linear_unit else 2
    if not moe:
        return [_linear("dense MLP", matrices * hidden * config.ffn_hidden_size, main)]
    latent = config.moe_latent_size
    width = matrices * (latent or hidden)
    experts = config.moe_router_topk * width * config.moe_ffn_hidden_size
    experts += 2 * hidden * (latent or 0)
    experts += matrices * hidden * (config.moe_shared_expert_intermediate_size or 0)
    experts += hidden if config.moe_shared_expert_gate else 0
    router = hidden * config.num_moe_experts
    return [_linear("experts", experts, main), _linear("router", router, main)]


def _linear(part: str, products: int, gradients: int) -> Work:
    return Work(part, TOKEN, products, gradients * products)


def _main_gradients(config) -> int:
    return 2 if trains_main(config) else 0


def _weight_gradients(config) -> int:
    return 1 if has_adapters(config) and trains_main(config) else _main_gradients(config)


def _merged(work: Iterable[Work]) -> list[Work]:
    sums: dict[tuple[str, Keys], list[int]] = {}
    for part, keys, forward, backward in work:
        total = sums.setdefault((part, keys), [0, 0])
        total[0] += forward
        total[1] += backward
    return [Work(*kind, *total) for kind, total in sums.items()]


#: Matrix products that run once per token.
TOKEN = Keys(limit=1)
