"""A small real data set, shared by all functional tests of a session."""

import pytest
import torch

from tests.functional.cases.run import prepare_data
from tests.functional.checkpoint_reader import gradients_of_first_step
from tests.functional.launch import REPOSITORY, train

ONE_STEP = {"--train-iters": 1, "--save-interval": 1, "--finetune": True}


def ranks_available() -> int:
    """Return the number of possible processes: any on the CPU, one per GPU otherwise."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 8


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Skip cases with too few GPUs (``ranks(n)``), before fixtures run."""
    marker = item.get_closest_marker("ranks")
    if marker and marker.args[0] > ranks_available():
        pytest.skip(f"needs {marker.args[0]} GPUs, {ranks_available()} here")


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return prepare_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def short_documents(tmp_path_factory):
    """``--data-path`` of documents of any length, many shorter than a sample."""
    from megatron_dsa.extras.prepare_data.shards import write_byte_dataset

    prefix = tmp_path_factory.mktemp("documents") / "lines"
    lines = (REPOSITORY / "LICENSE").read_text(encoding="utf-8").splitlines()
    write_byte_dataset([line.strip() for line in lines], prefix)
    return str(prefix)


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """``--data-path`` of this package's source as byte tokens: all batches differ."""
    from megatron_dsa.extras.prepare_data.shards import write_byte_dataset

    prefix = tmp_path_factory.mktemp("source") / "source"
    files = sorted((REPOSITORY / "megatron_dsa").rglob("*.py"))
    write_byte_dataset([file.read_text(encoding="utf-8") for file in files], prefix)
    return str(prefix)


@pytest.fixture(scope="session")
def started(source, tmp_path_factory):
    """Return a function that adds a start from a few steps of training to a model's flags.

    It trains each model once, with Megatron's layers.
    """
    from tests.functional.engine import LOCAL, START, run

    folders = {}

    def start(flags):
        key = tuple(sorted((name, str(value)) for name, value in flags.items()))
        flags = flags | {"--data-path": source}
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("start")
            run(flags | START | {"--save": folders[key]}, LOCAL)
        return flags | {"--load": folders[key], "--finetune": True}

    return start


@pytest.fixture(scope="session")
def steps_of(data, tmp_path_factory):
    """Return a function that prepares a model (changes to :data:`TINY`) and returns ``one_step``.

    ``one_step(changes, ranks)`` takes one step from a common checkpoint; returns log line, all
    gradients, run.
    """

    def prepare(model=None):
        model = {"--data-path": data} | (model or {})
        start = tmp_path_factory.mktemp("start")
        # A few steps, so that no weight is at its initial 0.
        train(model | {"--save": start, "--train-iters": 3, "--save-interval": 3})

        def one_step(changes=None, ranks=1):
            directory = tmp_path_factory.mktemp("step")
            flags = model | {"--load": start, "--save": directory} | ONE_STEP
            result = train(flags | (changes or {}), ranks=ranks)
            return result.steps[0], gradients_of_first_step(directory), result

        return one_step

    return prepare


@pytest.fixture(scope="session")
def one_step(steps_of):
    return steps_of()
