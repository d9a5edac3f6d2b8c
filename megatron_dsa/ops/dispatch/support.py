"""Implementations and the calls that they support."""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_dsa.ops.dispatch.hashing import HashedOnce
from megatron_dsa.ops.dispatch.packages import Package, Reason

HALF = (torch.bfloat16, torch.float16)
#: Support of kernels that sum in varying order unless torch's deterministic mode is on.
ATOMIC_SUMS: dict[str, Any] = {"deterministic": False, "deterministic_mode": True}


@dataclass(frozen=True)
class OpCall(HashedOnce):
    """Properties of a call that decide which implementation supports it.

    Attributes:
        dtype: widest dtype of queries and keys.
        heads: local query heads, or index heads.
        qk_dim, v_dim: dims of a query or key, and of a value (0 without values).
        rope_dim: dims of ``qk_dim`` that the keys of all heads share, or ``None``.
        packed: sequences of different lengths share the batch.
        relu: index scores clamp each head's product at 0.
        deterministic: ``torch.use_deterministic_algorithms(True)`` is on.
        teacher: attention also returns the head sum of the probabilities.
        teacher_dim: query dims of the attention that teaches a dense loss, or ``None``.
    """

    device: str
    capability: tuple[int, int] | None
    dtype: torch.dtype
    heads: int
    qk_dim: int
    v_dim: int
    rope_dim: int | None = None
    topk: int | None = None
    packed: bool = False
    sink: bool = False
    relu: bool = True
    deterministic: bool = False
    teacher: bool = False
    teacher_dim: int | None = None

    __hash__ = HashedOnce.__hash__

    def on(self) -> str:
        if self.capability is None:
            return "the CPU"
        return "a GPU of compute capability {}.{}".format(*self.capability)


@dataclass(frozen=True)
class Support:
    """Calls that an implementation supports; ``None`` means "any".

    Attributes:
        covers: short description of covered results or inputs.
        minimum: lowest version of ``package`` for this operation, if above the package's.
        not_run: capabilities for which the kernels were only compiled.
        dims: ``(qk_dim, v_dim)`` or ``(qk_dim, v_dim, rope_dim)``.
        heads, topk: inclusive ranges.
        packed, sink, without_relu: such calls are supported.
        deterministic: results are bitwise repeatable.
        deterministic_mode: results are so only in torch's deterministic mode.
        gives_teacher: attention returns the head sum of the probabilities on request.
        adds_keys: a backward can add to the key gradient of earlier calls.
        head_sizes: head counts of the kernel, ascending; the adapter pads others.
        bridged: description of the adapter's padding and conversions.
        probe: function ``OpCall -> reason or None``, run after all other checks passed.
    """

    covers: str
    package: Package | None = None
    minimum: str | None = None
    capabilities: tuple[tuple[int, int], ...] | None = None
    not_run: tuple[tuple[int, int], ...] = ()
    dtypes: tuple[torch.dtype, ...] | None = None
    dims: tuple[tuple[int, ...], ...] | None = None
    teacher_dims: tuple[int, ...] | None = None
    heads: tuple[int, int] | None = None
    topk: tuple[int, int] | None = None
    packed: bool = True
    sink: bool = True
    without_relu: bool = True
    deterministic: bool = True
    deterministic_mode: bool = False
    gives_teacher: bool = False
    adds_keys: bool = False
    head_sizes: tuple[int, ...] = ()
    bridged: str = ""
    probe: Callable[[OpCall], str | None] | None = None

    def reason(self, call: OpCall) -> Reason | None:
        reason: str | None = (
            self._gpu(call)
            or (self.package.problem(self.minimum) if self.package else None)
            or self._shape(call)
            or self._options(call)
            or self._import(call)
            or (self.probe(call) if self.probe else None)
        )
        return reason if reason is None or isinstance(reason, Reason) else Reason(reason)

    def kernel_heads(self, heads: int) -> int:
        return next((size for size in self.head_sizes if heads <= size), heads)

    def _gpu(self, call: OpCall) -> Reason | None:
        if self.capabilities is None or call.capability in self.capabilities:
            return None
        wanted = _versions(self.capabilities)
        if self.not_run:
            wanted += f" (compiled, not run: {_versions(self.not_run)})"
        owner = self.package.module if self.package else "it"
        return Reason(
            f"wrong GPU: this is {call.on()}",
            f", {owner} has kernels for compute capability {wanted}",
        )

    def _import(self, call: OpCall) -> Reason | None:
        # Plans for a GPU are also made without one, where kernel packages may not import.
        if self.package is None or call.device != "cuda" or not torch.cuda.is_available():
            return None
        return self.package.import_problem(self.minimum)

    def _shape(self, call: OpCall) -> Reason | None:
        if self.dtypes is not None and call.dtype not in self.dtypes:
            wanted = " or ".join(map(short_dtype, self.dtypes))
            return Reason(f"needs {wanted}", f", got {call.dtype}")
        if self.dims is not None:
            names = ("query and key", "value", "rope dims of all heads")[: len(self.dims[0])]
            got = (call.qk_dim, call.v_dim, call.rope_dim)[: len(names)]
            if got not in self.dims:
                wanted = " or ".join("/".join(map(str, dims)) for dims in self.dims)
                given = "/".join(map(str, got))
                return Reason(f"needs dims {wanted}", f" ({'/'.join(names)}), got {given}")
        if self.teacher_dims is not None and call.teacher_dim not in self.teacher_dims:
            wanted = " or ".join(map(str, self.teacher_dims))
            return Reason(f"needs a teacher of {wanted} dims", f", got {call.teacher_dim}")
        ranges = ("heads", self.heads, call.heads), ("selected keys", self.topk, call.topk)
        for name, limits, value in ranges:
            if limits and value is not None and not limits[0] <= value <= limits[1]:
                return Reason(f"takes {limits[0]} to {limits[1]} {name}", f", got {value}")
        return None

    def _options(self, call: OpCall) -> Reason | None:
        if call.packed and not self.packed:
            return Reason("has no packed (THD) mode")
        if call.sink and not self.sink:
            return Reason("has no attention sink")
        if not call.relu and not self.without_relu:
            return Reason("computes index scores with the relu only")
        if call.deterministic and not (self.deterministic or self.deterministic_mode):
            return Reason(
                "is not deterministic", ", and torch.use_deterministic_algorithms(True) asks for it"
            )
        return None


@dataclass(frozen=True)
class Candidate:
    """Implementation of an operation.

    ``kernel`` is ``"module:attribute"``, imported at the first call: it may need an optional
    package.
    """

    name: str
    kernel: str
    support: Support
    fused: bool = True

    def reason(self, call: OpCall) -> Reason | None:
        return self.support.reason(call)

    def load(self) -> Callable:
        found = import_attribute(self.kernel)
        return found() if isinstance(found, type) else found


_module = functools.cache(importlib.import_module)


def import_attribute(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(_module(module), attribute)


def short_dtype(dtype: torch.dtype) -> str:
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    return names.get(dtype, "fp8" if dtype == torch.float8_e4m3fn else str(dtype))


def _versions(capabilities: tuple[tuple[int, int], ...]) -> str:
    return ", ".join("{}.{}".format(*capability) for capability in capabilities)
