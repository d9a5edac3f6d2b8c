"""A training step of one DSA layer, to compare two attentions."""

from dataclasses import dataclass, field

import pytest
import torch
from megatron.core import tensor_parallel

from megatron_dsa.ops.dispatch import reset_report
from tests.cases.log import logged
from tests.helpers import relative_error
from tests.host import hidden_like, packed

#: Both round in fp64.
TOLERANCE = 1e-11
TOKENS = 64


@dataclass(frozen=True)
class Step:
    """Inputs of a step.

    Attributes:
        batch: of the hidden states; ``lengths`` packs their tokens, ``padded`` includes padding.
        recomputed: the whole layer runs again in the backward.
        changes: fields of the configuration.
    """

    batch: int = 1
    lengths: tuple[int, ...] | None = None
    padded: tuple[int, ...] | None = None
    recomputed: bool = False
    changes: dict = field(default_factory=dict)


#: Steps with equal results of all attentions.
STEPS = {
    "unpacked": Step(),
    "two sequences": Step(batch=2),
    "packed": Step(lengths=(1, 5, 1, 40, 17)),
    "padded": Step(lengths=(5, 1, 17, 50), padded=(8, 1, 24, 56)),
    "loss per token": Step(changes={"calculate_per_token_loss": True}),
    "no query latent": Step(changes={"q_lora_rank": None, "qk_layernorm": False}),
    "full recompute": Step(recomputed=True),
}
#: Modules that Megatron recomputes.
RECOMPUTED = (("core_attn",), ("mla_up_proj",), ("core_attn", "mla_up_proj"))


def selective(modules: tuple[str, ...]) -> dict:
    """Return the configuration fields that recompute modules."""
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


def train(module, step: Step) -> tuple[dict, dict]:
    """Return output, input gradient and parameter gradients of a layer, and its log."""
    packing = None
    if step.lengths is not None:
        packing = packed(*step.lengths, padded_lengths=step.padded)
    x = hidden_like(module, sum(step.padded or step.lengths or [TOKENS]), step.batch)

    def run(x):
        return module(x, None, packed_seq_params=packing)[0]

    reset_report()
    out = tensor_parallel.checkpoint(run, False, x) if step.recomputed else run(x)
    generator = torch.Generator().manual_seed(12)
    out.backward(torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out))
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return {"out": out.detach(), "dx": x.grad} | gradients, logged()


def check_same(got, want, tolerance=TOLERANCE) -> None:
    """Check that two results of :func:`train` are equal up to a relative ``tolerance``."""
    assert got[0].keys() == want[0].keys()
    for name, expected in want[0].items():
        if expected is None:
            assert got[0][name] is None, name
            continue
        assert expected.norm() > 0, name
        assert relative_error(got[0][name], expected) < tolerance, name
    assert got[1].keys() == want[1].keys()
    for name, figure in want[1].items():
        assert got[1][name] == pytest.approx(figure, rel=1e-6), name
