"""Hash layers against plain formulas and transformers; token ids; rejected tables."""

import functools

import pytest
import torch
from megatron.core.transformer.module import Float16Module

from megatron_dsa.errors import ConfigError
from megatron_dsa.layers.v4.hash_routing import HashMoELayer, HashRouter
from tests.cases.hash_routing import (
    BATCH,
    TOKENS,
    VOCABULARY,
    config_of,
    experts_float64,
    gradients_of,
    ids_of,
    model_of,
    run,
    scores_of,
)
from tests.helpers import relative_error
from tests.host import packed, start

FULL = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
}  # fmt: skip
RECOMPUTE = {
    "full": FULL,
    "full, two layers at once": FULL | {"recompute_num_layers": 2},
    "full, first layer only": FULL | {"recompute_method": "block"},
    "experts": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


def experts_of(model, layer=0):
    return model.decoder.layers[layer].mlp


def hidden(config, seed=2):
    x = torch.randn(
        TOKENS, BATCH, config.hidden_size, generator=torch.Generator().manual_seed(seed)
    )
    return x.to(start(), config.params_dtype).requires_grad_()


@pytest.mark.parametrize("recomputed", [False, True])
def test_layer_equals_the_formulas(recomputed):
    mlp = experts_of(model_of(config_of(**(RECOMPUTE["experts"] if recomputed else {}))))
    x, ids = hidden(mlp.config), ids_of().T
    mlp.token_ids = ids
    out, bias = mlp(x)
    assert bias is None
    wanted = torch.randn_like(out)
    out.backward(wanted)

    def double(tensor):
        return tensor.detach().double().requires_grad_()

    tokens, gate = double(x.flatten(0, 1)), double(mlp.router.weight)
    weights = [
        (double(e.linear_fc1.weight), double(e.linear_fc2.weight))
        for e in mlp.experts.local_experts
    ]
    want = experts_float64(tokens, ids.flatten(), mlp.router.tid2eid, gate, weights, 1.5)
    want.backward(wanted.flatten(0, 1).double())
    assert relative_error(out.flatten(0, 1), want) < 1e-5
    assert relative_error(x.grad.flatten(0, 1), tokens.grad) < 1e-5
    assert relative_error(mlp.router.weight.grad, gate.grad) < 1e-5
    for expert, (fc1, fc2) in zip(mlp.experts.local_experts, weights, strict=True):
        assert relative_error(expert.linear_fc1.weight.grad, fc1.grad) < 1e-5
        assert relative_error(expert.linear_fc2.weight.grad, fc2.grad) < 1e-5


@pytest.mark.parametrize("function", ["sqrtsoftplus", "sigmoid", "softmax", "pre-softmax"])
def test_weights_of_every_score_function(function):
    pre = function == "pre-softmax"
    name = "softmax" if pre else function
    bias = {"moe_router_enable_expert_bias": name != "softmax"}
    router = experts_of(
        model_of(config_of(moe_router_score_function=name, moe_router_pre_softmax=pre, **bias))
    ).router
    logits = torch.randn(TOKENS, BATCH, 5, device=start(), requires_grad=True)
    ids = router.token_ids = ids_of().T
    probs, chosen = router.routing(logits)
    table = router.tid2eid[ids.flatten()].long()
    assert chosen.int().equal(torch.zeros_like(chosen).int().scatter(1, table, 1))
    reference = logits.detach().double().flatten(0, 1).requires_grad_()
    scores = scores_of(reference, table, name, pre)
    share = scores if name == "softmax" else scores / scores.sum(1, keepdim=True)
    assert relative_error(probs.gather(1, table), 1.5 * share) < 1e-6
    assert float(probs[~chosen].abs().max()) == 0
    wanted = torch.randn_like(probs)
    probs.backward(wanted)
    (1.5 * share).backward(wanted.gather(1, table).double())
    assert relative_error(logits.grad.flatten(0, 1), reference.grad) < 1e-5


def test_router_equals_transformers():
    transformers = pytest.importorskip("transformers", minversion="5.23")
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HashRouter

    router = experts_of(model_of(config_of())).router
    theirs = DeepseekV4HashRouter(
        transformers.DeepseekV4Config(
            vocab_size=VOCABULARY, hidden_size=32, num_experts_per_tok=3, n_routed_experts=5,
            scoring_func="sqrtsoftplus", routed_scaling_factor=1.5,
        )
    ).to(start())  # fmt: skip
    with torch.no_grad():
        theirs.weight.copy_(router.weight)
        theirs.tid2eid.copy_(router.tid2eid)
    x, ids = hidden(router.config), ids_of()
    y = x.detach().clone().requires_grad_()
    router.token_ids = ids.T
    probs, chosen = router(x)
    _, weights, indices = theirs(y.transpose(0, 1), ids)
    # Theirs uses [b, s], ours [s, b].
    order = torch.arange(TOKENS * BATCH, device=ids.device).view(BATCH, TOKENS).T.flatten()
    weights, indices = weights[order], indices[order]
    assert torch.equal(indices.sort(1).values, chosen.nonzero()[:, 1].view(-1, 3))
    assert relative_error(probs.gather(1, indices), weights) < 1e-6
    factor = torch.randn_like(weights)
    (probs.gather(1, indices) * factor).sum().backward()
    (weights * factor).sum().backward()
    assert relative_error(x.grad, y.grad) < 1e-5
    assert relative_error(router.weight.grad, theirs.weight.grad) < 1e-5


@pytest.mark.parametrize("kind", ["dsa", "csa", "streams"])
@pytest.mark.parametrize("name", RECOMPUTE)
def test_recompute_with_two_microbatches_in_flight(kind, name):
    """A recomputed layer must use its own microbatch's ids."""
    changes = {"num_moe_experts": 5, "moe_hash_layers": 2}
    if kind == "streams":
        changes |= {"hc_mult": 2, "normalization": "RMSNorm"}
    kind = "csa" if kind == "csa" else "dsa"

    def step(settings):
        model = model_of(config_of(kind, **changes, **settings))
        found = []
        losses = [run(model, ids_of(seed)) for seed in (5, 6)]
        for loss in losses:
            loss.sum().backward()
            found.append(gradients_of(model))
        return [*losses, found]

    (one, two, want), (*losses, got) = step({}), step(RECOMPUTE[name])
    assert torch.equal(losses[0], one) and torch.equal(losses[1], two)
    assert relative_error(want[0]["decoder.layers.0.mlp.router.weight"],
                          want[1]["decoder.layers.0.mlp.router.weight"]) > 0.1  # fmt: skip
    for microbatch, expected in zip(got, want, strict=True):
        assert microbatch.keys() == expected.keys()
        for parameter, gradient in expected.items():
            assert relative_error(microbatch[parameter], gradient) < 1e-6, parameter


def test_evaluation_routes_alike():
    model, ids = model_of(config_of()), ids_of()
    want = run(model, ids).detach()
    model.eval()
    with torch.no_grad():
        assert torch.equal(run(model, ids), want)
    with torch.inference_mode():
        assert torch.equal(run(model, ids), want)
    # The token is routed, not its embedding.
    position = torch.arange(TOKENS, device=ids.device)[None]
    embedded = model.embedding(ids, position).detach()
    with torch.no_grad():
        other = model(ids_of(9), position, None, decoder_input=embedded, labels=ids.roll(-1, 1))
    assert relative_error(other, want) > 1e-3


def test_packed_batches_and_samples():
    model, ids = model_of(config_of()), ids_of()
    want = torch.cat([run(model, row[None]) for row in ids], 1)
    labels = ids.roll(-1, 1).flatten()[None]
    position = torch.arange(TOKENS, device=ids.device).repeat(2)[None]
    for samples in (None, TOKENS):
        params = packed(TOKENS, TOKENS)
        if samples:
            params.tokens_per_sample = samples
        row = ids.flatten()[None]
        out = model(row, position, None, labels=labels, packed_seq_params=params)
        assert relative_error(out, want) < 1e-6, samples


def test_table_is_a_buffer_that_no_cast_touches():
    config = config_of(dtype=torch.bfloat16, bf16=True)
    model = Float16Module(config, model_of(config)).module
    router = experts_of(model).router
    assert router.tid2eid.dtype == torch.int32 and router.weight.dtype == torch.bfloat16
    assert router.tid2eid.shape == (VOCABULARY, 3)
    assert not any("tid2eid" in name for name, _ in model.named_parameters())
    name = "decoder.layers.0.mlp.router.tid2eid"
    assert name in model.state_dict() and model.sharded_state_dict()[name].key == name
    # Megatron updates biases of all layers at once: this layer has none, the next one does.
    assert not hasattr(router, "expert_bias")
    other = [key for key in model.state_dict() if key.endswith("expert_bias")]
    assert other == ["decoder.layers.1.mlp.router.expert_bias"]


def test_megatron_updates_the_other_layers_alone():
    from megatron.core import parallel_state
    from megatron.core.distributed.finalize_model_grads import (
        _update_router_expert_bias,
        reset_model_temporary_tensors,
    )

    config = config_of()
    model = model_of(config)
    table = experts_of(model).router.tid2eid.clone()
    run(model, ids_of()).sum().backward()
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    _update_router_expert_bias([model], config, group)
    assert experts_of(model, 1).router.expert_bias.abs().max() > 0
    reset_model_temporary_tensors(config, [model])
    assert experts_of(model).router.tid2eid.equal(table)


def test_load_balancing_leaves_hash_layers_alone():
    """No loss can change a table; the z-loss concerns logits and stays."""
    ids = ids_of()

    def gate_gradients(**changes):
        model = model_of(config_of(**changes))
        run(model, ids).sum().backward()
        return [layer.mlp.router.weight.grad for layer in model.decoder.layers]

    loss = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 10.0}
    both = {"moe_hash_layers": 2}
    plain = gate_gradients(**both)
    for got, want in zip(gate_gradients(**both, **loss), plain, strict=True):
        assert torch.equal(got, want)
    for got, want in zip(gate_gradients(**both, moe_z_loss_coeff=10.0), plain, strict=True):
        assert relative_error(got, want) > 0.01
    assert relative_error(gate_gradients(**loss)[1], gate_gradients()[1]) > 0.01


