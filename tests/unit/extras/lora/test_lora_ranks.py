"""Models with adapters on tensor- and context-parallel ranks equal one rank."""

import dataclasses
import re

import pytest
import torch

from tests.cases.layers import DSA
from tests.cases.lora import config_of, model_of
from tests.helpers import relative_error
from tests.ranks import spawn, summed_gradients

#: Variant of :mod:`tests.cases.lora`, and options of tensor parallelism.
CASES = {
    "heads": ("sparse", {"tp_mode": "heads"}),
    "by sequence": ("sparse", {"tp_mode": "sequence"}),
    "masked": ("masked", {}),
    "recomputed": ("selectively recomputed", {}),
    "fully recomputed": ("fully recomputed", {}),
    "dense": ("dense", {}),
    "warm-up": ("warm-up of everything", {}),
    "V4, heads": ("V4", {"tp_mode": "heads"}),
    "V4, by sequence": ("V4, selectively recomputed", {"tp_mode": "sequence"}),
}


def part_of(name, parameter, full):
    """Return the tensor-parallel rank's shard of full values."""
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    if not getattr(parameter, "tensor_model_parallel", False):
        return full
    if name.endswith("linear_fc1.weight"):  # gate and up
        return torch.cat([half.chunk(ranks)[rank] for half in full.chunk(2)])
    return full.chunk(ranks, dim=parameter.partition_dim)[rank]


def run_case(case, tp, cp):
    """Run a microbatch; ``case`` is a variant, with options for divided heads or tokens."""
    from megatron.core import parallel_state

    variant, options = case
    config = config_of(
        variant,
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        sequence_parallel=tp > 1,
        use_cpu_initialization=True,
    )
    if tp > 1:
        config.dsa = dataclasses.replace(config.dsa, **options)
    model = model_of(config, part=part_of)
    ids = torch.randint(0, 96, (1, 64), generator=torch.Generator().manual_seed(5))
    places = dataclasses.replace(DSA, rows=64).global_positions(cp)
    own = torch.tensor(places[parallel_state.get_context_parallel_rank()])
    # Megatron computes the loss of labels in fp32.
    losses = model(ids[:, own], own[None], None).square().sum(-1)
    losses.sum().backward()
    losses = losses.detach()
    if tp > 1:  # a part of the vocabulary each
        group = parallel_state.get_tensor_model_parallel_group()
        torch.distributed.all_reduce(losses, group=group)
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    splits = {
        name: p.partition_dim
        for name, p in model.named_parameters()
        if p.requires_grad and getattr(p, "tensor_model_parallel", False)
    }
    return {
        "losses": losses,
        "places": own,
        "gradients": summed_gradients(model, tp, cp),
        "splits": splits,
    }


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return spawn(run_case, CASES, 1, tmp_path_factory.mktemp("one"))[0]


@pytest.mark.parametrize(("tp", "cp"), [(2, 1), (1, 2)])
def test_ranks_equal_one(tp, cp, single, tmp_path):
    cases = {name: case for name, case in CASES.items() if tp > 1 or name != "by sequence"}
    several = spawn(run_case, cases, tp, tmp_path, cp)
    for name in cases:
        one, ranks = single[name], [rank[name] for rank in several]
        for rank in ranks:
            wanted = one["losses"][:, rank["places"]]
            assert relative_error(rank["losses"], wanted) < 1e-12, name
        assert ranks[0]["gradients"].keys() == one["gradients"].keys()
        for parameter, wanted in one["gradients"].items():
            found = [rank["gradients"][parameter] for rank in ranks]
            axis = ranks[0]["splits"].get(parameter)
            if tp > 1 and axis is not None:
                found = [torch.cat(found, dim=axis)]
            for gradient in found:
                assert relative_error(gradient, wanted) < 1e-11, (name, parameter)
        if tp > 1:
            check_splits(ranks[0]["splits"], ranks[0]["gradients"])


def check_splits(splits, names):
    """Check that only B of column-parallel and A of row-parallel linears are split."""
    by_columns = r".*\.(o_proj|down_proj|wo_b|w2)_lora_A"
    by_rows = r".*\.((q_a|q_b|kv_a_proj_with_mqa|kv_b|gate|up)(_proj)?|wo_a|w1|w3)_lora_B"
    by_rows += r"|.*\.linear_q_up_proj\.wq_b_lora_B"  # not the indexer's
    assert splits == {name: 1 for name in names if re.fullmatch(by_columns, name)} | {
        name: 0 for name in names if re.fullmatch(by_rows, name)
    }
