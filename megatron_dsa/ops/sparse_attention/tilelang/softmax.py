"""Softmax steps of the Hopper and portable kernels, in base 2.

``top`` is the maximum per query head, ``total`` the sum of P.
"""

from tilelang import language as T

from megatron_dsa.ops.hopper.tiles import LN_2, LOG2_E

#: Finite initial maximum: masked scores minus the maximum are -inf, not NaN.
LOWEST = -1e30


@T.macro
def raise_top(peak, top, decay, scale):
    """Raise ``top`` to ``peak``; multiply earlier sums of P by ``decay``."""
    for r in T.Parallel(top.shape[0]):
        peak[r] = T.max(peak[r] * (scale * LOG2_E), top[r])
        decay[r] = T.exp2(top[r] - peak[r])
        top[r] = peak[r]


@T.macro
def divisors(factor, Sink, top, total, at, shape):
    for r in T.Parallel(shape.tile):
        factor[r] = total[r]
        if Sink is not None:
            head = r % shape.heads if shape.group > 1 else T.min(at.head + r, shape.heads - 1)
            factor[r] += T.exp2(Sink[head] * LOG2_E - top[r])
        factor[r] = T.if_then_else(total[r] == 0, 0.0, 1 / factor[r])


@T.macro
def write_lse(Lse, top, total, at, shape):
    for r in T.Parallel(shape.tile):
        if r < at.rows:
            Lse[at.first + r] = T.if_then_else(
                total[r] == 0, -T.infinity("float32"), (top[r] + T.log2(total[r])) * LN_2
            )


@T.macro
def read_lse(Lse, m, at, tile, thread):
    if thread < tile:
        # With an lse of inf, queries without keys get probabilities of 0.
        m.lse[thread] = T.infinity("float32")
        if thread < at.rows:  # noqa: SIM102 (the next condition reads memory)
            if Lse[at.first + thread] > -T.infinity("float32"):
                m.lse[thread] = Lse[at.first + thread] * LOG2_E
