"""Registration of operations: policies as text, layouts from tensors, derivatives."""

import ast
import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from megatron_dsa.errors import require
from megatron_dsa.ops.common.autograd import once_differentiable
from megatron_dsa.ops.dispatch import Policy, meta_dispatch
from megatron_dsa.ops.layout.compressed import visible_groups
from megatron_dsa.ops.layout.layout import Layout, bshd_layout, packed_layout

_DEFAULT = Policy()


def policy_text(policy: Policy) -> str:
    """Return a policy as text for schemas; ``""`` is the default policy."""
    parts = []
    for field in dataclasses.fields(policy):
        value = getattr(policy, field.name)
        if value != getattr(_DEFAULT, field.name):
            parts.append(f"{field.name}={value!r}")
    return "; ".join(parts)


@functools.lru_cache(maxsize=64)
def policy_of(text: str) -> Policy:
    known = {field.name for field in dataclasses.fields(Policy)}
    values: dict[str, Any] = {}
    try:
        for node in ast.parse(text).body:
            if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)):
                raise ValueError("no assignment")
            values[node.targets[0].id] = ast.literal_eval(node.value)
        holds = set(values) <= known
    except (SyntaxError, ValueError):
        holds = False
    require(
        holds,
        f"policy must be text of torch_library.policy_text, got {text!r}: pass that or nothing",
    )
    return Policy(**values)


def registered[**Arguments, Result](
    name: str, fake: Callable[[Any], Any] | None = None
) -> Callable[[Callable[Arguments, Result]], Any]:
    """Decorate the implementation of ``torch.ops.megatron_dsa.<name>``; see ``custom_op``.

    Autocast is off inside, as in every backward. Results have the strides of ``new_empty(shape)``.

    Args:
        fake: takes a namespace of the arguments and returns empty results; default: the function
            itself on fake tensors. Functions that call autograd must pass one, and functions that
            build a layout or run in blocks: their host sizes would compile a graph per number of
            tokens.
    """

    def register(function: Callable[Arguments, Result]):
        signature = inspect.signature(function)

        @functools.wraps(function)
        def plain(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            first: Any = args[0]
            with torch.autocast(first.device.type, enabled=False):
                return _each(_with_default_strides, function(*args, **kwargs))

        def as_fake(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Any:
            if fake is not None:
                given = signature.bind(*args, **kwargs)
                given.apply_defaults()
                return fake(SimpleNamespace(**given.arguments))
            with meta_dispatch(None, choose=False):
                return _each(empty_like, function(*args, **kwargs))

        operation: Any = torch.library.custom_op(f"megatron_dsa::{name}", plain, mutates_args=())
        operation.register_fake(as_fake)
        operation.__signature__ = signature
        return operation

    return register


def like(*names: str) -> Callable[[Any], Any]:
    return lambda a: tuple(empty_like(getattr(a, name)) for name in names)


def register_backward(
    name: str,
    forward: Any,
    backward: Callable,
    of: Sequence[str],
    results: Sequence[str] = (),
) -> None:
    """Register the backward of ``torch.ops.megatron_dsa.<name>``.

    Args:
        backward: takes the gradients of the first results, then arguments and results by name.
        of: arguments whose gradients ``backward`` returns, in this order.
        results: names of results that ``backward`` takes.
    """
    arguments = list(inspect.signature(forward).parameters)
    known = {*arguments, *results}
    wanted = list(inspect.signature(backward).parameters)
    needed = [x for x in wanted if x in known]
    gradients = len(wanted) - len(needed)

    def keep(ctx, inputs, output):
        values = dict(zip(arguments, inputs, strict=True))
        ctx.dtypes = {x: values[x].dtype for x in of if values[x] is not None}
        if isinstance(output, tuple):
            values |= zip(results, output, strict=False)
            ctx.mark_non_differentiable(*output[gradients:])
        kept = [values[x] for x in needed]
        ctx.save_for_backward(*(x if isinstance(x, torch.Tensor) else None for x in kept))
        ctx.others = [None if isinstance(x, torch.Tensor) else x for x in kept]
        ctx.set_materialize_grads(gradients > 1)

    @once_differentiable
    def differentiate(ctx, *given):
        if given[0] is None:
            return (None,) * len(arguments)
        given = (*given, *(None,) * gradients)[:gradients]  # read_head returns one tensor
        # Non-reentrant checkpointing unpacks saved tensors only once.
        pairs = zip(ctx.saved_tensors, ctx.others, strict=True)
        found = backward(*given, *(other if x is None else x for x, other in pairs))
        by_name = dict(zip(of, found, strict=True))
        return tuple(by_name[x].to(ctx.dtypes[x]) if x in ctx.dtypes else None for x in arguments)

    torch.library.register_autograd(f"megatron_dsa::{name}", differentiate, setup_context=keep)


def _each(change: Callable[[torch.Tensor], torch.Tensor], result: Any) -> Any:
    return tuple(map(change, result)) if isinstance(result, tuple) else change(result)


def empty_like(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def _with_default_strides(x: torch.Tensor) -> torch.Tensor:
    if x.stride() == torch.empty(x.shape, device="meta").stride():
        return x
    return empty_like(x).copy_(x)


def layout_of(
    tokens: int,
    device: torch.device,
    cu_seqlens: torch.Tensor | None,
    cu_seqlens_padded: torch.Tensor | None,
    max_seqlen: int | None,
) -> Layout:
    """Return a packed layout, or the layout of one sequence without ``cu_seqlens``."""
    check_lengths(cu_seqlens, cu_seqlens_padded, max_seqlen)
    if cu_seqlens is None:
        return bshd_layout(tokens, 1, device)
    return packed_layout(cu_seqlens, tokens, max_seqlen, cu_seqlens_padded)


def check_lengths(cu_seqlens, cu_seqlens_padded, max_seqlen) -> None:
    for name, value in (("cu_seqlens_padded", cu_seqlens_padded), ("max_seqlen", max_seqlen)):
        require(
            value is None or cu_seqlens is not None,
            f"{name} must be None without cu_seqlens, which makes all tokens one sequence: pass "
            "cu_seqlens as well",
        )


def index_layout(layout: Layout, ratio: int) -> Layout:
    """Return the layout of index keys, which are compressed above a ratio of 1."""
    check_ratio(ratio)
    return layout if ratio == 1 else visible_groups(layout, ratio)


def check_ratio(ratio: int) -> None:
    require(ratio >= 1, f"ratio must be at least 1, got {ratio}: pass the layer's ratio")


class TokenCounts(NamedTuple):
    """Layout attributes for argument checks on fake tensors, which have no values."""

    num_queries: int
    num_keys: int
    start: torch.Tensor


def none_of(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the empty tensor that stands for ``None`` in schemas."""
    return x.new_empty(0, dtype=dtype)


def derivatives(
    run: Callable[..., Sequence[torch.Tensor]],
    tensors: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor] | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the results of ``run(*tensors)`` and the gradients of ``tensors``.

    Enables autograd, which is off inside a registered operation. ``gradients``: one per result;
    ``None`` for a scalar result.
    """
    c = torch._C
    excluded = c._dispatch_tls_local_exclude_set().remove(c.DispatchKey.AutogradFunctionality)
    excluded = excluded.remove(c.DispatchKey.AutogradOther).remove(c.DispatchKey.ADInplaceOrView)
    with c._ForceDispatchKeyGuard(c._dispatch_tls_local_include_set(), excluded):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in tensors]
            results = run(*leaves)
        found = torch.autograd.grad(results, leaves, gradients, materialize_grads=True)
    return [x.detach() for x in results], list(found)
