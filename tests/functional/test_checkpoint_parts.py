"""Refusal of runs that would drop parts of their checkpoint's model, or compute them otherwise."""

import re

import pytest

from tests.functional.launch import train

SAVED = {
    "--num-layers": 2, "--linear-attention-freq": 2, "--linear-num-key-heads": 4,
    "--linear-num-value-heads": 4, "--linear-key-head-dim": 16, "--linear-value-head-dim": 16,
    "--kda-gate-lower-bound": -1.0, "--hc-mult": 2, "--softmax-type": "learnable",
    "--dsa-output-gate": True,
}  # fmt: skip
#: Changed flags -> what the refusal says.
CHANGED = {
    "--hc-mult": (None, "parameters hc_attn_fn, .* give --hc-mult above 1"),
    "--hc-collapse": ("mean", "parameters hc_head_fn, .* give --hc-collapse learned"),
    "--softmax-type": (None, "parameters attn_sink, .* give --softmax-type learnable"),
    "--dsa-output-gate": (None, "parameters linear_gate.weight, .* give --dsa-output-gate"),
    "--kda-gate-lower-bound": (None, "--kda-gate-lower-bound must be -1.0, as in checkpoint"),
}


@pytest.fixture(scope="module")
def saved(data, tmp_path_factory):
    """Flags of a run and of the checkpoint that it wrote."""
    flags = SAVED | {"--data-path": data, "--train-iters": 1}
    folder = tmp_path_factory.mktemp("saved")
    train(flags | {"--save": folder, "--save-interval": 1})
    return flags | {"--load": folder, "--finetune": True}


@pytest.mark.parametrize("flag", CHANGED)
def test_a_changed_flag_is_refused(flag, saved):
    value, message = CHANGED[flag]
    run = train(saved | {flag: value}, check=False)
    assert run.returncode == 2 and not run.steps and "Traceback" not in run.log, run.log
    assert re.search(message, run.log), run.log


def test_the_same_flags_are_taken(saved):
    assert len(train(saved).steps) == 1
