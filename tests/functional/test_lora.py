"""LoRA as users run it: from a base checkpoint, resumed on other ranks, exported and merged."""

import json
import re

import pytest
import torch

from tests.functional.checkpoint_reader import read
from tests.functional.launch import SPARSE, flags_in, launch, train
from tests.functional.parallel_flags import FULL_RECOMPUTE, TP2_HEADS

LORA = {
    "--lora-rank": 4,
    "--lora-alpha": 8,
    "--lora-targets": "all-linear",
    "--use-distributed-optimizer": True,
    # The optimizer's state can be read on other ranks.
    "--dist-ckpt-optim-fully-reshardable": True,
}
LAYOUTS = {
    "TP2": TP2_HEADS,
    "PP2 and full recompute": {"--pipeline-model-parallel-size": 2} | FULL_RECOMPUTE,
    "DP2, gradients and parameters on their way": {
        "--overlap-grad-reduce": True,
        "--overlap-param-gather": True,
    },
}


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """A base of two steps, and six steps of adapters from there; folder, flags and both logs."""
    folder = tmp_path_factory.mktemp("lora")
    flags = {"--data-path": data, "--norm-epsilon": 1e-6, "--save-interval": 2}
    flags |= {"--override-opt_param-scheduler": True}
    base = train(flags | {"--train-iters": 2, "--save": folder / "base"}, one_process=True)
    start = {"--pretrained-checkpoint": folder / "base", "--load": folder / "lora"}
    lora = train(
        flags | LORA | start | {"--save": folder / "lora", "--train-iters": 6}, one_process=True
    )
    return folder, flags, base, lora


def test_a_base_is_left_as_it_is(runs):
    folder, _, base, lora = runs
    assert "the optimizer starts anew" in lora.log
    assert "does not hold 44 tensors of adapters: they keep their initial values" in lora.log
    trained = 2 * 4 * (96 + 128 + 104 + 160 + 128 + 96 + 80 + 68 + 2 * 160 + 160)
    frozen = count(read(folder / "base"))
    assert (
        f"adapters of rank 4, scale 2: {trained:,} parameters are trained, {frozen:,} are fr"
        in (lora.log)
    )
    before, after = read(folder / "base"), read(folder / "lora")
    weights = [name for name in before if name.startswith(("decoder.", "embedding.", "output_"))]
    assert weights and all(before[name].equal(after[name]) for name in weights)
    states = [name for name in after if name.startswith("optimizer.") and "exp_avg" in name]
    adapters = [name for name in after if name.startswith("decoder.") and "_lora_" in name]
    assert adapters and all(after[name].any() for name in adapters)
    assert states and all("_lora_" in name for name in states)
    assert lora.column("lm loss")[-1] < base.column("lm loss")[-1]


