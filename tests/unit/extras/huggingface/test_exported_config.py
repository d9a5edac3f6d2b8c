"""export-hf: config.json compared with the training's arguments."""

import argparse
import copy
import functools
import json

import pytest
import torch

from megatron_dsa.config.fields import option_fields
from megatron_dsa.config.model import DSAOptions
from megatron_dsa.config.transformer import CSATransformerConfig
from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.cli import main
from megatron_dsa.extras.huggingface import commands as huggingface_commands
from megatron_dsa.extras.huggingface import trained_config
from megatron_dsa.extras.huggingface.config_json import parse_config
from megatron_dsa.extras.huggingface.flags import flags_of
from tests.host import parsed
from tests.tiny_models import YARN, published, tiny_config, tokens, transformers_v4

pytest.importorskip("safetensors")

SHARED = {"num_hidden_layers": 4, "index_topk_freq": 2, "index_skip_topk_offset": 2}
MODELS = {
    "v3.2": tiny_config(rope_scaling=YARN),
    "glm-5": tiny_config("glm_moe_dsa", **SHARED),
    "v4": transformers_v4(num_hash_layers=0, num_nextn_predict_layers=0),
}
#: The embedding has 70 entries, more than the tokenizer.
RUN = "--micro-batch-size 1 --seq-length 24 --train-iters 1 --lr 1e-4 --lr-decay-style constant "
RUN += "--dsa-indexer-loss-coeff 1 --tokenizer-type NullTokenizer --vocab-size 66"


