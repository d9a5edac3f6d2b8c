"""``--dsa-indexer-teacher served``: an indexer learns the mean of all layers that it serves."""

import dataclasses
import functools

import pytest
import torch

from megatron_dsa.config.model import DSAOptions
from megatron_dsa.errors import ConfigError
from megatron_dsa.layers import dsa_core
from megatron_dsa.layers.dsa_core import TopKIndices
from megatron_dsa.ops.indexer_loss import sample
from megatron_dsa.ops.indexer_loss.shared import SharedSelection
from tests.cases.calls import of_any_batch, recorded_calls
from tests.cases.layers import DSA, PACKED, RECOMPUTED, in_small_blocks
from tests.cases.log import empty_log, forget_log, logged, logged_of_first
from tests.cases.models import CORE, forward, full, gpt
from tests.helpers import relative_error
from tests.host import (
    attention_module,
    hidden_like,
    packed,
    small_config,
    start,
    v32_config,
)
from tests.ranks import build_two, check_parts, spawn, summed_gradients
from tests.reference import dsa_float64 as reference
from tests.reference.shapes import dsa_shape

TOLERANCE = 3e-6  # Megatron's rope angles are fp32
TOKENS, NUMBER, SHARE = 96, 70, 0.5
#: Layer 1 selects for all.
SHARING = {"num_layers": 3, "dsa_indexer_topk_freq": 3, "dsa_indexer_skip_topk_offset": 1}
SERVED = DSAOptions(indexer_teacher="served", health_tokens=0)
MASKED = dataclasses.replace(SERVED, selected_attention="masked")
OPTIONS = {"absorbed": SERVED, "masked": MASKED}
OVERLAP = {
    "overlap_moe_expert_parallel_comm": True, "expert_model_parallel_size": 2, "bf16": True,
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16,
    "moe_token_dispatcher_type": "alltoall",
}  # fmt: skip
FROZEN = {"dsa_indexer_loss_coeff": 0.0}


def run_layers(modules, x, packing=None):
    """Run attentions in order; return their inputs and the last output."""
    modules[0].hands_on_selection = True
    inputs, context = [], None
    for module in modules:
        inputs.append(x)
        if context is not None:
            module.shared_selection = TopKIndices.unpack(context)
        x = x + module(x, None, packed_seq_params=packing)[0]
        if context is None:
            context = modules[0].used_selection.pack()
    return inputs, x


def layers_of(config, count=3):
    numbers = range(1, count + 1)
    return [attention_module(config, number, seed=number).train() for number in numbers]


def attention_probabilities(weights, x, shape, selected):
    """Return the mean over heads of the softmax over the selected keys, ``[S, S]``."""
    _, q_nope, q_pe, c_kv, k_pe = reference.mla_inputs(weights, x, shape)
    up = (c_kv @ weights["linear_kv_up_proj.weight"].T).view(len(x), shape.heads, -1)
    scores = torch.einsum("thd,shd->hts", q_nope, up[..., : shape.nope])
    scores = (scores + torch.einsum("thd,sd->hts", q_pe, k_pe)) * shape.softmax_scale
    return reference.masked_softmax(scores, selected).mean(0)


def expected_training(config, modules, inputs, sequences, tokens, factor, given=None):
    """Return the loss of ``tokens`` and its indexer gradients in float64.

    ``given``: bool mask of one sequence's selected keys, by default the indexer's.
    """
    shape = dsa_shape(config)
    weights = [
        {name: p.detach().cpu().double() for name, p in module.named_parameters()}
        for module in modules
    ]
    trained = {n: p.requires_grad_() for n, p in weights[0].items() if ".indexer." in n}
    of_tokens = []
    for sequence in sequences:
        x = [each.detach().cpu().double()[sequence, 0] for each in inputs]
        qr = reference.mla_inputs(weights[0], x[0], shape)[0]
        parts = reference.indexer_inputs(weights[0], x[0], qr, shape)
        causal = reference.causal_mask(len(x[0]))
        scores = reference.indexer_scores(*parts, shape.index_relu)
        scores = scores.masked_fill(~causal, -torch.inf)
        selected = reference.select(scores, shape.topk) if given is None else given
        teachers = [
            attention_probabilities(of_layer, each, shape, selected)
            for of_layer, each in zip(weights, x, strict=True)
        ]
        loss = reference.kl_loss_rows(scores, sum(teachers) / len(teachers), selected)
        whole = torch.zeros(len(inputs[0]), dtype=torch.float64)
        of_tokens.append(whole.index_put((sequence,), loss))
    loss = sum(of_tokens)[tokens].sum() * factor
    real = sum(len(sequence) for sequence in sequences)
    loss = config.dsa_indexer_loss_coeff / real * loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in trained.items()}


