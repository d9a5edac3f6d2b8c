"""CUDA graphs without a GPU: values frozen by a capture, and Megatron's graphs of layers."""

import contextlib
from unittest import mock

import pytest
import torch
from megatron.core.transformer import cuda_graphs as megatron_graphs
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dsa.config.model import DSAOptions
from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.rl.replay import IndexCapture, IndexReplay
from megatron_dsa.layers import cuda_graphs
from megatron_dsa.layers.cuda_graphs import GraphedLayer, describe_graphs
from megatron_dsa.layers.freezing import freeze_for_stage
from megatron_dsa.metrics.log import IndexerLog
from megatron_dsa.metrics.tags import FIGURES, NAMES_OF_LOSSES
from tests import host
from tests.cases.cuda_graphs import step_of, traced, without_host_numbers
from tests.cases.log import empty_log, forget_log, logged
from tests.cases.models import forward, gpt
from tests.host import attention_module, small_config, small_csa_config, start

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a GPU, which captures graphs"
)
TOKENS = 96
#: Equally many documents per batch; the second ends in padding.
DOCUMENTS = ([0, 5, 65, 96], [0, 33, 33, 90], [0, 1, 2, 3])
MASKED = DSAOptions(selected_attention="masked", health_tokens=0)
#: Name -> configuration of an attention.
ATTENTIONS = {
    "sparse": lambda: small_config(options=options("sparse")),
    "sparse, dense loss": lambda: small_config(
        options=options("sparse"), dsa_indexer_use_sparse_loss=False
    ),
    "sparse, engine numerics": lambda: small_config(
        options=options("sparse", indexer_numerics="deepgemm-fp8")
    ),
    "sparse, loss per token": lambda: small_config(
        options=options("sparse"), calculate_per_token_loss=True
    ),
    "masked": lambda: small_config(options=MASKED),
    "masked, dense loss": lambda: small_config(options=MASKED, dsa_indexer_use_sparse_loss=False),
    "warmup": lambda: small_config(options=options("warmup", freeze_main=False)),
    "dense": lambda: small_config(options=options("dense")),
    "yarn": lambda: small_config(
        options=options("sparse"), rope_type="yarn", rotary_scaling_factor=4
    ),
} | {
    f"ratio {ratio}, {stage}": lambda ratio=ratio, stage=stage: small_csa_config(
        ratio, options=options(stage, freeze_main=False)
    )
    for ratio in (0, 4, 6)
    for stage in ("sparse", "warmup", "dense")
}
#: Operations that synchronise with the device or copy from the host.
FORBIDDEN = {
    "_local_scalar_dense", "item", "nonzero", "masked_select", "unique_dim", "_unique2",
    "is_nonzero", "lift_fresh", "lift_fresh_copy", "equal", "repeat_interleave.Tensor",
}  # fmt: skip


def options(stage, **settings):
    return DSAOptions(stage=stage, health_tokens=0, **settings)


def packed_of(lengths):
    return host.packed_of(lengths, TOKENS)


def inputs(seed, module, batch=1):
    """Draw inputs of :func:`step_of`."""
    generator = torch.Generator().manual_seed(seed)
    shape = (TOKENS, batch, module.config.hidden_size)
    x, gradient = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return (
        x, gradient, torch.tensor([0.5 + seed]), torch.zeros(2, 2, len(FIGURES)),
        torch.tensor(DOCUMENTS[seed % 3], dtype=torch.int32),
    )  # fmt: skip


