"""Dense stages by masked dense attention on tensor-parallel ranks equal one rank's."""

import dataclasses

import pytest
import torch

from megatron_dsa.config import DSAOptions
from tests.cases.layers import DSA, PACKED, RECOMPUTED
from tests.helpers import relative_error
from tests.ranks import build, spawn

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
    from megatron.core import parallel_state

    from megatron_dsa.dispatch import Candidate, Support, report, reset_report
    from megatron_dsa.metrics.log import IndexerLog
    from megatron_dsa.ops.masked_attention.declaration import BACKWARD, FORWARD, VISIBLE_BITS

    for operation in (VISIBLE_BITS, FORWARD, BACKWARD):
        torchs = operation.candidates[-1]
        if all(candidate.name != "mine" for candidate in operation.candidates):
            operation.add(Candidate("mine", torchs.kernel, Support("any shape")))
    module, x, packing = build(case, tp, cp)
    assert module.masked
    IndexerLog._state.sums = None
    IndexerLog.create(1, x.device)
    reset_report()
    out, _ = module(x, None, packed_seq_params=packing)
    out.square().sum().backward()
    gradients = {}
    for name, parameter in module.named_parameters():
        if getattr(parameter, "sequence_parallel", False) and tp > 1:
            group = parallel_state.get_tensor_model_parallel_group()
            torch.distributed.all_reduce(parameter.grad, group=group)
        gradients[name] = parameter.grad
    means = IndexerLog.reduce()
    loss = {name: float(x.value[0]) for name, x in means.items() if x.count[0]}
    return {"out": out.detach(), "dx": x.grad, "gradients": gradients, "report": report()} | loss


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What every rank found, by the number of ranks."""
    with pytest.MonkeyPatch.context() as patch:
        # On the CPU also where there is a GPU: NCCL wants one GPU per rank.
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        cases = {name: layer(name) for name in CASES}
        folder = tmp_path_factory.mktemp("visible")
        return {tp: spawn(_run, cases, tp, folder) for tp in (1, 2)}


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
