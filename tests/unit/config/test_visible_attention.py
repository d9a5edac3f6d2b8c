"""The choice between masked dense and dense attention, and its consumers."""

import pytest
import torch

from megatron_dsa.config.attention_choice import attention_of
from megatron_dsa.config.model import DSAOptions
from megatron_dsa.extras import info
from megatron_dsa.extras.cli import build_parser
from megatron_dsa.extras.planner.text import describe
from megatron_dsa.layers import warm_up
from megatron_dsa.layers.required_ops import required_ops
from megatron_dsa.ops import dispatch
from megatron_dsa.ops.masked_attention.api import MOST_KEPT
from megatron_dsa.ops.masked_attention.spec import BACKWARD, FORWARD, VISIBLE_BITS
from tests.host import attention_module, hidden_like, small_config, small_csa_config, start, stop
from tests.plans import BF16, only_chunk, plan

OPERATIONS = (VISIBLE_BITS, FORWARD, BACKWARD)


def choice(stage="dense", **options):
    changes = options.pop("config", {})
    return attention_of(small_config(options=DSAOptions(stage=stage, **options), **changes))


@pytest.mark.parametrize("stage", ["dense", "warmup"])
@pytest.mark.parametrize("length", [1, 4096, MOST_KEPT])
def test_masked_where_it_is_fused(fused, stage, length):
    found = choice(stage, sequence_length=length)
    assert not found.masked and "visible_bits is not fused here" in found.reason
    assert found.masked_up_to is None
    fused()
    found = choice(stage, sequence_length=length)
    assert found.masked and found.masked_up_to == MOST_KEPT
    assert found.reason == f"{length} tokens of a microbatch"