@pytest.fixture
def log():
    empty_log(3, start())
    yield
    forget_log()


@pytest.mark.parametrize("share", [1.0, SHARE])
@pytest.mark.parametrize("rows", ["one", "packed"])
@pytest.mark.parametrize("name", ["absorbed", "absorbed in blocks", "masked", "masked in blocks"])
def test_loss_and_gradients_are_of_the_mean_teacher(name, rows, share, monkeypatch, log):
    options = dataclasses.replace(OPTIONS[name.split()[0]], indexer_loss_queries=share)
    if len(name.split()) > 1:
        options = in_small_blocks(options)
    if share < 1:
        number = torch.tensor(NUMBER, device=start())
        monkeypatch.setattr(dsa_core, "draw_number", lambda *_: number)
    config = small_config(options=options, **SHARING)
    modules = layers_of(config)
    x = hidden_like(modules[0], TOKENS)
    sequences, packing = [torch.arange(TOKENS)], None
    if rows == "packed":  # with padding after each document, and after the last one
        lengths, padded = (30, 3, 33), (32, 8, 40)
        packing = packed(*lengths, padded_lengths=padded)
        begins = (0, 32, 40)
        sequences = [b + torch.arange(n) for b, n in zip(begins, lengths, strict=True)]
    inputs, out = run_layers(modules, x, packing)
    generator = torch.Generator().manual_seed(5)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    out.backward(weights.to(out))
    tokens, factor = torch.arange(TOKENS), 1.0
    if share < 1:
        taken = sample.sampled_tokens(TOKENS, 64, torch.tensor(NUMBER))
        tokens, factor = taken.tokens, taken.factor
    loss, gradients = expected_training(config, modules, inputs, sequences, tokens, factor)
    assert logged()["indexer loss", 0] == pytest.approx(float(loss), rel=1e-5)
    assert {layer for _, layer in logged()} <= {0}
    found = {n: p.grad for n, p in modules[0].named_parameters() if ".indexer." in n}
    assert found.keys() == gradients.keys()
    for parameter, gradient in gradients.items():
        assert gradient.norm() > 0
        assert relative_error(found[parameter], gradient) < TOLERANCE, parameter
    assert not any(".indexer." in n for module in modules[1:] for n, _ in module.named_parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("share", [1.0, 0.25])
@pytest.mark.parametrize("attention", ["sparse", "masked"])
def test_kernels_of_v3_2(attention, share, monkeypatch, log):
    count = 512
    number = torch.tensor(NUMBER, device=start())
    monkeypatch.setattr(dsa_core, "draw_number", lambda *_: number)
    options = dataclasses.replace(
        SERVED, selected_attention=attention, sequence_length=count, indexer_loss_queries=share
    )
    config = v32_config(options, **SHARING, dsa_indexer_topk=128)
    config.dsa_indexer_loss_coeff = 1.0
    modules = layers_of(config)
    inputs, out = run_layers(modules, hidden_like(modules[0], count))
    selected = torch.zeros(count, count, dtype=torch.bool)
    for query, (keys, length) in enumerate(zip(*modules[0].used_selection[:2], strict=True)):
        selected[query, keys[:length].long().cpu()] = True
    out.float().square().mean().backward()
    tokens, factor = torch.arange(count), 1.0
    if share < 1:
        taken = sample.sampled_tokens(count, sample.sample_size(count, share), number.cpu())
        tokens, factor = taken.tokens, taken.factor
    found = {n: p.grad for n, p in modules[0].named_parameters() if ".indexer." in n}
    errors = {}
    for layers in (3, 1):
        sequence = [torch.arange(count)]
        _, gradients = expected_training(
            config, modules[:layers], inputs[:layers], sequence, tokens, factor, selected
        )
        errors[layers] = {name: relative_error(found[name], x) for name, x in gradients.items()}
    # At most 0.05 in torch on the CPU; another teacher changes the linears by 0.26 to 0.32.
    assert all(error < 0.1 for error in errors[3].values()), errors
    linears = [name for name in errors[1] if ".linear_" in name]
    assert len(linears) == 3 and all(errors[3][x] < errors[1][x] / 4 for x in linears), errors


def gradients_of(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def step(model, seeds=(5,), order=None):
    """Run forward passes, then their backward passes; return losses and gradients."""
    model.zero_grad()
    losses = []
    for seed in seeds:
        torch.manual_seed(seed)  # draws the query tokens
        losses.append(forward(model, seed))
    for index in order or range(len(losses)):
        losses[index].backward()
    return [float(loss) for loss in losses], gradients_of(model)


def check_gradients(got, wanted, tolerance=1e-12):
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert relative_error(got[name], gradient) < tolerance, name


def model_of(options, **changes):
    changes = SHARING | {"num_layers": 4} | changes  # layer 4 serves itself only
    return gpt(small_config(options=options, **changes))


@pytest.mark.parametrize("share", [1.0, 0.9])
@pytest.mark.parametrize("options", [SERVED, MASKED], ids=["absorbed", "masked"])
@pytest.mark.parametrize(
    "recompute", [full(1), full(2), full(4), CORE, RECOMPUTED], ids=lambda x: str(list(x.values()))
)
def test_recomputed_layers_learn_the_same(recompute, options, share, monkeypatch):
    monkeypatch.setattr(sample, "TILE", 16)  # 48 of 64 tokens
    options = dataclasses.replace(options, indexer_loss_queries=share)
    losses, wanted = step(model_of(options))
    found, got = step(model_of(options, **recompute))
    assert found == pytest.approx(losses, rel=1e-12)
    check_gradients(got, wanted)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("options", [SERVED, MASKED], ids=["absorbed", "masked"])
def test_microbatches_in_flight_are_kept_apart(options, order, monkeypatch):
    monkeypatch.setattr(sample, "TILE", 16)
    options = dataclasses.replace(options, indexer_loss_queries=0.5)
    model = model_of(options, num_layers=3)  # all draw in the forward pass
    parts = [{name: x.clone() for name, x in step(model, (seed,))[1].items()} for seed in (5, 6)]
    _, both = step(model, (5, 6), order)
    check_gradients(both, {name: x + parts[1][name] for name, x in parts[0].items()})


def test_layers_that_serve_none_learn_their_own_teacher():
    """So must layers of multi-token prediction; attention's gradients stay the same."""
    found = []
    for teacher in ("own", "served"):
        options = dataclasses.replace(SERVED, indexer_teacher=teacher)
        found.append(step(model_of(options, mtp_num_layers=1))[1])
    own, served = found
    assert own.keys() == served.keys()
    changed = {name for name, x in own.items() if relative_error(served[name], x) > 1e-10}
    assert changed == {name for name in own if "decoder.layers.0." in name and ".indexer." in name}
    assert {n for n in own if "decoder.layers.3." in n and ".indexer." in n} and any(
        "mtp" in name and ".indexer." in name for name in own
    )


def test_evaluation_measures_the_teacher_of_its_own_layer(log):
    figures = []
    for teacher in ("own", "served"):
        options = dataclasses.replace(SERVED, indexer_teacher=teacher, evaluate_indexer=True)
        with torch.no_grad():
            forward(model_of(options, num_layers=3).eval(), 5)
        figures.append(logged())
    assert figures[0] == figures[1] and figures[0]


@pytest.mark.parametrize("options", [SERVED, MASKED], ids=["absorbed", "masked"])
def test_a_frozen_indexer_has_no_loss(options):
    wanted, got = (
        step(model_of(dataclasses.replace(options, indexer_teacher=teacher), **FROZEN))
        for teacher in ("own", "served")
    )
    assert got[0] == wanted[0] and not any(".indexer." in name for name in got[1])
    check_gradients(got[1], wanted[1])


def test_only_the_indexers_are_trained_of_a_frozen_model():
    """The loss runs in the attention's backward, even without other gradients."""
    wanted = step(model_of(SERVED))[1]
    model = model_of(SERVED)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".indexer." in name or "layers.0.input_layernorm" in name)
    got = {name: x for name, x in step(model)[1].items() if ".indexer." in name}
    check_gradients(got, {name: x for name, x in wanted.items() if ".indexer." in name})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dsa_indexer_use_sparse_loss": False}, "--dsa-indexer-use-sparse-loss is required with"),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl must not be local with --dsa-indexer-t"),
        (OVERLAP, "--overlap-moe-expert-parallel-comm is not supported with --dsa-indexer-teacher"),
    ],
)
def test_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        small_config(options=SERVED, **SHARING | changes)


