"""One of two ranks is lost without a launcher: the other ends in bounded time with a message, and
the same command resumes.
"""

import signal

import pytest

from tests.functional.launch import train, train_without_a_rank
from tests.processes import Lost

#: Seconds that a rank waits for another after the first steps.
WAIT = 10
#: NCCL's watchdog polls every second and writes a dump before it ends the process.
LIMIT = WAIT + 60
#: All ranks get four times these milliseconds (15000) to write.
TIME_TO_WRITE = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("how", "layout"),
    [
        (signal.SIGKILL, {"--context-parallel-size": 2}),
        (signal.SIGSTOP, {"--tensor-model-parallel-size": 2, "--sequence-parallel": True}),
    ],
    ids=["killed", "hangs"],
)
def test_the_other_rank_ends_and_the_run_resumes(how, layout, data, tmp_path, monkeypatch):
    monkeypatch.setenv(TIME_TO_WRITE, "1000")
    flags = {"--data-path": data, "--save": tmp_path, "--load": tmp_path} | layout
    flags |= {"--save-interval": 2, "--distributed-timeout-seconds-after-init": WAIT}
    flags |= {"--train-iters": 1000}  # the run must outlast the lost rank
    lost = Lost(1, "iteration        3/", how, LIMIT)  # printed by rank 1
    statuses, run = train_without_a_rank(flags, 2, lost)
    assert len(statuses) == 1 and statuses[0], f"rank 0 did not end by itself: {run.log[-3000:]}"
    told = "another rank is lost or does not answer"
    watchdog = "Watchdog caught collective operation timeout"
    assert told in run.log or watchdog in run.log, run.log[-3000:]
    saved = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    rest = train(flags | {"--exit-interval": saved + 2}, ranks=2)
    assert [step["iteration"] for step in rest.steps] == [saved + 1, saved + 2]
