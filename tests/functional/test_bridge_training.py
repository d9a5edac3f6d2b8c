"""Megatron-Bridge's ``pretrain`` and ``finetune`` on our layers, compared with our entry point.

Both start from one Hugging Face checkpoint and read the same data. Skipped without Megatron-Bridge;
on a CPU see :mod:`tests.functional.bridge_train`.
"""

import importlib.util
import re

import pytest

from megatron_dsa.extras.huggingface.config_json import read_config
from megatron_dsa.extras.huggingface.convert import export_model
from megatron_dsa.extras.huggingface.flags import flags_of
from megatron_dsa.extras.huggingface.models import MODELS
from tests.cases.chat import TAGGED, message, save_tokenizer, write_rows
from tests.functional.launch import flags_in, launch
from tests.tiny_models import tiny_config, tiny_model

if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("Megatron-Bridge is not installed", allow_module_level=True)

VOCABULARY, TOKENS = 320, 64
#: One configuration, as Bridge's fields and as our flags.
FIELDS = {
    "optimizer.lr": 3e-3,
    "optimizer.min_lr": 3e-3,
    "optimizer.weight_decay": 0.0,
    "optimizer.clip_grad": 0.0,
    "scheduler.lr_decay_style": "constant",
    "scheduler.lr_warmup_iters": 0,
    "scheduler.start_weight_decay": 0.0,
    "scheduler.end_weight_decay": 0.0,
    "rng.seed": 7,
    "model.moe_router_bias_update_rate": 1e-3,
    "model.moe_router_load_balancing_type": "seq_aux_loss",
}
FLAGS = {
    "--lr": 3e-3,
    "--min-lr": 3e-3,
    "--weight-decay": 0.0,
    "--clip-grad": 0.0,
    "--adam-beta2": 0.95,
    "--lr-decay-style": "constant",
    "--seed": 7,
    "--attention-backend": "dsa_fused",
    "--dsa-indexer-loss-queries": 1.0,
    "--dsa-indexer-use-sparse-loss": True,
    "--moe-router-load-balancing-type": "seq_aux_loss",
    "--moe-router-bias-update-rate": 1e-3,
    "--split": "100,0,0",
    "--eval-iters": 0,
    "--eval-interval": 1000,
    "--log-interval": 1,
    "--num-workers": 0,
}
PRETRAINING = {
    "train.global_batch_size": 8,
    "train.micro_batch_size": 2,
    "model.seq_length": TOKENS,
    "dataset.seq_length": TOKENS,
    "dataset.split": "100,0,0",
    "dataset.random_seed": 7,
    "tokenizer.tokenizer_type": "NullTokenizer",
    "tokenizer.tokenizer_model": None,
    "tokenizer.vocab_size": VOCABULARY - 1,
}
#: config.json of a GLM-5; Bridge otherwise balances experts differently.
GLM = {"n_group": 1, "topk_group": 1, "rms_norm_eps": 0.01, "indexer_rope_interleave": True}
FIGURES = ("lm loss", "indexer loss", "seq_load_balancing_loss", "dsa attention mass captured")
#: Printed digits of Megatron's and Bridge's log.
DIGITS = 2e-6


def write_checkpoint(folder, kind="deepseek_v32", **changes):
    """Write a tiny random model with experts in Hugging Face's format; return its folder."""
    architectures = [MODELS[kind].architecture]
    config = tiny_config(kind, architectures=architectures, vocab_size=VOCABULARY, **changes)
    prediction = config.get("num_nextn_predict_layers")
    export_model(tiny_model(config, vocab=VOCABULARY, mtp_num_layers=prediction), folder, config)
    return folder


def flags_for(checkpoint):
    """Return flags of our entry point: output of the command ``flags``, and :data:`FLAGS`."""
    model = flags_in(" ".join(flags_of(read_config(checkpoint))))
    return model | FLAGS | {"--dsa-load-hf": checkpoint}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    save_tokenizer(folder, TAGGED["deepseek"], 300)
    return folder


def bridge(recipe, checkpoint, data, fields, **settings):
    """Run a recipe of the example in Bridge's loop; return the run with its log."""
    settings_of_run = [f"{name}={value!r}" for name, value in (FIELDS | fields).items()]
    flags = {"--recipe": recipe, "--checkpoint": checkpoint, "--data": data}
    module = "tests.functional.bridge_train"
    return launch(flags | {"--set": settings_of_run}, module=module, **settings)


def assert_equal_figures(theirs, ours, names):
    assert [step["iteration"] for step in theirs] == [step["iteration"] for step in ours]
    for one, two in zip(theirs, ours, strict=True):
        for name in names:
            assert one[name] == pytest.approx(two[name], rel=DIGITS), (name, one, two)


def our_steps(checkpoint, data, number):
    sizes = {
        "--seq-length": TOKENS, "--max-position-embeddings": TOKENS, "--micro-batch-size": 2,
        "--global-batch-size": 8, "--train-iters": number, "--tokenizer-type": "NullTokenizer",
        "--vocab-size": VOCABULARY - 1, "--dsa-indexer-loss-coeff": 1.0,
        "--moe-aux-loss-coeff": 1e-4,
    }  # fmt: skip
    return launch(flags_for(checkpoint) | sizes | {"--data-path": data}).steps