OPTIONS = (CSATransformerConfig, DSAOptions)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that returns config.json, transformers' model and checkpoint by name, made
    once, with the entry point's arguments.
    """
    made = {}

    def make(name, capsys):
        if name not in made:
            folder = tmp_path_factory.mktemp("trained")
            theirs = published(MODELS[name], folder / "hf")
            path = folder / "hf" / "config.json"
            # transformers writes the base inside of the rope's object.
            config = json.loads(path.read_text()) | {"num_nextn_predict_layers": 0}
            path.write_text(json.dumps(config))
            capsys.readouterr()
            assert main(["flags", str(folder / "hf")]) == 0
            flags = [*capsys.readouterr().out.split(), *RUN.split()]
            write = huggingface_commands.write_checkpoint

            def with_arguments(directory, tensors, values, others, size):
                write(directory, tensors, values, others | {"args": args}, size)

            checkpoint = folder / "run"
            with pytest.MonkeyPatch.context() as patch:
                args = parsed(flags, 1, patch)
                patch.setattr(huggingface_commands, "write_checkpoint", with_arguments)
                paths = ["--input", str(folder / "hf"), "--output", str(checkpoint)]
                assert main(["import-hf", *paths]) == 0
            capsys.readouterr()
            made[name] = config, theirs, checkpoint, args
        return made[name]

    return make


def export(config, checkpoint, folder, *more):
    (folder / "config.json").write_text(json.dumps(config))
    paths = ["--input", checkpoint, "--config", folder / "config.json", "--output", folder / "back"]
    return main(["export-hf", *map(str, paths), *more])


def changed(config, changes):
    """Return a copy with other values; a dot enters an object, None removes a key."""
    config = copy.deepcopy(config)
    for key, value in changes.items():
        *path, last = key.split(".")
        inner = functools.reduce(lambda part, word: part[word], path, config)
        inner[last] = value
        if value is None:
            del inner[last]
    return config


@pytest.mark.parametrize("name", MODELS)
def test_the_config_of_the_training_gives_the_model(name, trained, tmp_path, capsys):
    config, theirs, checkpoint, _ = trained(name, capsys)
    assert export(config, checkpoint, tmp_path) == 0
    assert not capsys.readouterr().err
    back = type(theirs).from_pretrained(tmp_path / "back", attn_implementation="eager").float()
    with torch.no_grad():
        assert torch.equal(back(tokens()).logits, theirs(tokens()).logits)


#: Model -> changes of its config.json, and the error's part with both values.
CHANGES = {
    "v3.2": (
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps = 1e-05, and --norm-epsilon was 1e-06 in training"),
        ({"rope_parameters.rope_theta": 5e5}, "rope_theta = 500000.0, and --rotary-base was 10000"),
        ({"rope_parameters.factor": 8.0}, "rope_scaling.factor = 8.0, and --rotary-scaling-f"),
        ({"rope_parameters.beta_fast": 32}, "beta_fast = 32, and --yarn-beta-fast was 16"),
        ({"rope_parameters.beta_slow": 2}, "beta_slow = 2, and --yarn-beta-slow was 1"),
        ({"rope_parameters.mscale": 0.5}, "mscale = 0.5, and --mscale was 1.0"),
        ({"rope_parameters.mscale_all_dim": 1.0}, "mscale_all_dim = 1.0, and --mscale-all-dim was"),
        (
            {"rope_parameters.original_max_position_embeddings": 32},
            "original_max_position_embeddings = 32, and --yarn-original-max-position-embeddings",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "rope_scaling.type = 'rope', and --rope-type was 'yarn'",
        ),
        ({"index_topk": 7}, "index_topk = 7, and --dsa-indexer-topk was 6"),
        ({"model_type": "glm_moe_dsa"}, "model_type, or indexer_rope_interleave = True, and --"),
        (
            {"num_experts_per_tok": 2, "topk_group": 1},
            "num_experts_per_tok = 2, and --moe-router-topk was 4 in training; topk_group = 1, and",
        ),
        ({"n_group": 2}, "n_group = 2, and --moe-router-num-groups was 4"),
        ({"n_group": 1}, "n_group = None, and --moe-router-num-groups was 4"),
        ({"routed_scaling_factor": 1.0}, "routed_scaling_factor = 1.0, and --moe-router-topk-scal"),
        ({"n_shared_experts": 2}, "n_shared_experts . moe_intermediate_size = 40, and --moe-sh"),
        ({"vocab_size": 65}, "vocab_size = 65, and --vocab-size was 66"),
        ({"vocab_size": 71}, "vocab_size = 71, and --padded-vocab-size was 70"),
        ({"max_position_embeddings": 23}, "max_position_embeddings = 23, and --seq-length was 24"),
        ({"mlp_layer_types": ["sparse", "sparse"]}, "first_k_dense_replace, or mlp_layer_types ="),
    ),
    "glm-5": (
        ({"model_type": "deepseek_v32", "indexer_types": None}, "model_type, or indexer_rope"),
        ({"indexer_types": ["full", "full", "full", "full"]}, "index_topk_freq = 1, and --"),
        ({"indexer_types": ["full", "shared", "shared", "full"]}, "index_skip_topk_offset = "),
        ({"rope_parameters.rope_theta": 1e6}, "rope_theta = 1000000.0, and --rotary-base was"),
    ),
    "v4": (
        ({"rope_parameters.main.rope_theta": 5e5}, "rope_theta = 500000.0, and --rotary-base"),
        (
            {"rope_parameters.compress.rope_theta": 5e5},
            "compress_rope_theta = 500000.0, and --csa-compress-rotary-base was 40000",
        ),
        ({"rope_parameters.compress.factor": 8}, "rope_scaling.factor = 8, and --rotary-scaling-f"),
        ({"sliding_window": 6}, "sliding_window = 6, and --csa-window-size was 5"),
        ({"index_topk": 3}, "index_topk = 3, and --dsa-indexer-topk was 2"),
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid', and --moe-router-score-function"),
        ({"swiglu_limit": 7.0}, "swiglu_limit = 7.0, and --activation-func-clamp-value was 0.5"),
        ({"swiglu_limit": 0}, "swiglu_limit = None, and --activation-func-clamp-value was 0.5"),
        ({"hc_eps": 1e-5}, "hc_eps = 1e-05, and --hc-eps was 1e-06"),
        ({"hc_sinkhorn_iters": 3}, "hc_sinkhorn_iters = 3, and --hc-sinkhorn-iters was 20"),
        ({"routed_scaling_factor": 2}, "routed_scaling_factor = 2, and --moe-router-topk-scaling-"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps = 1e-05, and --norm-epsilon was 1e-06"),
        (
            {
                "qk_rope_head_dim": 12, "partial_rotary_factor": 0.75,
                "rope_parameters.main.partial_rotary_factor": 0.75,
                "rope_parameters.compress.partial_rotary_factor": 0.75,
            },
            "qk_rope_head_dim = 12, and --qk-pos-emb-head-dim was 8",
        ),
        (
            {"num_hidden_layers": 3, "layer_types": None, "mlp_layer_types": None}
            | {"compress_ratios": [0, 4, 8], "num_hash_layers": 0},
            "num_hidden_layers = 3, and --num-layers was 4",
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_another_config_is_refused(name, trained, tmp_path, capsys):
    """Most of these changes affect no shape."""
    config, _, checkpoint, _ = trained(name, capsys)
    changes, message = CHANGES[name][0]
    with pytest.raises(ConfigError, match=f"config.json is not the config.json of .*{message}"):
        export(changed(config, changes), checkpoint, tmp_path)
    assert not (tmp_path / "back").exists()
    for changes, message in CHANGES[name]:
        hf = parse_config(changed(config, changes))
        with pytest.raises(ConfigError, match=message):
            trained_config.check_trained(checkpoint / "release", hf, "config.json")


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"max_position_embeddings": 640}, "max_position_embeddings = 640 by config.json, --max-"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers = 1 by config.json, and the m"),
        ({"vocab_size": 68}, "vocab_size = 68 by config.json, and the training had 70 rows for 66"),
        ({"dtype": "bfloat16"}, "weights are stored as torch.float32 and rounded to torch.bfloat1"),
    ],
)
def test_what_a_user_may_want_is_noted(changes, note, trained, tmp_path, capsys):
    config, _, checkpoint, _ = trained("v3.2", capsys)
    assert export(config | changes, checkpoint, tmp_path) == 0
    assert f"note: {note}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {
                "dsa_indexer_pool_size": 3,
                "qk_pos_emb_head_dim": 0,
                "dsa_indexer_rotate_activation": False,
            },
            "no key says --dsa-indexer-pool-size, which was 3",
        ),
        ({"dsa_output_gate": True}, "no key says --dsa-output-gate, which was True"),
        ({"softmax_type": "learnable"}, "no key says --softmax-type, which was 'learnable'"),
        ({"layernorm_zero_centered_gamma": True}, "no key says --apply-layernorm-1p, which was Tr"),
        ({"activation_func_clamp_value": 7.0}, "no key says --activation-func-clamp-value, which"),
        ({"rotary_percent": 0.5}, "no key says --rotary-percent, which was 0.5"),
        ({"untie_embeddings_and_output_weights": False}, "tie_word_embeddings = False, and --u"),
        ({"mtp_num_layers": 2}, "num_nextn_predict_layers = 1, and --mtp-num-layers was 2"),
        ({"dsa_latent_norm_epsilon": 1e-3}, "dsa_latent_norm_epsilon = 1e-06, and --dsa-latent-no"),
    ],
)
def test_trainings_of_other_models_are_refused(changes, message, trained, tmp_path, capsys):
    config, _, checkpoint, args = trained("v3.2", capsys)
    hf = parse_config(config | {"num_nextn_predict_layers": 1})
    with pytest.MonkeyPatch.context() as patch:
        save(patch, args, changes)
        with pytest.raises(ConfigError, match=message):
            trained_config.check_trained(checkpoint, hf, "config.json")


def save(patch, args, changes):
    """Save changed arguments in all checkpoints."""
    saved = {"args": argparse.Namespace(**vars(args) | changes)}
    patch.setattr(trained_config.dist_checkpointing, "load_common_state_dict", lambda _: saved)


def test_equal_models_are_taken(trained, capsys):
    config, _, checkpoint, args = trained("glm-5", capsys)
    listed = ["full", "full", "shared", "full"]
    assert config["indexer_types"] == listed
    again = {key: x for key, x in config.items() if key != "indexer_types"}
    again |= {"index_topk_freq": 2, "index_skip_topk_offset": 2, "routed_scaling_factor": 1.0}
    again |= {"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5}
    changes = {"moe_router_topk_scaling_factor": None, "layernorm_epsilon": 1e-5}
    changes |= {"moe_router_num_groups": None, "moe_router_group_topk": None}
    changes |= {"dsa_indexer_k_norm_epsilon": None}
    with pytest.MonkeyPatch.context() as patch:
        save(patch, args, changes)
        notes = trained_config.check_trained(checkpoint, parse_config(again), "config.json")
    used = "was not given in training, which used --norm-epsilon 1e-05; programs that load a glm"
    assert len(notes) == 2 and all(used in note for note in notes)


def test_another_family_is_said_at_once(trained, tmp_path, capsys):
    _, _, checkpoint, _ = trained("v3.2", capsys)
    hf = parse_config(MODELS["v4"])
    with pytest.raises(ConfigError, match="'deepseek_v4', and the training was without --csa-comp"):
        trained_config.check_trained(checkpoint / "release", hf, "config.json")


def test_how_it_was_trained_does_not_matter(monkeypatch):
    hf = parse_config(tiny_config())
    args = parsed([*flags_of(hf), *RUN.split()], 1, monkeypatch)
    for changes in (
        {"train_samples": 100, "train_iters": 50},
        {"dsa_packed_documents": 4, "reset_position_ids": True},
        {"moe_enable_deepep": True, "moe_router_force_biased": -0.1, "qk_clip": True},
        {"padded_vocab_size": None, "vocab_size": None},
    ):
        save(monkeypatch, args, changes)
        assert not trained_config.check_trained("run", hf, "config.json")


@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v32"])
def test_trainings_by_other_programs_are_compared(kind, monkeypatch):
    """Megatron's own runs lack this package's arguments, and its attention has dropout."""
    hf = parse_config(tiny_config(kind))
    # The dense stage has no indexer loss.
    run = RUN if hf.has_indexer else RUN.replace("--dsa-indexer-loss-coeff 1 ", "")
    args = parsed([*flags_of(hf), *run.split()], 1, monkeypatch)
    own = {about.dest for each in OPTIONS for _, about in option_fields(each)}
    theirs = argparse.Namespace(**{key: x for key, x in vars(args).items() if key not in own})
    save(monkeypatch, theirs, {"attention_dropout": 0.1})
    assert not trained_config.check_trained("run", hf, "config.json")
    save(monkeypatch, theirs, {"layernorm_epsilon": 1e-5})
    with pytest.raises(ConfigError, match="rms_norm_eps = 1e-06, and --norm-epsilon was 1e-05"):
        trained_config.check_trained("run", hf, "config.json")