def test_what_stays_with_dense_attention(fused):
    fused()
    found = choice(sequence_length=MOST_KEPT + 1)
    assert not found.masked and found.masked_up_to == MOST_KEPT
    assert not choice(sequence_length=MOST_KEPT, packed_sequences=2).masked
    assert choice(sequence_length=MOST_KEPT // 2, packed_sequences=2).masked
    found = choice(sequence_length=64, interleaved_sequences=2)
    assert not found.masked and "alternate" in found.reason
    found = choice()
    assert not found.masked and "no sequence length" in found.reason
    found = choice(sequence_length=64, config={"context_parallel_size": 2})
    assert not found.masked and "context-parallel" in found.reason
    assert not choice(sequence_length=64, fused=False).masked


def test_a_named_implementation_is_what_runs(fused, monkeypatch):
    fused()
    named = (("dense_attention", "torch"),)
    found = choice(sequence_length=64, named=named)
    assert not found.masked and found.reason == "dense_attention=torch was asked for"
    assert choice(sequence_length=64, named=(("dense_attention", "auto"),)).masked
    found = choice(sequence_length=64, named=(("masked_attention_backward", "torch"),))
    assert not found.masked and "named by --dsa-impl" in found.reason
    monkeypatch.setenv("MEGATRON_DSA_IMPL", "dense_attention=torch")
    assert not choice(sequence_length=64).masked


@pytest.mark.parametrize("missing", [operation.name for operation in OPERATIONS])
def test_every_operation_has_to_be_fused(fused, missing):
    fused(*(op.name for op in OPERATIONS if op.name != missing))
    found = choice(sequence_length=64)
    assert not found.masked and missing in found.reason
    # A strict policy rejects implementations, not questions.
    assert not choice(sequence_length=64, strict=True).masked


def test_stages_and_models_that_select(fused):
    fused()
    options = DSAOptions(sequence_length=64)
    assert not attention_of(small_config(options=options)).masked
    assert "selected keys" in attention_of(small_config(options=options)).describe()
    for stage in ("dense", "sparse"):
        config = small_csa_config(4, options=DSAOptions(stage=stage, sequence_length=64))
        assert not attention_of(config).masked


def test_heads_of_a_rank_count(fused):
    """A rank's heads count, even if it would select for local tokens in stage sparse."""
    fused("visible_bits")
    fused("masked_attention_forward", "masked_attention_backward", heads=(2, 2))
    assert not choice(sequence_length=64).masked
    both = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    for mode in ("auto", "heads", "select", "sequence"):
        assert choice(sequence_length=64, config=both, tp_mode=mode).masked


def test_a_layer_runs_what_was_chosen_and_says_so(fused, monkeypatch, caplog):
    fused()
    monkeypatch.setattr(dispatch.choice_log, "_logged", set())
    caplog.set_level("INFO", "megatron_dsa.ops.dispatch")
    for length, kind in ((64, "masked_attention_forward"), (10**6, "dense_attention")):
        module = attention_module(small_config(options=DSAOptions("dense", sequence_length=length)))
        dispatch.reset_report()
        module(hidden_like(module, 20), None)[0].sum().backward()
        assert kind in dispatch.report()
    lines = [line for line in caplog.messages if "visible keys" in line]
    assert lines == [
        "visible keys: masked dense attention (64 tokens of a microbatch); masked up "
        f"to {MOST_KEPT} tokens",
        "visible keys: dense attention (1000000 tokens of a microbatch); masked up to "
        f"{MOST_KEPT} tokens",
    ]


@pytest.mark.parametrize("stage", ["dense", "warmup"])
def test_warm_up_runs_what_a_step_calls(add, monkeypatch, stage):
    """On the CPU instead of a GPU: every operation once, the dense loss with the step's keys."""
    start()
    ran = []

    def noting(name):
        return lambda torchs: lambda *args: ran.append((name, args)) or torchs(*args)

    names = [operation.name for operation in OPERATIONS]
    for name in [*names, "dense_indexer_loss"]:
        add(name, noting(name))
    options = DSAOptions(stage=stage, sequence_length=64)
    config = small_config(options=options, dtype=torch.float32, dsa_indexer_use_sparse_loss=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: None)
    ops = required_ops(config, 1, device="cuda")
    ropes = ("rotate", "index_rotation")
    calls = tuple((op.operation, op.call) for op in ops if op.operation not in ropes)
    monkeypatch.setattr(warm_up, "_DEVICE", "cpu")
    warm_up.warm_up.__wrapped__(calls, options.policy, 0.3)
    assert [name for name, _ in ran] == [name for name, _ in calls]
    if stage == "warmup":
        loss = ran[-1][1][0]
        assert loss.k.kv.shape[1:] == (4, 22) and loss.lse is not None


def test_plans_choose_for_their_gpu(fused):
    stop()  # plans need their own process groups
    flags = BF16 | {"--dsa-stage": "warmup", "--micro-batch-size": 1}
    before = plan(flags)
    fused(capabilities=((9, 0),))
    after = plan(flags)
    assert after.attention.masked and not before.attention.masked
    kinds = [layer.kind for layer in only_chunk(after).layers]
    assert all(kind.startswith("MLA (masked)") for kind in kinds)
    ran = {c.operation for layer in only_chunk(after).layers for c in layer.choices}
    assert {operation.name for operation in OPERATIONS} <= ran and "dense_attention" not in ran
    assert "visible keys: masked dense attention (96 tokens" in describe(after)
    assert "visible keys" not in describe(before)
    assert after.operations == before.operations
    again = plan(flags)
    assert only_chunk(again).kept == only_chunk(after).kept  # the bits count every time


def test_info_says_which(fused, capsys):
    (model,) = info.collect_info()["visible_attention"]
    assert model == "v3.2"
    assert "visible_bits" in info.collect_info()["operations"][model]
    fused()
    found = info.collect_info()
    assert found["visible_attention"][model]["masked_up_to_tokens"] == MOST_KEPT
    assert found["operations"][model]["visible_bits"]["runs"] == "made_up"
    assert "visible_bits" not in found["operations"]["v4-pro"]
    info.print_info(build_parser().parse_args(["info"]))
    assert "visible keys: dense attention (no sequence length is given)" in capsys.readouterr().out
