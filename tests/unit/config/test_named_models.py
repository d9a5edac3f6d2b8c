"""``--dsa-model``: flags of a named model, and overrides by the command line."""

import argparse
import re

import pytest

from tests.host import start, stop


def parse(*flags):
    start()
    from megatron.training.arguments import add_megatron_arguments

    from megatron_dsa.arguments import add_dsa_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    return add_dsa_arguments(add_megatron_arguments(parser)).parse_args(list(flags))


@pytest.mark.parametrize("name", ["v3.2", "glm-5", "glm-5.3-flash", "v4-flash", "v4-pro"])
def test_named_models_are_the_released_ones(name):
    from megatron_dsa.config.presets import MODELS, PRESETS, TINY, model_flags
    from megatron_dsa.extras.huggingface.config_json import parse_config
    from megatron_dsa.extras.huggingface.flags import flags_of
    from tests.cases.released_models import CONFIGS

    assert name in MODELS and set(MODELS) == set(TINY) | set(PRESETS)
    named = vars(parse(*model_flags(name)))
    released = vars(parse(*flags_of(parse_config(CONFIGS[name]))))
    default = vars(parse())
    said = {key for key, value in released.items() if value != default[key]}
    # V4's attention ignores it. Experts in every layer have two spellings.
    apart = {"kv_lora_rank", "moe_layer_freq"} if name.startswith("v4") else set()
    assert len(said) > 20 and all(named[key] == released[key] for key in said - apart)


@pytest.mark.parametrize("place", ["before", "behind"])
def test_the_users_flags_win_and_are_listed(place, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    model, own = ["--dsa-model=v3.2-tiny"], ["--num-layers", "2", "--hidden-size=128"]
    args = parse(*(own + model if place == "before" else model + own))
    assert (args.num_layers, args.hidden_size, args.q_lora_rank) == (2, 128, 64)
    assert args.dsa_model == "v3.2-tiny"
    sentence = "--num-layers is 2 by the command line, 4 in --dsa-model v3.2-tiny"
    assert args.dsa_model_changes == [sentence]  # the other one is no change
    first, *changes = capsys.readouterr().out.splitlines()
    assert first.startswith("> --dsa-model v3.2-tiny sets ") and "--q-lora-rank 64" in first
    assert changes == [f"> megatron_dsa {sentence}"]
    monkeypatch.setenv("RANK", "1")
    parse(*model, *own)
    assert not capsys.readouterr().out


def test_no_named_model_changes_nothing(capsys):
    args = parse("--num-layers", "2")
    assert args.dsa_model is None and not args.dsa_model_changes and not capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dsa-model", "v3"], "invalid choice: 'v3' .*v3.2-tiny.*v4-pro"),
        (["--dsa-model"], "expected one argument"),
        (["--dsa-model", "v3.2", "--dsa-model=glm-5"], "given 2 times"),
        (["--dsa-model", "v3.2", "--use-checkpoint-args"], "with --use-checkpoint-args which"),
        (["--dsa-model", "v3.2", "--yaml-cfg", "it"], "not allowed with --yaml-cfg"),
        (["--dsa-model", "v3.2", "--spec", "my.specs", "it"], "with --spec, other than"),
    ],
)
def test_models_that_are_refused(flags, message, capsys):
    with pytest.raises(SystemExit) as end:
        parse(*flags)
    assert end.value.code == 2 and re.search(message, capsys.readouterr().err)


def test_our_own_layer_specs_are_taken():
    args = parse("--dsa-model", "v3.2-tiny", "--spec", "megatron_dsa.specs", "dsa_block_spec")
    assert args.spec == ["megatron_dsa.specs", "dsa_block_spec"] and args.num_layers == 4


def test_a_plan_notes_what_changes_a_model():
    from megatron_dsa.config.gpus import GPUS
    from megatron_dsa.extras.planner.command import plan_of
    from megatron_dsa.extras.planner.text import describe

    stop()  # a plan needs its own process groups
    flags = "--dsa-model v3.2-tiny --num-layers 1 --seq-length 64 --vocab-size 257 --lr 1"
    flags += " --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --eval-interval 1"
    text = describe(plan_of(["pretrain", *flags.split()], 1, GPUS["h200"]))
    note = "note: --num-layers is 1 by the command line, 4 in --dsa-model v3.2-tiny"
    assert note in text.splitlines()
