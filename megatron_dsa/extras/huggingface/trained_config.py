"""Comparison of config.json with the arguments of the exported training.

A wrong rope base or epsilon changes no shape: it loads silently and gives a worse model.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing

from megatron_dsa.config.extras import load_extra
from megatron_dsa.config.fields import flag_of
from megatron_dsa.config.model import uses_csa
from megatron_dsa.config.presets import POOL_SIZE
from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.huggingface.config_json import UNSAID, HFModel, differences
from megatron_dsa.extras.huggingface.keys import shown
from megatron_dsa.extras.huggingface.models import key_of
from megatron_dsa.training.checkpoint_names import arguments_of_gpt
from megatron_dsa.training.setup import model_config_from_args

#: Arguments without a configuration field -> (config.json key, its only value).
_ARGUMENTS = {
    "untie_embeddings_and_output_weights": ("tie_word_embeddings", True),
    "position_embedding_type": ("rope_theta", "rope"),
}
#: Epsilons that some model types fix; unset arguments are not compared.
_FIXED = ("dsa_latent_norm_epsilon", "dsa_indexer_k_norm_epsilon")


def check_trained(directory: Path, hf: HFModel, source: str) -> list[str]:
    """Compare config.json with the arguments in a distributed checkpoint.

    Returns:
        Notes on differences that are intended or that config.json cannot express.

    Raises:
        ConfigError: config.json contradicts them.
    """
    saved = dist_checkpointing.load_common_state_dict(str(directory)).get("args")
    if saved is None:
        return [
            f"{directory} holds imported weights and no arguments of a training: what no shape of "
            f"a tensor shows (rope, epsilons, routing, ...) is as {source} says, unchecked"
        ]
    saved = arguments_of_gpt(saved)
    trained = _configuration(hf, saved)
    if found := list(_contradictions(hf, saved, trained)):
        raise ConfigError(
            f"{source} is not the config.json of the model that was trained in {directory}: "
            f"{'; '.join(found)}; give the config.json of that model, or correct these keys"
        )
    return list(_notes(hf, saved, trained))


def _contradictions(hf: HFModel, saved: argparse.Namespace, trained: Any) -> Iterator[str]:
    is_v4 = "csa_compress_ratios" in hf.fields
    if is_v4 != uses_csa(trained):
        kind = {True: "with", False: "without"}
        yield (
            f"model_type = {hf.raw['model_type']!r}, and the training was {kind[not is_v4]} "
            f"{flag_of('csa_compress_ratios')}"
        )
        return
    if getattr(saved, "dsa_output_gate", False):
        yield f"no key says {flag_of('dsa_output_gate')}, which was True in training"
    for name, (actual, expected) in differences(hf, trained).items():
        if name in _FIXED and getattr(saved, name, None) is None:
            continue
        if name in UNSAID and name not in hf.fields:
            yield f"no key says {flag_of(name)}, which was {actual!r} in training"
        else:
            yield _said(key_of(name), expected, flag_of(name), actual)
    for name, (key, expected) in _ARGUMENTS.items():
        if (actual := getattr(saved, name, expected)) != expected:
            yield _said(key, hf.text.get(key), flag_of(name), actual)
    prediction = trained.mtp_num_layers or 0
    if prediction and hf.mtp_layers not in (0, prediction):
        key = "num_nextn_predict_layers"
        yield _said(key, hf.mtp_layers, flag_of("mtp_num_layers"), prediction)
    if hf.vocab_size < (words := getattr(saved, "vocab_size", None) or 0):
        yield _said("vocab_size", hf.vocab_size, "--vocab-size", words)
    rows = getattr(saved, "padded_vocab_size", None)
    if rows is not None and hf.vocab_size > rows:
        yield _said("vocab_size", hf.vocab_size, "--padded-vocab-size", rows)
    positions = hf.text.get("max_position_embeddings")
    if positions is not None and positions < saved.seq_length:
        yield _said("max_position_embeddings", positions, "--seq-length", saved.seq_length)


def _said(key: str, expected: Any, flag: str, actual: Any) -> str:
    return f"{key} = {shown(expected)}, and {flag} was {shown(actual)} in training"


def _notes(hf: HFModel, saved: argparse.Namespace, trained: Any) -> Iterator[str]:
    for name, (_, expected) in differences(hf, trained).items():
        yield (
            f"{flag_of(name)} was not given in training, which used --norm-epsilon "
            f"{trained.layernorm_epsilon:g}; programs that load a {hf.raw['model_type']} use "
            f"{expected:g}"
        )
    key, positions = "max_position_embeddings", hf.text.get("max_position_embeddings")
    if positions not in (None, saved.max_position_embeddings):
        was = f"{flag_of(key)} was {saved.max_position_embeddings} in training"
        yield f"{key} = {positions} by config.json, {was}"
    if hf.mtp_layers and not saved.mtp_num_layers:
        yield (
            f"num_nextn_predict_layers = {hf.mtp_layers} by config.json, and the model has no such "
            "layers: 0 is written"
        )
    rows, words = (getattr(saved, name, None) for name in ("padded_vocab_size", "vocab_size"))
    if rows is not None and hf.vocab_size not in (words, rows):
        yield (
            f"vocab_size = {hf.vocab_size} by config.json, and the training had {rows} rows for "
            f"{words or 'an unknown number of'} tokens"
        )


def _configuration(hf: HFModel, saved: argparse.Namespace) -> Any:
    """Return the configuration of a training, run by any program, for one process."""
    generate = load_extra("generate.trained_model", "export-hf")
    planner = load_extra("planner.command", "export-hf")
    said = generate.taken_over(saved, data=False)
    said = {name: value for name, value in said.items() if name not in generate.READING}
    said |= {"train_iters": 1, "micro_batch_size": 1, "lr": 1e-4}
    said["padded_vocab_size"] = said.get("padded_vocab_size") or hf.vocab_size
    said.setdefault("dsa_stage", "sparse" if hf.has_indexer else "dense")
    # Satisfy rules that concern only training.
    said |= {"attention_dropout": 0.0, "experimental_attention_variant": None}
    unsaid = {name: said.pop(name) for name in UNSAID if name in said and name != POOL_SIZE}
    with planner.parsed(["megatron_dsa"], 1, False, generate.adding(said)) as args:
        config: Any = model_config_from_args(args).transformer
    # Set after validation: some layer specs reject these fields.
    vars(config).update(unsaid)
    return config
