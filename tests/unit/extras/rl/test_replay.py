"""Given selections: exact capture and replay, rejected indices."""

import os

import pytest
import torch
from torch.multiprocessing import ProcessExitedException

from megatron_dsa.config.model import DSAOptions
from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.rl.replay import IndexCapture, IndexReplay
from megatron_dsa.ops.common.autograd import in_backward
from megatron_dsa.ops.dispatch import report, reset_report
from megatron_dsa.ops.layout.positions import positions_to_indices
from tests.cases.layouts import shuffled
from tests.cases.models import CORE, MODELS, SELECTING, forward, full, gpt
from tests.host import attention_module, hidden_like, packed, small_config, start
from tests.processes import run_ranks


def step(model, seeds):
    """Run two microbatches in flight: both forwards, then the backwards in order."""
    model.zero_grad()
    losses = [forward(model, seed) for seed in seeds]
    for loss in losses:
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [loss.detach() for loss in losses], {n: g.clone() for n, g in gradients.items()}


def equal(one, other):
    assert all(a.equal(b) for a, b in zip(one[0], other[0], strict=True))
    assert one[1].keys() == other[1].keys()
    assert all(one[1][name].equal(other[1][name]) for name in one[1])


@pytest.mark.parametrize("recompute", [{}, full(1), full(2), CORE], ids=["", "1", "2", "core"])
@pytest.mark.parametrize("kind", MODELS)
def test_what_was_captured_replays_to_the_last_bit(kind, recompute):
    config, arguments, changes = MODELS[kind]
    model = gpt(config(*arguments, **changes, **recompute))
    capture = IndexCapture()
    with capture.on(model):
        expected = step(model, (1, 2))
    assert len(capture.microbatches) == 2
    assert sorted(capture.microbatches[0]) == SELECTING[kind]
    plain = step(model, (1, 2))
    equal(plain, expected)
    given = [{n: shuffled(x) for n, x in one.items()} for one in capture.microbatches]
    reset_report()
    again = IndexCapture()
    with IndexReplay(given).on(model), again.on(model):
        replayed = step(model, (1, 2))
    assert "indexer_topk" not in report() and "indexer_scores" not in report()
    equal(replayed, expected)
    for one, other in zip(again.microbatches, capture.microbatches, strict=True):
        assert all(one[layer].equal(other[layer]) for layer in other)
    equal(step(model, (1, 2)), expected)  # and nothing is left behind


