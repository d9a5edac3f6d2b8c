"""Fixtures for all tests. Memory that nobody wrote is poisoned, so that reading it shows."""

import importlib.util
import sys
import zlib

import pytest
import torch

from megatron_dsa.training.launching import remove_stale_build_lock
from tests import tiers

# An assertion there says what it compared, as in a test.
pytest.register_assert_rewrite("tests.cases", "tests.functional.comparisons")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EXAMPLES = 100


def pytest_addoption(parser):
    """Let a run take every case (:mod:`tests.tiers`), and random cases be more than CI's."""
    parser.addoption("--push", action="store_true", help="the push tier's part of given paths")
    parser.addoption("--all", action="store_true", help="all tests, every case")
    parser.addoption("--seed", help="of the push tier's sample; by default the day's")
    parser.addoption(
        "--examples", type=int, default=EXAMPLES,
        help="random cases per property; other numbers than the default draw new ones each time",
    )  # fmt: skip


def pytest_configure(config):
    """Draw the same random cases in every run of CI, so that no run fails by chance.

    Where there is no GPU, transformer-engine is hidden, as this package's commands do.
    """
    tiers.start(config)
    remove_stale_build_lock()  # tests that wait for it would hang
    if not torch.cuda.is_available() and importlib.util.find_spec("transformer_engine"):
        from megatron_dsa.patches.cpu_host import hide_transformer_engine

        hide_transformer_engine()
    if importlib.util.find_spec("hypothesis") is None:
        return
    from hypothesis import HealthCheck, settings

    examples = config.getoption("--examples")
    settings.register_profile(
        "operations",
        max_examples=examples,
        derandomize=examples == EXAMPLES,
        database=None,
        deadline=None,
        # Fixtures of this file hold for all examples of a test alike.
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    settings.load_profile("operations")


def pytest_report_header():
    """Say which tests run."""
    return tiers.header()


def pytest_ignore_collect(collection_path, config):
    """Leave out files of which the push tier runs nothing."""
    if tiers.is_push() and collection_path.is_file():
        return tiers.leaves_out(str(collection_path.relative_to(config.rootpath))) or None
    return None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Take the tier's tests; skip GPU tests, with the reason, where there is no GPU."""
    gpu = torch.cuda.is_available()
    if tiers.is_push():
        runnable = [item for item in items if gpu or "gpu" not in item.keywords]
        kept = tiers.sample(runnable)
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept
    elif not gpu:
        skip = pytest.mark.skip(reason="no CUDA GPU on this machine")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def seeded(request):
    """Give every test random numbers of its own, the same in every run and order of tests."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def no_scale_of_auxiliary_losses():
    """Megatron keeps it in a class, and copies later ones into it, which may have another shape."""
    yield
    if utils := sys.modules.get("megatron.core.transformer.moe.moe_utils"):
        utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None


@pytest.fixture(autouse=True)
def poisoned_empty():
    """Let ``torch.empty`` and friends return NaN: an output that is not written cannot pass."""
    before = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    # This switch only fills memory in deterministic mode.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)
    torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.fixture(scope="session")
def python():
    """Return the interpreter that scripts of ``examples/`` and commands start."""
    return sys.executable


@pytest.fixture(params=DEVICES)
def device(request):
    """Every device that this machine has."""
    return torch.device(request.param)
