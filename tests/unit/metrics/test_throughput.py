"""Megatron's log of models with layers of this package."""

import ast
import importlib
import inspect
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from megatron_dsa import pretrain
from megatron_dsa.metrics import throughput
from megatron_dsa.metrics.flops import flops, model_work
from megatron_dsa.ops import dispatch
from megatron_dsa.ops.dispatch.operation import OperationTimes
from tests.host import packed, small_config, small_csa_config, start
from tests.writers import Board, Wandb

ARGS = SimpleNamespace(
    padded_vocab_size=64, seq_length=40, curr_iteration=6, log_timers_to_tensorboard=True
)
KINDS = {
    "dsa": lambda: small_config(dtype=torch.bfloat16),
    "hybrid": lambda: small_csa_config(
        4, dtype=torch.bfloat16, csa_compress_ratios=[4, 0], csa_window_size=7
    ),
}


@pytest.fixture(autouse=True)
def writers(monkeypatch):
    """Megatron's arguments and collecting writers."""
    start()
    megatron, dispatched = importlib.import_module("megatron.training"), Counter()
    monkeypatch.setattr(dispatch.operation, "_calls", dispatched)
    writers = SimpleNamespace(board=Board(), wandb=Wandb(), dispatched=dispatched)
    monkeypatch.setattr(megatron, "get_args", lambda: ARGS)
    monkeypatch.setattr(megatron, "get_tensorboard_writer", lambda: writers.board)
    monkeypatch.setattr(megatron, "get_wandb_writer", lambda: writers.wandb)
    return writers


@pytest.fixture
def training():
    """Replaces Megatron's module of the training loop."""
    lines, tracked = [], []

    def track(*throughputs):
        tracked.append(throughputs)

    return SimpleNamespace(
        lines=lines,
        tracked=tracked,
        num_floating_point_operations=lambda *_: 0,
        consume_seqlen_stats_in_iteration=lambda: (None, None),
        one_logger_utils=SimpleNamespace(track_e2e_metrics=track),
        print_rank_0=lines.append,
        print_rank_last=lines.append,
    )


def of_sequences(config, lengths):
    work = model_work(config, ARGS.padded_vocab_size)
    return sum(flops(work, lambda keys, n=n: keys.pairs(n)) for n in lengths)


@pytest.mark.parametrize("kind", KINDS)
def test_full_sequences_and_packed_documents(kind, training):
    config = KINDS[kind]()
    throughput.install_throughput(config, training)
    counter, count = throughput.installed(training), training.num_floating_point_operations
    assert training.consume_seqlen_stats_in_iteration() == (None, None)
    assert count(ARGS, 3) == of_sequences(config, [40, 40, 40])

    microbatches = [(5, 20, 0, 15), (39, 1)]
    for lengths in microbatches:
        counter.count_documents(packed(*lengths).cu_seqlens_q)
    tokens, squares = training.consume_seqlen_stats_in_iteration()
    assert (tokens, squares) == (80, 5**2 + 20**2 + 15**2 + 39**2 + 1)
    expected = of_sequences(config, [n for lengths in microbatches for n in lengths])
    for _ in range(2):  # in every iteration, and again when logged
        counted = count(
            ARGS, 2, seqlen_squared_sum_in_batch=squares, total_real_tokens_in_batch=tokens
        )
        assert counted == expected < of_sequences(config, [40, 40])

    # The next iteration starts anew.
    assert training.consume_seqlen_stats_in_iteration() == (None, None)
    assert count(ARGS, 1) == of_sequences(config, [40])


class Model:
    """Runs nothing; evaluation and interleaved chunks also get every batch."""

    def __init__(self, training, vp_stage):
        self.training, self.vp_stage = training, vp_stage

    def __call__(self, *_arguments, **_settings):
        return torch.zeros(())


@pytest.mark.parametrize(
    ("model", "counts"),
    [
        (Model(True, None), True),
        (Model(True, 0), True),
        (Model(True, 1), False),
        (Model(False, None), False),
    ],
)
def test_the_entry_point_counts_a_microbatch_once(model, counts, training, monkeypatch):
    start()
    config, documents = KINDS["dsa"](), packed(5, 20, 15)
    throughput.install_throughput(config, training)
    counter = throughput.installed(training)
    batch = dict.fromkeys(("tokens", "position_ids", "attention_mask", "labels", "loss_mask"))
    timer = SimpleNamespace(start=lambda: None, stop=lambda: None)
    for name, value in {
        "megatron_dsa.training.setup.get_attr_wrapped_model": lambda model, name: getattr(
            model, name
        ),
        "megatron_dsa.training.setup.get_model_config": lambda model: config,
        "megatron_dsa.training.setup.get_timers": lambda: lambda *_, **__: timer,
        "megatron_dsa.training.setup.get_batch": lambda *_: (batch, documents),
        "megatron_dsa.training.setup.installed": lambda: counter,
    }.items():
        monkeypatch.setattr(name, value)
    pretrain.forward_step(None, model)
    tokens, _ = training.consume_seqlen_stats_in_iteration()
    assert tokens == (40 if counts else None)


