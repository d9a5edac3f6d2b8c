"""LoRA like users run it: from a base checkpoint, resumed on other ranks, exported, merged."""

import contextlib
import io
import json
import re
import shutil

import pytest
import torch

from tests.functional.checkpoint_reader import read
from tests.functional.comparisons import TOLERANCE
from tests.functional.launch import SPARSE, flags_in, launch, train
from tests.functional.parallel_flags import FULL_RECOMPUTE, TP2_HEADS
from tests.helpers import relative_error

LORA = {
    "--lora-rank": 4,
    "--lora-alpha": 8,
    "--lora-targets": "all-linear",
    "--use-distributed-optimizer": True,
    # Readable on other ranks.
    "--dist-ckpt-optim-fully-reshardable": True,
}
LAYOUTS = {
    "TP2": TP2_HEADS,
    "PP2 interleaved, rank 0 without adapters, full recompute": {
        "--pipeline-model-parallel-size": 2,
        "--pipeline-model-parallel-layout": "E|t||tL",
    }
    | FULL_RECOMPUTE,
    "DP2, gradients and parameters on their way": {
        "--overlap-grad-reduce": True,
        "--overlap-param-gather": True,
    },
}


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """Train a base of two steps and six steps of adapters; return folder, flags, both logs."""
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
    assert f"hold no frozen weights: keep their base {folder / 'base/iter_0000002'}" in lora.log
    after = read(folder / "lora")
    assert not after.keys() & read(folder / "base").keys()
    states = [name for name in after if name.startswith("optimizer.") and "exp_avg" in name]
    adapters = after.keys() - set(states)
    assert (
        len(adapters) == 44
        and all("_lora_" in name for name in adapters)
        and all(after[name].any() for name in adapters)
    )
    assert states and all("_lora_" in name for name in states)
    assert lora.column("lm loss")[-1] < base.column("lm loss")[-1]


def count(state):
    return sum(
        tensor.numel()
        for name, tensor in state.items()
        if name.startswith(("decoder.", "embedding.", "output_"))
    )


def figures(run):
    return [{name: x for name, x in step.items() if "time" not in name} for step in run.steps]


def size_of(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.fixture(scope="module")
def whole(runs):
    """Train the same with the base in ``--save``, whose checkpoints include it; return folder and
    log.
    """
    folder, flags, _, _ = runs
    shutil.copytree(folder / "base", folder / "whole")
    start = {"--load": folder / "whole", "--save": folder / "whole", "--finetune": True}
    return folder / "whole", train(flags | LORA | start | {"--train-iters": 6}, one_process=True)


def test_checkpoints_without_the_base_are_small_and_say_the_same(runs, whole):
    folder, _, _, lora = runs
    assert f"hold the frozen weights also: {whole[0] / 'iter_0000002'} lies in" in whole[1].log
    assert figures(whole[1]) == figures(lora)
    adapters, everything = read(folder / "lora"), read(whole[0])
    assert all(adapters[name].equal(everything[name]) for name in adapters)
    weights = everything.keys() - adapters.keys()
    frozen = sum(everything[name].nbytes for name in weights)
    small, large = (size_of(x / "iter_0000006") for x in (folder / "lora", whole[0]))
    assert weights and small < 0.75 * large and large - small > frozen
    print(f"a checkpoint takes {large:,} bytes with the base, {small:,} without it")


def test_resume_is_the_uninterrupted_run(runs, whole, tmp_path):
    folder, flags, _, lora = runs
    for source in (folder / "lora", whole[0]):
        start = {"--load": source, "--ckpt-step": 4, "--save": tmp_path / source.name}
        run = train(flags | LORA | start | {"--train-iters": 6}, one_process=True)
        assert figures(run) == figures(lora)[4:]
        found, expected = read(tmp_path / source.name), read(folder / "lora")
        assert found.keys() == expected.keys()
        assert all(found[name].equal(expected[name]) for name in found)


@pytest.mark.parametrize(
    ("base", "changes", "kept"),
    [
        ({"--dsa-stage": "dense"}, {}, ".indexer."),
        ({}, {"--padded-vocab-size": 272}, "embedding.|output_layer."),
    ],
    ids=["fresh indexers", "more rows that pad the vocabulary"],
)
def test_what_the_base_lacks_is_saved(base, changes, kept, runs, tmp_path):
    flags = runs[1] | {"--save": tmp_path / "base", "--train-iters": 2}
    train(flags | base, one_process=True)
    flags |= LORA | changes | {"--train-iters": 4}
    start = {"--pretrained-checkpoint": tmp_path / "base", "--save": tmp_path / "whole"}
    lora = train(flags | start, one_process=True)
    start = {"--load": tmp_path / "whole", "--ckpt-step": 2, "--save": tmp_path / "resumed"}
    resumed = train(flags | start, one_process=True)
    assert figures(resumed) == figures(lora)[2:]
    expected, found = read(tmp_path / "whole"), read(tmp_path / "resumed")
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in found)
    weights = [x for x in found if "_lora_" not in x]
    assert weights and all(re.search(kept, name) for name in weights)


