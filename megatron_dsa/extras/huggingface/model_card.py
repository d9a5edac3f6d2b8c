"""The model card (README.md) of an exported checkpoint: what config.json and the training say."""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing

from megatron_dsa import __version__
from megatron_dsa.errors import DSAError
from megatron_dsa.extras.report.events import find_runs, read_run
from megatron_dsa.training.checkpoint_files import RELEASE
from megatron_dsa.training.files.whole import whole_file
from megatron_dsa.versions import installed_version

CARD = "README.md"
#: Keys of config.json -> what the card calls them.
_SHAPES = {
    "model_type": "type",
    "num_hidden_layers": "layers",
    "num_nextn_predict_layers": "layers of multi-token prediction",
    "hidden_size": "hidden size",
    "vocab_size": "vocabulary",
    "max_position_embeddings": "positions",
    "num_attention_heads": "attention heads",
    "q_lora_rank": "latent of queries",
    "kv_lora_rank": "latent of keys and values",
    "index_n_heads": "heads of the indexer",
    "index_head_dim": "dims of the indexer's heads",
    "index_topk": "keys that a token selects",
    "n_routed_experts": "experts of a layer",
    "num_experts_per_tok": "experts of a token",
    "hc_mult": "residual streams",
    "dtype": "dtype",
    "torch_dtype": "dtype",
}
#: Arguments of the training -> what the card calls them.
_TRAINING = {
    "dsa_stage": "stage",
    "seq_length": "tokens of a sequence",
    "global_batch_size": "sequences of a step",
    "optimizer": "optimizer",
    "lr": "learning rate, highest",
    "min_lr": "learning rate, lowest",
}
#: Tags of TensorBoard -> what the card calls them.
_LOSSES = {
    "lm loss": "language modelling, training",
    "lm loss validation": "language modelling, validation",
    "indexer loss": "indexer",
    "mtp_1 loss": "multi-token prediction",
}


def write_card(folder: Path, config: dict[str, Any], checkpoint: Path) -> None:
    """Write the card of an export, unless its folder has a README.md already.

    Args:
        folder: where config.json and weights were written.
        config: the config.json there.
        checkpoint: the distributed checkpoint that was exported.
    """
    if not os.path.lexists(folder / CARD):
        text = "\n".join(card(folder.resolve().name, config, checkpoint)) + "\n"
        with whole_file(folder / CARD) as file:
            file.write_text(text, encoding="utf-8", errors="backslashreplace")


def card(name: str, config: dict[str, Any], checkpoint: Path) -> Iterator[str]:
    """Yield the lines of a card; what the checkpoint does not know is said to be unknown."""
    common = dist_checkpointing.load_common_state_dict(str(checkpoint))
    args, step = common.get("args"), common.get("iteration")
    yield from (
        "---",
        "library_name: transformers",
        "tags: [megatron-dsa, sparse-attention]",
        "---",
    )
    yield from (f"# {name}", "", "Exported from a checkpoint of Megatron by `megatron_dsa`.", "")
    yield from ("## Model", "")
    shapes = {words: config.get(key) for key, words in _SHAPES.items() if config.get(key)}
    yield from _table(shapes)
    yield from ("", "## Training", "")
    if args is None or checkpoint.name == RELEASE:
        yield "Not known: the checkpoint holds imported weights, not those of a training run."
    else:
        yield from _table({"step": step} | _training(args))
        yield from ("", "## Losses", "")
        yield from _losses(args, step)
    yield from ("", "## Versions of the export", "")
    packages = ("megatron-core", "torch", "safetensors")
    versions = {package: installed_version(package) for package in packages}
    yield from _table({"megatron_dsa": __version__} | versions)


def _table(rows: dict[str, Any]) -> Iterator[str]:
    yield from ("| | |", "|---|---|")
    for name, value in rows.items():
        yield f"| {name} | {'not known' if value is None else value} |"


def _training(args: argparse.Namespace) -> dict[str, Any]:
    rows = {words: getattr(args, name, None) for name, words in _TRAINING.items()}
    # Earlier stages may have had other lengths: the run counts sequences.
    sequences, length = (getattr(args, x, None) for x in ("consumed_train_samples", "seq_length"))
    tokens = None if sequences is None or length is None else sequences * length
    rows["sequences that were trained on"] = sequences
    rows["tokens, with sequences of this length"] = tokens
    if (rank := getattr(args, "lora_rank", None)) is not None:
        rows["rank of adapters, merged"] = rank
    bf16, fp16 = getattr(args, "bf16", False), getattr(args, "fp16", False)
    rows["precision"] = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    return rows


def _losses(args: argparse.Namespace, step: int) -> Iterator[str]:
    """Yield the losses that the training wrote to TensorBoard up to a step."""
    folder, found = getattr(args, "tensorboard_dir", None), {}
    if folder is not None:
        try:
            for run in find_runs([Path(folder)]).values():
                scalars = read_run("", run).scalars
                for tag, words in _LOSSES.items():
                    # Megatron writes a loss by step, and again by samples under another tag.
                    written = [pair for pair in scalars.get(tag, []) if pair[0] <= step]
                    if written:
                        found[words] = f"{written[-1][1]:.4f} (step {written[-1][0]})"
        except DSAError:  # no such folder any more, or no package to read it
            found = {}
    if found:
        yield from _table(found)
    else:
        yield "Not known: checkpoints hold none, and TensorBoard's files of the run were not found."
