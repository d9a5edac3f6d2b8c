"""A checkpoint of two tensor-parallel ranks resumed on two context-parallel ones.

With the distributed optimizer, once its states have been saved for any layout.
"""

import pytest

from tests.functional.checkpoint_reader import read
from tests.functional.launch import train
from tests.functional.parallel_flags import CP2, TP2_HEADS
from tests.helpers import relative_error

DISTRIBUTED = {"--use-distributed-optimizer": True}
RESHARDABLE = {"--dist-ckpt-optim-fully-reshardable": True}
TOTAL, HALF = 6, 3


@pytest.mark.ranks(2)
def test_resume(data, tmp_path):
    flags = {"--data-path": data, "--train-iters": TOTAL, "--save-interval": HALF} | DISTRIBUTED
    whole = train(flags | RESHARDABLE | TP2_HEADS | {"--save": tmp_path / "whole"}, ranks=2)
    part = {"--save": tmp_path / "part", "--load": tmp_path / "part"}
    first = train(flags | TP2_HEADS | part | {"--exit-interval": HALF - 1}, ranks=2)
    assert first.log.count("--dist-ckpt-optim-fully-reshardable saves it for any") == 1
    flags |= RESHARDABLE
    train(flags | TP2_HEADS | part | {"--exit-interval": HALF}, ranks=2)
    rest = train(flags | CP2 | part, ranks=2)
    assert [step["iteration"] for step in rest.steps] == [4, 5, 6]
    assert "the optimizer starts anew" not in rest.log
    for figure in ("lm loss", "indexer loss", "grad norm"):
        straight = whole.column(figure)[HALF:]
        assert rest.column(figure) == pytest.approx(straight, rel=1e-4), figure
    expected, state = read(tmp_path / "whole"), read(tmp_path / "part")
    names = [name for name in expected if name.startswith(("decoder.", "optimizer.state."))]
    moments = [name for name in names if "exp_avg" in name]
    assert len(moments) > 20 and set(names) <= set(state)
    errors = {name: relative_error(state[name], expected[name]) for name in names}
    worst = max(errors, key=errors.get)
    print(f"{worst} {errors[worst]:.1e}")
    assert all(error < 1e-4 for error in errors.values()), errors
