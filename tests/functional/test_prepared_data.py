"""Training on data of ``prepare-data`` with a Hugging Face tokenizer: blends, splits, rejected
data.
"""

import json
import math
import re

import pytest

from megatron_dsa.extras import cli
from megatron_dsa.extras.prepare_data.inputs import python_documentation
from tests.cases.tokenizers import write_tokenizer
from tests.functional.launch import TINY, launch

VOCABULARY = 600


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Return flags of a tokenizer, and prefixes of data sets, the last two small."""
    folder = tmp_path_factory.mktemp("prepared")
    texts = python_documentation()
    tokenizer = write_tokenizer(folder / "tokenizer", texts, VOCABULARY)
    prefixes = []
    for name, part in (("a", texts[:40]), ("b", texts[40:]), ("c", texts[:2]), ("d", texts[2:4])):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in part)
        (folder / f"{name}.jsonl").write_text(lines)
        prefixes.append(str(folder / name))
        cli.main([
            "prepare-data", "--tokenizer", str(tokenizer), "--append-eod", "--workers", "2",
            "--input", str(folder / f"{name}.jsonl"), "--output", prefixes[-1],
        ])  # fmt: skip
    flags = TINY | {"--vocab-size": None, "--padded-vocab-size": None}
    flags |= {"--tokenizer-type": "HuggingFaceTokenizer", "--tokenizer-model": tokenizer}
    return flags | {"--make-vocab-size-divisible-by": 8}, prefixes


def test_a_blend_with_validation(prepared, tmp_path):
    flags, (a, b, *_) = prepared
    flags = flags | {"--data-path": ["0.3", a, "0.7", b], "--split": "90,10,0", "--eval-iters": 2}
    saved = {"--save": tmp_path, "--save-interval": 100, "--train-iters": 6}
    run = launch(flags | saved)
    losses = run.column("lm loss")
    assert (
        losses[0] == pytest.approx(math.log(VOCABULARY), rel=0.1) and losses[-1] < losses[0] - 0.5
    )
    assert "validation loss at iteration 6" in run.log
    text = launch(
        {"generate": True, "--load": tmp_path, "--prompt": "An expression", "--tokens": 4},
        module="megatron_dsa",
    ).log.splitlines()[-1]
    assert "An expression" in text


def test_full_validation_on_two_sets(prepared):
    flags, (a, *_, c, d) = prepared
    sets = {"--train-data-path": a, "--valid-data-path": [c, d], "--split": None}
    sets |= {"--multiple-validation-sets": True, "--full-validation": True, "--train-iters": 1}
    run = launch(flags | sets | {"--eval-iters": 1})
    losses = re.findall(r"validation-(\d) loss at iteration 1.*lm loss value: (\S+)", run.log)
    assert [name for name, _ in losses] == ["0", "1"] and losses[0][1] != losses[1][1], run.log


def test_a_tokenizer_that_is_not_the_data_s(prepared):
    flags, (a, *_) = prepared
    run = launch(flags | TINY | {"--data-path": a, "--tokenizer-model": None}, check=False)
    assert run.returncode == 2
    assert "and the vocabulary has 257 tokens: give the tokenizer that the data was" in run.log


def test_a_tokenizer_that_is_not_there(prepared):
    flags, (a, *_) = prepared
    missing = {"--data-path": a, "--tokenizer-model": "/nowhere/tokenizer"}
    run = launch(flags | missing, check=False)
    assert run.returncode == 2 and "Traceback" not in run.log
    assert "error: no tokenizer can be read from /nowhere/tokenizer: give a folder" in run.log
