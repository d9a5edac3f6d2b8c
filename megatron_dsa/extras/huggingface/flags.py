"""Megatron flags for a config.json, without the slow import of Megatron."""

import argparse
import sys
from collections.abc import Collection
from typing import Any

from megatron_dsa.config.fields import flag_words
from megatron_dsa.config.presets import ALWAYS
from megatron_dsa.extras.huggingface.config_json import HFModel, read_config
from megatron_dsa.extras.huggingface.features import (
    check_names,
    check_prediction,
    described_features,
)
from megatron_dsa.extras.huggingface.model_v4 import FEATURE_FIELDS
from megatron_dsa.extras.huggingface.names import PREDICTION


def print_flags(arguments: argparse.Namespace) -> int:
    """Print one line of flags; notes go to the standard error."""
    hf = read_config(arguments.config)
    check_names(hf, arguments.without)
    print(" ".join(flags_of(hf, arguments.without)))
    for note in unsaid(hf):
        print(f"note: {note}", file=sys.stderr)
    return 0


def fields_of(hf: HFModel, features: Collection[str]) -> dict[str, Any]:
    left = {x for feature, keys in FEATURE_FIELDS.items() if feature not in features for x in keys}
    return {name: value for name, value in hf.fields.items() if name not in left}


def flags_of(hf: HFModel, without: Collection[str] = ()) -> list[str]:
    """Return the pretraining flags that describe a model, except layout, data and schedule."""
    features = described_features(hf) - set(without)
    check_prediction(hf, features)
    mtp = hf.mtp_layers if PREDICTION in features else 0
    fields = fields_of(hf, features) | {
        "dsa_latent_norm_epsilon": hf.latent_norm_epsilon,
        "dsa_stage": None if hf.has_indexer else "dense",
        "mtp_num_layers": mtp or None,
        # The model's vocabulary may exceed the tokenizer's.
        "padded_vocab_size": hf.vocab_size,
        "max_position_embeddings": hf.text.get("max_position_embeddings"),
    }
    if "csa_compress_ratios" in fields:
        fields["csa_compress_ratios"] = fields["csa_compress_ratios"][: hf.num_layers + mtp]
    return [x for field, value in fields.items() for x in flag_words(field, value)] + list(ALWAYS)


def unsaid(hf: HFModel) -> list[str]:
    """Describe settings that flags cannot express."""
    notes = list(hf.remarks)
    base = hf.fields.get("rotary_base")
    if base is not None and base != int(base):
        notes.append(f"rope_theta = {base}: --rotary-base takes whole numbers")
    notes.append(
        "--dsa-indexer-loss-coeff is yours to add: 1.0 trains the indexers, 0 freezes them"
        if hf.has_indexer
        else "the model has no indexers; --dsa-stage warmup adds them, with "
        "--dsa-indexer-n-heads, --dsa-indexer-head-dim and --dsa-indexer-topk of your choice"
    )
    return notes