def test_documents_that_another_script_hands_to_megatron(training):
    config = KINDS["dsa"]()
    training.consume_seqlen_stats_in_iteration = lambda: (60, 3 * 20**2)
    throughput.install_throughput(config, training)
    tokens, squares = training.consume_seqlen_stats_in_iteration()
    counted = training.num_floating_point_operations(ARGS, 2, squares, tokens)
    assert counted == of_sequences(config, [20, 20, 20])


def test_the_log_says_once_what_is_counted(training):
    throughput.install_throughput(KINDS["hybrid"](), training)
    for _ in range(2):
        training.num_floating_point_operations(ARGS, 2)
    assert len(training.lines) == 1
    for part in ("megatron_dsa counts", "40 tokens", "index scores", "window attention"):
        assert part in training.lines[0]
    per_token = of_sequences(KINDS["hybrid"](), [40]) / 40 / 1e9
    assert f"counts {per_token:.4g} GFLOP per token" in training.lines[0]


@pytest.mark.parametrize(
    ("device", "dtype", "peak"),
    [
        ("NVIDIA H200", torch.bfloat16, 989),
        ("NVIDIA B200", torch.float16, 2250),
        ("NVIDIA H200", torch.float32, None),
        ("NVIDIA H200 MIG 1g.18gb", torch.bfloat16, None),
        ("", torch.bfloat16, None),
    ],
)
def test_mfu_only_where_the_peak_is_known(device, dtype, peak, training, writers):
    throughput.install_throughput(small_config(dtype=dtype), training)
    counter = throughput.installed(training)
    counter.device = device
    counter.track(True, 500.0)
    counter.track(False, 500.0)
    assert training.tracked == [(True, 500.0), (False, 500.0)]
    text = throughput.describe(counter.config, model_work(counter.config, 64), 40, device)
    if peak is None:
        assert (training.lines, writers.board.scalars) == ([], []) and "no MFU" in text
    else:
        assert training.lines == [f"> iteration 7: MFU {100 * 500 / peak:.1f} %"]
        assert writers.board.scalars == [("dsa/mfu", 500 / peak, 7)]
        assert writers.wandb.logged == [({"dsa/mfu": 500 / peak}, 7)]
        assert f"MFU of {peak} TFLOP/s" in text


def test_what_ran_is_written_with_its_time(training, writers, monkeypatch):
    times = OperationTimes()
    times.on = True
    monkeypatch.setattr(throughput, "TIMES", times)
    throughput.install_throughput(KINDS["dsa"](), training)
    counter = throughput.installed(training)
    written = []
    for iteration, calls in ((7, 2), (10, 6)):
        monkeypatch.setattr(ARGS, "curr_iteration", iteration - 1)
        writers.dispatched["dense_attention", "flash2"] = calls
        with times.measure("dense_attention", cuda=False):
            time.sleep(0.03)
        counter.track()
        counted, (tag, seconds, at) = writers.board.scalars[-2:]
        assert counted == ("dsa/calls/dense_attention/flash2", calls, iteration)
        assert (tag, at) == ("dsa/time/dense_attention", iteration)
        written.append(seconds)
    assert written[0] >= 0.03 and 0.01 <= written[1] < written[0]  # of one step, then of three
    assert writers.wandb.logged[-1] == ({counted[0]: 6, tag: written[1]}, 10)


def test_a_second_model_takes_the_first_ones_place(training):
    """Stages of one model share a configuration; Megatron's functions remain the fallback."""
    config = KINDS["dsa"]()
    throughput.install_throughput(config, training)
    first = throughput.installed(training)
    throughput.install_throughput(config, training)
    assert throughput.installed(training) is first
    throughput.install_throughput(KINDS["hybrid"](), training)
    second = throughput.installed(training)
    assert second is not first and second.megatron is first.megatron
    second.track(True, 1.0)
    assert training.tracked == [(True, 1.0)]


def parameters(module, name):
    """Return names of a function's parameters in a module's source, even if patched."""
    tree = ast.parse(inspect.getsource(module))
    found = [x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == name]
    return [argument.arg for argument in found[0].args.args]


def test_specs_install_it_in_megatrons_training_loop():
    start()
    training = importlib.import_module("megatron.training.training")
    config = KINDS["dsa"]()
    importlib.import_module("megatron_dsa.specs").dsa_block_spec(config)
    assert throughput.installed().config is config
    for module, name in (
        (training, "num_floating_point_operations"),
        (training, "consume_seqlen_stats_in_iteration"),
        (training.one_logger_utils, "track_e2e_metrics"),
    ):
        ours = getattr(module, name)
        assert ours.__self__ is throughput.installed()
        assert list(inspect.signature(ours).parameters) == parameters(module, name)
