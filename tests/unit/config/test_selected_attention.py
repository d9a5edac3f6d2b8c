"""The choice between sparse and masked dense attention, and its consumers."""

import pytest
import torch

from megatron_dsa.config.attention_choice import MASKED_OPERATIONS as OPERATIONS
from megatron_dsa.config.attention_choice import attention_of
from megatron_dsa.config.model import DSAOptions
from megatron_dsa.errors import ConfigError
from megatron_dsa.extras import info
from megatron_dsa.extras.cli import build_parser
from megatron_dsa.extras.planner.text import describe
from megatron_dsa.layers import warm_up
from megatron_dsa.layers.required_ops import required_ops
from megatron_dsa.ops import dispatch
from megatron_dsa.training.model import print_start_table
from tests.host import attention_module, hidden_like, small_config, small_csa_config, start, stop
from tests.plans import BF16, only_chunk, plan

#: The small configuration (12 keys, 4 heads) prefers masked dense attention up to this length.
CROSSOVER = 74


def choice(**options):
    changes = options.pop("config", {})
    return attention_of(small_config(options=DSAOptions(**options), **changes))


@pytest.mark.parametrize("length", [1, 12, 40, CROSSOVER])
def test_masked_where_it_is_fused_and_cheaper(fused, length):
    assert not choice(sequence_length=length).masked
    fused()
    found = choice(sequence_length=length)
    assert found.masked and found.masked_up_to == CROSSOVER
    assert found.reason == f"sequences of {length} tokens, 4 heads on a rank"


def test_sparse_for_long_sequences(fused):
    fused()
    found = choice(sequence_length=CROSSOVER + 1)
    assert not found.masked and found.masked_up_to == CROSSOVER
    assert not choice(sequence_length=40, interleaved_sequences=3).masked
    assert choice(sequence_length=40, selected_attention="masked").masked
    assert choice(sequence_length=10**6, selected_attention="masked").masked
    assert not choice(sequence_length=40, selected_attention="sparse").masked


def test_a_configuration_without_a_length_stays_sparse(fused):
    fused()
    found = choice()
    assert not found.masked and "no sequence length" in found.reason


@pytest.mark.parametrize("missing", [operation.name for operation in OPERATIONS])
def test_every_operation_has_to_be_fused(fused, missing):
    fused(*(op.name for op in OPERATIONS if op.name != missing))
    found = choice(sequence_length=40)
    assert not found.masked and missing in found.reason and found.masked_up_to is None
    # A strict policy rejects implementations, not questions.
    assert not choice(sequence_length=40, strict=True).masked


def test_what_does_not_ask_for_fused_kernels_stays_sparse(fused):
    fused()
    assert not choice(sequence_length=40, fused=False).masked
    named = (("masked_attention_backward", "torch"),)
    found = choice(sequence_length=40, named=named)
    assert not found.masked and "named by --dsa-impl" in found.reason


def test_kernels_that_never_ran_on_the_gpu_are_not_taken(fused):
    with dispatch.meta_dispatch((9, 0)):
        fused(capabilities=((9, 0), (10, 0)), not_run=((10, 0),))
        assert choice(sequence_length=40).masked
    with dispatch.meta_dispatch((10, 0)):
        found = choice(sequence_length=40)
    assert not found.masked and "not run on one" in found.reason


BY_HEADS = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def test_what_ranks_divide(fused):
    fused()
    found = choice(sequence_length=40, config=BY_HEADS, tp_mode="heads")
    assert found.masked and "2 heads on a rank" in found.reason
    found = choice(sequence_length=40, config=BY_HEADS)
    assert found.masked and "2 heads on a rank" in found.reason
    # Masked attention would repeat a dense loss on every rank.
    dense_loss = BY_HEADS | {"dsa_indexer_use_sparse_loss": False}
    for mode, config in (("sequence", BY_HEADS), ("auto", dense_loss)):
        found = choice(sequence_length=40, config=config, tp_mode=mode)
        assert not found.masked and "by sequence" in found.reason


def test_keys_of_other_ranks_count(fused):
    fused()
    found = choice(sequence_length=40, config={"context_parallel_size": 2})
    assert found.masked and CROSSOVER > found.masked_up_to > 40
    assert found.reason == (
        "sequences of 40 tokens, 4 heads on a rank, which makes keys of the latents of 2"
    )
    found = choice(sequence_length=40, config={"context_parallel_size": 64})
    assert not found.masked and found.masked_up_to == 0 and "of the latents of 64" in found.reason
    asked = choice(selected_attention="masked", config={"context_parallel_size": 64})
    assert asked.masked


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        (BY_HEADS, {"tp_mode": "sequence"}, "--dsa-tp-mode must not be sequence"),
        ({}, {"recompute": "latent_output"}, "--dsa-recompute must be nothing"),
    ],
)
def test_where_it_cannot_be_asked_for(changes, options, message):
    with pytest.raises(ConfigError, match=f"{message} with --dsa-selected-attention masked"):
        small_config(options=DSAOptions(selected_attention="masked", **options), **changes)
    small_config(options=DSAOptions(**options), **changes)


