"""Agreement of a training step with its rollout: selected keys, log probabilities.

These functions synchronise with the device; call them between steps.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_dsa.errors import require
from megatron_dsa.ops.common.arithmetic import items_within, slices
from megatron_dsa.ops.layout.positions import check_form

#: Sentinel that sorts after every position.
_NONE = torch.iinfo(torch.int32).max
_BYTES_PER_ENTRY = 48


@dataclass(frozen=True)
class LayerAgreement:
    """Agreement of one layer's selections on one rank.

    Attributes:
        tokens: number of tokens with keys in both; differing: number with unequal keys.
        keys: number of recorded keys in these tokens; common: number also selected.
        first: first token that differs, or ``None``.
        recorded_only, selected_only: some keys of token ``first``, ascending.
    """

    layer: int
    rank: int
    tokens: int
    differing: int
    keys: int
    common: int
    first: int | None = None
    recorded_only: tuple[int, ...] = ()
    selected_only: tuple[int, ...] = ()

    @property
    def share(self) -> float:
        """Share of recorded keys that are selected; 1 without keys."""
        return self.common / self.keys if self.keys else 1.0

    def describe(self) -> str:
        line = f"layer {self.layer}, rank {self.rank}: {self.share:.3%} of {self.keys} keys agree"
        if self.first is None:
            return line
        return (
            f"{line}; {self.differing} of {self.tokens} tokens differ, first token {self.first}: "
            f"recorded only {_listed(self.recorded_only)}, selected only "
            f"{_listed(self.selected_only)}"
        )


def compare_selections(
    recorded: Mapping[int, torch.Tensor],
    selected: Mapping[int, torch.Tensor],
    *,
    tokens: torch.Tensor | None = None,
    rank: int = 0,
    shown: int = 4,
    workspace_bytes: int = 2**28,
) -> list[LayerAgreement]:
    """Compare an engine's selections with this rank's, layer by layer.

    Args:
        recorded: layer -> positions int32 ``[all tokens, K]``, see
            :func:`megatron_dsa.extras.rl.rollouts.selections_of`.
        selected: layer -> positions of this rank's tokens, see
            :class:`~megatron_dsa.extras.rl.replay.IndexCapture`; ``K`` may differ.
        tokens: int64 ``[local tokens]``, their indices among all tokens; ``None``: all.
        rank: for messages.
        shown: maximum keys to list of the first differing token, per kind.
        workspace_bytes: budget for temporary memory.

    Returns:
        One entry per layer of ``selected``. Tokens without keys in either are ignored.

    Raises:
        ConfigError: a layer has no record, or token counts differ.
    """
    missing = sorted(set(selected) - set(recorded))
    require(
        not missing,
        f"recorded must have every layer that selects, layer(s) {_listed(missing)} missing: see "
        "record_layers",
    )
    results = []
    for layer, local in selected.items():
        given = recorded[layer]
        check_form(given, f"recorded[{layer}]")
        check_form(local, f"selected[{layer}]")
        if tokens is not None:
            given = given[tokens.to(given.device)]
        require(
            len(given) == len(local),
            f"recorded[{layer}] must have one row for each of the {len(local)} tokens of "
            f"selected[{layer}], got {len(given)}: say which tokens they are",
        )
        results.append(
            _compared(layer, rank, given.to(local.device), local, tokens, shown, workspace_bytes)
        )
    return results


def _compared(layer, rank, given, local, tokens, shown, workspace_bytes) -> LayerAgreement:
    counts = torch.zeros(4, dtype=torch.int64)
    first: tuple[int, tuple[int, ...], tuple[int, ...]] | None = None
    width = given.shape[1] + local.shape[1]
    for part in slices(len(local), items_within(workspace_bytes, _BYTES_PER_ENTRY * width)):
        a, b = given[part], local[part]
        both = (a >= 0).any(1) & (b >= 0).any(1)
        only_a, only_b = _missing(a, b) & both[:, None], _missing(b, a) & both[:, None]
        differs = only_a.any(1) | only_b.any(1)
        keys = ((a >= 0) & both[:, None]).sum()
        counts += torch.stack([both.sum(), differs.sum(), keys, keys - only_a.sum()]).cpu()
        if first is None and differs.any():
            at = int(differs.nonzero()[0])
            token = part.start + at
            token = token if tokens is None else int(tokens[token])
            first = token, _some(a[at], only_a[at], shown), _some(b[at], only_b[at], shown)
    return LayerAgreement(layer, rank, *counts.tolist(), *(first or ()))


def _missing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Mark keys of ``a`` missing in ``b``, bool ``[r, K]``."""
    ordered = torch.where(b < 0, _NONE, b).sort(1).values
    slot = torch.searchsorted(ordered, a.contiguous()).clamp_max(ordered.shape[1] - 1)
    return (a >= 0) & (ordered.gather(1, slot) != a)


def _some(keys: torch.Tensor, chosen: torch.Tensor, shown: int) -> tuple[int, ...]:
    return tuple(keys[chosen].sort().values[:shown].tolist())


def _listed(numbers) -> str:
    return ", ".join(map(str, numbers)) or "none"


class LogProbGap(NamedTuple):
    """Difference of sampled tokens' log probabilities between rollout and training.

    Attributes:
        kl: estimate of KL(rollout || training) per token: mean of ``exp(d) - 1 - d``, with ``d``
            training minus rollout; never negative.
        mean: mean of ``-d``, the plain estimate, may be negative.
        largest: largest ``|d|``.
        token: index of that token.
        tokens: number of counted tokens.
    """

    kl: float
    mean: float
    largest: float
    token: int
    tokens: int


def log_prob_gap(
    training: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor | None = None
) -> LogProbGap:
    """Compare log probabilities of sampled tokens; synchronises with the device.

    Args:
        training, rollout: natural logarithms, of one shape.
        mask: bool of that shape, tokens that count; ``None``: all.

    Raises:
        ConfigError: shapes differ, no token counts, or a counted value is not finite.
    """
    require(
        training.shape == rollout.shape and (mask is None or mask.shape == training.shape),
        f"training, rollout and mask must have one shape, got {tuple(training.shape)}, "
        f"{tuple(rollout.shape)} and {None if mask is None else tuple(mask.shape)}",
    )
    gap = (training.detach().double() - rollout.detach().double().to(training.device)).flatten()
    counted = torch.ones_like(gap, dtype=torch.bool) if mask is None else mask.flatten().bool()
    d = gap[counted.to(gap.device)]
    require(d.numel() > 0, "mask must leave at least one token, got none")
    require(
        d.isfinite().all(),
        "log probabilities must be finite where they count: mask tokens that were not sampled",
    )
    index = int(d.abs().argmax())
    return LogProbGap(
        float((d.exp() - 1 - d).mean()),
        float(-d.mean()),
        float(d[index].abs()),
        int(counted.nonzero()[index]),
        d.numel(),
    )


def lines(agreements: list[LayerAgreement]) -> Iterator[str]:
    for each in agreements:
        if each.differing:
            yield each.describe()
    keys, common = (sum(getattr(x, name) for x in agreements) for name in ("keys", "common"))
    yield f"{common / keys if keys else 1:.3%} of {keys} recorded keys are selected"
