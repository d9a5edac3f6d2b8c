"""Flags: the model of a config.json as Megatron's command line describes it."""

from collections.abc import Collection

from megatron_dsa.config.fields import flag_words
from megatron_dsa.config.presets import ALWAYS
from megatron_dsa.extras.huggingface.config_json import HFModel
from megatron_dsa.extras.huggingface.deepseek_v4 import FEATURE_FIELDS
from megatron_dsa.extras.huggingface.features import check_prediction, described_features
from megatron_dsa.extras.huggingface.names import PREDICTION


def flags_of(hf: HFModel, without: Collection[str] = ()) -> list[str]:
    """Return the flags of ``python -m megatron_dsa.pretrain`` that describe a model.

    How to train it is not among them: parallel layout, data, precision, schedule. ``without`` has
    the features of ``names.py`` that are left out.

    Raises:
        ConfigError: what predicts further tokens is not understood, and not left out.
    """
    features = described_features(hf) - set(without)
    check_prediction(hf, features)
    left = {x for feature, keys in FEATURE_FIELDS.items() if feature not in features for x in keys}
    mtp = hf.mtp_layers if PREDICTION in features else 0
    fields = {name: value for name, value in hf.fields.items() if name not in left} | {
        "dsa_latent_norm_epsilon": hf.latent_norm_epsilon,
        "dsa_stage": None if hf.has_indexer else "dense",
        "mtp_num_layers": mtp or None,
        # Exactly the model's rows: a tokenizer may know fewer words.
        "padded_vocab_size": hf.vocab_size,
        "max_position_embeddings": hf.raw.get("max_position_embeddings"),
    }
    if "csa_compress_ratios" in fields:
        fields["csa_compress_ratios"] = fields["csa_compress_ratios"][: hf.num_layers + mtp]
    return [x for field, value in fields.items() for x in flag_words(field, value)] + list(ALWAYS)


def unsaid(hf: HFModel) -> list[str]:
    """Return what these flags cannot say of the model, a sentence each."""
    notes = list(hf.remarks)
    base = hf.fields["rotary_base"]
    if base != int(base):
        notes.append(f"rope_theta = {base}: --rotary-base takes whole numbers")
    notes.append(
        "--dsa-indexer-loss-coeff is yours to add: 1.0 trains the indexers, 0 freezes them"
        if hf.has_indexer
        else "the model has no indexers; --dsa-stage warmup adds them, with "
        "--dsa-indexer-n-heads, --dsa-indexer-head-dim and --dsa-indexer-topk of your choice"
    )
    return notes