def test_graphs_of_an_iteration_are_not_refused():
    small_config(options=SERVED, cuda_graph_impl="full_iteration", **SHARING)


def test_a_packed_selection():
    generator = torch.Generator().manual_seed(1)
    indices = torch.randint(-1, 2**31 - 1, (5, 7), generator=generator).int()
    selection = SharedSelection(indices, torch.arange(5).int(), torch.tensor([2**30]))
    for dtype in (torch.float32, torch.float64):
        found = SharedSelection.unpack(selection.pack(dtype))
        assert found.indices.equal(indices.to(found.indices.dtype))
        assert found.length.tolist() == [0, 1, 2, 3, 4] and found.drawn.tolist() == [2**30]
        empty = SharedSelection(indices[:0], selection.length[:0], selection.drawn).pack(dtype)
        assert SharedSelection.unpack(empty).indices.shape == (0, 7)


PAIR = SHARING | {"num_layers": 2}
#: Layout of tokens, then fields of the case.
CASES = {
    "zigzag": ("zigzag", {}),
    "contiguous, two sequences": ("contiguous", {"batch": 2}),
    "packed": ("zigzag", PACKED),
    "recomputed": ("zigzag", {"changes": RECOMPUTED}),
    # Of ranks with the same query tokens, drawn by the first one.
    "half of the queries": ("zigzag", {}),
}
GRIDS = [
    ("sparse", 2, 1, "heads"), ("sparse", 2, 1, "sequence"), ("sparse", 1, 2, "heads"),
    ("sparse", 2, 2, "sequence"), ("masked", 2, 1, "heads"), ("masked", 2, 1, "select"),
    ("masked", 1, 2, "heads"), ("masked", 2, 2, "select"),
]  # fmt: skip


