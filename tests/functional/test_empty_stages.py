"""A resumed run whose second of three pipeline stages has no weights."""

import pytest
import torch

from tests.functional.checkpoint_reader import read
from tests.functional.launch import train
from tests.functional.muon_flags import MUON

EMPTY = {"--pipeline-model-parallel-size": 3, "--pipeline-model-parallel-layout": "Et||tL"}
TOTAL, HALF = 4, 2
OPTIMIZERS = {
    "Adam": {},
    "distributed, reshardable": {
        "--use-distributed-optimizer": True,
        "--dist-ckpt-optim-fully-reshardable": True,
    },
    "Muon": MUON,
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resume(optimizer, data, tmp_path):
    if optimizer == "Muon":
        pytest.importorskip("emerging_optimizers", minversion="0.3")
    flags = {"--data-path": data, "--train-iters": TOTAL, "--save-interval": HALF}
    flags |= EMPTY | OPTIMIZERS[optimizer]
    whole = train(flags | {"--save": tmp_path / "whole"}, ranks=3)
    part = {"--save": tmp_path / "part", "--load": tmp_path / "part"}
    train(flags | part | {"--exit-interval": HALF}, ranks=3)
    rest = train(flags | part, ranks=3)
    assert [step["iteration"] for step in rest.steps] == [3, 4]
    assert rest.column("grad norm") == whole.column("grad norm")[HALF:]
    expected, state = read(tmp_path / "whole"), read(tmp_path / "part")
    assert set(state) == set(expected)
    assert sum("exp_avg." in name or "momentum_buffer" in name for name in state) > 10
    for name, values in expected.items():
        assert torch.equal(state[name], values), name
