"""Wrong selections, losses and teachers must be found by the doctor."""

import dataclasses

import pytest
import torch

from megatron_dsa.extras.doctor import shapes_from
from megatron_dsa.extras.doctor.checks import engine_scores
from tests.doctor_harness import SMALL, TEACHER, others_are_ok, parse, run, verdicts


def select(pick):
    """Return a top-k that takes columns by ``pick(scores, visible, topk) -> bool mask``."""

    def wrap(original):
        def implementation(scores, seen, topk):
            visible = seen.columns(scores.shape[1])
            mask = pick(scores.masked_fill(~visible, float("-inf")), visible, topk)
            place = torch.where(mask, mask.cumsum(-1) - 1, topk)
            columns = torch.arange(mask.shape[1], dtype=torch.int32).expand_as(mask)
            out = torch.full((len(mask), topk + 1), -1, dtype=torch.int32)
            return out.scatter_(1, place, columns)[:, :topk]

        return implementation

    return wrap


def ties_to_the_largest(scores, visible, topk):
    order = scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    return torch.zeros_like(visible).scatter_(1, scores.shape[1] - 1 - order, True) & visible


def smallest_keys(scores, visible, topk):
    return visible & (visible.cumsum(-1) <= topk)


def looks_ahead(scores, visible, topk):
    return ties_to_the_largest(torch.where(visible, scores, 1e9), torch.ones_like(visible), topk)


def reordered(original):
    return lambda *args: original(*args).flip(-1)


def repeated(original):
    def implementation(*args):
        out = original(*args)
        out[:, 1] = out[:, 0]
        return out

    return implementation


def one_too_few(original):
    def implementation(*args):
        out = original(*args)
        out[:, -1] = -1
        return out

    return implementation


def unsigned(original):
    """Drop the sign of head weights: many selections are plausible, few are right."""

    def implementation(inputs, *args):
        positive = dataclasses.replace(inputs, weights=inputs.weights.abs())
        return original(positive, *args)

    return implementation


def in_another_order(original):
    """Start the same sums with the last head."""

    def implementation(inputs, *args):
        q, weights = inputs.q.roll(1, 1), inputs.weights.roll(1, 1)
        return original(dataclasses.replace(inputs, q=q, weights=weights), *args)

    return implementation


def rounded_to_bf16(original):
    return lambda *args: original(*args).bfloat16().float()


def without_key_scales(original):
    def implementation(inputs, *args):
        ones = torch.ones_like(inputs.key_scales)
        return original(dataclasses.replace(inputs, key_scales=ones), *args)

    return implementation


def scaled_gradients(original):
    def implementation(call):
        loss = original(call)
        return loss._replace(gradients=loss.gradients._replace(k=loss.gradients.k * 2))

    return implementation


def scaled_loss(original):
    def implementation(call):
        result = original(call)
        return result._replace(value=result.value * 1.5)

    return implementation


def padding_pulls_at_row_0(original):
    def implementation(call):
        loss = original(call)
        loss.gradients.k[0] = 1e-3
        return loss

    return implementation


def unmasked(original):
    """Keep the weights of entries past the length."""
    return lambda call, lse: original(dataclasses.replace(call, topk_length=None), lse)


#: Operation -> its check, and wrong implementations with their complaint.
WRONG = {
    "indexer_topk": (
        "index selection",
        (select(ties_to_the_largest), "all scores equal: not the best keys"),
        (select(smallest_keys), "recall"),
        (select(looks_ahead), "an invisible key is selected"),
        (reordered, "keys are not distinct and ascending"),
        (repeated, "keys are not distinct and ascending"),
        (one_too_few, "the list is no prefix"),
    ),
    "indexer_scores": ("index selection", (unsigned, "recall"), (unsigned, "score shortfall")),
    "indexer_engine_scores": (
        "engine scores",
        (in_another_order, "not added up in the order of the rule"),
        (rounded_to_bf16, "not added up in the order of the rule"),
        (without_key_scales, "engine scores 1."),
    ),
    "sparse_indexer_loss": (
        "indexer loss",
        (scaled_loss, "loss 5.0e-01"),
        (scaled_gradients, "dk 1.0e+00"),
        (padding_pulls_at_row_0, "dk of an unselected key is not 0"),
    ),
    TEACHER: ("teacher", (unmasked, "p_sum of an invalid entry is not 0")),
}


@pytest.mark.parametrize(
    ("operation", "check", "wrap", "said"),
    [(name, check, *wrong) for name, (check, *some) in WRONG.items() for wrong in some],
)
def test_wrong_implementations_are_found(capsys, add, operation, check, wrap, said):
    add(operation, wrap)
    engine = " --index-heads 8 --index-dim 64" if check == "engine scores" else ""
    code, data = run(capsys, SMALL + engine)
    assert code == 1 and others_are_ok(data)
    (result,) = verdicts(data).values()
    assert result["check"] == check and said in result["verdict"], result["verdict"]


def test_right_selection_by_other_means_passes(capsys, add):
    def pick(scores, visible, topk):
        order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
        return torch.zeros_like(visible).scatter_(1, order, True) & visible

    add("indexer_topk", select(pick))
    code, data = run(capsys, f"{SMALL} --packed both")
    assert code == 0, data["verdict"]
    assert len([r for r in data["results"] if r["check"] == "index selection"]) == 4


def test_engines_have_no_wider_heads():
    (shape,) = shapes_from(parse(f"{SMALL} --index-dim 256"))
    (check,) = engine_scores(shape, torch.device("cpu"))
    assert "at most 128 index dims" in check.unsupported
