"""Hyper-connections of a transformer layer: dtypes, operations, saved tensors, recompute."""

import pytest
import torch
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import build_module

from megatron_dsa.errors import ConfigError
from megatron_dsa.layers.v4.hyper_connections import StreamsHead, StreamsNorm
from tests.cases.calls import recorded_calls
from tests.host import small_config, small_csa_config, start

TOKENS, BATCH = 24, 2


def config_of(kind="dsa", **changes):
    changes = {"normalization": "RMSNorm", "hc_mult": 4, "dtype": torch.float32} | changes
    return small_csa_config(4, **changes) if kind == "csa" else small_config(**changes)


def layer_of(config, number=2):
    start()
    from megatron_dsa.specs import dsa_layer_spec

    layer = build_module(dsa_layer_spec(config), config=config, layer_number=number).to(start())
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "hc_" in name and name.endswith("base"):
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    return layer.train()


def streams_like(config, width=None, seed=2):
    shape = TOKENS, BATCH, width or config.hc_mult * config.hidden_size
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.to(start(), config.params_dtype).requires_grad_()


@pytest.mark.parametrize("kind", ["dsa", "csa"])
def test_first_layer_makes_the_streams(kind):
    config = config_of(kind)
    first, other = layer_of(config, 1), layer_of(config, 2)
    other.load_state_dict(first.state_dict())
    x = streams_like(config, config.hidden_size)
    out, _ = first(x, attention_mask=None)
    copies = x.detach().repeat(1, 1, 4).requires_grad_()
    want, _ = other(copies, attention_mask=None)
    assert out.shape == (TOKENS, BATCH, 4 * config.hidden_size) and out._base is None
    assert torch.equal(out, want)
    out.square().sum().backward()
    want.square().sum().backward()
    summed = copies.grad.view(TOKENS, BATCH, 4, -1).sum(2)
    assert torch.allclose(x.grad, summed, rtol=1e-4, atol=1e-4)


def test_connections_stay_fp32_in_a_16_bit_model():
    config = config_of(dtype=torch.bfloat16, bf16=True)
    layer = Float16Module(config, layer_of(config)).module
    head = Float16Module(
        config, StreamsHead(config=config, hidden_size=32, eps=config.layernorm_epsilon)
    ).module
    for module in (layer, head):
        for name, parameter in module.named_parameters(recurse=False):
            assert parameter.dtype == (torch.float32 if "hc_" in name else torch.bfloat16), name
    out, _ = layer(streams_like(config), attention_mask=None)
    assert out.dtype == head(out).dtype == torch.bfloat16
    assert {name for name, _ in layer.named_parameters(recurse=False)} == {
        f"hc_{kind}_{part}" for kind in ("attn", "ffn") for part in ("fn", "base", "scale")
    }


def test_parameters_are_replicated_over_tensor_parallel_ranks():
    """Megatron must sum their gradients, with sequence parallelism only."""
    for parallel in (False, True):
        config = config_of()
        config.sequence_parallel = parallel
        head = StreamsHead(config=config, hidden_size=32, eps=config.layernorm_epsilon)
        layer = [
            p for n, p in layer_of(config).named_parameters() if "hc_" in n or "layernorm" in n
        ]
        own = [p for p in layer if p.shape[-1] != 24 and p.shape[-1] != 16]  # no latent norms
        for parameter in (*head.parameters(), *own):
            assert parameter.sequence_parallel is parallel


def test_nothing_is_held_after_a_write():
    config = config_of()
    layer = layer_of(config)
    with torch.no_grad():
        layer(streams_like(config), attention_mask=None)
    assert layer.self_attn_bda.read is None and layer.mlp_bda.read is None


def test_calls_are_those_declared():
    """Start-up, info and the planner read the declaration."""
    from megatron_dsa.layers.required_ops import stream_ops

    config = config_of()
    layer = layer_of(config)
    head = StreamsHead(config=config, hidden_size=32, eps=config.layernorm_epsilon)
    with recorded_calls("hyper_connection") as got:
        out, _ = layer(streams_like(config), attention_mask=None)
        head(out)
    declared = [(op.operation, op.call) for op in stream_ops(config)]
    end = [(op.operation, op.call) for op in stream_ops(config, head=True)]
    assert got == 2 * declared + end
    assert not stream_ops(small_config())


def test_kept_are_the_streams_and_few_numbers():
    config = config_of()
    layer = layer_of(config)
    x = streams_like(config)
    output = streams_like(config, config.hidden_size, seed=4)
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        normed, streams = layer.input_layernorm(x)
        layer.self_attn_bda(True, False)((output, None), streams, 0.0)
    assert normed.shape == output.shape and streams.data_ptr() == x.data_ptr()
    numbers = (4 + 1) * config.hidden_size + 4 + 16
    assert sum(storages.values()) == 4 * TOKENS * BATCH * numbers


def test_operations_are_counted():
    from megatron_dsa.metrics.flops import flops_by_part, model_work

    config = config_of()
    (count,) = {flops_by_part(model_work(c, 100), lambda keys: 1).get("hyper-connections")
                for c in (config, config_of(kind="csa"))}  # fmt: skip
    width = 4 * config.hidden_size
    assert count == 2 * 3 * (config.num_layers * 2 * 24 + 4) * width
    plain = flops_by_part(model_work(config_of(hc_mult=1), 100), lambda keys: 1)
    assert "hyper-connections" not in plain


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_dropout_is_on_the_output(dropout):
    config = config_of(hidden_dropout=dropout)
    layer = layer_of(config)
    x = streams_like(config).detach()
    outs = [layer(x, attention_mask=None)[0] for _ in range(2)]
    assert torch.equal(*outs) == (dropout == 0.0)
    layer.eval()
    outs = [layer(x, attention_mask=None)[0] for _ in range(2)]
    assert torch.equal(*outs)


def test_norms_have_one_epsilon():
    config = config_of()
    with pytest.raises(ConfigError, match="eps must be that of the configuration"):
        StreamsNorm(config=config, hidden_size=32, eps=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalization": "LayerNorm"}, "--normalization must be RMSNorm"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
            "--recompute-modules must not name layernorm with --hc-mult 4",
        ),
        (
            {"fine_grained_activation_offloading": True, "offload_modules": ["mlp_norm"]},
            "--fine-grained-activation-offloading is not supported with --hc-mult 4",
        ),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl must be none with --hc-mult 4"),
        (
            {
                "pipeline_model_parallel_size": 2,
                "pipeline_dtype": torch.float32,
                "pipeline_model_parallel_layout": "E|ttL",
            },
            "--pipeline-model-parallel-layout must begin with a decoder layer",
        ),
        (
            {
                "pipeline_model_parallel_size": 2,
                "pipeline_dtype": torch.float32,
                "variable_seq_lengths": True,
                "moe_token_dispatcher_type": "alltoall",
            },
            "variable_seq_lengths is not supported with --hc-mult 4",
        ),
        ({"hc_mult": 0}, "--hc-mult must be finite and at least 1"),
        ({"hc_sinkhorn_iters": 0}, "--hc-sinkhorn-iters must be finite and at least 1"),
        ({"hc_eps": 0.0}, "--hc-eps must be finite and above 0"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(ConfigError, match=message):
        config_of(**changes)


def test_account_for_embedding_leaves_the_first_stage_a_layer():
    start()
    with pytest.raises(ConfigError, match="must leave the first stage a layer"):
        config_of(
            num_layers=3, pipeline_model_parallel_size=4, pipeline_dtype=torch.float32,
            account_for_embedding_in_pipeline_split=True,
        )  # fmt: skip
