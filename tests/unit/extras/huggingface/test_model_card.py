"""Model cards of exports: what is known stands there, what is not is said to be unknown."""

import argparse
from pathlib import Path

import pytest

from megatron_dsa import __version__
from megatron_dsa.extras.huggingface import model_card
from megatron_dsa.extras.huggingface.model_card import card, write_card
from megatron_dsa.extras.report.events import RunLog

CONFIG = {"model_type": "deepseek_v32", "num_hidden_layers": 4, "index_topk": 48, "hc_mult": None}
TRAINED = {
    "dsa_stage": "sparse", "seq_length": 256, "consumed_train_samples": 3200,
    "global_batch_size": 8, "bf16": True, "lr": 0.001, "tensorboard_dir": "events",
}  # fmt: skip
SCALARS = {
    "lm loss": [(399, 1.91), (400, 1.875), (500, 1.0)],
    "lm loss vs samples": [(400, 7.0)],
    "lm loss validation": [(300, 2.0)],
}


@pytest.fixture
def lines(monkeypatch):
    """Function that returns the lines of a card of a checkpoint with these arguments."""

    def make(args, directory="iter_0000400", config=CONFIG):
        common = {"iteration": 400} | ({} if args is None else {"args": argparse.Namespace(**args)})
        load = argparse.Namespace(load_common_state_dict=lambda _path: common)
        monkeypatch.setattr(model_card, "dist_checkpointing", load)
        return list(card("model", config, Path("run") / directory))

    return make


def test_a_card_says_what_config_and_checkpoint_say(lines, monkeypatch):
    monkeypatch.setattr(model_card, "find_runs", lambda folders: {"run": folders[0]})
    log = RunLog("", SCALARS, {}, {})
    monkeypatch.setattr(model_card, "read_run", lambda _name, _folder: log)
    text = lines(TRAINED)
    for row in (
        "layers | 4", "keys that a token selects | 48", "step | 400", "stage | sparse",
        "sequences that were trained on | 3200", "tokens, with sequences of this length | 819200",
        "precision | bf16", "optimizer | not known", f"megatron_dsa | {__version__}",
        "language modelling, training | 1.8750 (step 400)",
        "language modelling, validation | 2.0000 (step 300)",
    ):  # fmt: skip
        assert f"| {row} |" in text
    assert not any("residual streams" in line or "| indexer |" in line for line in text)
    assert text[0] == "---" and "# model" in text and "run" not in " ".join(text).split()


def test_losses_without_event_files_are_unknown(lines, tmp_path):
    for folder in (None, str(tmp_path / "gone"), str(tmp_path)):
        text = lines(TRAINED | {"tensorboard_dir": folder})
        (line,) = [line for line in text if line.startswith("Not known")]
        assert "TensorBoard" in line


def test_the_training_of_imported_weights_is_unknown(lines):
    text = lines(None, "release")
    assert any(line.startswith("Not known: the checkpoint holds imported") for line in text)
    assert "## Losses" not in text and "| layers | 4 |" in text


def test_a_card_of_the_user_stays(lines, tmp_path):
    lines(TRAINED | {"tensorboard_dir": None})
    write_card(tmp_path, CONFIG, Path("run/iter_0000400"))
    assert "| layers | 4 |" in (tmp_path / "README.md").read_text()
    (tmp_path / "README.md").write_text("mine")
    write_card(tmp_path, CONFIG, Path("run/iter_0000400"))
    assert (tmp_path / "README.md").read_text() == "mine"
