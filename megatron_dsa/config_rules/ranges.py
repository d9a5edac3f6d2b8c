"""Ranges of numbers on the command line: flags of Megatron, of this package and of the commands.

One table for trainings, plans and commands. An entry gives range and reason, from which
the message is made. Every other number must be finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_dsa.config_fields import flag_of


@dataclass(frozen=True)
class Range:
    """Numbers that a flag takes.

    Attributes:
        low, high: least and greatest value.
        why: reason of the limits, a clause.
        open: whether ``low`` itself is excluded.
    """

    low: float
    high: float
    why: str
    open: bool = False

    def holds(self, value: float) -> bool:
        """Check that ``value`` is finite and within the range."""
        above = value > self.low if self.open else value >= self.low
        return above and value <= self.high and value < math.inf

    def __str__(self) -> str:
        least = f"above {self.low:g}" if self.open else f"at least {self.low:g}"
        return least if self.high == math.inf else f"{least} and at most {_said(self.high)}"


def _rows(limits: Range, flags: str) -> dict[str, Range]:
    return dict.fromkeys(flags.split(), limits)


_INF = math.inf

#: Flag -> range, for the training entry point and its plans.
FLAGS: dict[str, Range] = {
    **_rows(Range(1, 512, "every layer is built"), "--num-layers"),
    **_rows(
        Range(1, 2**24, "it is a dimension of weights"),
        "--hidden-size --ffn-hidden-size --kv-lora-rank --moe-ffn-hidden-size --vocab-size "
        "--padded-vocab-size --make-vocab-size-divisible-by --dsa-indexer-head-dim "
        "--moe-shared-expert-intermediate-size --q-lora-rank --o-lora-rank --lora-rank",
    ),
    **_rows(
        Range(1, 2**16, "it counts heads, groups, streams or experts, or dimensions of a head"),
        "--num-attention-heads --num-query-groups --kv-channels --qk-head-dim --v-head-dim "
        "--dsa-indexer-n-heads --num-experts --moe-router-topk --o-groups --hc-mult",
    ),
    **_rows(Range(0, 2**16, "it is a dimension of a head"), "--qk-pos-emb-head-dim"),
    **_rows(
        Range(1, 2**30, "it is a number of tokens"),
        "--seq-length --max-position-embeddings --dsa-indexer-topk --csa-window-size",
    ),
    **_rows(
        Range(1, 2**20, "it is a number of sequences"),
        "--micro-batch-size --global-batch-size --eval-micro-batch-size --eval-global-batch-size",
    ),
    **_rows(
        Range(1, 2**20, "it is a number of ranks"),
        "--tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size "
        "--expert-model-parallel-size --expert-tensor-parallel-size --dsa-dry-run-world",
    ),
    **_rows(Range(0, 2**30, "it is a number of tokens"), "--csa-compress-ratios"),
    **_rows(Range(1, 2**24, "it is memory of a GPU"), "--dsa-workspace-mib"),
    **_rows(Range(0, 512, "every layer is built"), "--mtp-num-layers"),
    **_rows(Range(1, 512, "it is a number of layers"), "--recompute-num-layers"),
    **_rows(
        Range(1, _INF, "it is a number of steps"),
        "--log-interval --save-interval --eval-interval --tensorboard-log-interval "
        "--muon-num-ns-steps --exit-interval",
    ),
    **_rows(
        Range(0, _INF, "it is a number of steps or samples"),
        "--train-iters --train-samples --eval-iters --lr-decay-iters --lr-warmup-iters "
        "--lr-decay-samples --lr-warmup-samples --lr-wsd-decay-iters --num-workers --ckpt-step",
    ),
    **_rows(
        Range(0, _INF, "with a negative one the loss grows"),
        "--lr --min-lr --lr-warmup-init --weight-decay --start-weight-decay --end-weight-decay "
        "--decoupled-lr --decoupled-min-lr --mtp-loss-scaling-factor --moe-z-loss-coeff "
        "--dsa-indexer-loss-coeff",
    ),
    **_rows(Range(0, _INF, "0 turns clipping off"), "--clip-grad"),
    **_rows(Range(0, 1, "it is a share"), "--lr-warmup-fraction"),
    **_rows(
        Range(0, 1, "it is a probability"), "--attention-dropout --hidden-dropout"
    ),
    **_rows(
        Range(0, 1 - 2**-53, "averages with a factor of 1 never move"),
        "--adam-beta1 --adam-beta2 --sgd-momentum --muon-momentum",
    ),
    **_rows(
        Range(0, _INF, "a divisor must not be 0", open=True),
        "--adam-eps --norm-epsilon --rotary-base --rotary-scaling-factor --lora-alpha "
        "--dsa-latent-norm-epsilon --initial-loss-scale --min-loss-scale --loss-scale",
    ),
    **_rows(Range(0, _INF, "it is a standard deviation"), "--init-method-std"),
    **_rows(Range(1, 2**32 - 1, "numpy's generators take 32 bits"), "--seed"),
}  # fmt: skip


def range_rules(
    values: Mapping[str, Any], table: Mapping[str, Range]
) -> Iterator[tuple[bool, str]]:
    """Yield ``(ok, message)`` for the numbers of a command line.

    Args:
        values: parsed arguments by name; lists are checked number by number.
        table: :data:`FLAGS` or the table of the commands.
    """
    for name, value in values.items():
        flag = flag_of(name)
        limits = table.get(flag)
        for number in value if isinstance(value, list | tuple) else (value,):
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            if limits is None:
                ok = isinstance(number, int) or math.isfinite(number)
                yield ok, f"{flag} must be finite, got {number}: give a number, or drop it"
            else:
                yield (
                    limits.holds(number),
                    f"{flag} must be finite and {limits}, got {_said(number)}: {limits.why}; give "
                    "a number in this range, or drop it",
                )


def _said(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"
