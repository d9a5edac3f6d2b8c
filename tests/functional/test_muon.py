"""Muon through the training entry point: every layout updates parameters like one process."""

import pytest

from tests.functional.checkpoint_reader import read
from tests.functional.comparisons import check_resume, layout_cases
from tests.functional.launch import train
from tests.functional.muon_flags import EXPERTS, MUON, V4
from tests.functional.parallel_flags import TP2_HEADS, TP2_SEQUENCE
from tests.helpers import relative_error

pytest.importorskip("emerging_optimizers", minversion="0.3")

#: Moments near 0 must not decide a step of Adam.
UPDATES = MUON | {"--adam-eps": 1e-4}
TP4 = TP2_HEADS | {"--tensor-model-parallel-size": 4}
PP2 = {
    "--pipeline-model-parallel-size": 2,
    "--pipeline-model-parallel-layout": "Ett|tL",
}
V4_LAYOUTS = {
    "TP2 by sequence": (TP2_SEQUENCE, 2),
    "TP4, one head and group per rank": (TP4, 4),
    "TP4, distributed": (TP4 | {"--muon-tp-mode": "distributed"}, 4),
    "TP2 over PP2": (TP2_HEADS | PP2, 4),
    "EP2 over DP2": ({"--expert-model-parallel-size": 2}, 2),
}
#: Layouts of V3.2.
DSA_LAYOUTS = {
    "TP2": (TP2_HEADS, 2),
    "TP4, one head per rank": (TP4, 4),
}
TOLERANCE = 2e-4


def weights(folder):
    others = ("optimizer", "chained", "rng")
    return {n: x.double() for n, x in read(folder).items() if not n.startswith(others)}


class Training:
    """Three steps of a model from a common checkpoint, in any layout."""

    def __init__(self, model, data, folder):
        self.flags, self.folder = model | UPDATES | {"--data-path": data}, folder
        start = {"--save": folder / "start", "--train-iters": 1, "--save-interval": 1}
        train(self.flags | start)
        self.start = weights(folder / "start")

    def updates(self, name, changes=None, ranks=1):
        """Return the updates of every parameter, and the run."""
        flags = self.flags | {"--load": self.folder / "start", "--finetune": True}
        flags |= {"--save": self.folder / name, "--train-iters": 3, "--save-interval": 3}
        run = train(flags | (changes or {}), ranks=ranks)
        after = weights(self.folder / name)
        assert set(after) == set(self.start)
        return {name: after[name] - before for name, before in self.start.items()}, run


def check_same(got, expected, tolerance=TOLERANCE):
    errors = {name: relative_error(got[name], x) for name, x in expected.items()}
    assert all(error < tolerance for error in errors.values()), errors


@pytest.fixture(scope="module")
def v4(data, tmp_path_factory):
    return Training(V4 | EXPERTS, data, tmp_path_factory.mktemp("v4"))


@pytest.fixture(scope="module")
def v4_single(v4):
    updates, run = v4.updates("single")
    assert all(update.norm() > 0 for update in updates.values())
    return updates, run


@pytest.mark.parametrize("name", layout_cases(V4_LAYOUTS))
def test_layout_of_v4(name, v4, v4_single):
    check_same(v4.updates(name, *V4_LAYOUTS[name])[0], v4_single[0])


@pytest.fixture(scope="module")
def dsa(data, tmp_path_factory):
    return Training({}, data, tmp_path_factory.mktemp("dsa"))


@pytest.fixture(scope="module")
def dsa_single(dsa):
    return dsa.updates("single")[0]


@pytest.mark.parametrize("name", layout_cases(DSA_LAYOUTS))
def test_layout_of_dsa(name, dsa, dsa_single):
    check_same(dsa.updates(name, *DSA_LAYOUTS[name])[0], dsa_single)


def test_blocks_make_a_difference(v4, v4_single):
    whole = v4.updates("whole", {"--dsa-muon-per-head": "none"})[0]
    errors = {name: relative_error(whole[name], x) for name, x in v4_single[0].items()}
    for part in ("linear_q_up_proj.weight", "linear_wq_b.weight"):
        assert min(e for name, e in errors.items() if part in name) > 0.1, part
    attention = v4.updates("attention", {"--dsa-muon-per-head": "attention"})[0]
    indexer = [name for name in errors if "linear_wq_b" in name]
    assert all(relative_error(attention[n], v4_single[0][n]) > 0.1 for n in indexer)


def test_table_says_what_updates_what(v4_single):
    lines = [line.split(">   ")[1] for line in v4_single[1].log.splitlines() if ">   " in line]
    table = {
        (line.split()[0], line.split()[1]): line for line in lines if line.split()[0][0] in "AM"
    }
    assert "embedding.word_embeddings.weight" in {name for kind, name in table if kind == "AdamW"}
    attention = "decoder.layers.*.self_attention"
    ape = f"{attention}.core_attention.compressor.ape"
    assert ("AdamW", ape) in table and ("Muon", ape) not in table
    for name, words in (
        (f"{attention}.linear_o_group_proj.weight", "[64, 32]  3       4 blocks of 16 rows"),
        (f"{attention}.linear_q_up_proj.weight", "[128, 32]  3       4 blocks of 32 rows"),
        (f"{attention}.core_attention.indexer.linear_wq_b.weight", "4 blocks of 16 rows"),
        ("decoder.layers.*.hc_attn_fn", "one matrix"),
        ("decoder.layers.*.mlp.experts.local_experts.*.linear_fc1.weight", "one matrix"),
    ):
        assert " ".join(words.split()) in " ".join(table["Muon", name].split()), name


@pytest.mark.ranks(4)
def test_stages_of_a_pipeline_are_in_the_table(v4, v4_single):
    run = v4.updates("stages", *V4_LAYOUTS["TP2 over PP2"])[1]
    tables = [
        [line for line in log.splitlines() if line.startswith((">   AdamW", ">   Muon"))]
        for log in (run.log, v4_single[1].log)
    ]
    assert tables[0] == tables[1] and len(tables[0]) > 20


@pytest.mark.ranks(2)
@pytest.mark.parametrize("experts", [{}, {"--expert-model-parallel-size": 2}])
def test_layer_wise_optimizer(experts, data, tmp_path):
    training = Training(V4 | EXPERTS | {"--bf16": True}, data, tmp_path)
    plain = training.updates("plain", experts, 2)[0]
    changes = experts | {"--use-distributed-optimizer": True}
    check_same(training.updates("layer-wise", changes, 2)[0], plain, 1e-6)


def test_resume_equals_uninterrupted(data, tmp_path):
    state = check_resume(V4 | EXPERTS | MUON | {"--data-path": data}, tmp_path)
    momenta = [name for name in state if "momentum_buffer" in name]
    assert momenta and not any(name.endswith((".ape", "attn_sink")) for name in momenta)
    assert any(name.endswith("hc_attn_fn") for name in momenta)


@pytest.mark.ranks(2)
def test_resume_of_the_layer_wise_optimizer(data, tmp_path):
    flags = V4 | EXPERTS | MUON | {"--data-path": data, "--bf16": True}
    check_resume(flags | {"--use-distributed-optimizer": True}, tmp_path, ranks=2)


def test_refusals_name_the_flags(data):
    def refused(changes):
        run = train(changes | {"--data-path": data}, check=False)
        assert run.returncode != 0 and not run.steps
        return run.log

    per_head = refused({"--dsa-muon-per-head": "all"})
    assert "--dsa-muon-per-head all has a meaning only with --optimizer muon" in per_head
    assert "layer-wise optimizer" in refused(MUON | {"--use-distributed-optimizer": True})
