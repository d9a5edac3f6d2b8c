"""Fixtures for all tests. Unwritten memory is poisoned, so that reading it is noticed."""

import importlib.util
import sys
import zlib

import pytest
import torch

from megatron_dsa.training.launching import remove_stale_build_lock
from tests import tiers

# Show compared values in their assertions.
pytest.register_assert_rewrite("tests.cases", "tests.functional.comparisons")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EXAMPLES = 100


def pytest_addoption(parser):
    """Add options for all cases (:mod:`tests.tiers`) and for more random cases."""
    parser.addoption("--push", action="store_true", help="the push tier's part of given paths")
    parser.addoption("--all", action="store_true", help="all tests, every case")
    parser.addoption("--seed", help="of the push tier's sample; by default the day's")
    parser.addoption(
        "--examples", type=int, default=EXAMPLES,
        help="random cases per property; other numbers than the default draw new ones each time",
    )  # fmt: skip


def pytest_configure(config):
    """Draw the same random cases in every run of CI; hide transformer-engine without a GPU."""
    tiers.start(config)
    remove_stale_build_lock()  # tests would wait for it
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
        # This file's fixtures hold for all examples of a test.
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    settings.load_profile("operations")


def pytest_report_header():
    return tiers.header()


def pytest_ignore_collect(collection_path, config):
    if tiers.is_push() and collection_path.is_file():
        return tiers.leaves_out(str(collection_path.relative_to(config.rootpath))) or None
    return None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Select the tier's tests; skip GPU tests without a GPU."""
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
    """Seed every test independently of the order of tests."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def no_scale_of_auxiliary_losses():
    """Reset Megatron's scale, a class attribute that keeps the first shape."""
    yield
    if utils := sys.modules.get("megatron.core.transformer.moe.moe_utils"):
        utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None


@pytest.fixture(autouse=True)
def poisoned_empty():
    """Make ``torch.empty`` return NaN, so that unwritten outputs fail."""
    before = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    # Filling memory requires deterministic mode.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)
    torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.fixture(scope="session")
def python():
    return sys.executable


@pytest.fixture(params=DEVICES)
def device(request):
    """Yield every device of this machine."""
    return torch.device(request.param)
