"""Log probabilities of rollout and training; selections are compared in tests of records."""

import math

import pytest
import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.rl.agreement import log_prob_gap


def test_log_prob_gap_estimates_the_divergence():
    generator = torch.Generator().manual_seed(0)
    rollout = torch.randn(50, generator=generator).double().log_softmax(0)
    training = (rollout + 0.3 * torch.randn(50, generator=generator)).log_softmax(0)
    true = float((rollout.exp() * (rollout - training)).sum())
    drawn = torch.multinomial(rollout.exp(), 200_000, replacement=True, generator=generator)
    found = log_prob_gap(training[drawn], rollout[drawn])
    assert found.kl == pytest.approx(true, rel=0.03) and found.mean == pytest.approx(true, rel=0.1)
    assert found.tokens == 200_000
    worst = (training - rollout).abs().max()
    assert found.largest == pytest.approx(float(worst)) or found.largest <= float(worst)


def test_the_mask_and_the_place():
    training = torch.tensor([[0.0, -1.0, -2.0], [-3.0, math.nan, -5.0]])
    rollout = torch.tensor([[0.0, -1.5, -2.0], [-3.0, -4.0, -9.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    found = log_prob_gap(training, rollout, mask)
    assert (found.largest, found.token, found.tokens) == (0.5, 1, 4)
    assert found.mean == -0.125
    assert found.kl == pytest.approx((math.exp(0.5) - 1.5) / 4)
    with pytest.raises(ConfigError, match="must be finite where they count"):
        log_prob_gap(training, rollout)
    with pytest.raises(ConfigError, match="at least one token"):
        log_prob_gap(training, rollout, torch.zeros_like(mask))
    with pytest.raises(ConfigError, match="one shape"):
        log_prob_gap(training, rollout[0])
