"""What the backwards begin and end with: a tile of queries, their gradients, lse, delta; dQ."""

# No postponed annotations here: TileLang reads the kernels' shapes from them.
from tilelang import language as T

from megatron_dsa.ops.hopper.tiles import GROUP, LOG2_E, TILE, fetch


def start_macro(dim: int, v_dim: int):
    """Return the macro ``start`` for queries of ``dim`` and values of ``v_dim``.

    Its arguments: Q, O, dO, Lse, Delta of the program; ``m``: shared memory (q, do, lse, delta);
    ``queries``: a barrier of 256 arrivals; ``at``: the tile's first row, its number of rows and
    that of all; scale; the thread. In shared memory, lse is in units of log 2, and delta times
    scale.
    """
    fp32 = "float32"

    @T.macro
    def start(Q, O, dO, Lse, Delta, m, queries, at, scale, tx):  # noqa: E741
        """Fetch the queries and their gradients, compute delta; 256 threads do this."""
        if tx < 2 * GROUP:
            for r in T.unroll(2):
                row = r * 32 + tx // 8
                source = T.min(at.first + row, at.all_tokens - 1)
                fetch(m.q, Q, row, source, row < at.rows, (0, dim), tx)
                fetch(m.do, dO, row, source, row < at.rows, (0, v_dim), tx)
            T.cp_async_barrier_noinc(queries)
            delta = T.alloc_local([1], fp32)
            row = tx // 4
            delta[0] = 0.0
            if row < at.rows:
                delta[0] = T.call_extern(
                    fp32,
                    f"dsa_row_product<{v_dim}>",
                    T.address_of(O[0, 0]),
                    T.address_of(dO[0, 0]),
                    at.first + row,
                    tx % 4,
                )
            delta[0] += T.shfl_xor(delta[0], 1)
            delta[0] += T.shfl_xor(delta[0], 2)
            if tx % 4 == 0:
                m.delta[row] = delta[0] * scale
                if row < at.rows:
                    Delta[at.first + row] = delta[0]
        if tx < TILE:
            # P = exp2(S - inf) = 0 for rows without keys and heads that do not exist.
            m.lse[tx] = T.infinity(fp32)
            if tx < at.rows:  # noqa: SIM102 (the next condition reads memory)
                if Lse[at.first + tx] > -T.infinity(fp32):
                    m.lse[tx] = Lse[at.first + tx] * LOG2_E
        T.sync_threads()

    return start


@T.macro
def write_columns(dQ, staged, columns, at, barrier):
    """Write columns of dQ that one warpgroup has put in shared memory."""
    T.sync_threads(barrier, GROUP)
    for r, c in T.Parallel(TILE, columns[1] - columns[0]):
        if r < at.rows:
            dQ[at.first + r, columns[0] + c] = staged[r, columns[0] + c]