def test_capacity_drops_tokens():
    config = config_of(moe_expert_capacity_factor=0.5, moe_token_drop_policy="probs")
    router = experts_of(model_of(config)).router
    router.token_ids = ids_of().T
    probs, chosen = router(hidden(config))
    assert chosen.sum(0).max() == -(-TOKENS * BATCH * 3 // 10)
    assert float(probs[~chosen].abs().max()) == 0


def test_layers_and_seeds_have_tables_of_their_own():
    model, other = (model_of(config_of(moe_hash_layers=2, moe_hash_seed=s)) for s in (0, 1))
    tables = [experts_of(m, layer).router.tid2eid for m in (model, other) for layer in (0, 1)]
    assert not any(a.equal(b) for i, a in enumerate(tables) for b in tables[:i])
    again = model_of(config_of(moe_hash_layers=2))
    assert experts_of(again).router.tid2eid.equal(tables[0])


def test_set_table():
    router = experts_of(model_of(config_of())).router
    before, table = router.tid2eid.clone(), torch.tensor([[4, 0, 2]] * 30)
    router.set_table(table)
    assert router.tid2eid[:30].equal(table.int().to(start()))
    assert router.tid2eid[30:].equal(before[30:])  # ids of the padding
    with pytest.raises(ConfigError, match="at most as many rows as the vocabulary, 40, got 41"):
        router.set_table(torch.tensor([[4, 0, 2]] * 41))
    with pytest.raises(ConfigError, match="tid2eid of layer 1 must hold experts from 0 to"):
        router.set_table(table + 1)


@pytest.mark.parametrize("value", [-1, 5, "twice"])
def test_wrong_tables_are_found_before_the_first_step(value):
    """Tables put in by hand or loaded must never route at random."""
    model, ids = model_of(config_of()), ids_of()
    run(model, ids)
    router = experts_of(model).router
    state = {k: v.clone() for k, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
    row = state["decoder.layers.0.mlp.router.tid2eid"][7]
    row[0] = row[1] if value == "twice" else value
    model.load_state_dict(state, strict=False)
    with pytest.raises(ConfigError, match=r"tid2eid of layer 1 must .* for token 7"):
        run(model, ids)
    router.tid2eid = torch.zeros_like(router.tid2eid)  # another tensor
    with pytest.raises(ConfigError, match="must not name an expert twice"):
        run(model, ids)


def test_tables_are_read_once(monkeypatch):
    """Reading one is a host synchronisation."""
    from megatron_dsa.layers.v4 import hash_routing

    calls, original = [], hash_routing.check_table
    monkeypatch.setattr(
        hash_routing, "check_table", lambda *args: (calls.append(1), original(*args))
    )
    model = model_of(config_of())
    for seed in range(3):
        run(model, ids_of(seed)).sum().backward()
    assert len(calls) == 1


def test_ids_that_do_not_arrive_are_an_error():
    from megatron_dsa.specs import dsa_block_spec, dsa_layer_spec

    config = config_of()
    model, ids = model_of(config), ids_of()
    layer, mlp = model.decoder.layers[0], experts_of(model)
    x = hidden(config)
    with pytest.raises(ConfigError, match="context must hold the token ids of layer 1"):
        layer(x, attention_mask=None)
    with pytest.raises(ConfigError, match=r"token ids must reach the router of layer 1 .*None"):
        mlp(x)
    with pytest.raises(ConfigError, match=r"with shape \[24, 2\], got \[12, 2\]"):
        mlp.token_ids = ids.T[:12]
        mlp(x)
    run(model, ids)
    assert mlp.token_ids is None and mlp.router.token_ids is None
    assert not model.decoder._forward_pre_hooks
    with pytest.raises(ConfigError, match="token ids must reach"):
        mlp(x)  # the last microbatch's are gone
    embedded = model.embedding(ids, None)
    with pytest.raises(ConfigError, match="input_ids must be given with --moe-hash-layers"):
        model(None, None, None, decoder_input=embedded)
    assert not model.decoder._forward_pre_hooks
    assert isinstance(mlp, HashMoELayer) and isinstance(mlp.router, HashRouter)

    from megatron.core.models.gpt import GPTModel

    build = functools.partial(GPTModel, position_embedding_type="rope")
    plain = build(config, dsa_layer_spec(config, moe=True), VOCABULARY, 64).to(start())
    with pytest.raises(ConfigError, match="--moe-hash-layers is 1, but 0 of the first layers"):
        run(plain, ids)
    larger = build(config, dsa_block_spec(config), VOCABULARY + 8, 64).to(start())
    with pytest.raises(ConfigError, match=r"moe_hash_vocab_size must be the vocabulary .* 48"):
        run(larger, ids)
    config.moe_hash_vocab_size = None
    with pytest.raises(ConfigError, match="moe_hash_vocab_size must be set with moe_hash_layers"):
        build(config, dsa_block_spec(config), VOCABULARY, 64)


def test_models_without_hash_layers_are_as_before():
    """The patch of Megatron's model stays in the process."""
    model_of(config_of())
    plain = model_of(config_of(moe_hash_layers=0))
    calls = []
    plain.decoder.register_forward_pre_hook(
        lambda _m, _a, kwargs: calls.append(kwargs.get("context")), with_kwargs=True
    )
    run(plain, ids_of())
    assert calls == [None]
    assert not any("tid2eid" in name for name in plain.state_dict())
