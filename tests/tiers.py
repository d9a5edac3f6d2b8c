"""Tiers of the tests: a push runs some of the cases, ``--all`` every one.

The push tier runs without path, ``-k`` or ``-m``. It excludes files of :data:`LEFT_OUT` except
tests of :data:`KEPT`, and takes :data:`CASES` cases of each test, another sample every day that
includes every value of every parameter.
"""

import datetime
import os
import zlib
from collections.abc import Iterable

#: Variables that pass tier and seed to pytest's workers.
TIER, SEED = "TESTS_OF_TIER", "TESTS_SEED"
#: Cases per test in the push tier; more if a parameter has more values.
CASES = 5
MOST = 12
#: Exceptions: few of slow tests, all of fast ones.
OTHER = {
    "tests/unit/config/": 1000,
    "tests/functional/": 1,
    "tests/unit/layers/parallel/test_masked_ranks.py": 6,
    "tests/unit/layers/parallel/test_masked_tokens.py": 1,
    "tests/unit/layers/parallel/test_ranks.py": 40,
    "tests/unit/layers/test_cuda_graphs.py": 6,
    "tests/unit/ops/test_compiled_kernels.py::test_compiles": 6,
}
#: Files and folders that only ``--all`` runs.
LEFT_OUT = (
    "tests/functional/",
    "tests/unit/benchmarks/",
    "tests/unit/examples/",
    "tests/unit/extras/planner/test_planned_layers.py",
    "tests/unit/extras/test_docs.py",
    "tests/unit/extras/huggingface/test_whole_v4.py",
    "tests/unit/patches/test_unusable_engine.py",
    "tests/unit/test_evidence_page.py",
)
#: Exceptions for a push: the entry point like users run it.
KEPT = (
    "tests/functional/test_cases.py::test_case",
    "tests/functional/test_huggingface.py::test_dense_checkpoint_to_warmed_up_sparse_checkpoint",
    "tests/functional/test_parity.py::test_layout",
    "tests/functional/test_stages.py::test_dense_to_warmup_to_sparse",
    "tests/functional/test_stages.py::test_strict_refuses_before_training",
    "tests/functional/test_whole_v4.py::test_layout",
    "tests/functional/test_whole_v4.py::test_packed_documents_over_context_parallel_ranks",
    "tests/unit/examples/test_examples.py",
    "tests/unit/extras/test_docs.py::test_named_files_exist",
)


def start(config) -> None:
    """Set the tier of this run, in pytest's first process."""
    options = config.option
    narrowed = config.args_source is config.ArgsSource.ARGS or options.keyword or options.markexpr
    tier = "push" if options.push or not (options.all or narrowed) else "all"
    os.environ.setdefault(TIER, tier)
    today = str(datetime.date.today().toordinal())
    os.environ.setdefault(SEED, today if options.seed is None else options.seed)


def header() -> str:
    if not is_push():
        return "tier: all cases"
    return f"tier: push, {CASES} cases of a test (--seed {os.environ[SEED]}); --all runs every case"


def is_push() -> bool:
    return os.environ.get(TIER) == "push"


def leaves_out(path: str) -> bool:
    """Return whether a file (relative path) has nothing in the push tier."""
    return path.startswith(LEFT_OUT) and not any(kept.startswith(path) for kept in KEPT)


def sample(items: Iterable) -> list:
    tests: dict[str, list] = {}
    for item in items:
        test = item.nodeid.partition("[")[0]
        if not test.startswith(LEFT_OUT) or test.startswith(KEPT):
            tests.setdefault(test, []).append(item)
    kept = {item for test, cases in tests.items() for item in _sample(cases, _cases_of(test))}
    return [item for item in items if item in kept]


def _cases_of(test: str) -> int:
    return next((number for path, number in OTHER.items() if test.startswith(path)), CASES)


def _sample(cases: list, number: int) -> list:
    """Draw ``number`` cases; tests of a module with the same cases draw the same ones."""
    if len(cases) <= number:
        return cases

    def draw(item) -> int:
        return zlib.crc32(f"{os.environ[SEED]} {item.callspec.id}".encode())

    left, chosen = sorted(cases, key=draw), []
    missing = {value for item in cases for value in _values(item)}
    while left and (len(chosen) < number or (missing and number == CASES)):
        best = max(left, key=lambda item: len(missing & _values(item)))  # the first of equal ones
        left.remove(best)
        missing -= _values(best)
        chosen.append(best)
        if len(chosen) >= max(MOST, number):
            break
    return chosen


def _values(item) -> set[tuple[int | str, str]]:
    # Parameters given together share an id.
    words = {(n, str(x)) for n, x in item.callspec.params.items() if isinstance(x, str | int)}
    return words | set(enumerate(item.callspec._idlist))


def cases_run(request, *names: str) -> set[tuple]:
    """Return the values of parameters ``names`` in this module's tests, for fixtures that compute
    all cases at once.
    """
    return {
        tuple(item.callspec.params[name] for name in names)
        for item in request.session.items
        if item.path == request.path
        and hasattr(item, "callspec")
        and set(names) <= set(item.callspec.params)
    }
