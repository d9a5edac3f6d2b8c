"""What an implementation can run, declared once.

One :class:`Support` per implementation and operation drives dispatch, the error messages, ``info``,
``doctor``, the skips of the tests and ``info --support-table``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_dsa.ops.dispatch.packages import Package

HALF = (torch.bfloat16, torch.float16)
#: What an implementation declares whose sums vary in order unless torch's deterministic mode is on.
ATOMIC_SUMS: dict[str, Any] = {"deterministic": False, "deterministic_mode": True}


@dataclass(frozen=True)
class OpCall:
    """The properties of a call that decide which implementation can take it.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        capability: compute capability of the GPU, e.g. ``(9, 0)``; ``None`` without one.
        dtype: dtype of queries and keys (the wider one where inputs differ).
        heads: local query heads, or index heads.
        qk_dim, v_dim: dims of a query/key and of a value (0 where there is no value).
        rope_dim: dims of ``qk_dim`` that the keys of all heads share; ``None``: not asked.
        topk: keys selected per query; ``None`` where nothing is selected.
        packed: sequences of different lengths share the batch.
        sink: a learned sink takes part in the softmax.
        relu: index scores clamp each head's product at 0.
        deterministic: ``torch.use_deterministic_algorithms(True)`` is in force.
        teacher: the head sum of the probabilities is wanted along with the result.
        teacher_dim: dims of the attention's queries, from which a dense loss forms its teacher;
            ``None``: not asked.
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

    def on(self) -> str:
        """Return the device in words, for messages."""
        if self.capability is None:
            return "the CPU"
        return "a GPU of compute capability {}.{}".format(*self.capability)


@dataclass(frozen=True)
class Support:
    """Declaration of one implementation of one operation; ``None`` means "any".

    Attributes:
        covers: what it computes, in a few words.
        package: optional package that it needs.
        minimum: floor of that package's version for this operation, if above the package's own.
        capabilities: compute capabilities of the GPUs that it has kernels for.
        not_run: those of them for which the kernels were only compiled, never run.
        dtypes: dtypes of queries and keys.
        dims: pairs ``(qk_dim, v_dim)``.
        rope_dim: of which so many are shared by all heads' keys.
        teacher_dims: dims of the queries from which a dense loss forms its teacher.
        heads, topk: inclusive ranges.
        packed, sink: whether it takes them.
        without_relu: whether it takes index scores without the relu.
        deterministic: whether equal inputs give bitwise equal results.
        deterministic_mode: whether ``torch.use_deterministic_algorithms(True)`` makes it so.
        gives_teacher: whether attention returns the head sum of the probabilities on request.
        adds_keys: whether a backward adds to the key gradient of the calls before, if it is given.
        head_sizes: numbers of heads that its kernel takes, ascending; the adapter pads others.
        bridged: what the adapter does to fit the contract (padding, conversions).
        declined: why it is never used, for a kernel that exists and does not fit.
        probe: a last question ``OpCall -> reason or None``, asked only when the rest fits.
    """

    covers: str
    package: Package | None = None
    minimum: str | None = None
    capabilities: tuple[tuple[int, int], ...] | None = None
    not_run: tuple[tuple[int, int], ...] = ()
    dtypes: tuple[torch.dtype, ...] | None = None
    dims: tuple[tuple[int, int], ...] | None = None
    rope_dim: int | None = None
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
    declined: str | None = None
    probe: Callable[[OpCall], str | None] | None = None

    def reason(self, call: OpCall) -> str | None:
        """Return why ``call`` cannot be run, or ``None``.

        What is wrong comes first: short lines end at the first comma, semicolon or parenthesis.
        """
        for rule in (
            self._declined,
            self._gpu,
            self._package,
            self._dtype,
            self._dims,
            self._counts,
            self._options,
            self.probe or (lambda _: None),
        ):
            reason = rule(call)
            if reason is not None:
                return reason
        return None

    def never_run(self, call: OpCall) -> bool:
        """Whether its kernels were compiled for this GPU, but never run on one."""
        return call.capability in self.not_run

    def kernel_heads(self, heads: int) -> int:
        """Return how many heads its kernel computes for a call of ``heads``."""
        return next((size for size in self.head_sizes if heads <= size), heads)

    def _declined(self, call: OpCall) -> str | None:
        return None if self.declined is None else f"declined: {self.declined}"

    def _gpu(self, call: OpCall) -> str | None:
        if self.capabilities is None or call.capability in self.capabilities:
            return None
        wanted = ", ".join("{}.{}".format(*c) for c in self.capabilities)
        if self.not_run:
            compiled = ", ".join("{}.{}".format(*c) for c in self.not_run)
            wanted += f" (compiled, not run: {compiled})"
        owner = self.package.module if self.package else "it"
        return (
            f"wrong GPU: this is {call.on()}, {owner} has kernels for compute capability {wanted}"
        )

    def _package(self, call: OpCall) -> str | None:
        return None if self.package is None else self.package.problem(self.minimum)

    def _dtype(self, call: OpCall) -> str | None:
        if self.dtypes is None or call.dtype in self.dtypes:
            return None
        return f"needs {' or '.join(map(short_dtype, self.dtypes))}, got {call.dtype}"

    def _dims(self, call: OpCall) -> str | None:
        if self.dims is not None and (call.qk_dim, call.v_dim) not in self.dims:
            wanted = " or ".join(f"{qk_dim}/{v_dim}" for qk_dim, v_dim in self.dims)
            return f"needs dims {wanted} (query and key/value), got {call.qk_dim}/{call.v_dim}"
        if self.rope_dim is not None and call.rope_dim != self.rope_dim:
            return f"needs {self.rope_dim} rope dims of all heads, got {call.rope_dim}"
        if self.teacher_dims is not None and call.teacher_dim not in self.teacher_dims:
            wanted = " or ".join(map(str, self.teacher_dims))
            return f"needs a teacher of {wanted} dims, got {call.teacher_dim}"
        return None

    def _counts(self, call: OpCall) -> str | None:
        for name, limits, value in (
            ("heads", self.heads, call.heads),
            ("selected keys", self.topk, call.topk),
        ):
            if limits is None or value is None:
                continue
            low, high = limits
            if not low <= value <= high:
                return f"takes {low} to {high} {name}, got {value}"
        return None

    def _options(self, call: OpCall) -> str | None:
        if call.packed and not self.packed:
            return "has no packed (THD) mode"
        if call.sink and not self.sink:
            return "has no attention sink"
        if not call.relu and not self.without_relu:
            return "computes index scores with the relu only"
        if call.deterministic and not (self.deterministic or self.deterministic_mode):
            return "is not deterministic, and torch.use_deterministic_algorithms(True) asks for it"
        return None


def short_dtype(dtype: torch.dtype) -> str:
    """``torch.bfloat16 -> "bf16"``."""
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    names[torch.float8_e4m3fn] = "fp8"
    return names.get(dtype, str(dtype))