def count(state):
    """Parameters of a model's checkpoint."""
    return sum(
        tensor.numel()
        for name, tensor in state.items()
        if name.startswith(("decoder.", "embedding.", "output_"))
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_ranks_train_the_same(layout, runs, tmp_path):
    """From the base, whose adapters every rank draws alike, or from step 2 of one process."""
    folder, flags, _, one = runs
    start = {"--pretrained-checkpoint": folder / "base", "--load": tmp_path}
    if layout != "TP2":
        start = {"--load": folder / "lora", "--ckpt-step": 2}
    several = train(
        flags | LORA | LAYOUTS[layout] | start | {"--save": tmp_path, "--train-iters": 6}, ranks=2
    )
    steps = {step["iteration"]: step for step in one.steps}
    assert len(several.steps) == (6 if layout == "TP2" else 4)
    assert ("starts anew" in several.log) == (layout == "TP2")
    for step in several.steps:
        # Megatron averages the first two losses that it logs after a start.
        averaged = step["iteration"] == several.steps[1]["iteration"] and layout != "TP2"
        for figure in ("grad norm",) if averaged else ("lm loss", "indexer loss", "grad norm"):
            expected = steps[step["iteration"]][figure]
            assert step[figure] == pytest.approx(expected, rel=1e-4), (figure, step)


def test_export_and_evaluation(runs, tmp_path):
    """Merged weights are those that the trained adapters make of the base's."""
    pytest.importorskip("safetensors")
    from megatron_dsa.huggingface.files import CheckpointReader, read_safetensors
    from megatron_dsa.tools.cli import main

    folder = runs[0]
    (tmp_path / "config.json").write_text(json.dumps(SPARSE))
    for name, source, flags in (
        ("base", "base", []), ("merged", "lora", []), ("adapter", "lora", ["--adapter"]),
    ):  # fmt: skip
        arguments = ["export-hf", "--input", folder / source, "--config", tmp_path / "config.json"]
        assert main([*map(str, [*arguments, "--output", tmp_path / name]), *flags]) == 0
    base, merged = (CheckpointReader(tmp_path / name) for name in ("base", "merged"))
    adapter = read_safetensors(tmp_path / "adapter" / "adapter_model.safetensors")
    assert base.names() == merged.names() and len(adapter) == 44
    for name in base.names():
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_{{}}.weight"
        expected = base.read(name)
        if key.format("A") in adapter:
            product = adapter.pop(key.format("B")) @ adapter.pop(key.format("A"))
            assert product.norm() > 1e-3 * expected.norm(), name
            expected = expected + 2 * product
        torch.testing.assert_close(merged.read(name), expected, rtol=1e-6, atol=1e-7)
    assert not adapter
    assert "| rank of adapters, merged | 4 |" in (tmp_path / "merged" / "README.md").read_text()
    losses = {}
    for name in ("base", "lora"):
        flags = {"--load": folder / name, "--data-path": runs[1]["--data-path"]}
        log = launch({"evaluate": True} | flags, module="megatron_dsa").log
        losses[name] = float(re.search(r"tokens: loss ([\d.]+)", log)[1])
    assert losses["lora"] < losses["base"]


def test_adapters_are_not_dropped(runs):
    run = train(
        runs[1] | {"--load": runs[0] / "lora", "--train-iters": 7}, one_process=True, check=False
    )
    message = "has adapters, which this run would leave out: give --lora-rank 4 --lora-alpha 8 --"
    assert run.returncode and message in run.log


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_rank": 8}, "--lora-rank and --lora-alpha must be as in checkpoint"),
        ({"lora_alpha": None}, "--lora-rank and --lora-alpha must be as in checkpoint"),
        ({"lora_targets": ["o_proj", "mlp.gate_proj"]}, "has adapters of self_attn.q_a_proj, self"),
        ({"dsa_indexer_loss_coeff": 0.0}, "--dsa-indexer-loss-coeff must not be 0"),
    ],
    ids=["rank", "alpha", "targets", "loss"],
)
def test_other_adapters_are_refused(changes, message, runs):
    """Dense stages have no indexers, and leave their adapters behind as they do the indexers."""
    from megatron_dsa.errors import ConfigError
    from megatron_dsa.tools.trained_model import saved_arguments
    from megatron_dsa.training.checkpoints import check_adapters

    directory = runs[0] / "lora" / "iter_0000006"
    args = saved_arguments(directory)
    check_adapters(args, directory)
    vars(args).update(changes)
    with pytest.raises(ConfigError, match=message):
        check_adapters(args, directory)
    vars(args).update(dsa_stage="dense")
    if "dsa_indexer_loss_coeff" in changes:
        check_adapters(args, directory)


