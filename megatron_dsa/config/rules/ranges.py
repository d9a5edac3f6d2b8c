"""Allowed ranges of numeric flags.

Numbers without an entry must be finite and not negative.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_dsa.config.fields import choices_of, flag_of, option_fields


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` (excluded if ``open``) to ``high``."""

    low: float
    high: float
    why: str
    open: bool = False

    def holds(self, value: float) -> bool:
        above = value > self.low if self.open else value >= self.low
        return above and value <= self.high and value < math.inf

    def __str__(self) -> str:
        if self.low == -math.inf:
            return "finite"
        least = f"finite and {'above' if self.open else 'at least'} {self.low:g}"
        return least if self.high == math.inf else f"{least} and at most {_said(self.high)}"


_INF = math.inf
_OTHERS = Range(0, _INF, "it has no meaning below")
_ANY = Range(-_INF, _INF, "nothing can be computed with it", open=True)

_ROWS: tuple[tuple[Range, str], ...] = (
    (Range(1, 512, "every layer is built"), "--num-layers"),
    (Range(0, 512, "every layer is built"), "--mtp-num-layers"),
    (
        Range(1, 2**24, "it is a dimension of weights"),
        "--hidden-size --ffn-hidden-size --kv-lora-rank --moe-ffn-hidden-size --vocab-size "
        "--padded-vocab-size --make-vocab-size-divisible-by --dsa-indexer-head-dim --q-lora-rank "
        "--moe-shared-expert-intermediate-size --moe-latent-size --lora-rank --o-lora-rank",
    ),
    (
        Range(1, 2**16, "it counts heads, groups, streams or experts, or dimensions of a head"),
        "--num-attention-heads --num-query-groups --kv-channels --qk-head-dim --v-head-dim "
        "--linear-num-key-heads --linear-num-value-heads --linear-key-head-dim "
        "--linear-value-head-dim --linear-conv-kernel-dim "
        "--dsa-indexer-n-heads --num-experts --moe-router-topk --moe-router-num-groups "
        "--moe-router-group-topk --o-groups --hc-mult --dsa-indexer-pool-size",
    ),
    (Range(0, 2**16, "it is a dimension of a head"), "--qk-pos-emb-head-dim"),
    (
        Range(1, 2**30, "it is a number of tokens"),
        "--seq-length --max-position-embeddings --dsa-indexer-topk --csa-window-size",
    ),
    (Range(0, 2**30, "it is a number of tokens"), "--csa-compress-ratios"),
    (
        Range(1, 2**20, "it is a number of sequences"),
        "--micro-batch-size --global-batch-size --eval-micro-batch-size --eval-global-batch-size "
        "--dsa-packed-documents",
    ),
    (
        Range(1, 2**20, "it is a number of ranks"),
        "--tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size "
        "--expert-model-parallel-size --expert-tensor-parallel-size --dsa-dry-run-world "
        "--num-distributed-optimizer-instances --num-virtual-stages-per-pipeline-rank "
        "--microbatch-group-size-per-virtual-pipeline-stage",
    ),
    (
        Range(1, 512, "it is a number of layers"),
        "--recompute-num-layers --num-layers-per-virtual-pipeline-stage",
    ),
    (
        Range(1, 2**16, "it is a number of threads or processes"),
        "--num-dataset-builder-threads --dist-ckpt-workers",
    ),
    (
        Range(1, _INF, "it is a duration"),
        "--distributed-timeout-minutes --distributed-timeout-seconds-after-init",
    ),
    (Range(1, 2**24, "it is memory of a GPU"), "--dsa-workspace-mib"),
    (
        Range(1, _INF, "it is a number of steps"),
        "--log-interval --save-interval --eval-interval --tensorboard-log-interval "
        "--muon-num-ns-steps --save-retain-interval --log-memory-interval "
        "--check-weight-hash-across-dp-replicas-interval "
        "--adlr-autoresume-interval --loss-scale-window --hysteresis "
        "--dsa-indexer-topk-freq --hc-sinkhorn-iters",
    ),
    (
        Range(0, _INF, "it is a number of steps or samples"),
        "--train-iters --train-samples --eval-iters --lr-decay-iters --lr-warmup-iters "
        "--lr-decay-samples --lr-warmup-samples --lr-wsd-decay-iters --num-workers --ckpt-step",
    ),
    (
        Range(0, _INF, "with a negative one the loss grows"),
        "--lr --min-lr --lr-warmup-init --weight-decay --start-weight-decay --end-weight-decay "
        "--decoupled-lr --decoupled-min-lr --mtp-loss-scaling-factor --moe-z-loss-coeff "
        "--moe-aux-loss-coeff --dsa-indexer-loss-coeff",
    ),
    (Range(0, _INF, "0 turns clipping off"), "--clip-grad"),
    (
        Range(0, 1, "it is a share"),
        "--lr-warmup-fraction --activation-offload-fraction --optimizer-offload-fraction",
    ),
    (Range(0, 1, "it is a share, and 0 would rotate nothing", open=True), "--rotary-percent"),
    (
        Range(0, 1, "it is a share, and none would train nothing", open=True),
        "--dsa-indexer-loss-queries --dsa-indexer-loss-heads",
    ),
    (Range(0, 1, "it is a probability"), "--attention-dropout --hidden-dropout"),
    (
        Range(-5, -1e-6, "kernels multiply the decays of 16 steps in fp32"),
        "--kda-gate-lower-bound",
    ),
    (
        Range(0, 1 - 2**-53, "averages with a factor of 1 never move"),
        "--adam-beta1 --adam-beta2 --sgd-momentum --muon-momentum --lion-beta1 --lion-beta2",
    ),
    (
        Range(0, _INF, "a divisor must not be 0", open=True),
        "--adam-eps --norm-epsilon --rotary-base --rotary-scaling-factor --lora-alpha "
        "--dsa-latent-norm-epsilon --initial-loss-scale --min-loss-scale --loss-scale "
        "--csa-compress-rotary-base --dsa-indexer-k-norm-epsilon --hc-eps "
        "--moe-router-topk-scaling-factor --muon-extra-scale-factor",
    ),
    (
        Range(0, _INF, "YaRN takes its logarithm", open=True),
        "--yarn-beta-fast --yarn-beta-slow --yarn-original-max-position-embeddings",
    ),
    (
        Range(0, _INF, "it is a standard deviation"),
        "--init-method-std --embedding-init-method-std",
    ),
    (Range(1, 2**32 - 1, "numpy's generators take 32 bits"), "--seed"),
)
FLAGS: dict[str, Range] = {flag: limits for limits, flags in _ROWS for flag in flags.split()}

