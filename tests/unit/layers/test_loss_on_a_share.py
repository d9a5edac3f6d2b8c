"""Layers that train their indexer on a share of the query tokens."""

from unittest import mock

import pytest
import torch

from megatron_dsa.config.model import DSAOptions
from tests.cases.log import empty_log, logged_of_first
from tests.host import attention_module, hidden_like, small_config, small_csa_config, start

TOKENS = 200


def layer(kind, **options):
    start()
    fields = {"dsa_indexer_use_sparse_loss": "dense" not in kind}
    if "warm-up" in kind:
        options["stage"] = "warmup"
    settings = {"dtype": torch.float64, "options": DSAOptions(**options)} | fields
    config = small_csa_config(4, **settings) if "CSA" in kind else small_config(**settings)
    module = attention_module(config).train()
    return module, hidden_like(module, TOKENS)


KINDS = ("DSA", "DSA dense loss", "DSA dense warm-up", "CSA", "CSA dense warm-up")


def recorded_samples(step):
    """Return the tokens of every sample that ``step()`` draws."""
    from megatron_dsa.layers import core
    from megatron_dsa.ops.indexer_loss import training
    from megatron_dsa.ops.indexer_loss.sample import draw_sample

    seen = []

    def draw(*arguments):
        seen.append(draw_sample(*arguments))
        return seen[-1]

    with (
        mock.patch.object(core, "draw_sample", draw),
        mock.patch.object(training, "draw_sample", draw),
    ):
        step()
    return [sample.tokens.tolist() for sample in seen]


@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_layers_take_the_same_tokens_and_others_in_the_next_step(kind):
    """Megatron restores the generator's state for the second pass."""
    from megatron.core.tensor_parallel import checkpoint

    module, x = layer(kind, indexer_loss_queries=0.4)
    gradients, steps = {}, []

    def step(recompute):
        module.zero_grad()
        if recompute:
            out = checkpoint(lambda x: module(x, None)[0], False, x)
        else:
            out = module(x, None)[0]
        out.square().sum().backward()
        gradients[recompute] = [p.grad for p in module.parameters() if p.grad is not None]

    for recompute in (False, True):
        torch.manual_seed(1)
        steps.append([recorded_samples(lambda r=recompute: step(r)) for _ in range(3)])
    once, twice = steps
    # A loss over all keys draws in the forward pass, which runs twice.
    passes = 2 if "dense" in kind else 1
    assert twice == [passes * samples for samples in once]
    assert len({tuple(samples[0]) for samples in once}) == 3
    for a, b in zip(gradients[False], gradients[True], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_takes_all_tokens(kind):
    losses = []
    for share in (1.0, 0.4):
        module, x = layer(kind, indexer_loss_queries=share, evaluate_indexer=True)
        empty_log(1, x.device)
        with torch.no_grad():
            assert recorded_samples(lambda m=module.eval(), x=x: m(x, None)) == []
        losses.append(logged_of_first())
    assert losses[0] == losses[1] and any("indexer" in name for name in losses[0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_logged_loss_is_that_of_all_tokens_in_the_mean(kind):
    from megatron_dsa.ops.indexer_loss.sample import draw_sample

    values = []
    places = range(0, TOKENS, 8)  # all tokens are in equally many of these tiles
    for place in (None, *places):
        module, x = layer(kind, indexer_loss_queries=1.0 if place is None else 0.4)
        empty_log(1, x.device)
        with mock.patch.object(torch, "randint", lambda *_, p=place, **__: torch.tensor(p)):
            module(x, None)[0].sum().backward()
        values.append(logged_of_first()["indexer loss"])
    assert draw_sample(TOKENS, 0.4, x.device).factor == TOKENS / 64
    assert sum(values[1:]) / len(places) == pytest.approx(values[0], rel=1e-5)