def test_start_from_an_adapter(runs, tmp_path):
    """In PEFT's format beside the base's weights: both are what the run starts with."""
    from megatron_dsa.tools.cli import main

    folder, flags, _, lora = runs
    (tmp_path / "config.json").write_text(json.dumps(SPARSE))
    arguments = ["export-hf", "--input", folder / "lora", "--config", tmp_path / "config.json"]
    arguments += ["--adapter", "--output", tmp_path / "adapter"]
    assert main([*map(str, arguments)]) == 0
    start = {"--pretrained-checkpoint": folder / "base", "--lora-load": tmp_path / "adapter"}
    settings = {"--train-iters": 1, "--save-interval": 1, "--lr": 0.0, "--min-lr": 0.0}
    settings |= {"--load": tmp_path / "run", "--save": tmp_path / "run"}
    run = train(flags | LORA | start | settings, one_process=True)
    assert f"> adapters of {tmp_path / 'adapter'} are loaded" in run.log
    before, after = read(folder / "lora"), read(tmp_path / "run")
    weights = [name for name in before if name.startswith(("decoder.", "embedding.", "output_"))]
    assert weights and all(before[name].equal(after[name]) for name in weights)
    assert run.steps[0]["lm loss"] < lora.steps[0]["lm loss"]


@pytest.mark.ranks(2)
def test_a_whole_v4(short_documents, tmp_path, capsys):
    """Trained on two ranks from a released base; evaluated on one, and merged."""
    pytest.importorskip("safetensors")
    from megatron_dsa.huggingface.convert import export_model
    from megatron_dsa.huggingface.files import CheckpointReader
    from megatron_dsa.huggingface.names import V4
    from megatron_dsa.tools.cli import main
    from tests.tiny_models import tiny_model, tiny_v4

    def command(*arguments):
        capsys.readouterr()
        assert main([*map(str, arguments)]) == 0
        return capsys.readouterr().out

    base, run, merged = (tmp_path / name for name in ("base", "run", "merged"))
    config = tiny_v4(
        vocab_size=264, max_position_embeddings=96, num_nextn_predict_layers=1, num_hash_layers=2
    )
    features = V4.features.keys()
    model = tiny_model(config, vocab=264, features=features, mtp_num_layers=1)
    export_model(model, base, config)
    flags = {"--data-path": short_documents, "--split": "60,40,0", "--eval-iters": 2}
    flags |= {"--dsa-load-hf": base, "--save": run, "--save-interval": 100, "--train-iters": 2}
    trained = train(flags_in(command("flags", base)) | flags | LORA | TP2_HEADS, ranks=2)
    assert (
        "attn.wo_a, attn.wo_b, attn.compressor.wkv, attn.compressor.wgate, attn.in" in trained.log
    )
    loss = re.search(r"validation loss at iteration 2 on .* lm loss value: (\S+) \|", trained.log)
    # In a process of its own: it ends the process group.
    evaluated = launch({"evaluate": True, "--load": run}, module="megatron_dsa").log
    found = re.search(r"sequences of 96 tokens: loss (\S+), ", evaluated)
    assert float(found[1]) == pytest.approx(float(loss[1]), rel=1e-6)

    command("export-hf", "--input", run, "--config", base, "--output", merged)
    before, after = (CheckpointReader(folder) for folder in (base, merged))
    assert before.names() == after.names()
    linears = (
        r"attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.(wq_b|weights_proj))"
        r"|attn\.(indexer\.)?compressor\.(wkv|wgate)|ffn\.shared_experts\.w[123]"
    )
    adapted = {x for x in before.names() if re.fullmatch(rf"\w+\.\d\.({linears})\.weight", x)}
    assert adapted == {x for x in before.names() if not before.read(x).equal(after.read(x))}
    assert len(adapted) == 5 * (5 + 3) + 3 * 2 + 2 * 4
    state = read(run)
    layer = "decoder.layers.1.self_attention.linear_o_group_proj.wo_a_lora_{}".format
    product = 2 * state[layer("B")] @ state[layer("A")]
    name = "layers.1.attn.wo_a.weight"
    torch.testing.assert_close(after.read(name), before.read(name) + product, rtol=1e-6, atol=1e-7)
