"""``--sft``: parallel layouts, stages, resume, evaluation, rejected flags."""

import re

import pytest

pytest.importorskip("transformers")

from tests.cases.chat import CONVERSATIONS, TEMPLATES, message, save_tokenizer, write_rows
from tests.functional.checkpoint_reader import read
from tests.functional.comparisons import TOLERANCE, check_resume, compare, layout_cases
from tests.functional.launch import TINY, launch, train
from tests.functional.parallel_flags import CP2, FULL_RECOMPUTE, SMALL_V4, TP2_HEADS, TP2_SEQUENCE

PP2 = {"--pipeline-model-parallel-size": 2}
LAYOUTS = {
    "TP2 by heads": (TP2_HEADS, 2),
    "TP2 by sequence": (TP2_SEQUENCE, 2),
    "CP2": (CP2, 2),
    "CP2 contiguous, two sequences, full recompute": (
        CP2 | FULL_RECOMPUTE | {"--dsa-cp-layout": "contiguous", "--micro-batch-size": 2},
        2,
    ),
    "TP2 by sequence and CP2": (TP2_SEQUENCE | CP2, 4),
    "PP2": (PP2, 2),
    "PP2 and CP2": (PP2 | CP2, 4),
    "DP2": ({"--use-distributed-optimizer": True, "--dist-ckpt-optim-fully-reshardable": True}, 2),
    "two sequences": ({"--micro-batch-size": 2}, 1),
}


@pytest.fixture(scope="session")
def flags(tmp_path_factory):
    """Return flags of fine-tuning on conversations of 10 to 90 tokens, some longer than a
    sequence.
    """
    from pydoc_data.topics import topics

    folder = tmp_path_factory.mktemp("sft")
    save_tokenizer(folder / "tokenizer", TEMPLATES["deepseek"], 400)
    rows = [{"messages": each} for each in CONVERSATIONS.values()]
    for number, (name, text) in enumerate(sorted(topics.items())):
        answer = " ".join(text.split()[6 : 7 + number % 17])
        rows.append({"messages": [message("user", name), message("assistant", answer)]})
    return {
        "--sft": True,
        "--data-path": write_rows(folder / "chat.jsonl", rows),
        "--tokenizer-type": "HuggingFaceTokenizer",
        "--tokenizer-model": folder / "tokenizer",
        "--vocab-size": None,
        "--padded-vocab-size": 400,
        "--micro-batch-size": 1,
        "--global-batch-size": 4,
    }


@pytest.fixture(scope="session")
def sft_step(steps_of, flags):
    return steps_of(flags)


@pytest.fixture(scope="session")
def sft_single(sft_step):
    step, gradients, result = sft_step()
    assert all(gradient.norm() > 0 for gradient in gradients.values())
    assert "conversations are longer than --seq-length 96" in result.log
    return step, gradients, result


def test_a_validation_part_that_is_not_read(flags):
    run = train(flags | {"--split": "90,10,0", "--eval-iters": 0, "--train-iters": 1})
    assert len(run.steps) == 1


@pytest.mark.parametrize("name", layout_cases(LAYOUTS))
def test_layout(name, sft_single, sft_step):
    step, *rest = sft_step(*LAYOUTS[name])
    if "two sequences" in name:  # the log averages microbatches with different tokens
        figure = "indexer loss"
        assert step[figure] == pytest.approx(sft_single[0][figure], rel=1e-2)
        step[figure] = sft_single[0][figure]
    compare((step, *rest), sft_single, TOLERANCE)


@pytest.mark.parametrize(
    ("stage", "layout"),
    [
        ({"--dsa-stage": "dense", "--dsa-indexer-use-sparse-loss": None}, CP2),
        ({"--dsa-stage": "warmup", "--dsa-indexer-use-sparse-loss": None}, TP2_HEADS),
        (SMALL_V4, CP2),
    ],
    ids=["dense, CP2", "warm-up, TP2", "V4, CP2"],
)
@pytest.mark.ranks(2)
def test_stages(stage, layout, flags, tmp_path):
    flags = flags | stage | {"--train-iters": 3}
    one, two = train(flags, one_process=True), train(flags | layout, ranks=2)
    for figure in ("lm loss", "grad norm"):
        assert two.column(figure) == pytest.approx(one.column(figure), rel=1e-4), figure


def validation(log):
    return [
        float(x) for x in re.findall(r"validation loss at iteration \d+ \| .*value: (\S+)", log)
    ]


