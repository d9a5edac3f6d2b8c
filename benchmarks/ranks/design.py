"""Bytes that ranks send in a step, by design."""

from dataclasses import dataclass

from benchmarks.ranks.traffic import exchange, gather, reduce, sum_everywhere


@dataclass(frozen=True)
class Design:
    """Parameters of a step's traffic.

    Attributes:
        config: of the layer; ratio: its compression ratio, ``None`` for DSA.
        rows: tokens of a rank.
        tp, cp: ranks.
        runs: runs of adjacent tokens on a rank.
    """

    config: object
    ratio: int | None
    rows: int
    tp: int
    cp: int
    runs: int

    @property
    def ranks(self) -> int:
        return self.tp * self.cp

    @property
    def by_sequence(self) -> bool:
        from megatron_dsa.config.attention_choice import by_sequence

        return by_sequence(self.config)

    @property
    def narrow(self) -> int:
        """Bytes of an activation; gradients are summed over ranks in fp32."""
        return self.config.params_dtype.itemsize


WIDE = 4


def formula_bytes(d: Design) -> float:
    """Return the bytes that a rank sends in a training step (forward, backward) of an attention
    layer.
    """
    own = _dsa_bytes(d) if d.ratio is None else _hybrid_bytes(d)
    return own + _tensor_parallel_bytes(d)


def hidden_bytes(d: Design) -> float:
    """Return the bytes that a rank would send if hidden states were gathered instead of keys.

    All ranks then project all keys: an all-gather in the forward, and its reduce-scatter in the
    backward, in the activations' dtype. A second gather for the weights' gradient is not included.
    """
    part = d.rows * d.config.hidden_size * d.narrow
    return gather(part, d.ranks) + reduce(part, d.ranks)


def _summed_keys(d: Design, rows: float, dim: int, ranks: int) -> float:
    """Keys gathered in the forward, their fp32 gradients reduced in the backward."""
    return gather(rows * dim * d.narrow, ranks) + reduce(rows * dim * WIDE, ranks)


def _index_keys(d: Design, rows: float) -> float:
    """Like other keys; by heads, the ranks of a token group compute the same gradient."""
    part = rows * d.config.dsa_indexer_head_dim
    back = d.ranks if d.by_sequence else d.cp
    return gather(part * d.narrow, d.ranks) + reduce(part * WIDE, back)


def _index_queries(d: Design) -> float:
    """By heads every rank scores its group's tokens, and needs their latents and weights."""
    c = d.config
    if d.by_sequence:
        return 0.0
    return gather(d.rows * (c.q_lora_rank + c.dsa_indexer_n_heads) * d.narrow, d.tp) + (
        sum_everywhere(d.rows * d.tp * c.dsa_indexer_topk * WIDE, d.tp)  # teacher
    )


def _balanced_selection(d: Design) -> float:
    """If ranks see many, but unequally many keys, another rank scores half of a rank's tokens.

    Index queries and weights leave, selected keys return. In an odd number of parts the middle rank
    keeps its tokens.
    """
    from megatron_dsa.config.model import options_of
    from megatron_dsa.layers.parallel.balanced_topk import VISIBLE_TO_TOPK

    c, rows = d.config, d.rows if d.by_sequence else d.rows * d.tp
    contiguous = d.cp > 1 and options_of(c).cp_layout == "contiguous"
    visible = d.rows * d.ranks / 2 / (d.ratio or 1)
    if not (contiguous or d.by_sequence) or visible < VISIBLE_TO_TOPK * c.dsa_indexer_topk:
        return 0.0
    query = c.dsa_indexer_n_heads * (c.dsa_indexer_head_dim + 1) * d.narrow
    return rows / 2 * (query + c.dsa_indexer_topk * WIDE)


def _dsa_bytes(d: Design) -> float:
    c = d.config
    latent = c.kv_lora_rank + c.qk_pos_emb_head_dim
    total = _summed_keys(d, d.rows, latent, d.ranks) + _index_keys(d, d.rows) + _index_queries(d)
    total += _balanced_selection(d)
    # Megatron's own layers split down projections by columns, so hidden states are gathered (again
    # for the weight's gradient) and so are the latents, which are then split again.
    total += 2 * 3 * gather(d.rows * c.hidden_size * d.narrow, d.tp)
    total += 2 * gather(d.rows * (c.q_lora_rank + latent) * d.narrow, d.tp)
    if d.by_sequence:  # absorbed up projection of keys and values, gathered again in the backward
        weight = c.num_attention_heads * (c.qk_head_dim + c.v_head_dim) * c.kv_lora_rank / d.tp
        total += 2 * gather(weight * d.narrow, d.tp) + reduce(weight * WIDE, d.tp)
    return total


def _hybrid_bytes(d: Design) -> float:
    c, total = d.config, 0.0
    queries, rows = (d.ranks, d.rows) if d.by_sequence else (d.cp, d.rows * d.tp)
    if not d.by_sequence:
        total += _summed_keys(d, d.rows, c.head_dim, d.tp)
    window = min(rows, d.runs * (c.csa_window_size - 1))
    total += _summed_keys(d, window, c.head_dim, queries)
    if d.by_sequence:  # sinks
        total += 2 * gather(c.num_attention_heads / d.tp * WIDE, d.tp)
    if not d.ratio:
        return total
    overlap = 2 if d.ratio == 4 else 1
    reach = d.ratio * overlap - 1
    halo = min(d.rows, d.runs * reach)
    slots = (d.rows + d.runs * reach) // d.ratio

    def compressor(dim: int) -> float:
        """Values and scores of the halo, and their gradients."""
        return 2 * gather(halo * 2 * dim * overlap * d.narrow, d.ranks)

    total += compressor(c.head_dim) + _summed_keys(d, slots, c.head_dim, d.ranks)
    if d.ratio == 4:
        total += compressor(c.dsa_indexer_head_dim) + _index_keys(d, slots) + _index_queries(d)
        total += _balanced_selection(d)
    return total


def _tensor_parallel_bytes(d: Design) -> float:
    """Up and output projection under sequence parallelism, and tokens for heads and back."""
    c = d.config
    hybrid = d.ratio is not None
    up = 3 * gather(d.rows * c.q_lora_rank * d.narrow, d.tp)  # forward, again backward, gradient
    out = 2 * gather(d.rows * c.hidden_size * d.narrow, d.tp)
    if not d.by_sequence:
        return up + out
    query = c.v_head_dim if hybrid else c.qk_head_dim + c.qk_pos_emb_head_dim
    swapped = d.rows * c.num_attention_heads * (query + c.v_head_dim) * d.narrow
    return up + out + 2 * exchange(swapped, d.tp)
