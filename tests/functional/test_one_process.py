"""Runs that share a process train, save and resume like separate processes."""

import pytest

from tests.functional.launch import TINY, Trainer, launch, shared_trainer, train
from tests.functional.parallel_flags import PACKED, SMALL_V4

V4 = SMALL_V4 | {"--micro-batch-size": 1}
EXPERTS = {
    "--num-experts": 4,
    "--moe-router-topk": 2,
    "--moe-ffn-hidden-size": 32,
    "--moe-layer-freq": "[0,1]",
}


@pytest.fixture
def one_process(monkeypatch):
    """Return a function that trains in this test's process, run by ``one_process.trainer``."""
    trainer = Trainer()
    monkeypatch.setattr("tests.functional.launch.shared_trainer", lambda: trainer)

    def run(flags, **settings):
        return launch(TINY | flags, one_process=True, **settings)

    run.trainer = trainer
    yield run
    trainer.close()


def figures(run):
    names = ("iteration", "lm loss", "indexer loss", "grad norm")
    return [[step.get(name) for name in names] for step in run.steps]


def test_runs_equal_those_of_their_own_processes(one_process, data, tmp_path, short_documents):
    flags = {"--data-path": data, "--global-batch-size": 2}
    saved = flags | {"--save": tmp_path / "shared", "--save-interval": 2, "--exit-interval": 2}
    cases = [
        (flags, flags),
        (flags | V4 | {"--loss-scale": 65536}, flags | V4 | {"--loss-scale": 65536}),
        (saved, saved | {"--save": tmp_path / "own"}),
        (flags | {"--load": tmp_path / "shared"}, flags | {"--load": tmp_path / "own"}),
        (flags | EXPERTS | PACKED | {"--data-path": short_documents},) * 2,
        (flags | {"--dsa-stage": "dense"},) * 2,
        (flags, flags),
    ]
    for shared, own in cases:
        assert figures(one_process(shared)) == figures(train(own))
    assert one_process.trainer.starts == 1


def test_a_run_that_fails_does_not_end_the_others(one_process, data):
    flags = {"--data-path": data, "--global-batch-size": 2, "--train-iters": 2}
    first = one_process(flags)
    wrong = one_process(flags | {"--dsa-indexer-topk": -1}, check=False)
    assert wrong.returncode and not wrong.steps and "--dsa-indexer-topk" in wrong.log
    assert figures(one_process(flags)) == figures(first)
    assert one_process.trainer.starts == 2
    # Variables must not leak between runs.
    variables = {"MEGATRON_DSA_IMPL": "indexer_topk=no_such_implementation"}
    wrong = one_process(flags, env=variables, check=False)
    assert wrong.returncode and "no_such_implementation" in wrong.log
    assert figures(one_process(flags)) == figures(first)


def test_the_process_is_shared():
    assert shared_trainer() is shared_trainer()