@pytest.mark.ranks(2)
def test_it_learns_and_evaluates(flags, tmp_path):
    rows = [{"messages": CONVERSATIONS[name]} for name in ("one turn", "ends with the user")]
    rows += [{"prompt": "x", "completion": "y " * n} for n in (1, 40, 2, 30)]
    flags = flags | {
        "--data-path": None, "--train-data-path": flags["--data-path"],
        "--valid-data-path": write_rows(tmp_path / "valid.jsonl", rows), "--split": None,
        "--train-iters": 24, "--eval-iters": 1, "--eval-interval": 12,
    }  # fmt: skip
    run = train(flags, one_process=True)
    losses = run.column("lm loss")
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])
    save = {"--save": tmp_path / "run", "--save-interval": 1}
    short = flags | save | {"--train-iters": 1, "--eval-interval": 1}
    one, two = train(short, one_process=True), train(short | CP2, ranks=2)
    assert validation(two.log) == pytest.approx(validation(one.log), rel=1e-4)
    assert len(validation(run.log)) == 2 and validation(run.log)[1] < validation(one.log)[0]
    evaluated = launch({"evaluate": True, "--load": tmp_path / "run"}, module="megatron_dsa").log
    found = re.search(r"sequences of 96 tokens: loss (\S+),", evaluated)
    assert float(found[1]) == pytest.approx(validation(one.log)[0], rel=1e-4)
    whole = {
        "evaluate": True,
        "--load": tmp_path / "run",
        "--data-path": flags["--valid-data-path"],
    }
    assert "3 sequences of 96 tokens: loss" in launch(whole, module="megatron_dsa").log


def test_resume(flags, tmp_path):
    check_resume(flags, tmp_path)


def test_adapters(flags, tmp_path):
    save = {"--save": tmp_path, "--save-interval": 6, "--lora-rank": 4}
    save |= {"--lora-targets": "all-linear"}
    run = train(flags | save | {"--train-iters": 6, "--lr": 1e-2}, one_process=True)
    assert run.column("lm loss")[-1] < run.column("lm loss")[0]
    moments = [x for x in read(tmp_path) if x.startswith("optimizer.state.exp_avg.")]
    assert moments and all("_lora_" in name for name in moments)


def test_prediction_layers(flags):
    run = train(flags | {"--mtp-num-layers": 1, "--train-iters": 2}, one_process=True)
    assert run.column("mtp_1 loss")[0] == pytest.approx(run.column("lm loss")[0], rel=0.1)


@pytest.mark.ranks(2)
def test_from_the_shell(flags, tmp_path):
    flags = TINY | flags | CP2 | {"--train-iters": 1, "--data-cache-path": tmp_path}
    run = launch(flags, as_users_do=True, ranks=2)
    assert "--sft, no GPU" in run.log and "in the loss, the longest has" in run.log
    assert "> the first one, the loss between [[ and ]]: '<bos>" in run.log
    wrong = write_rows(tmp_path / "wrong.jsonl", [{"prompt": "a"}])
    run = launch(flags | {"--data-path": wrong}, as_users_do=True, ranks=2, check=False)
    assert run.returncode and f"{wrong}:1 must have either messages, or prompt and" in run.log


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"--tokenizer-type": "SFTTokenizer"},
            "--tokenizer-type must be HuggingFaceTokenizer with",
        ),
        ({"--mock-data": True, "--data-path": None}, "--mock-data is not supported with --sft"),
        ({"--eod-mask-loss": True}, "--eod-mask-loss is not supported with --sft"),
        ({"--sft-tokenizer-prompt-format": "identity"}, "--sft-tokenizer-prompt-format must be"),
        ({"--data-path": "nowhere.jsonl"}, "there is no file nowhere.jsonl"),
        ({"--data-path": None}, "no data: give --data-path"),
        ({"--sft": None, "--dsa-sft-long": "drop"}, "--dsa-sft-long drop has a meaning only with"),
        ({"--seq-length": 4}, "no conversation of .*chat.jsonl that fits --seq-length"),
        (CP2 | {"--dsa-cp-layout": "zigzag"}, "--dsa-cp-layout must be zigzag_rows"),
        ({"--micro-batch-size": 2} | PP2, "--micro-batch-size must be 1 with"),
    ],
)
def test_refusals(changes, message, flags):
    ranks = 2 if changes.keys() & {*CP2, *PP2} else 1
    run = train(flags | changes, ranks=ranks, one_process=ranks == 1, check=False)
    assert run.returncode == 2 and re.search(message, run.log), run.log[-2000:]
    assert "Traceback" not in run.log and not run.steps
