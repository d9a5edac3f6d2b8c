"""Hybrid models: losses of a GPT with the same layers, layouts, checkpoints of both."""

import functools
import importlib.util
import json
import subprocess

import pytest

from tests.functional.checkpoint_reader import read
from tests.functional.comparisons import check_layout, layout_cases
from tests.functional.launch import REPOSITORY, SPARSE, train
from tests.functional.parallel_flags import CP2, FULL_RECOMPUTE, PACKED, TP2_HEADS, TP2_SEQUENCE


def hybrid(pattern):
    return {"--num-layers": None, "--hybrid-layer-pattern": pattern}


EXPERTS = {"--num-experts": 4, "--moe-router-topk": 2, "--moe-ffn-hidden-size": 32}
SHARED = {"--dsa-indexer-topk-freq": 2}
WARMUP = {"--dsa-stage": "warmup", "--dsa-indexer-use-sparse-loss": None}
SELECTIVE = {
    "--recompute-granularity": "selective",
    "--recompute-modules": ["core_attn", "mla_up_proj"],
}
#: Flags of a GPT, of the hybrid model with its layers, of both.
MODELS = {
    "D-": ({}, hybrid("D-D-"), {}),
    "DE": ({"--moe-layer-freq": "[0,1]"}, hybrid("D-DE"), EXPERTS),
    "balanced DE": (
        {"--moe-layer-freq": 1}, hybrid("DEDE"),
        EXPERTS | {"--moe-router-load-balancing-type": "aux_loss", "--moe-aux-loss-coeff": 0.01},
    ),
    "prediction": ({"--mtp-num-layers": 2}, hybrid("D-D-/D-/D-"), {}),
    "index sharing": ({"--num-layers": 5}, hybrid("D-D-D-D-D-"), SHARED),
    "index sharing around experts": (
        {"--num-layers": 4, "--moe-layer-freq": "[0,1,1,1]"}, hybrid("D-DEDEDE"), SHARED | EXPERTS,
    ),
    "index sharing, served": (
        {"--num-layers": 4}, hybrid("D-D-D-D-"), SHARED | {"--dsa-indexer-teacher": "served"},
    ),
    "index sharing, recomputed": (
        {"--num-layers": 4}, hybrid("D-D-D-D-"), SHARED | FULL_RECOMPUTE,
    ),
    "index sharing, served, recomputed": (
        {"--num-layers": 4}, hybrid("D-D-D-D-"),
        SHARED | FULL_RECOMPUTE | {"--dsa-indexer-teacher": "served"},
    ),
    "selective recompute": ({}, hybrid("D-D-"), SELECTIVE),
    "dense": ({}, hybrid("D-D-"), {"--dsa-stage": "dense"}),
    "warm-up": ({}, hybrid("D-D-"), WARMUP),
    "warm-up, recomputed": ({}, hybrid("D-D-"), WARMUP | FULL_RECOMPUTE),
    "packed": ({}, hybrid("D-D-"), PACKED),
    "dropout": ({}, hybrid("D-D-"), {"--hidden-dropout": 0.1}),
}  # fmt: skip


def figures(run):
    return [{k: v for k, v in step.items() if "time" not in k} for step in run.steps]


@pytest.mark.parametrize("name", MODELS)
def test_losses_of_a_gpt(name, data):
    ofs, hybrids, both = MODELS[name]
    both = {"--data-path": data, "--train-iters": 3} | both
    # Megatron's log of balancing losses keeps the first run's number of layers.
    one_process = name != "balanced DE"
    expected = train(both | ofs, one_process=one_process)
    got = train(both | hybrids, one_process=one_process)
    assert len(got.steps) == 3 and figures(got) == figures(expected)
    assert counted(got) == counted(expected)


def counted(run):
    """Return a run's counted operations."""
    (line,) = (line for line in run.log.splitlines() if "GFLOP per token" in line)
    return line.partition("megatron_dsa counts")[2]


@pytest.mark.parametrize("spec", ["dsa_hybrid_stack_spec", "dsa_local_hybrid_stack_spec"])
def test_specs_by_name(spec, data):
    flags = hybrid("D-D-") | {"--data-path": data, "--train-iters": 2}
    named = flags | {"--spec": ["megatron_dsa.specs", spec]}
    assert figures(train(named, one_process=True)) == figures(train(flags, one_process=True))


