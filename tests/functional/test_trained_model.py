"""``generate`` and ``evaluate`` on models saved by training."""

import re
from pathlib import Path

import numpy
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from tests.functional.launch import ENTRY_POINT, TINY, launch
from tests.functional.parallel_flags import SMALL_V4

EVALUATED = re.compile(r"^step (\d+), (.*), (\d+) sequences of 96 tokens: loss (\S+), ", re.M)
TP2 = {"--tensor-model-parallel-size": 2, "--sequence-parallel": True}


def command(name, load, **flags):
    """Run a command on a saved model; return its output."""
    flags = {f"--{flag.replace('_', '-')}": value for flag, value in flags.items()}
    return launch({name: True, "--load": load} | flags, module="megatron_dsa").log


@pytest.fixture(scope="module")
def trained(short_documents, tmp_path_factory):
    """Return a function that trains and returns folder and validation loss."""

    def train(changes, ranks):
        folder = tmp_path_factory.mktemp("trained")
        data = {"--data-path": short_documents, "--split": "60,40,0", "--eval-iters": 2}
        saved = {"--save": folder, "--save-interval": 100, "--train-iters": 2}
        run = launch(TINY | data | saved | changes, ranks=ranks)
        loss = re.search(r"validation loss at iteration 2 on .* lm loss value: (\S+) \|", run.log)
        return folder, float(loss[1])

    return train


@pytest.fixture(scope="module")
def small(trained):
    return trained(TP2, 2)


def check_evaluation(folder, expected):
    ((step, _, sequences, loss),) = EVALUATED.findall(command("evaluate", folder))
    assert (step, sequences) == ("2", "16")
    # Ranks add in another order.
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    return float(loss)


@pytest.mark.ranks(2)
def test_the_loss_is_that_of_the_training(small, short_documents):
    part = check_evaluation(*small)
    log = command("evaluate", small[0], data_path=short_documents)
    ((_, name, sequences, whole),) = EVALUATED.findall(log)
    tokens = Path(f"{short_documents}.bin").stat().st_size // 2
    assert name == f"{short_documents} (all)" and int(sequences) == (tokens - 1) // 96
    assert float(whole) == pytest.approx(part, rel=0.05)


def test_the_loss_of_a_v4_is_that_of_the_training(trained):
    check_evaluation(*trained(SMALL_V4, 1))


@pytest.mark.ranks(2)
def test_text_is_the_same_in_every_run(small):
    folder, _ = small
    prompts = {"prompt": ["Licensed under", ""], "tokens": 12, "temperature": 1.0}
    first, second = (command("generate", folder, seed=5, **prompts) for _ in range(2))
    texts = first.splitlines()[-2:]
    assert texts == second.splitlines()[-2:]
    assert texts[0].startswith("Licensed under") and len(texts[0]) > 20 and texts[1]
    assert "nothing is cached" in first and "WARNING" not in first


def test_ids_of_padding_rows_are_no_tokens(small, tmp_path):
    prefix = tmp_path / "data"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for _ in range(4):
        builder.add_document(torch.tensor([5, 260] * 100), [200])
    builder.finalize(f"{prefix}.idx")
    says = "error: --data-path holds the token 260, and the vocabulary has 257 tokens: give"
    settings = {"check": False, "one_process": True}
    for flags, module in (
        (TINY | {"--data-path": prefix}, ENTRY_POINT),
        ({"evaluate": True, "--load": small[0], "--data-path": prefix}, "megatron_dsa"),
    ):
        run = launch(flags, module=module, **settings)
        assert run.returncode == 2 and says in run.log, run.log
    run = launch(TINY | {"--mock-data": True, "--train-iters": 1}, one_process=True)
    assert len(run.steps) == 1
