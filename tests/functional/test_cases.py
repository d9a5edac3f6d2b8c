"""The functional cases as tests; see ``cases/README.md``."""

import pytest

from tests.functional.cases import run as cases


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.ranks(cases.load_case(name)["RANKS"]))
        for name in cases.case_names()
    ],
)
def test_case(name, data):
    result = cases.run_case(name, data)
    assert cases.differences(name, result) == []
    losses = result.column("indexer loss" if "warmup" in name else "lm loss")
    assert losses[-1] < 0.9 * losses[0]