class Recorder(TorchDispatchMode):
    """Operations in order: names, shapes and numbers."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::")
        assert not {name, name.split(".")[0]} & FORBIDDEN, name
        if name.startswith("profiler::"):
            return func(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        if name.startswith("index"):
            masks = [x for x in leaves if isinstance(x, torch.Tensor) and x.dtype == torch.bool]
            assert not masks, f"{name} by a mask"
        # As text, because NaN is not equal to itself.
        given = [(x.shape, x.dtype) if isinstance(x, torch.Tensor) else repr(x) for x in leaves]
        self.seen.append((name, given))
        return func(*args, **(kwargs or {}))


def check_replay(step, module, batch=1):
    """Check that a step's operations on another step's inputs give the other step."""
    run = traced(step, inputs(0, module, batch))
    for seed in (1, 2):
        given = inputs(seed, module, batch)
        with without_host_numbers():
            wanted = step(*given)
        got = run(*given)
        assert len(got) == len(wanted) > 3
        for one, other in zip(got, wanted, strict=True):
            assert torch.equal(one, other)
    return wanted


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_replay_depends_on_its_inputs_alone(name, packed):
    module = attention_module(ATTENTIONS[name]()).train()
    step = step_of(module, packed_of if packed else lambda _lengths: None)
    wanted = check_replay(step, module)
    trains = module.core_attention.indexer is not None
    assert bool(wanted[-1].any()) == trains


def test_a_replay_of_two_sequences():
    module = attention_module(small_config(options=options("sparse"))).train()
    check_replay(step_of(module), module, batch=2)


@pytest.mark.parametrize("stage", ["sparse", "warmup"])
def test_what_a_capture_freezes_is_found(stage):
    """The check must fail for a changing host number, and for a number read from a tensor."""
    module = attention_module(small_config(options=options(stage, freeze_main=False))).train()
    right = step_of(module)

    def frozen(x, gradient, scale, *rest):
        return right(x, gradient, scale.detach().clone().fill_(scales.pop()), *rest)

    scales = [5.0, 4.0, 3.0, 2.0, 1.0]
    with pytest.raises(AssertionError):
        check_replay(frozen, module)

    def reading(x, gradient, *rest):
        return right(x * float(gradient.sum()), gradient, *rest)

    with pytest.raises(RuntimeError):
        check_replay(reading, module)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_rehearsal_on_zeros(name, packed):
    """Megatron runs a layer on zeros before capture: no token is in any document then."""
    module = attention_module(ATTENTIONS[name]()).train()
    zeros = torch.zeros(TOKENS, 1, 32, dtype=torch.float64, requires_grad=True)
    params = packed_of(torch.zeros(4, dtype=torch.int32)) if packed else None
    out = module(zeros, None, packed_seq_params=params)[0]
    out.backward(torch.zeros_like(out))
    found = [zeros.grad, *(p.grad for p in module.parameters() if p.grad is not None)]
    assert all(bool(x.isfinite().all()) for x in (out, *found))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["sparse", "masked", "warmup", "dense", "ratio 4, sparse"])
def test_steps_run_the_same_operations(name, packed):
    """Nothing may run only in the first microbatch, or synchronise."""
    config = ATTENTIONS[name]()
    config.cuda_graph_impl = "local"
    config.dsa = DSAOptions(**config.dsa.__dict__ | {"health_tokens": 4})
    empty_log(2, start())
    module = attention_module(config).train()
    step = step_of(module, packed_of if packed else lambda _lengths: None)
    seen = []
    with without_host_numbers():
        step(*inputs(0, module))
        for seed in (1, 2):
            given = inputs(seed, module)
            with Recorder() as recorder:
                step(*given)
            seen.append(recorder.seen)
    forget_log()
    assert len(seen[0]) > 50 and seen[0] == seen[1]


def test_figures_of_the_selection_are_part_of_a_whole_iteration():
    """Graphs of layers omit them: they are measured once per iteration, between layers."""
    for impl in ("none", "full_iteration", "local"):
        empty_log(2, start())
        config = small_config(cuda_graph_impl=impl)
        module = attention_module(config).train()
        module(torch.randn(TOKENS, 1, 32, dtype=torch.float64), None)[0].sum().backward()
        figures = {name for name, _ in logged()}
        assert ("dsa attention mass captured" in figures) == (impl != "local")
        assert "indexer loss" in figures
    forget_log()


def test_the_log_counts_no_rehearsal_of_a_capture():
    empty_log(2, start())
    loss = {"indexer loss": torch.tensor(2.0)}
    for begin, end in (
        (megatron_graphs._set_warmup_start, megatron_graphs._set_warmup_end),
        (megatron_graphs._set_capture_start, megatron_graphs._set_capture_end),
    ):
        begin()
        try:
            IndexerLog.record(0, loss)
        finally:
            end()
    assert logged() == {}
    megatron_graphs._set_capture_start()
    try:
        with mock.patch("megatron_dsa.metrics.log.capturing", lambda: True):
            IndexerLog.record(0, loss)  # as captured
    finally:
        megatron_graphs._set_capture_end()
    assert logged() == {("indexer loss", 0): 2.0}
    forget_log()


def test_the_loss_scale_stays_where_it_is():
    config = small_config()
    module = attention_module(config).train()
    scale = config.experimental_attention_variant_loss_scale_func
    module(torch.randn(TOKENS, 1, 32, dtype=torch.float64), None)[0].sum().backward()
    place = scale.value.data_ptr()
    scale(torch.tensor([0.25]))
    assert scale.value.data_ptr() == place and float(scale.on(start())) == 0.25


def test_the_start_up_says_what_is_left_out():
    assert list(describe_graphs(small_config())) == []
    held, left_out = describe_graphs(small_config(cuda_graph_impl="local"))
    assert held.startswith("CUDA graphs (local) hold whole layers;")
    for name, tag in FIGURES.items():
        assert (tag in left_out) == (name not in NAMES_OF_LOSSES)
    held, left_out = describe_graphs(small_config(cuda_graph_impl="full_iteration"))
    assert "an iteration" in held and "dsa/calls" in left_out and "mass" not in left_out


@pytest.mark.parametrize("what", [IndexReplay, IndexCapture])
def test_selections_of_graphs_cannot_be_handed_in_or_out(what):
    module = attention_module(small_config(cuda_graph_impl="local"))
    refused = pytest.raises(ConfigError, match=r"without CUDA graphs .* --cuda-graph-impl local")
    with refused, what().on(module):
        pass


class Manager(torch.nn.Module):
    """Replaces Megatron's ``CudaGraphManager``: wraps like it and captures nothing."""

    def __init__(self, config, base_module=None, function_name=None):
        super().__init__()
        self.replays, self.func = 0, None
        if function_name is not None:
            function = self.func = getattr(base_module, function_name)

            def wrapped(*args, eager=False, cache_key=None, **kwargs):
                return function(*args, **kwargs) if eager else self(base_module, args, kwargs)

            setattr(base_module, function_name, wrapped)

    def __call__(self, module, args, kwargs):
        self.replays += 1
        if self.func is not None:
            return self.func(*args, **kwargs)
        return module.forward(*args, **kwargs)