def _run_layers(case, tp, cp):
    from megatron_dsa.layers.required_ops import called_ops

    first, second, x, packing = build_two(case, tp, cp)
    torch.manual_seed(torch.distributed.get_rank())
    with recorded_calls() as ran:
        _, out = run_layers((first, second), x, packing)
        out.square().sum().backward()
    declared = [
        each
        for core in (first.core_attention, second.core_attention)
        for each in called_ops(core.required_ops(), core.options.policy)
    ]
    gradients = summed_gradients(torch.nn.ModuleList((first, second)), tp, cp)
    return {
        "out": out.detach(), "dx": x.grad, "gradients": gradients,
        "loss": logged_of_first()["indexer loss"],
        "undeclared": of_any_batch(ran) ^ of_any_batch(declared),
    }  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """``results(attention, tp, cp, mode)``: results of every rank."""

    @functools.cache
    def found(attention, tp, cp, mode):
        cases = {}
        for name, (cp_layout, fields) in CASES.items():
            if "half" in name and (cp, mode) != (1, "heads"):
                continue  # ranks draw different query tokens
            options = DSAOptions(
                indexer_teacher="served", selected_attention=attention, cp_layout=cp_layout,
                tp_mode=mode, health_tokens=0, indexer_loss_queries=0.5 if "half" in name else 1.0,
            )  # fmt: skip
            changes = fields.get("changes", {}) | PAIR | {"options": options}
            fields = fields | {"changes": changes}
            cases[name] = dataclasses.replace(DSA, cp_layout=cp_layout, **fields)
        return cases, spawn(_run_layers, cases, tp, tmp_path_factory.mktemp(mode), cp)

    return found


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_ranks_equal_one(name, grid, results):
    attention, tp, cp, _ = grid
    cases, several = results(*grid)
    if name not in cases:
        pytest.skip("ranks draw query tokens of their own")
    (one,) = results(attention, 1, 1, "heads")[1]
    ranks, one = [rank[name] for rank in several], one[name]
    check_parts(cases[name], one, ranks, 1e-12, tp, cp)
    for each in (*ranks, one):
        assert each["loss"] == pytest.approx(one["loss"], rel=1e-6) and each["loss"] > 0
        assert not each["undeclared"]