def test_v4_refuses_it():
    with pytest.raises(ConfigError, match=r"--csa-compress-ratios must be unset with --dsa-sel"):
        small_csa_config(4, options=DSAOptions(selected_attention="masked"))


@pytest.mark.parametrize("name", ["sequence_length", "interleaved_sequences", "packed_sequences"])
def test_sizes_are_positive(name):
    with pytest.raises(ConfigError, match=f"DSAOptions.{name} must be at least 1, got 0"):
        DSAOptions(**{name: 0})


def test_a_layer_runs_what_was_chosen_and_says_so(fused, monkeypatch, caplog):
    fused()
    monkeypatch.setattr(dispatch.choice_log, "_logged", set())
    caplog.set_level("INFO", "megatron_dsa.ops.dispatch")
    for length, kind in ((40, "masked"), (10**6, "sparse")):
        module = attention_module(small_config(options=DSAOptions(sequence_length=length)))
        dispatch.reset_report()
        module(hidden_like(module, 20), None)[0].sum().backward()
        ran = dispatch.report()
        assert {name for name in ran if "_attention_backward" in name} == {
            f"{kind}_attention_backward"
        }
    lines = [line for line in caplog.messages if "selected keys" in line]
    assert lines == [
        "selected keys: masked dense attention (sequences of 40 tokens, 4 heads on a "
        "rank); masked is cheaper up to about 74 tokens",
        "selected keys: sparse attention (sequences of 1000000 tokens, 4 heads on a "
        "rank); masked is cheaper up to about 74 tokens",
    ]


@pytest.mark.parametrize("loss", [0.7, 0.0])
def test_warm_up_runs_what_a_step_calls(add, monkeypatch, loss):
    """On the CPU instead of a GPU: every operation once, with the step's list width."""
    start()
    ran = []

    def noting(name):
        return lambda torchs: lambda *args: ran.append((name, args)) or torchs(*args)

    for operation in OPERATIONS:
        add(operation.name, noting(operation.name))
    options = DSAOptions(selected_attention="masked")
    config = small_config(options=options, dtype=torch.float32, dsa_indexer_loss_coeff=loss)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: None)
    ops = required_ops(config, 1, device="cuda")
    others = ("indexer", "rotat")  # rotations compile quickly
    calls = tuple(
        (op.operation, op.call) for op in ops if not any(x in op.operation for x in others)
    )
    monkeypatch.setattr(warm_up, "_DEVICE", "cpu")
    warm_up.warm_up.__wrapped__(calls, options.policy, 0.3)
    assert {name for name, _ in ran} == {name for name, _ in calls}
    lists, inputs = ran[0][1][0], ran[1][1][0]
    assert lists.indices.shape[1] == 12 and lists.num_keys == len(inputs.k_pe)
    assert inputs.q.shape[1:] == (4, 20) and inputs.v_dim == 10


def test_plans_choose_for_their_gpu(fused):
    stop()  # plans need their own process groups
    flags = BF16 | {"--dsa-indexer-topk": 32}  # of 96 tokens
    before = plan(flags)
    fused(capabilities=((9, 0),))
    after = plan(flags)
    long = plan(flags | {"--dsa-indexer-topk": 4})
    assert after.attention.masked and not before.attention.masked
    kinds = [layer.kind for layer in only_chunk(after).layers]
    assert all(kind.startswith("DSA (masked)") for kind in kinds)
    ran = {c.operation for layer in only_chunk(after).layers for c in layer.choices}
    assert {operation.name for operation in OPERATIONS} <= ran
    assert not any(name.startswith("sparse_attention") for name in ran)
    assert "selected keys: masked dense attention" in describe(after)
    assert "selected keys" not in describe(before)
    assert not long.attention.masked and long.attention.masked_up_to < 96
    assert "selected keys: sparse attention (sequences of 96 tokens" in describe(long)
    assert only_chunk(after).kept != only_chunk(before).kept
    assert after.operations["attention"] != before.operations["attention"]


def test_info_says_which(fused, capsys):
    (model,) = info.collect_info()["selected_attention"]
    assert model == "v3.2"
    fused()
    found = info.collect_info()
    assert 14000 < found["selected_attention"][model]["masked_up_to_tokens"] < 15000
    assert found["operations"][model]["masked_attention_forward"]["runs"] == "made_up"
    assert "masked_attention_forward" not in found["operations"]["v4-pro"]
    info.print_info(build_parser().parse_args(["info"]))
    out = capsys.readouterr().out
    assert "selected keys: sparse attention (no sequence length is given); masked is" in out
    assert "cheaper up to about 14k tokens" in out


def test_the_table_at_start_up_says_which(capsys):
    start()
    candidate = dispatch.Candidate("torch", "", dispatch.Support(""), fused=False)
    chosen = dispatch.Choice("one", candidate)
    found = choice(selected_attention="masked")
    print_start_table([chosen], found)
    assert capsys.readouterr().out.splitlines()[-1] == f"> megatron_dsa {found.describe()}"
    print_start_table([chosen])
    assert "selected keys" not in capsys.readouterr().out