@contextlib.contextmanager
def managers():
    with (
        mock.patch.object(megatron_graphs, "CudaGraphManager", Manager),
        mock.patch.object(cuda_graphs, "CudaGraphManager", Manager),
        # Models with graphs of layers also make one for inference.
        mock.patch(
            "megatron.core.models.common.language_module.language_module.CudaGraphManager", Manager
        ),
    ):
        yield


def graphed_model(modules, **changes):
    with managers():
        return gpt(small_config(cuda_graph_impl="local", cuda_graph_modules=modules, **changes))


def layers_of(model):
    return [module for module in model.modules() if isinstance(module, GraphedLayer)]


def test_attention_alone_is_captured_in_training_only():
    model = graphed_model(["attn"])
    plain = gpt(small_config())
    for replays, training in ((1, True), (1, False), (2, True)):
        model.train(training), plain.train(training)
        loss = forward(model, 5)
        assert torch.equal(loss, forward(plain, 5))
        for layer in layers_of(model):
            assert layer.attention_graphs.replays == replays
            assert not hasattr(layer, "cudagraph_manager")


def test_whole_layers_are_captured_in_training_only():
    for layer in layers_of(graphed_model([])):
        assert layer.attention_graphs is None
        assert layer._should_call_local_cudagraph()
        layer.eval()
        assert not layer._should_call_local_cudagraph()


@pytest.mark.parametrize("experts", [False, True])
def test_a_frozen_model_learns_the_same_where_attention_is_captured(experts):
    """The loss is attached to the output of its graph, and no gradient passes the MLP."""
    changes = {"options": DSAOptions(stage="warmup"), "dsa_indexer_use_sparse_loss": False}
    if experts:
        changes |= {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16}
    gradients = []
    for model in (graphed_model(["attn"], **changes), gpt(small_config(**changes))):
        freeze_for_stage([model])
        forward(model, 5).backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert found and all(".indexer." in name for name in found)
        gradients.append(found)
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name