@pytest.mark.parametrize("form", [[], ["--adapter"]], ids=["merged", "adapter"])
def test_exports_are_equal_to_the_byte(form, runs, whole, tmp_path):
    pytest.importorskip("safetensors")
    (tmp_path / "config.json").write_text(json.dumps(SPARSE))
    for source in (runs[0] / "lora", whole[0]):
        output = tmp_path / source.name
        arguments = ("--input", source, "--config", tmp_path / "config.json", "--output", output)
        command("export-hf", *arguments, *form)
    files = {path.name for path in (tmp_path / "lora").glob("*.safetensors*")}
    assert files == {path.name for path in (tmp_path / "whole").glob("*.safetensors*")} != set()
    for name in files:
        assert (tmp_path / "lora" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_base_that_moves_or_changes(runs, tmp_path):
    folder, flags, _, _ = runs
    base, moved = tmp_path / "base", tmp_path / "moved"
    shutil.copytree(folder / "base", base)
    flags = flags | LORA | {"--load": tmp_path / "lora", "--save": tmp_path / "lora"}
    first = train(flags | {"--pretrained-checkpoint": base, "--train-iters": 2})
    base.rename(moved)
    gone = train(flags | {"--train-iters": 4}, check=False)
    message = f"holds adapters only, and their base {base / 'iter_0000002'} is gone"
    assert gone.returncode == 2 and message in gone.log
    found = train(flags | {"--train-iters": 4, "--pretrained-checkpoint": moved})
    assert f"keep their base {moved / 'iter_0000002'}" in found.log and first.steps
    assert [step["iteration"] for step in found.steps] == [3, 4]
    file = next((moved / "iter_0000002").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # the smallest change, at a sampled byte
    file.write_bytes(content)
    changed = train(flags | {"--train-iters": 6, "--pretrained-checkpoint": moved}, check=False)
    message = f"the base {moved / 'iter_0000002'} of the adapters in checkpoint"
    assert changed.returncode == 2 and message in changed.log and not changed.steps


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_ranks_train_the_same(layout, runs, tmp_path):
    folder, flags, _, one = runs
    start = {"--pretrained-checkpoint": folder / "base", "--load": tmp_path}
    if layout != "TP2":
        start = {"--load": folder / "lora", "--ckpt-step": 2}
    several = train(
        flags | LORA | LAYOUTS[layout] | start | {"--save": tmp_path, "--train-iters": 6}, ranks=2
    )
    assert len(several.steps) == (6 if layout == "TP2" else 4)
    assert ("starts anew" in several.log) == (layout == "TP2")
    check_steps(several, one)
    check_adapters_and_moments(tmp_path, folder / "lora")


def check_steps(run, expected, figures=("lm loss", "indexer loss", "grad norm")):
    """Check the figures of each step of a run against ``expected``."""
    steps = {step["iteration"]: step for step in expected.steps}
    for step in run.steps:
        for figure in figures:
            wanted = steps[step["iteration"]][figure]
            assert step[figure] == pytest.approx(wanted, rel=1e-4), (figure, step)


def check_adapters_and_moments(folder, expected):
    """Check adapters and moments of the last checkpoint, and its frozen weights to the bit."""
    found, wanted = read(folder), read(expected)
    assert set(found) == set(wanted)
    for name, tensor in found.items():
        if "_lora_" in name:
            error = relative_error(tensor, wanted[name])
            assert error < TOLERANCE, (name, error)
        elif name.startswith(("decoder.", "mtp.", "embedding.", "output_")):
            assert tensor.equal(wanted[name]), name


def test_export_and_evaluation(runs, tmp_path):
    pytest.importorskip("safetensors")
    from megatron_dsa.extras.cli import main
    from megatron_dsa.extras.huggingface.files import CheckpointReader, read_safetensors

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
    from megatron_dsa.errors import ConfigError
    from megatron_dsa.extras.generate.trained_model import saved_arguments
    from megatron_dsa.training.checkpoints import check_adapters, entries_of

    directory = runs[0] / "lora" / "iter_0000006"
    args = saved_arguments(directory)
    check_adapters(args, directory, entries_of(directory))
    vars(args).update(changes)
    with pytest.raises(ConfigError, match=message):
        check_adapters(args, directory, entries_of(directory))
    vars(args).update(dsa_stage="dense")
    if "dsa_indexer_loss_coeff" in changes:
        check_adapters(args, directory, entries_of(directory))


def test_start_from_an_adapter(runs, tmp_path):
    from megatron_dsa.extras.cli import main

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


@pytest.fixture(scope="module")
def v4(short_documents, tmp_path_factory):
    """Train two steps of adapters on two ranks from a released base; return folder, flags, log."""
    pytest.importorskip("safetensors")
    from megatron_dsa.extras.huggingface.convert import export_model
    from megatron_dsa.extras.huggingface.names import V4
    from tests.tiny_models import tiny_model, tiny_v4

    folder = tmp_path_factory.mktemp("v4")
    config = tiny_v4(
        vocab_size=264, max_position_embeddings=96, num_nextn_predict_layers=1, num_hash_layers=2
    )
    features = V4.features.keys()
    model = tiny_model(config, vocab=264, features=features, mtp_num_layers=1)
    export_model(model, folder / "base", config)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        command("flags", folder / "base")
    flags = flags_in(printed.getvalue()) | LORA | {"--data-path": short_documents}
    flags |= {"--split": "60,40,0", "--save-interval": 100, "--override-opt_param-scheduler": True}
    start = {"--dsa-load-hf": folder / "base", "--save": folder / "run", "--train-iters": 2}
    return folder, flags, train(flags | start | {"--eval-iters": 2} | TP2_HEADS, ranks=2)


def command(*arguments):
    from megatron_dsa.extras.cli import main

    assert main([*map(str, arguments)]) == 0


@pytest.mark.ranks(2)
def test_a_whole_v4(v4, tmp_path):
    from megatron_dsa.extras.huggingface.files import CheckpointReader

    folder, _, trained = v4
    assert "hold the frozen weights also: no --pretrained-checkpoint has them" in trained.log
    assert (
        "attn.wo_a, attn.wo_b, attn.compressor.wkv, attn.compressor.wgate, attn.in" in trained.log
    )
    loss = re.search(r"validation loss at iteration 2 on .* lm loss value: (\S+) \|", trained.log)
    # It ends the process group.
    evaluated = launch({"evaluate": True, "--load": folder / "run"}, module="megatron_dsa").log
    found = re.search(r"sequences of 96 tokens: loss (\S+), ", evaluated)
    assert float(found[1]) == pytest.approx(float(loss[1]), rel=1e-6)

    base, merged = folder / "base", tmp_path / "merged"
    command("export-hf", "--input", folder / "run", "--config", base, "--output", merged)
    before, after = CheckpointReader(base), CheckpointReader(merged)
    assert before.names() == after.names()
    linears = (
        r"attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.(wq_b|weights_proj))"
        r"|attn\.(indexer\.)?compressor\.(wkv|wgate)|ffn\.shared_experts\.w[123]"
    )
    adapted = {x for x in before.names() if re.fullmatch(rf"\w+\.\d\.({linears})\.weight", x)}
    assert adapted == {x for x in before.names() if not before.read(x).equal(after.read(x))}
    assert len(adapted) == 5 * (5 + 3) + 3 * 2 + 2 * 4
    state = read(folder / "run")
    layer = "decoder.layers.1.self_attention.linear_o_group_proj.wo_a_lora_{}".format
    product = 2 * state[layer("B")] @ state[layer("A")]
    name = "layers.1.attn.wo_a.weight"
    torch.testing.assert_close(after.read(name), before.read(name) + product, rtol=1e-6, atol=1e-7)


@pytest.mark.ranks(4)
def test_v4_goes_on_over_other_ranks(v4, tmp_path):
    folder, flags, two = v4
    layout = FULL_RECOMPUTE | {
        "--pipeline-model-parallel-size": 2,
        "--pipeline-model-parallel-layout": "Ett|t|t|mL",
        "--expert-model-parallel-size": 2,
        "--overlap-grad-reduce": True,
        "--overlap-param-gather": True,
    }
    flags |= {"--load": folder / "run", "--train-iters": 5}
    one = train(flags | {"--save": tmp_path / "one"}, one_process=True)
    four = train(flags | layout | {"--save": tmp_path / "four"}, ranks=4)
    assert [step["iteration"] for step in four.steps] == [3, 4, 5]
    check_steps(four, one, ("lm loss", "indexer loss", "mtp_1 loss", "grad norm"))
    check_adapters_and_moments(tmp_path / "four", tmp_path / "one")
    count = re.compile("[0-9,]+ parameters are trained, .*")
    assert len({count.search(run.log)[0] for run in (one, two, four)}) == 1