@pytest.mark.parametrize("precision", [{}, {"--bf16": True, "--use-distributed-optimizer": True}])
@pytest.mark.parametrize("name", ["DE", "prediction", "index sharing"])
def test_checkpoint_of_the_other_kind(name, precision, data, tmp_path):
    gpt, other, both = MODELS[name]
    both = {"--data-path": data, "--train-iters": 4, "--save-interval": 2} | both | precision
    if precision:
        both |= {"--dist-ckpt-optim-fully-reshardable": True}
    kinds = {"gpt": both | gpt, "hybrid": both | other}
    whole, states = {}, {}
    for kind, flags in kinds.items():
        whole[kind] = train(flags | {"--save": tmp_path / kind}, one_process=True)
        states[kind] = read(tmp_path / kind)
    for kind, flags in kinds.items():
        (other_kind,) = kinds.keys() - {kind}
        folder = tmp_path / f"{kind} resumed"
        start = {"--load": tmp_path / other_kind, "--ckpt-step": 2, "--save": folder}
        rest = train(flags | start, one_process=True)
        assert figures(rest) == figures(whole[kind])[2:]
        state = read(folder)
        assert state.keys() == states[kind].keys()
        assert all(tensor.equal(states[kind][key]) for key, tensor in state.items())


MODEL = hybrid("D-DE") | EXPERTS
LAYOUTS = {
    "TP2 by heads": (TP2_HEADS, 2),
    "TP2 by sequence and CP2": (TP2_SEQUENCE | CP2, 4),
    "CP2": (CP2, 2),
    "CP2 contiguous, full recompute": (
        CP2 | FULL_RECOMPUTE | {"--dsa-cp-layout": "contiguous"}, 2,
    ),
    "PP2": ({"--pipeline-model-parallel-size": 2, "--hybrid-layer-pattern": "D-|DE"}, 2),
    "PP2 and TP2 by sequence": (
        TP2_SEQUENCE | {"--pipeline-model-parallel-size": 2, "--hybrid-layer-pattern": "D-|DE"}, 4,
    ),
    "PP2 with cut pairs and virtual stages": (
        {"--pipeline-model-parallel-size": 2, "--hybrid-layer-pattern": "D|-|D|E"}, 2,
    ),
    "EP2 and DP2": ({"--expert-model-parallel-size": 2}, 2),
    "DP2 with distributed optimizer": (
        {"--use-distributed-optimizer": True, "--dist-ckpt-optim-fully-reshardable": True}, 2,
    ),
}  # fmt: skip
SHARING = hybrid("D-D-D-D-/D-") | SHARED
SHARING_LAYOUTS = {
    "TP2 by sequence, sharing": (TP2_SEQUENCE, 2),
    "CP2, sharing": (CP2, 2),
    "PP2, sharing": (
        {"--pipeline-model-parallel-size": 2, "--hybrid-layer-pattern": "D-D-|D-D-/D-"}, 2,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def steps(steps_of):
    """Return a function that gives a model's ``one_step`` and its single-process result."""

    @functools.cache
    def of_model(sharing):
        one_step = steps_of(SHARING if sharing else MODEL)
        step, gradients, result = one_step()
        assert all(gradient.norm() > 0 for gradient in gradients.values())
        return one_step, (step, gradients, result)

    return of_model


@pytest.mark.parametrize("name", layout_cases(LAYOUTS | SHARING_LAYOUTS))
def test_layout(name, steps):
    one_step, expected = steps("sharing" in name)
    check_layout(name, (LAYOUTS | SHARING_LAYOUTS)[name], expected, one_step)


def test_layers_are_logged_under_their_numbers(data, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = hybrid("D--D-/-D/-D") | {"--data-path": data, "--train-iters": 1}
    train(flags | {"--tensorboard-dir": tmp_path, "--tensorboard-log-interval": 1})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag.startswith("dsa/indexer-loss/layer-")]
    assert {int(tag.rpartition("-")[2]) for tag in tags} == {1, 4, 7, 9}


GATED = hybrid("GD-") | {
    "--deterministic-mode": True, "--linear-key-head-dim": 8, "--linear-value-head-dim": 8,
    "--linear-num-key-heads": 4, "--linear-num-value-heads": 4,
}  # fmt: skip


def test_gated_delta_net_between(data, tmp_path):
    flags = GATED | {"--data-path": data, "--train-iters": 4, "--save-interval": 2}
    run = functools.partial(train, module="tests.functional.gated_pretrain")
    whole = run(flags | {"--save": tmp_path})
    losses = whole.column("lm loss")
    assert losses[-1] < losses[0] - 0.5 and all(whole.column("indexer loss"))
    assert figures(run(flags | {"--load": tmp_path, "--ckpt-step": 2})) == figures(whole)[2:]
    for layout in (TP2_HEADS, CP2):
        start = {"--load": tmp_path, "--ckpt-step": 2, "--no-load-optim": True, "--finetune": True}
        one, two = (run(flags | start | changes, ranks=r) for r, changes in ((1, {}), (2, layout)))
        for figure in ("lm loss", "indexer loss", "grad norm"):
            assert two.column(figure) == pytest.approx(one.column(figure), rel=2e-4), figure


def test_gated_delta_net_names_its_package(data):
    if importlib.util.find_spec("fla"):
        pytest.skip("it is installed")
    run = train(GATED | {"--data-path": data}, check=False)
    assert run.returncode and "flash-linear-attention" in run.log


REFUSED = {
    "M": (hybrid("MD-"), "must not have M (Mamba) with --transformer-impl local"),
    "no D": (hybrid("G-"), "must have a layer D"),
    "no stages": (
        hybrid("D-D-") | {"--pipeline-model-parallel-size": 2},
        "must have | between pipeline stages",
    ),
    "no experts": (hybrid("DE"), "--num-experts is required with layers E"),
    "no depth": (hybrid("D-") | {"--mtp-num-layers": 1}, "--mtp-num-layers (1) must count"),
    "a stage of reuse": (
        hybrid("D-|D-") | SHARED | {"--pipeline-model-parallel-size": 2},
        "index sharing does not cross pipeline stages",
    ),
    "LoRA": (
        hybrid("D-") | {"--lora-rank": 4, "--lora-targets": "o_proj"},
        "--lora-rank must be unset with --hybrid-layer-pattern",
    ),
    "streams": (hybrid("D-") | {"--hc-mult": 2}, "--hc-mult must be 1"),
    "a plan": (hybrid("D-") | {"--dsa-dry-run": True}, "--hybrid-layer-pattern must be unset"),
    "a letter": (hybrid("DX"), "'X' is not a valid layer symbol"),
    "a Hugging Face model": (
        hybrid("D-") | {"--dsa-load-hf": "folder"}, "--hybrid-layer-pattern must be unset",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, data):
    flags, message = REFUSED[name]
    ranks = flags.get("--pipeline-model-parallel-size", 1)
    run = train(flags | {"--data-path": data}, check=False, ranks=ranks)
    assert run.returncode == 2 and message in run.log, run.log[-3000:]
    assert "Traceback" not in run.log


def test_refused_checkpoints(data, tmp_path):
    flags = {"--data-path": data, "--train-iters": 2, "--save-interval": 1, "--exit-interval": 1}
    named = flags | {"--bf16": True, "--use-distributed-optimizer": True}
    fresh = {"--finetune": True}
    train(named | {"--save": tmp_path / "gpt"}, one_process=True)
    train(flags | hybrid("DD-") | {"--save": tmp_path / "hybrid"}, one_process=True)
    for changes, folder, message in (
        (named | hybrid("DD-") | fresh, "gpt", "must then be pairs D- or DE, got DD-"),
        (flags | {"--num-layers": 3}, "hybrid", "must then be pairs D- or DE, got DD-"),
        (flags | hybrid("D-") | fresh, "gpt", "must have 2 pairs"),
        (named | hybrid("D-D-"), "gpt", "saved without --dist-ckpt-optim-fully-reshardable"),
    ):
        run = train(changes | {"--load": tmp_path / folder}, check=False, one_process=True)
        assert run.returncode == 2 and message in run.log, run.log[-3000:]


def test_hugging_face_both_ways(data, tmp_path, python):
    safetensors = pytest.importorskip("safetensors.torch")

    def command(*arguments):
        call = [python, "-m", "megatron_dsa", *map(str, arguments)]
        done = subprocess.run(call, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]

    config = tmp_path / "config.json"
    config.write_text(json.dumps(SPARSE))
    flags = {"--data-path": data, "--train-iters": 1, "--save-interval": 1, "--norm-epsilon": 1e-6}
    kinds = {"gpt": {}, "hybrid": hybrid("D-D-")}
    exports = []
    for name, kind in kinds.items():
        train(flags | kind | {"--save": tmp_path / name}, one_process=True)
        out = tmp_path / f"{name} exported"
        command("export-hf", "--input", tmp_path / name, "--output", out, "--config", config)
        exports.append(
            {k: v for x in out.glob("*.safetensors") for k, v in safetensors.load_file(x).items()}
        )
    assert exports[0].keys() == exports[1].keys() and len(exports[0]) > 30
    assert all(tensor.equal(exports[1][key]) for key, tensor in exports[0].items())
    command("import-hf", "--input", out, "--output", tmp_path / "start")
    start = flags | {"--load": tmp_path / "start"}
    runs = [train(start | kind, one_process=True) for kind in kinds.values()]
    assert figures(runs[0]) == figures(runs[1])


def test_evaluate_reads_the_model(data, tmp_path, python):
    flags = {"--data-path": data, "--train-iters": 1, "--save-interval": 1}
    patterns = {"gpt": {}, "hybrid": hybrid("D-D-"), "others": hybrid("DD-")}
    losses = {}
    for name, kind in patterns.items():
        train(flags | kind | {"--save": tmp_path / name}, one_process=True)
        given = ["--load", tmp_path / name, "--data-path", data]
        call = [python, "-m", "megatron_dsa", "evaluate", *map(str, given)]
        done = subprocess.run(call, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        losses[name] = done.stdout.replace(str(tmp_path / name), "")
    assert losses["gpt"] == losses["hybrid"] != losses["others"]
