"""Selections passed from layer to layer, with and without Megatron's ``context``."""

import contextlib
from unittest import mock

import pytest
import torch
from megatron.core.transformer import cuda_graphs as megatron_graphs
from megatron.core.transformer.enums import CudaGraphModule
from megatron.core.transformer.module import GraphableMegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_dsa.config.model import DSAOptions
from megatron_dsa.layers.index_sharing import IndexSharingLayer
from tests.cases.models import forward, gpt
from tests.host import small_config

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a GPU, which captures graphs"
)
#: Layers 1, 2 and 4 select; layers 3 and 5 reuse a selection.
SHARING = {"num_layers": 5, "dsa_indexer_topk_freq": 2, "dsa_indexer_skip_topk_offset": 2}
MASKED = DSAOptions(selected_attention="masked", health_tokens=0)
SPARSE = DSAOptions(health_tokens=0)


def gradients(model, seeds):
    """Return losses and all gradients of microbatches whose forwards all run first."""
    model.zero_grad()
    losses = [forward(model, seed) for seed in seeds]
    for loss in losses:
        loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return torch.stack(losses).detach(), found


def check_same(got, wanted):
    assert torch.equal(got[0], wanted[0]) and got[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        assert torch.equal(got[1][name], gradient), name
    assert any(".indexer." in name and bool(x.any()) for name, x in got[1].items())


def test_a_selection_is_handed_on_as_another_tensor():
    """Megatron marks tensors as inputs and as outputs of graphs."""
    model = gpt(small_config(num_layers=3, dsa_indexer_topk_freq=3))
    contexts = []
    for layer in model.decoder.layers:
        layer.register_forward_hook(
            lambda _layer, _args, kwargs, out: contexts.append((kwargs["context"], out[1])),
            with_kwargs=True,
        )
    forward(model, 5)
    (_, first), *reused = contexts
    for given, handed_on in reused:
        assert given is not handed_on and handed_on._base is None
        assert handed_on.data_ptr() == first.data_ptr()


@contextlib.contextmanager
def capturing():
    megatron_graphs._set_capture_start()
    try:
        yield
    finally:
        megatron_graphs._set_capture_end()


class Graph:
    """Replaces a layer's graph of transformer-engine's ``make_graphed_callables``.

    A replay runs the layer again, reading and writing selections in the capture's memory.
    """

    def __init__(self, layer, hidden_states):
        self.layer, self.read = layer, IndexSharingLayer._waiting
        with capturing():
            outputs = layer(hidden_states, attention_mask=None)
        (self.output,) = outputs  # hidden states only
        self.written = IndexSharingLayer._waiting

    def __call__(self, hidden_states, **kwargs):
        assert kwargs["context"] is None
        IndexSharingLayer._waiting = self.read
        with capturing():
            outputs = self.layer._te_cuda_graph_capture(hidden_states, attention_mask=None)
        if self.layer.self_attention.core_attention.computes_topk and self.written is not None:
            self.written.copy_(IndexSharingLayer._waiting)
        IndexSharingLayer._waiting = None
        return outputs


def graphed(model, microbatches):
    """Capture all layers, microbatch by microbatch, like Megatron for transformer-engine."""
    layers = model.decoder.layers
    model.config.cuda_graph_impl = "transformer_engine"
    for module in (model, model.decoder, *layers):
        module.cuda_graphs, module.cuda_graph_manual_hooks = [], []
    captured = []
    for _ in range(microbatches):
        hidden_states = torch.ones(64, 1, 32, dtype=torch.float64, requires_grad=True)
        for layer in layers:
            captured.append(Graph(layer, hidden_states))
            hidden_states = captured[-1].output
        assert IndexSharingLayer._waiting is None  # the last layer of a group releases it
    for number, layer in enumerate(layers):
        layer.cuda_graphs = captured[number :: len(layers)]


@pytest.mark.parametrize("modules", [[], [CudaGraphModule.attn]], ids=["layers", "attention"])
@pytest.mark.parametrize("options", [SPARSE, MASKED], ids=["sparse", "masked"])
def test_graphs_of_transformer_engine(options, modules):
    model = gpt(small_config(options=options, **SHARING))
    steps = [gradients(model, (seed, seed + 1)) for seed in (5, 7)]
    model.config.cuda_graph_modules = modules
    graphed(model, 2)
    number = iter([*[0, 1] * len(steps), 0])

    def next_microbatch(*_args):
        megatron_graphs.set_current_microbatch(model, next(number))

    model.register_forward_pre_hook(next_microbatch)
    with mock.patch.object(
        # Megatron's requires the package.
        TransformerLayer, "_get_te_cuda_graph_replay_args",
        GraphableMegatronModule._get_te_cuda_graph_replay_args,
    ):  # fmt: skip
        for seed, wanted in zip((5, 7), steps, strict=True):
            check_same(gradients(model, (seed, seed + 1)), wanted)
    plain = gpt(small_config(options=options, **SHARING)).eval()
    assert torch.equal(forward(model.eval(), 5), forward(plain, 5))  # uncaptured
    assert next(number, None) is None


def test_a_selection_without_content_is_not_read():
    """Before a capture Megatron runs a layer on the output buffer of a graph that never ran."""
    model = gpt(small_config(options=SPARSE, **SHARING))
    selecting, reusing = model.decoder.layers[1:3]
    hidden_states = torch.randn(64, 1, 32, dtype=torch.float64)
    _, context = selecting(hidden_states, attention_mask=None)
    wanted, _ = reusing(hidden_states, attention_mask=None, context=torch.zeros_like(context))
    garbage = torch.full_like(context, 2**30)
    megatron_graphs._set_warmup_start()
    try:
        got, _ = reusing(hidden_states, attention_mask=None, context=garbage)
    finally:
        megatron_graphs._set_warmup_end()
    assert torch.equal(got, wanted) and bool(got.isfinite().all())
