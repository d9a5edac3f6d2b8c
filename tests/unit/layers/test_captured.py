"""CUDA graphs on a GPU: captured attentions, layers and steps equal uncaptured ones."""

import contextlib
import dataclasses
import functools
import gc

import pytest
import torch

from megatron_dsa.config.model import DSAOptions
from megatron_dsa.layers.freezing import freeze_for_stage
from megatron_dsa.metrics.log import IndexerLog
from tests import host
from tests.cases.log import empty_log, forget_log, logged
from tests.cases.models import gpt
from tests.helpers import relative_error
from tests.host import attention_module, small_config, small_csa_config, start, stop, v32_config

pytestmark = pytest.mark.gpu
TOKENS, STEPS, RATE = 64, 50, 0.05
MASKED = DSAOptions(selected_attention="masked")
#: Cumulative lengths of equally many documents per batch, with other lengths, with or without
#: padding.
DOCUMENTS = ([0, 5, 40, 64], [0, 1, 1, 60], [0, 20, 30, 31])


@pytest.fixture(autouse=True)
def log():
    """A log of two layers, reset after a capture."""
    start()
    empty_log(2, torch.device("cuda"))
    yield
    forget_log()
    gc.collect()
    torch.cuda.synchronize()


def lengths_of(seed, tokens=TOKENS):
    lengths = torch.tensor(DOCUMENTS[seed % 3], dtype=torch.int32, device="cuda")
    return lengths * (tokens // TOKENS)


def packed_of(lengths, tokens=TOKENS):
    return host.packed_of(lengths, tokens)


class Captured:
    """A function of tensors as one CUDA graph; every replay overwrites static tensors."""

    def __init__(self, function, inputs):
        self.inputs = [x.clone() for x in inputs]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # compile kernels, build tables
                function(*self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = function(*self.inputs)

    def __call__(self, *inputs):
        for static, x in zip(self.inputs, inputs, strict=True):
            static.copy_(x)
        self.graph.replay()
        return tuple(x.clone() for x in self.outputs)


def attention_step(module, packed):
    """Return forward and backward of an attention as a function of tensors."""
    parameters = [p for p in module.parameters() if p.requires_grad]

    def step(x, gradient, lengths):
        x = x.detach().requires_grad_()
        params = packed_of(lengths, len(x)) if packed else None
        out = module(x, None, packed_seq_params=params)[0]
        found = torch.autograd.grad(out, [x, *parameters], gradient, allow_unused=True)
        return out.detach(), *(g for g in found if g is not None)

    return step


def drawn(seed, module, tokens):
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (tokens, 1, module.config.hidden_size)
    x, gradient = (torch.randn(shape, generator=generator, device="cuda") for _ in range(2))
    dtype = module.config.params_dtype
    return x.to(dtype), gradient.to(dtype), lengths_of(seed, tokens)


def check_captured(module, packed, tokens, tolerance, replays):
    """Compare replays with uncaptured steps: results, log, and a changing loss scale.

    Both draw the indexer loss's tokens from the same generator state.
    """
    step = attention_step(module, packed)
    scale = module.config.experimental_attention_variant_loss_scale_func
    scale(torch.ones(1, device="cuda"))
    run = Captured(step, drawn(0, module, tokens))
    IndexerLog.reduce()
    for seed in range(1, replays + 1):
        given = drawn(seed, module, tokens)
        scale(torch.full((1,), 1 / seed, device="cuda"))
        torch.cuda.manual_seed(seed)
        wanted, figures = step(*given), logged()
        torch.cuda.manual_seed(seed)
        got = run(*given)
        found = logged()
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            assert relative_error(one, other) < tolerance
        assert found.keys() == figures.keys()
        for name, figure in figures.items():
            assert found[name] == pytest.approx(figure, rel=1e-3), name
    return figures


SMALL = {
    "sparse": lambda: small_config(options=DSAOptions(health_tokens=0)),
    "sparse, dense loss": lambda: small_config(
        options=DSAOptions(health_tokens=0), dsa_indexer_use_sparse_loss=False
    ),
    "masked": lambda: small_config(
        options=DSAOptions(selected_attention="masked", health_tokens=0)
    ),
    "warmup": lambda: small_config(options=DSAOptions(stage="warmup", freeze_main=False)),
    "dense": lambda: small_config(options=DSAOptions(stage="dense")),
} | {
    f"ratio {ratio}": lambda ratio=ratio: small_csa_config(
        ratio, options=DSAOptions(health_tokens=0)
    )
    for ratio in (0, 4, 6)
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_a_captured_attention(name, packed):
    """In fp64 by torch, because gradients accumulated in any order differ in the last bits."""
    module = attention_module(SMALL[name]()).train()
    figures = check_captured(module, packed, TOKENS, 1e-10, STEPS)
    assert bool(figures) == (module.core_attention.indexer is not None)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("stage", "attention", "heads"),
    [
        ("sparse", "sparse", 16),
        ("sparse", "sparse", 128),
        ("sparse", "masked", 16),
        ("warmup", "sparse", 16),
        ("dense", "sparse", 16),
    ],
)
def test_a_captured_attention_of_v3_2(stage, attention, heads, packed):
    options = DSAOptions(
        stage=stage, selected_attention=attention, freeze_main=False, health_tokens=0,
        sequence_length=4096,
    )  # fmt: skip
    module = attention_module(v32_config(options, heads)).train()
    check_captured(module, packed, 4096, 1e-2, 5)


def test_deterministic_kernels_replay_to_the_bit():
    options = DSAOptions(selected_attention="sparse", health_tokens=0, sequence_length=4096)
    torch.use_deterministic_algorithms(True)
    check_captured(attention_module(v32_config(options)).train(), False, 4096, 1e-30, 3)


def model_of(config):
    model = gpt(config)
    freeze_for_stage([model])
    return model


def tokens_of(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 96, (1, TOKENS), generator=generator).to("cuda")


POSITIONS = torch.arange(TOKENS)[None]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("stage", ["sparse", "warmup", "dense"])
def test_a_captured_training_step(stage, packed):
    losses = []
    for captured in (False, True):
        options = DSAOptions(stage=stage, health_tokens=0)
        changes = {"dsa_indexer_use_sparse_loss": stage == "sparse"}
        model = model_of(small_config(options=options, **changes))
        parameters = [p for p in model.parameters() if p.requires_grad]
        positions = POSITIONS.to("cuda")

        def step(ids, lengths, rate, model=model, parameters=parameters, positions=positions):
            params = packed_of(lengths) if packed else None
            loss = model(ids, positions, None, labels=ids, packed_seq_params=params).mean()
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    if gradient is not None:
                        parameter.sub_(rate * gradient)
            return (loss.detach(),)

        rate = torch.zeros((), dtype=torch.float64, device="cuda")
        run = Captured(step, (tokens_of(0), lengths_of(0), rate)) if captured else step
        IndexerLog.reduce()
        rate = torch.full_like(rate, RATE)
        found = [
            (float(run(tokens_of(seed), lengths_of(seed), rate)[0]), logged())
            for seed in range(STEPS)
        ]
        losses.append(found)
    for (one, figures), (other, others) in zip(*losses, strict=True):
        assert one == pytest.approx(other, rel=1e-9)
        assert figures.keys() == others.keys()
        for name, figure in figures.items():
            assert figure == pytest.approx(others[name], rel=1e-4), name
    assert len({loss for loss, _ in losses[0]}) > STEPS // 2


@contextlib.contextmanager
def megatron_graphs():
    """Isolate Megatron's state of graphs."""
    from megatron.core import tensor_parallel
    from megatron.core.transformer.cuda_graphs import delete_cuda_graphs

    tensor_parallel.model_parallel_cuda_manual_seed(
        1, use_cudagraphable_rng=True, force_reset_rng=True
    )
    try:
        yield
    finally:
        delete_cuda_graphs()
        torch.cuda.set_stream(torch.cuda.default_stream())
        stop()


def training(config, packed, microbatches, steps, wrap=lambda schedule: schedule):
    """Train with Megatron's schedule and buffers; return losses, log, parameters.

    A ``forward_only`` step (evaluation) is in between.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func

    scale = torch.ones((), device="cuda")
    config.grad_scale_func = lambda loss: loss * scale
    config.finalize_model_grads_func = finalize_model_grads
    empty_log(config.num_layers, torch.device("cuda"))
    model = model_of(config)
    # On its own stream like Megatron: a capture cannot wait for the legacy stream, where gradients
    # accumulate.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    torch.cuda.current_stream().wait_stream(side)
    positions = POSITIONS.to("cuda")
    trained = [p for p in model.parameters() if p.requires_grad]

    def forward_step(iterator, model):
        batch = next(iterator)
        params = packed_of(batch["lengths"]) if packed else None
        out = model(
            batch["tokens"], positions, None, labels=batch["tokens"], packed_seq_params=params
        )
        return out, lambda out: (out.mean(), {"loss": out.mean().detach()})

    schedule = wrap(get_forward_backward_func())
    found = []
    for iteration in range(steps):
        scale.fill_(2.0 ** -(iteration % 4))
        for evaluation in (False, True) if iteration % 10 == 5 else (False,):
            wrapped.train(not evaluation)
            seeds = [iteration * microbatches + i for i in range(microbatches)]
            data = ({"tokens": tokens_of(seed), "lengths": lengths_of(seed)} for seed in seeds)
            wrapped.zero_grad_buffer()
            with torch.no_grad() if evaluation else contextlib.nullcontext():
                results = schedule(
                    forward_step_func=forward_step, data_iterator=data, model=[wrapped],
                    num_microbatches=microbatches, seq_length=TOKENS, micro_batch_size=1,
                    forward_only=evaluation,
                )  # fmt: skip
            losses = [float(result["loss"]) for result in results]
            found.append((evaluation, losses, logged()))
            if not evaluation:
                with torch.no_grad():
                    for parameter in trained:
                        parameter.sub_(parameter.main_grad * (RATE / scale))
    return found, {n: p.detach().clone() for n, p in model.named_parameters()}


def check_training(found, wanted, rel):
    for (evaluation, losses, figures), (_, others, expected) in zip(
        found[0], wanted[0], strict=True
    ):
        assert losses == pytest.approx(others, rel=rel)
        assert figures.keys() == expected.keys(), evaluation
        for name, figure in figures.items():
            assert figure == pytest.approx(expected[name], rel=100 * rel), name
    for name, parameter in found[1].items():
        assert relative_error(parameter, wanted[1][name]) < 100 * rel, name


def check_graphs(make, graphs, packed=False):
    """Compare 50 iterations of 2 microbatches and evaluations with and without graphs."""
    results = []
    for changes in (graphs, {}):
        start()
        with megatron_graphs():
            config = make(dtype=torch.float32, **changes)
            if not changes:  # omitted by graphs of layers
                config.dsa = dataclasses.replace(config.dsa, health_tokens=0)
            results.append(training(config, packed, 2, STEPS))
    check_training(*results, rel=1e-4)


GRAPHS = {"cuda_graph_impl": "local"}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("modules", [[], ["attn"]], ids=["layers", "attention"])
@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        ("sparse", {}),
        ("sparse", {"dsa_indexer_use_sparse_loss": False}),
        ("sparse", {"num_layers": 4, "dsa_indexer_topk_freq": 3}),
        ("sparse", {"options": MASKED}),
        ("warmup", {}),
        ("warmup", {"options": DSAOptions(stage="warmup", freeze_main=False)}),
        ("dense", {}),
    ],
)
def test_megatrons_graphs_of_layers(stage, changes, modules, packed):
    settings = {"options": DSAOptions(stage=stage, evaluate_indexer=stage != "dense")} | changes
    if stage == "warmup":
        settings["dsa_indexer_use_sparse_loss"] = False
    make = functools.partial(small_config, **settings)
    check_graphs(make, GRAPHS | {"cuda_graph_modules": modules}, packed)


@pytest.mark.parametrize("stage", ["sparse", "warmup"])
def test_megatrons_graphs_of_attention_before_experts(stage):
    make = functools.partial(
        small_config, options=DSAOptions(stage=stage, health_tokens=0), num_moe_experts=4,
        moe_router_topk=2, moe_ffn_hidden_size=16, moe_token_dispatcher_type="alltoall",
        dsa_indexer_use_sparse_loss=stage == "sparse",
    )  # fmt: skip
    check_graphs(make, GRAPHS | {"cuda_graph_modules": ["attn"]})


@pytest.mark.parametrize("ratio", [0, 4, 6])
def test_megatrons_graphs_of_v4_layers(ratio):
    options = DSAOptions(health_tokens=0)
    check_graphs(functools.partial(small_csa_config, ratio, options=options), GRAPHS)


@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        ("sparse", {}),
        ("sparse", {"num_layers": 4, "dsa_indexer_topk_freq": 3}),
        ("warmup", {}),
        ("dense", {}),
    ],
)
def test_megatrons_graph_of_an_iteration(stage, changes):
    """The graph also holds the first microbatch's figures of the selection."""
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader

    settings = {
        "options": DSAOptions(stage=stage), "dtype": torch.float32,
        "dsa_indexer_use_sparse_loss": stage == "sparse",
    } | changes  # fmt: skip
    results, wrappers = [], []

    def whole(schedule):
        wrappers.append(FullCudaGraphWrapper(schedule, cuda_graph_warmup_steps=3))
        return wrappers[-1]

    for graphs in ({"cuda_graph_impl": "full_iteration"}, {}):
        start()
        with megatron_graphs():
            config = small_config(**settings | graphs)
            try:
                results.append(training(config, False, 2, STEPS, *([whole] if graphs else [])))
            finally:
                if graphs:
                    wrappers[-1].reset_cuda_graph()
                    StaticBufferLoader.static_buffers = {"training": [], "validation": []}
    check_training(*results, rel=1e-4)
    assert stage != "sparse" or any("mass" in name for name, _ in results[0][0][-1][2])