@pytest.mark.parametrize("recompute", [{}, full(1), CORE], ids=["", "1", "core"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("coefficient", [0.7, 0.0])
def test_given_keys_are_attended_to_and_taught(kind, recompute, coefficient, monkeypatch):
    """Given keys must act like the indexer's selection, microbatch by microbatch; without a loss
    the indexer must not run.
    """
    from megatron_dsa.layers.core import CoreAttention

    config, arguments, changes = MODELS[kind]
    model = gpt(config(*arguments, **changes, **recompute, dsa_indexer_loss_coeff=coefficient))
    with IndexCapture().on(model) as own:
        selected = step(model, (1, 2))
    ratio, topk = (4 if kind == "hybrid" else 1), model.config.dsa_indexer_topk
    last = (torch.arange(64)[:, None] + 1) // ratio - 1 - torch.arange(topk - 1)
    first = torch.arange(topk - 1)
    first = torch.where(first < (torch.arange(64)[:, None] + 1) // ratio, first, -1)
    lists = [x.clamp_min(-1).int().to(start()) for x in (last, first)]
    given = [dict.fromkeys(SELECTING[kind], one) for one in lists]
    indexers = [m.indexer for m in model.modules() if getattr(m, "indexer", None) is not None]
    runs = []
    for indexer in indexers:
        indexer.register_forward_hook(lambda *_: runs.append(1))
    with IndexReplay(given).on(model):
        replayed = step(model, (1, 2))
    assert bool(runs) == bool(coefficient)
    assert not replayed[0][0].equal(selected[0][0]) and len(own.microbatches) == 2

    # Every layer's calls are in microbatch order, in forward and recomputed passes.
    calls, current = {}, []

    def instead(core, inputs, layout, ranks, compressed=None):
        width = core.config.dsa_indexer_topk
        keys = layout if compressed is None else compressed.layout
        place = calls.setdefault((in_backward(), id(current[-1])), iter(lists))
        return positions_to_indices(next(place), keys, width)

    monkeypatch.setattr(CoreAttention, "topk", instead)
    for core in (m for m in model.modules() if getattr(m, "selects", False)):
        of_dsa = ("forward_sparse", "forward_masked")
        for name in of_dsa if hasattr(core, of_dsa[0]) else ("forward",):

            def tracked(*args, core=core, original=getattr(core, name), **settings):
                current.append(core)
                return original(*args, **settings)

            monkeypatch.setattr(core, name, tracked)
    equal(step(model, (1, 2)), replayed)
    assert calls


def test_packed_batches_with_padding():
    module = attention_module(small_config()).train()
    packing = packed(5, 50, 17, padded_lengths=(8, 56, 24))
    x = hidden_like(module, 91)
    results = []
    capture = IndexCapture()
    with capture.on(module):
        results.append(gradients(module, x, packing))
    (selected,) = capture.microbatches
    selected[1][5:8] = 40  # padding
    with IndexReplay([selected]).on(module):
        results.append(gradients(module, x, packing))
    assert all(a.equal(b) for a, b in zip(*results, strict=True))


def gradients(module, x, packing=None):
    module.zero_grad()
    x.grad = None
    out, _ = module(x, None, packed_seq_params=packing)
    out.square().sum().backward()
    return [out.detach(), x.grad.clone()] + [p.grad.clone() for p in module.parameters()]


def test_chunks_of_an_interleaved_schedule():
    """Every layer needs its own queue: all microbatches pass one chunk before the next."""
    config = small_config(**CORE)
    chunks = [attention_module(config, layer_number=n, seed=n).train() for n in (1, 2)]
    inputs = [hidden_like(chunks[0], 64), hidden_like(chunks[0], 64).detach().flip(0)]

    def interleaved():
        for chunk in chunks:
            chunk.zero_grad()
        between = [chunks[0](x, None)[0] for x in inputs]
        outputs = [chunks[1](x, None)[0] for x in between]
        for out in outputs:
            out.square().sum().backward()
        return outputs + [p.grad.clone() for chunk in chunks for p in chunk.parameters()]

    with IndexCapture().on(chunks) as capture:
        expected = interleaved()
    first, second = capture.microbatches
    assert sorted(first) == [1, 2] and not first[2].equal(second[2])
    with IndexReplay([first, second]).on(chunks):
        assert all(a.equal(b) for a, b in zip(interleaved(), expected, strict=True))
    with IndexReplay([second, first]).on(chunks):
        assert not interleaved()[0].equal(expected[0])


def test_evaluation_needs_no_backward():
    model = gpt(small_config(options=DSAOptions(evaluate_indexer=True))).eval()
    with torch.no_grad():
        with IndexCapture().on(model) as capture:
            expected = forward(model, 1)
        with IndexReplay(capture.microbatches).on(model):
            assert forward(model, 1).equal(expected)


def captured(model):
    with IndexCapture().on(model) as capture:
        step(model, (1, 2))
    return capture.microbatches


def test_counts_that_do_not_fit_are_refused():
    model = gpt(small_config(**full(1)))
    given = captured(model)
    too_many = pytest.raises(ConfigError, match=r"layer\(s\) 1, 2 those of 1 microbatch.*add as")
    with too_many, IndexReplay([*given, given[0]]).on(model):
        step(model, (1, 2))
    too_few = pytest.raises(ConfigError, match="layer 1 runs a microbatch that has none")
    with too_few, IndexReplay(given[:1]).on(model):
        step(model, (1, 2))
    waiting = pytest.raises(ConfigError, match=r"layer\(s\) 1, 2 ran in training mode without")
    with waiting, IndexReplay(given[:1]).on(model), torch.no_grad():
        forward(model, 1)
    first = IndexReplay(given[:1])
    with first.on(model):
        loss = forward(model, 1)
        twice = pytest.raises(ConfigError, match="layer 1 has a replay already")
        with twice, IndexReplay(given).on(model):
            pass
        first.add(given[1])
        other = forward(model, 2)
        loss.backward()
        other.backward()
    assert all(getattr(m, "replay", None) is None for m in model.modules())


def test_recomputed_layers_outside_of_the_step_are_refused():
    model = gpt(small_config(**full(1)))
    given = captured(model)
    loss = forward(model, 1)
    late = pytest.raises(ConfigError, match="layer 2 is computed again in a backward pass")
    with late, IndexReplay(given[:1]).on(model):
        loss.backward()


WRONG = {
    "missing": (lambda given: {1: given[1]}, r"layer\(s\) 2 missing"),
    "unknown": (lambda given: given | {3: given[1]}, r"which layer\(s\) 3 of this model do not"),
    "wide": (lambda given: {n: x.repeat(1, 2) for n, x in given.items()}, "at most .* = 12 keys"),
    "dtype": (
        lambda given: {n: x.long() for n, x in given.items()},
        r"indices\[1\] must be an",
    ),
    "rows": (lambda given: {n: x[:9] for n, x in given.items()}, r"this rank \(64\) or of all"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_indices_are_refused(wrong):
    change, message = WRONG[wrong]
    model = gpt(small_config())
    (given, _) = captured(model)
    with pytest.raises(ConfigError, match=message), IndexReplay([change(given)]).on(model):
        forward(model, 1)
    assert all(getattr(m, "replay", None) is None for m in model.modules())


def replay_keys_that_are_not_seen():
    model = gpt(small_config())
    (given, _) = captured(model)
    with IndexReplay([{n: x.flip(0) for n, x in given.items()}]).on(model):
        forward(model, 1)


def test_indices_that_break_a_rule_are_refused():
    """On a GPU by an assertion, without synchronisation; no kernel may run after it."""
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"indices\[1\]: one of these"):
            replay_keys_that_are_not_seen()
        return
    with pytest.raises(ProcessExitedException) as ended:
        run_ranks(_until_the_assertion, (), 1)
    assert ended.value.exit_code == ASSERTION_FAILED


ASSERTION_FAILED = 17


def _until_the_assertion(rank):
    try:
        replay_keys_that_are_not_seen()
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "device-side assert" in str(error):
            os._exit(ASSERTION_FAILED)  # NCCL would wait for this GPU
        raise


@pytest.mark.parametrize("stage", ["dense", "warmup"])
def test_dense_stages_have_nothing_to_replay(stage):
    changes = {"dsa_indexer_use_sparse_loss": False} if stage == "warmup" else {}
    module = attention_module(small_config(options=DSAOptions(stage=stage), **changes))
    for what in (IndexReplay, IndexCapture):
        refused = pytest.raises(ConfigError, match=f"stage 'sparse' .* got --dsa-stage {stage}")
        with refused, what().on(module):
            pass


def test_a_layer_alone_may_have_any_number():
    module = attention_module(small_config(dsa_indexer_topk_freq=2), layer_number=7).train()
    assert module.core_attention.selects
    with IndexCapture().on(module) as capture:
        gradients(module, hidden_like(module, 64))
    assert list(capture.microbatches[0]) == [7]


def test_layers_of_multi_token_prediction_select_for_themselves():
    from megatron.core.transformer.spec_utils import build_module

    from megatron_dsa.specs import dsa_layer_spec

    config = small_config(mtp_num_layers=1)
    spec = dsa_layer_spec(config, is_mtp=True).submodules.self_attention
    module = build_module(spec, config=config, layer_number=1).to(start())
    with IndexCapture().on(module) as capture, IndexReplay().on(module):
        assert gradients(module, hidden_like(module, 64))[0].norm() > 0
    assert capture.microbatches == []


@pytest.mark.gpu
def test_no_host_synchronisation():
    module = attention_module(small_config(dtype=torch.bfloat16)).train()
    x = hidden_like(module, 96, 2)
    with IndexCapture().on(module) as first:
        expected = gradients(module, x)
    host = {1: shuffled(first.microbatches[0][1]).cpu().pin_memory()}
    for attempt in range(2):  # the first call loads kernels
        torch.cuda.set_sync_debug_mode("error" if attempt else "default")
        try:
            with IndexReplay([host]).on(module), IndexCapture().on(module) as second:
                replayed = gradients(module, x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert second.microbatches[0][1].equal(first.microbatches[0][1])
    assert replayed[0].equal(expected[0])
