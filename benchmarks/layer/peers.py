"""Ways to run one attention layer, with the same weights and inputs.

* ``ours``: this package's layer with its defaults. ``torch``: without fused kernels. ``graph``: the
  layer of ``ours``, for its CUDA graph.
* ``sparse``, ``masked``: the same, with sparse or masked dense attention. ``recomputed``: sparse
  attention with ``--dsa-recompute latent_output``; V4's layers with ``queries``.
* ``all-queries``: ``ours`` with ``--dsa-indexer-loss-queries 1``. ``frozen``: with
  ``--dsa-indexer-loss-coeff 0``, which trains no indexer. ``unpooled``: with
  ``--dsa-indexer-pool-size 1``.
* ``bundled``: megatron-core's own DSA layer with its TileLang kernels. Its Hadamard rotation of
  index queries and keys, which changes no score, needs a package; where that is missing it goes
  without.
* ``dense``: the layer of this package in stage ``dense``, with whatever attention of torch is the
  fastest here.
* ``ours-dense``: the same stage, its attention left to dispatch.

``bundled`` and ``dense`` are peers of DeepSeek-V3.2's layer. Ways of one of several ranks:
:mod:`benchmarks.layer.rank`. All have torch's linears and norms.
"""

import copy
import dataclasses
import functools
import math

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.child import one_line
from benchmarks.layer.graph import GRAPH
from benchmarks.megatron_layer import Layer, LayerSpec
from benchmarks.timing import Clock, quantile
from megatron_dsa.errors import ImplementationError
from megatron_dsa.ops import OPERATIONS

#: Tokens for comparing dense attentions.
TRIAL_ROWS = 8192
#: Most elements of a tensor in torch's attention.
MOST_ELEMENTS = 2**31 - 1


def build(way: str, spec: LayerSpec, device: torch.device) -> tuple[Layer, str]:
    """Return a layer in training mode with seeded weights, and a remark on it.

    Raises:
        ImplementationError: a way has nothing that runs here.
    """
    if way == "torch":
        return Layer(dataclasses.replace(spec, fused=False), device), ""
    if way in ("sparse", "recomputed", "masked"):
        attention = "masked" if way == "masked" else "sparse"
        again = "latent_output" if spec.ratio is None else "queries"
        recompute = again if way == "recomputed" else "nothing"
        spec = dataclasses.replace(spec, selected_attention=attention, recompute=recompute)
        layer = Layer(spec, device)
        if device.type == "cuda":
            require_fused(layer.config, f"{attention}_attention")
        return layer, ""
    losses: dict[str, dict[str, float]] = {
        "all-queries": {"indexer_loss_queries": 1.0},
        "frozen": {"coefficient": 0.0},
    }
    layer = Layer(dataclasses.replace(spec, **losses.get(way, {})), device)
    if way in ("ours", GRAPH, *losses):
        return layer, ""
    makers = {
        "dense": dense_module, "ours-dense": own_dense_module, "bundled": bundled_module,
        "unpooled": lambda config, _: changed_module(config, indexer_pool_size=1),
    }  # fmt: skip
    module, remark = makers[way](layer.config, device)
    layer.module = with_weights(module.to(device).bfloat16().train(), layer.module)
    return layer, remark


def require_fused(config, prefix: str) -> None:
    """Require fused kernels for a layer's operations that start with ``prefix``.

    Raises:
        ImplementationError: one is missing, and a step in torch would take minutes.
    """
    from megatron_dsa.layers.required_ops import called_ops, required_ops

    policy = config.dsa.policy
    for operation, call in called_ops(required_ops(config, 1), policy):
        if operation.startswith(prefix):
            reason = OPERATIONS[operation].why_not_fused(call, policy)
            if reason is not None:
                raise ImplementationError(f"{operation} is not fused here: {reason}")


def with_weights(module: torch.nn.Module, source: torch.nn.Module) -> torch.nn.Module:
    """Copy all parameters of ``module`` from those of the same name in ``source``."""
    weights = dict(source.named_parameters())
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(weights[name])
    return module


