"""The family ``indexer``: its checks find wrong results, and its peer computes the same."""

import dataclasses

import pytest
import torch

from benchmarks import indexer
from benchmarks.indexer import bundled, dense
from benchmarks.settings import Settings, Work
from megatron_dsa.dsa_kernels import indexer_topk
from megatron_dsa.errors import ImplementationError
from megatron_dsa.ops.dispatch import Policy
from megatron_dsa.testing.comparison import relative_error
from megatron_dsa.testing.tolerances import MODEL_SHAPES

LIMIT = MODEL_SHAPES[torch.bfloat16]
TORCH = Policy(fused=False)


def measurer(tokens, topk=8, heads=4, device="cpu", **more):
    case = indexer.Case(tokens, heads=heads, topk=topk, teacher_heads=3, **more)
    return indexer.prepare(case, torch.device(device), Settings(device, repeats=1))


def test_bundled_dense_loss_is_ours():
    one = measurer(40)
    made = one.dense(TORCH, False, "")
    ours, theirs = made.call(), one.dense(TORCH, True, "").call()
    assert all(relative_error(x, y) < LIMIT for x, y in zip(ours, theirs, strict=True))
    assert not made.check(ours).wrong() and made.check([2 * x for x in ours]).wrong()


def test_work_of_the_dense_loss():
    one = measurer(40)
    # 820 visible pairs; 4 index heads of 128, 3 heads of 192
    assert dense.flops(dense.draw(one.inputs, one.layout, 3)) == 2 * 820 * (3 * 4 * 128 + 3 * 192)


def test_engine_scores_are_compared_with_the_rule(monkeypatch):
    monkeypatch.setattr(indexer, "named", lambda operation, way: ())
    one = measurer(300, topk=16, workspace_mib=1)
    ((_, result),) = one.measure(Work("select", indexer.ENGINE))
    assert result["status"] == "ok" and "indexer_engine_scores=torch" in result["ran"]
    assert result["rule_recall"] == 1 and 0.8 < result["recall"] <= 1
    # The keys of other queries are found out.
    monkeypatch.setattr(
        indexer,
        "indexer_topk",
        lambda given, *rest, policy: indexer_topk(
            dataclasses.replace(given, q=given.q.flip(1)), *rest, policy=policy
        ),
    )
    ((_, result),) = one.measure(Work("select", indexer.ENGINE))
    assert result["status"] == "failed" and "of the rule's keys" in result["reason"]


def test_a_way_that_cannot_run_says_why():
    if torch.cuda.is_available():
        pytest.skip("they may run here")
    one = measurer(64)
    for work, reason in (
        (Work("select", "cudnn"), "wrong GPU"), (Work("select", "megatron"), "needs a CUDA GPU"),
        (Work("loss:sorted", "megatron"), "keys behind the query"),
    ):  # fmt: skip
        with pytest.raises(ImplementationError, match=reason):
            list(one.measure(work))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [700, 9000])
def test_bundled_indexer_is_ours(tokens, monkeypatch):
    """Selection and gradients, with blocks of tokens that are cut off, and short lists."""
    one = measurer(tokens, topk=512, heads=64, device="cuda")
    # The bundled loss ignores keys behind the query, which the made-up lists have.
    selected, _ = indexer_topk(one.inputs, one.layout, 512)
    monkeypatch.setattr(indexer, "make_indices", lambda *_: selected)
    made = one.select(Policy(), True, "")
    assert not made.check(made.call()).wrong()
    theirs, ours = (one.loss(Policy(), way, "clustered") for way in (True, False))
    found, gradients = theirs.call(), ours.call()
    assert not theirs.check(found).wrong()
    assert all(relative_error(x, y) < 1e-2 for x, y in zip(found, gradients, strict=True))


def test_order_of_a_selection():
    made = measurer(40).select(TORCH, False, "")
    indices, length = made.call()
    assert not made.check((indices, length)).wrong()
    assert made.check((indices.flip(1), length)).complaints
    again, count = bundled.sorted_lists(indices.flip(1))
    assert torch.equal(again, indices) and torch.equal(count, length)


def test_checks_find_wrong_results():
    one = measurer(80)
    made = one.select(TORCH, False, "")
    indices, length = made.call()
    wrong = indices.clone()
    worst = (one.inputs.k.double() @ one.inputs.q[-1].double().t()).relu()
    worst = (worst @ one.inputs.weights[-1].double()).argsort()
    wrong[-1] = worst[:8].sort().values
    assert made.check((wrong, length)).errors["score inversion"] > 0.1
    wrong[-1, 1] = wrong[-1, 0]
    assert made.check((wrong, length)).complaints

    made = one.loss(TORCH, False, "sorted")
    gradients = made.call()
    assert not made.check(gradients).wrong()
    assert made.check([x / 2 for x in gradients]).wrong()