@pytest.fixture(scope="module")
def ours(checkpoint, data):
    return our_steps(checkpoint, data, 6)


def test_pretraining(checkpoint, ours, data, tmp_path):
    fields = PRETRAINING | {
        "checkpoint.save": str(tmp_path),
        "checkpoint.load": str(tmp_path),
        "logger.tensorboard_dir": str(tmp_path / "events"),
    }
    first = bridge("pretrain", checkpoint, data, fields | {"train.train_iters": 4})
    second = bridge("pretrain", checkpoint, data, fields | {"train.train_iters": 6})
    theirs = first.steps + second.steps
    print(*(f"{x['lm loss']} {x['indexer loss']}" for x in theirs), sep="\n")
    assert_equal_figures(theirs, ours, FIGURES)
    assert theirs[-1]["lm loss"] < theirs[0]["lm loss"] - 1
    counts = re.search(r"(\d+) of (\d+) parameters moved, (\d+) of indexers", first.log)
    assert counts[1] == counts[2] and int(counts[3]) == 2 * 5  # layers, weights of an indexer
    events = list((tmp_path / "events").glob("events*"))
    assert events and any("dsa/indexer-loss" in str(each.read_bytes()) for each in events)


@pytest.mark.parametrize(
    "layout",
    [
        {"model.tensor_model_parallel_size": 2, "model.sequence_parallel": True},
        {"model.pipeline_model_parallel_size": 2},
        {},
    ],
    ids=["TP2", "PP2", "DP2"],
)
@pytest.mark.ranks(2)
def test_layouts(checkpoint, ours, data, layout):
    fields = PRETRAINING | {"train.train_iters": 3, "checkpoint.save": None}
    theirs = bridge("pretrain", checkpoint, data, fields | layout, ranks=2).steps
    assert_equal_figures(theirs, ours[:3], FIGURES[:2])


@pytest.mark.parametrize(
    ("kind", "changes", "fields", "figures"),
    [
        ("glm_moe_dsa", GLM, {"model.moe_aux_loss_coeff": 1e-4}, FIGURES),
        (
            "deepseek_v32",
            {"num_nextn_predict_layers": 1},
            {"model.mtp_num_layers": 1, "model.mtp_loss_scaling_factor": 0.1},
            (*FIGURES, "mtp_1 loss"),
        ),
    ],
    ids=["GLM-5", "V3.2 with prediction"],
)
def test_models(kind, changes, fields, figures, data, tmp_path):
    folder = write_checkpoint(tmp_path, kind, **changes)
    fields = PRETRAINING | {"train.train_iters": 3, "checkpoint.save": None} | fields
    theirs = bridge("pretrain", folder, data, fields).steps
    assert_equal_figures(theirs, our_steps(folder, data, 3), figures)


@pytest.mark.parametrize("coefficient", [0.0, 1.0], ids=["frozen", "trained"])
def test_finetuning(checkpoint, coefficient, tmp_path):
    """Without trained indexers: Bridge counts padding as one more conversation for them."""
    rows = [
        {"messages": [
            message("user", f"what is {i} and {i + 1}?"),
            message("assistant", f"it is {i * 7} then {i * i}."),
        ]} for i in range(8)
    ]  # fmt: skip
    data = write_rows(tmp_path / "training.jsonl", rows)
    fields = {
        "train.train_iters": 3,
        "train.global_batch_size": 2,  # all conversations
        "model.seq_length": 128,
        "dataset.seq_length": 128,
        "dataset.offline_packing_specs.packed_sequence_size": 128,
        "model.dsa_indexer_loss_coeff": coefficient,
        "model.moe_aux_loss_coeff": 0.0,
        "model.moe_router_bias_update_rate": 0.0,
        "checkpoint.save": None,
    }
    theirs = bridge("finetune", checkpoint, tmp_path, fields).steps
    ours = launch(
        flags_for(checkpoint) | {
            "--sft": True, "--data-path": data, "--seq-length": 128, "--train-iters": 3,
            "--max-position-embeddings": 128, "--tokenizer-type": "HuggingFaceTokenizer",
            "--tokenizer-model": checkpoint, "--micro-batch-size": 1, "--global-batch-size": 2,
            "--dsa-indexer-loss-coeff": coefficient, "--moe-aux-loss-coeff": 0.0,
            "--moe-router-bias-update-rate": 0.0,
        }
    ).steps  # fmt: skip
    print(*(f"{x['lm loss']} {y['lm loss']}" for x, y in zip(theirs, ours, strict=True)), sep="\n")
    if coefficient == 0:
        assert_equal_figures(theirs, ours, ["lm loss"])
        return
    assert_equal_figures(theirs[:1], ours[:1], ["lm loss"])
    assert theirs[-1]["lm loss"] == pytest.approx(ours[-1]["lm loss"], rel=2e-2)
    assert theirs[-1]["indexer loss"] < 0.8 * theirs[0]["indexer loss"]