def own_dense_module(config, _device: torch.device | None = None, **options):
    """Return the layer of a configuration in stage ``dense``, and no remark."""
    return changed_module(config, stage="dense", **options)


def changed_module(config, **options):
    """Return the layer of a configuration with changed ``options``, and no remark."""
    from megatron.core.transformer.spec_utils import build_module

    from megatron_dsa.specs import dsa_layer_spec

    config = copy.copy(config)
    config.dsa = dataclasses.replace(config.dsa, **options)
    spec = dsa_layer_spec(config).submodules.self_attention
    return build_module(spec, config=config, layer_number=1), ""


def dense_module(config, device: torch.device):
    """Return the dense layer of a configuration, and the name of its attention."""
    # Without a length the layer uses no bits of visible keys.
    module, _ = own_dense_module(config, sequence_length=None)
    if device.type != "cuda":
        return module, ""  # dispatch decides
    dims = (config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim)
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    name, attention = fastest_attention(heads, *dims, device)
    scale = module.core_attention.softmax_scale
    # One sequence without indexer: layout and index inputs are unused.
    module.core_attention.forward_dense = lambda q, k, v, *_: attention(q, k, v, scale)
    return module, f"sdpa={name}"


def attend(backend: SDPBackend, q, k, v, scale: float) -> torch.Tensor:
    """Run causal attention by one of torch's kernels: ``q, k [S, H, D]``, ``v [S, H, Dv]`` -> as v.

    FlashAttention requires values as wide as keys: they are zero padded. Tensors beyond 32-bit
    indexing are split by heads.
    """
    heads, width = v.shape[1:]
    if backend == SDPBackend.FLASH_ATTENTION:
        v = functional.pad(v, (0, q.shape[-1] - width))
    at_once = math.ceil(heads / math.ceil(q.numel() / MOST_ELEMENTS))
    parts = []
    with sdpa_kernel(backend):
        for own in zip(*(x.split(at_once, 1) for x in (q, k, v)), strict=True):
            own = (x.transpose(0, 1)[None] for x in own)
            out = functional.scaled_dot_product_attention(*own, is_causal=True, scale=scale)
            parts.append(out[0, ..., :width].transpose(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


ATTENTIONS = {
    "cudnn": functools.partial(attend, SDPBackend.CUDNN_ATTENTION),
    "flash, padded": functools.partial(attend, SDPBackend.FLASH_ATTENTION),
    "efficient": functools.partial(attend, SDPBackend.EFFICIENT_ATTENTION),
}


@functools.cache
def fastest_attention(heads: int, qk_dim: int, v_dim: int, device: torch.device):
    """Return name and function of the fastest dense attention, forward and backward.

    Raises:
        ImplementationError: none can run; the message has the reasons.
    """
    generator = torch.Generator(device).manual_seed(0)

    def normal(dim: int) -> torch.Tensor:
        shape = (TRIAL_ROWS, heads, dim)
        return torch.randn(*shape, dtype=torch.bfloat16, device=device, generator=generator)

    tensors = [normal(dim).requires_grad_() for dim in (qk_dim, qk_dim, v_dim)]
    gradient, clock = normal(v_dim), Clock(device)
    times, reasons = {}, []
    for name, attention in ATTENTIONS.items():

        def call(attention=attention):
            out = attention(*tensors, qk_dim**-0.5)
            torch.autograd.grad(out, tensors, gradient)

        try:
            call()
            times[name] = quantile(clock.milliseconds(call, 3), 0.5)
        except RuntimeError as error:
            reasons.append(f"{name}: {one_line(error)}")
    if not times:
        raise ImplementationError(f"no dense attention can run here: {'; '.join(reasons)}")
    name = min(times, key=times.get)
    return name, ATTENTIONS[name]


def bundled_module(config, device: torch.device):
    """Return megatron-core's DSA layer, and its differences to ``ours``."""
    from megatron_dsa.extras.doctor.bundled import bundled_layer

    return bundled_layer(config, "tilelang" if device.type == "cuda" else "none")
