"""Figures in Megatron's log: averaged over their iterations, also without a loss."""

import sys
from unittest import mock

import pytest
import torch

from tests.functional.launch import TINY, command_line, parse_steps
from tests.host import attention_module, hidden_like, parsed, small_config, small_csa_config
from tests.writers import Board

MASS, OVERLAP = "dsa attention mass captured", "dsa query overlap"


@pytest.fixture
def training_log(monkeypatch):
    """Return a function that makes Megatron's ``training_log`` with our log for a configuration.

    ``step(iteration, skipped)`` logs an iteration and returns its line, ``None`` between lines;
    ``step.board`` is the TensorBoard writer.
    """
    from megatron.training import training

    from megatron_dsa.metrics.log import IndexerLog, install_logging

    def make(config, interval):
        args = parsed([*command_line(TINY), "--log-interval", str(interval)], 1, monkeypatch)
        args.dsa_indexer_loss_coeff = config.dsa_indexer_loss_coeff
        args.curr_iteration = args.consumed_train_samples = args.skipped_train_samples = 0
        lines, total, board = [], {}, Board()
        timers = mock.MagicMock()
        timers.return_value.elapsed.return_value = 1.0
        replaced = {
            "get_args": lambda: args,
            "get_timers": lambda: timers,
            "get_tensorboard_writer": lambda: board,
            "get_wandb_writer": lambda: None,
            "get_one_logger": lambda: None,
            "get_energy_monitor": lambda: None,
            "get_num_microbatches": lambda: 1,
            "print_rank_last": lines.append,
            "num_floating_point_operations": lambda *_args, **_kwargs: 1,
            "one_logger_utils": mock.MagicMock(),
            "training_log": training.training_log,  # restored at the end
        }
        for name, value in replaced.items():
            monkeypatch.setattr(training, name, value)
        monkeypatch.setattr(
            sys.modules["megatron.training"], "get_tensorboard_writer", lambda: board
        )
        monkeypatch.setattr(sys.modules["megatron.training"], "get_args", lambda: args)
        install_logging(config, "cpu")

        def step(iteration, skipped=False, first=False):
            losses = {"lm loss": torch.tensor([float(iteration)])}
            before = len(lines)
            # losses, totals, learning rate, iteration, loss scale, memory, skipped, gradient norm,
            # parameter norm, zeros, largest logit
            training.training_log(
                losses, total, 0.1, iteration, 1.0, False, int(skipped), 1.0, None, None, None,
                is_first_iteration=first,
            )  # fmt: skip
            return parse_steps(lines[-1])[0] if len(lines) > before else None

        step.board = board
        return step

    IndexerLog._state.sums = None
    yield make
    IndexerLog._state.sums = None


def test_means_are_over_the_iterations_that_have_a_figure(training_log):
    from megatron_dsa.metrics.log import IndexerLog

    step = training_log(small_config(), interval=4)

    def record(mass, overlap=None):
        IndexerLog.record(0, {MASS: torch.tensor(mass)})
        if overlap is not None:
            IndexerLog.record(1, {OVERLAP: torch.tensor(overlap)})

    record(0.9)
    assert step(1, skipped=True) is None
    record(0.6, overlap=0.5)
    assert step(2) is None
    record(0.8)  # no query sees more keys than it selects
    assert step(3) is None
    record(0.9)
    line = step(4, skipped=True)
    assert line["lm loss"] == 2.5 and line["number of skipped iterations"] == 2
    assert line[MASS] == pytest.approx(0.7) and line[OVERLAP] == pytest.approx(0.5)

    for iteration in (5, 6, 7):
        record(0.3)
        assert step(iteration, skipped=iteration == 6) is None
    line = step(8)
    assert line[MASS] == pytest.approx(0.3)
    assert OVERLAP not in line  # a 0 would be read as one

    for iteration in (9, 10, 11):
        record(0.5)
        assert step(iteration, skipped=True) is None
    line = step(12, skipped=True)
    assert MASS not in line and line["number of skipped iterations"] == 4


@pytest.mark.parametrize("config", [small_config(), small_csa_config(0)], ids=["indexer", "none"])
@pytest.mark.parametrize(
    ("interval", "start", "lines"),
    [
        (1, 1, {1: 1, 2: 2, 3: 3}),
        (1, 6, {6: 6, 7: 7}),  # resumed
        (2, 6, {6: 6, 8: 7.5}),
        (2, 1, {1: 1, 2: 1.5, 4: 3.5}),  # the first interval starts with the displayed step
    ],
)
def test_the_first_step_is_in_one_line_only(config, interval, start, lines, training_log):
    step = training_log(config, interval)
    steps = range(start, max(lines) + 1)
    logged = {n: line["lm loss"] for n in steps if (line := step(n, first=n == start))}
    assert logged == lines


def test_means_over_layers_and_microbatches(training_log):
    from megatron_dsa.metrics.log import IndexerLog

    step = training_log(small_config(num_layers=3), interval=1)
    for value in (1.0, 3.0):
        IndexerLog.record(0, {"indexer loss": torch.tensor(value)})
    IndexerLog.record(2, {"indexer loss": torch.tensor(6.0)})
    assert step(1)["indexer loss"] == 4.0  # layers 1 (2.0) and 3 (6.0); layer 2 has none
    assert "indexer loss" not in step(2)  # cleared: nothing counts twice


@pytest.mark.parametrize("recompute", [False, True], ids=["", "core recomputed"])
@pytest.mark.parametrize("hybrid", [False, True], ids=["dsa", "hybrid"])
def test_the_selection_of_a_frozen_indexer_is_logged(hybrid, recompute, training_log):
    changes = {"dsa_indexer_use_sparse_loss": False}
    if recompute:
        changes |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    figures = []
    for coefficient in (0.7, 0.0):
        fields = changes | {"dsa_indexer_loss_coeff": coefficient}
        config = small_csa_config(4, **fields) if hybrid else small_config(**fields)
        step = training_log(config, interval=1)
        module = attention_module(config).train()
        module(hidden_like(module, 64), None)[0].sum().backward()
        line = step(1)
        assert ("indexer loss" in line) == bool(coefficient)
        figures.append({name: line[name] for name in line if name.startswith("dsa ")})
        written = {tag for tag, _, _ in step.board.scalars}
        assert {"dsa/mass-captured", "dsa/query-overlap"} <= written
    trained, frozen = figures
    assert 0 < trained[MASS] <= 1 and len(trained) == 2
    assert frozen == trained


def test_a_frozen_indexer_is_evaluated_and_announced_once(training_log, capsys, caplog):
    from megatron_dsa.config.model import DSAOptions
    from megatron_dsa.metrics import log as losses
    from megatron_dsa.metrics.log import EVALUATION

    losses._log_once.cache_clear()
    values = []
    for coefficient in (0.0, 0.5, 0.0):
        options = DSAOptions(evaluate_indexer=True)
        config = small_config(dsa_indexer_loss_coeff=coefficient, options=options)
        step = training_log(config, interval=1)
        module = attention_module(config).eval()
        with torch.no_grad():
            module(hidden_like(module, 64), None)
        step(1)
        (line,) = (x for x in capsys.readouterr().out.splitlines() if EVALUATION in x)
        values.append(float(line.split()[-1]))
    assert values[0] > 0 and values[1] == pytest.approx(0.5 * values[0], rel=1e-5)
    said = [r.getMessage() for r in caplog.records if "indexer frozen" in r.getMessage()]
    assert said == ["indexer frozen: --dsa-indexer-loss-coeff 0"]
