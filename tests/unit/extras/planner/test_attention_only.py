"""``--dsa-dry-run-attention-only``: plans of models of which the attention alone is known."""

from unittest import mock

import pytest

from megatron_dsa.extras.planner import attention_only, chunks
from megatron_dsa.extras.planner.command import dry_run
from tests import host
from tests.functional.launch import TINY
from tests.plans import BF16, EXPERTS, HYBRID, command, forget_layouts, only_chunk, plan


@pytest.fixture(autouse=True)
def a_fresh_process():
    """Plans have process groups of their own, and count the tables that they make."""
    host.stop()
    forget_layouts()


ALONE = {
    "--dsa-dry-run-attention-only": True,
    "--vocab-size": None,
    "--padded-vocab-size": None,
    "--mtp-num-layers": 1,
    "--csa-compress-ratios": "0 4 16 0",
}


WITH_THE_REST = {
    "--dsa-dry-run-attention-only": None,
    "--padded-vocab-size": 264,
    "--moe-layer-freq": "1",
}


def test_the_attention_alone(capsys):
    """All else is left out of the figures, whatever flags say about it, and the plan says so."""
    changes = BF16 | HYBRID | ALONE
    assert dry_run([*command(changes | {"--dsa-dry-run-world": 2}), "--dsa-dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("plan of the attention alone for 2 x ")
    assert "  0: layer 1: window | layer 2: CSA (ratio 4) with indexer | layer 3: HCA" in out
    assert "note: planned is the attention alone: MLPs, experts, embedding and output" in out
    for part in ("MLP;", "dense MLP", "experts |", "embedding |", "logits", "MFU"):
        assert part not in out, part

    def attention_and_norms(chunk):
        """Numbers of what is planned, from modules that were built whole."""
        names = ("self_attention", "input_layernorm", "final", "eh_proj", "enorm", "hnorm")
        parameters = chunk.named_parameters()
        return sum(p.numel() for name, p in parameters if any(part in name for part in names))

    seen = []
    measure = chunks._measure

    def count(args, chunk, names):
        seen.append(attention_and_norms(chunk))
        return measure(args, chunk, names)

    with mock.patch.object(chunks, "_measure", count):
        whole_plan = plan(changes | EXPERTS | WITH_THE_REST)
    alone_plan = plan(changes)
    whole, alone = only_chunk(whole_plan), only_chunk(alone_plan)
    fake_kernel = 2 * TINY["--hidden-size"]  # embedding and output layer of one token
    assert sum(each.count for each in alone.weights) == seen[0] + fake_kernel
    assert sum(each.count for each in whole.weights) > 2 * seen[0]
    left_out = {"experts", "router", "logits", "dense MLP"}
    assert set(attention_only.LEFT_OUT) == left_out
    assert left_out - {*whole_plan.operations} == {"dense MLP"}  # all layers have experts there
    assert alone_plan.operations == {
        part: count for part, count in whole_plan.operations.items() if part not in left_out
    }
    # Experts that are named, too, are not in the plan.
    again = only_chunk(plan(changes | EXPERTS | {"--moe-layer-freq": "1"}))
    assert (again.weights, again.kept) == (alone.weights, alone.kept)


def test_the_attention_between_streams():
    """Connections belong to the residual: those of MLPs, which are left out, are planned."""
    streams = BF16 | HYBRID | ALONE | {"--hc-mult": 4}
    whole, alone = plan(streams | EXPERTS | WITH_THE_REST), plan(streams)
    for part in ("hyper-connections", "multi-token prediction", "attention"):
        assert alone.operations[part] == whole.operations[part], part
    assert "experts" not in alone.operations
    width = 4 * TINY["--hidden-size"]
    per_sublayer, head = 24 * width + 24 + 3, 4 * width + 4 + 1
    (fp32,) = (each for each in only_chunk(alone).weights if each.itemsize == 4)
    plain = only_chunk(plan(streams | {"--hc-mult": 1})).weights
    others = sum(each.count for each in plain if each.itemsize == 4)  # sinks, positions of groups
    assert fp32.count == others + 4 * 2 * per_sublayer + 2 * head


def test_rope_values_change_no_figure():
    """As the plan of the attention alone says: it assumes values for them."""
    model = BF16 | HYBRID | ALONE | {"--rope-type": "yarn"}
    neutral = {"--rotary-scaling-factor": 1, "--yarn-original-max-position-embeddings": 96}
    other = {
        "--rotary-scaling-factor": 7,
        "--yarn-original-max-position-embeddings": 32,
        "--rotary-base": 12345,
        "--csa-compress-rotary-base": 77,
    }
    plans = []
    for changes in (neutral, neutral, other):  # the first one fills what is kept per process
        forget_layouts()
        plans.append(plan(model | changes))
    _, one, two = plans
    assert one.stages == two.stages and one.operations == two.operations
    assert "--rotary-scaling-factor 7" in two.remarks[1] and one.remarks[0] == two.remarks[0]
