"""``examples/continue_small.sh``: a checkpoint of transformers, trained and exported."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.cases.launch_scripts import EXAMPLES
from tests.functional.launch import REPOSITORY
from tests.processes import python_path

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")


@pytest.mark.parametrize("model", ["glm-5", "v3.2", "v4"])
def test_a_checkpoint_is_continued_and_exported(model, tmp_path, python):
    variables = {"PYTHON": python, "RUN_DIR": str(tmp_path), "STEPS": "2 4 12", "MODEL": model}
    done = subprocess.run(
        [EXAMPLES / "continue_small.sh"],
        env=os.environ | {"PYTHONPATH": python_path(), "MASTER_PORT": "0"} | variables,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "checkpoint")
    questions = tmp_path / "some.jsonl"
    some = (tmp_path / "chat.jsonl").read_text().splitlines()[::20]
    questions.write_text("\n".join(some) + "\n")

    def command(*arguments) -> str:
        call = [python, "-m", "megatron_dsa", *map(str, arguments)]
        done = subprocess.run(call, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    trained = command("evaluate", "--load", tmp_path / "sft", "--data-path", questions)
    # transformers reads fp8 on a GPU only.
    command("import-hf", "--input", tmp_path / "exported-fp8", "--output", tmp_path / "again")
    back = ("--config", tmp_path / "checkpoint", "--output", tmp_path / "from-fp8")
    command("export-hf", "--input", tmp_path / "again", *back)
    before, after, fp8 = (
        answer_loss(tmp_path / name, tokenizer, [json.loads(line)["messages"] for line in some])
        for name in ("checkpoint", "exported", "from-fp8")
    )
    assert after < before - 1
    assert after == pytest.approx(float(re.search(r"loss ([\d.]+)", trained)[1]), rel=1e-3)
    assert fp8 == pytest.approx(after, rel=0.02) and fp8 != after


def answer_loss(folder: Path, tokenizer, conversations: list) -> float:
    """Return the mean loss of all answer tokens, each conversation separately."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    total, count = 0.0, 0
    with torch.no_grad():
        for messages in conversations:
            whole = tokenizer.apply_chat_template(messages, return_dict=False)
            asked = tokenizer.apply_chat_template(
                messages[:-1], add_generation_prompt=True, return_dict=False
            )
            assert whole[: len(asked)] == asked
            ids = torch.tensor([whole[:256]])
            labels = ids[:, len(asked) :]
            logits = model(ids).logits[:, len(asked) - 1 : -1]
            total += float(torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum"))
            count += labels.numel()
    return total / count