#: Flags without a range that accept negative numbers.
_NEGATIVE = {
    "--glu-linear-offset",
    "--inference-batch-times-seqlen-threshold",
    "--inference-dynamic-batching-num-cuda-graphs",
    "--moe-expert-capacity-factor",
    "--moe-paged-stash-buffer-size-factor-cpu",
    "--moe-paged-stash-buffer-size-factor-cuda",
    "--moe-router-force-biased",
    "--null-tokenizer-eod-id",
    "--null-tokenizer-pad-id",
    "--rl-default-top-k",
}


def range_rules(
    values: Mapping[str, Any], table: Mapping[str, Range] = FLAGS
) -> Iterator[tuple[bool, str]]:
    """Check numbers and lists, keyed by flag or field; yield ``(ok, message)``."""
    for name, value in values.items():
        flag = name if name.startswith("--") else flag_of(name)
        limits = table.get(flag, _ANY if flag in _NEGATIVE else _OTHERS)
        for number in value if isinstance(value, list | tuple) else (value,):
            if isinstance(number, str) and flag in table:  # YAML reads 1e-6 as a string
                yield False, f"{flag} must be a number, got {number!r}: give one"
            if isinstance(number, int | float) and not isinstance(number, bool):
                yield (
                    limits.holds(number),
                    f"{flag} must be {limits}, got {_said(number)}: {limits.why}; give a number "
                    "in this range, or drop it",
                )


def option_rules(config_class: type, values: Any) -> Iterator[tuple[Any, str]]:
    for each, about in option_fields(config_class):
        value, choices = getattr(values, each.name), choices_of(each)
        if choices is not None:
            rule = f"one of {', '.join(choices)}"
            yield value in choices, f"{about.flag} must be {rule}, got {value!r}"
        elif each.type is not bool and value is not None:
            given = value if about.unit == 1 else value / about.unit
            yield from range_rules({about.flag: given})


def schedule_rules(values: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    """Yield rules: warm-up ends within the run, and ``--lr`` is the highest learning rate."""
    if values["skip_train"]:
        return
    highest = values["lr"]
    for name in ("min_lr", "lr_warmup_init"):
        lower = values[name]
        yield (
            highest is None or lower is None or lower <= highest,
            f"{flag_of(name)} must be at most --lr = {highest}, got {lower}: give a lower one",
        )
    for unit in ("iters", "samples"):
        warmup = f"lr_warmup_{unit}"
        for end in (f"lr_decay_{unit}", f"train_{unit}"):
            if values[end]:
                yield (
                    not values[warmup] or values[warmup] < values[end],
                    f"{flag_of(warmup)} must be less than {flag_of(end)} = {values[end]}, got "
                    f"{values[warmup]}: warm up for fewer, or train longer",
                )
                break


def _said(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"
