"""Compare a ``config.json`` with the arguments of the training whose model is exported.

Shapes show few of a model's values: with another base of rope or epsilon the same weights are
another model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_dsa.errors import require
from megatron_dsa.huggingface.config_json import HFModel, differences
from megatron_dsa.tools.trained_model import saved_configuration


def check_arguments(hf: HFModel, saved: argparse.Namespace | None, directory: Path) -> None:
    """Check that config.json describes the model of a training; notes go to the standard error.

    Args:
        hf: the content of config.json.
        saved: arguments of the training, from its checkpoint; ``None``: it holds none.
        directory: the checkpoint.

    Raises:
        ConfigError: names every value that differs, of the training and of config.json; or the
            norms are of a kind that no released model has.
    """
    if saved is None:
        _note(
            f"{directory} holds no arguments of a training (imported weights do not): values of "
            "--config that no shape shows, such as rope_theta, are taken as they are"
        )
        return
    require(
        not getattr(saved, "layernorm_zero_centered_gamma", False),
        f"--input {directory} was trained with --apply-layernorm-1p: its norms add 1 to their "
        "weights, which config.json cannot say. Train without it what is to be exported",
    )
    found = differences(hf, saved_configuration(saved))
    words, rows = getattr(saved, "vocab_size", None) or 0, getattr(saved, "padded_vocab_size", None)
    if hf.vocab_size < words:
        found.append(f"--vocab-size is {words} in the model, {hf.vocab_size} by config.json")
    require(
        not found,
        f"--config is not of the model that {directory} was trained as. Give the config.json of "
        "this model, or change these values in it:\n"
        + "\n".join(f"  - {difference}" for difference in found),
    )
    if rows is not None and hf.vocab_size < rows:
        _note(
            f"vocab_size = {hf.vocab_size} by config.json: the last {rows - hf.vocab_size} of "
            f"{rows} rows of the vocabulary are left out as padding"
        )
    length, trained = hf.raw.get("max_position_embeddings"), saved.max_position_embeddings
    if length is not None and length != trained:
        _note(
            f"max_position_embeddings = {length} by config.json; the model was trained with "
            f"--max-position-embeddings {trained} and --seq-length {saved.seq_length}"
        )


def _note(sentence: str) -> None:
    print(f"note: {sentence}", file=sys.stderr)
