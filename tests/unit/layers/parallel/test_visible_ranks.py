"""Dense stages by masked dense attention on tensor-parallel ranks equal one rank's."""

import dataclasses

import pytest

from megatron_dsa.config.model import DSAOptions
from tests.cases.layers import DSA, PACKED, RECOMPUTED
from tests.helpers import relative_error
from tests.ranks import build, spawn, summed_gradients

WARM_UP = {"dsa_indexer_use_sparse_loss": False}
CASES = {
    "dense": ("dense", {}),
    "warm-up": ("warmup", {"changes": WARM_UP}),
    "packed": ("warmup", PACKED | {"changes": WARM_UP}),
    "recomputed": ("warmup", {"changes": WARM_UP | RECOMPUTED}),
}


def layer(name):
    stage, settings = CASES[name]
    options = DSAOptions(stage=stage, freeze_main=False, sequence_length=96)
    changes = settings.get("changes", {}) | {"options": options}
    return dataclasses.replace(DSA, **settings | {"changes": changes})


def _run(case, tp, cp):
    """A step of the layer, whose masked operations count as fused in this process."""
    from megatron_dsa.ops.dispatch import Candidate, Support, report, reset_report
    from megatron_dsa.ops.masked_attention.spec import BACKWARD, FORWARD, VISIBLE_BITS
    from tests.cases.log import empty_log, logged_of_first

    for operation in (VISIBLE_BITS, FORWARD, BACKWARD):
        torchs = operation.candidates[-1]
        if all(candidate.name != "mine" for candidate in operation.candidates):
            operation.add(Candidate("mine", torchs.kernel, Support("any shape")))
    module, x, packing = build(case, tp, cp)
    assert module.choice.masked
    empty_log(1, x.device)
    reset_report()
    out, _ = module(x, None, packed_seq_params=packing)
    out.square().sum().backward()
    found = {"out": out.detach(), "dx": x.grad, "gradients": summed_gradients(module, tp, cp)}
    return found | {"report": report()} | logged_of_first()


@pytest.fixture(scope="module")
def results(tmp_path_factory, backend):
    """What every rank found, by the number of ranks."""
    cases = {name: layer(name) for name in CASES}
    folder = tmp_path_factory.mktemp("visible")
    return {tp: spawn(_run, cases, tp, folder, backend=backend) for tp in (1, 2)}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_rank(name, results):
    (one,), several = ([rank[name] for rank in results[n]] for n in (1, 2))
    case = layer(name)
    for index, rank in enumerate(several):
        assert (
            rank["report"]["masked_attention_forward"] and "dense_attention" not in rank["report"]
        )
        for what in ("out", "dx"):
            assert relative_error(rank[what], one[what].chunk(2)[index]) < 1e-11, (what, index)
        for parameter, full in one["gradients"].items():
            expected = case.part(parameter, full, index, 2)
            assert expected.norm() > 0
            part = rank["gradients"][parameter]
            assert relative_error(part, expected) < 1e-11, (parameter, index)
        if name != "dense":
            assert rank["indexer loss"] == pytest.approx(one["indexer loss"], rel=1e-6)
