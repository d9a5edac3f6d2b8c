"""Small shared helpers."""

import contextlib
import functools
import importlib.util
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from megatron_dsa.ops import OPERATIONS
from megatron_dsa.ops.dispatch import Candidate, describe_call
from megatron_dsa.testing import comparison as verify


@dataclass(frozen=True)
class MadeUp(Candidate):
    """A candidate with kernel ``function``."""

    function: Callable | None = None

    def load(self) -> Callable:
        return self.function


@contextlib.contextmanager
def no_synchronisation():
    """Fail if the host would wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def never_waits(call):
    """Call twice, the second time with :func:`no_synchronisation`; the first loads kernels."""
    call()
    with no_synchronisation():
        call()


@contextlib.contextmanager
def no_room(size):
    """Limit files to ``size`` bytes, like a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    bytecode = sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # Python would leave it truncated for later runs
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        sys.dont_write_bytecode = bytecode
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def relative_error(x: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ``norm(x - ref) / norm(ref)`` in float64; NaN in ``x`` gives NaN, which never passes.

    A reference that is only rounding (root mean square below 1e-4) counts as size 1 per entry.
    """
    x, reference = x.detach().double().cpu(), reference.detach().double().cpu()
    if reference.norm() > 1e-4 * reference.numel() ** 0.5:
        return verify.relative_error(x, reference)
    return verify.relative_error(x - reference, torch.zeros_like(reference))


def leaf(*shape, seed, device="cpu", dtype=torch.float32, scale=1.0):
    """Draw a leaf, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale
    return values.to(device=device, dtype=dtype).requires_grad_()


def double_leaf(x: torch.Tensor) -> torch.Tensor:
    """Return a float64 leaf with the (rounded) values of ``x``."""
    return x.detach().double().requires_grad_()


def skip_unless_it_runs(candidate: Candidate, heads: int = 64, dim: int = 576) -> None:
    """Skip a test of sparse attention in bf16 if it cannot run."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = {"heads": heads, "qk_dim": dim, "v_dim": 512, "topk": 128}
    reason = candidate.reason(describe_call(device, dtype=torch.bfloat16, **shape))
    if reason is not None:
        pytest.skip(reason)


needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("tilelang") is None or shutil.which("nvcc") is None,
    reason="needs tilelang and nvcc",
)


@functools.cache
def ptxas(source: str, target: str) -> str:
    """Return ptxas's report on a kernel's CUDA source for ``target``, e.g. sm_90a."""
    import tilelang

    root = os.path.dirname(tilelang.__file__)
    arch = f"arch=compute_{target.removeprefix('sm_')},code={target}"
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cu")
        with open(path, "w") as file:
            file.write(source)
        command = ["nvcc", "-cubin", f"-gencode={arch}", "-std=c++17", "-O3"]
        command += ["--use_fast_math", "-Xptxas", "-v", "-o", os.path.join(folder, "kernel.cubin")]
        command += [f"-I{root}/src", f"-I{root}/3rdparty/cutlass/include", path]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


def dynamic_shared_memory(kernel) -> int:
    """Return a compiled kernel's dynamic shared memory in bytes."""
    numbers = re.findall(r"v_int64\) = \(\(int64_t\)(\d+)\)", kernel.get_host_source())
    dynamic = max(int(x) for x in numbers)  # the largest number
    offsets = re.findall(r"buf_dyn_shmem \+ (\d+)", kernel.get_kernel_source())
    assert dynamic > max(int(x) for x in offsets)
    return dynamic


def peak_memory_above(call):
    """Return ``call()`` and torch's peak memory above its start, in bytes."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - before


def peak_bytes(device, call):
    """Return the peak of allocated bytes during ``call``, above its start."""
    if device.type == "cuda":
        # cuBLAS allocates its workspace with the first product.
        for dtype in (torch.bfloat16, torch.float32):
            torch.ones(1, 16, 16, device=device, dtype=dtype).bmm(
                torch.ones(1, 16, 16, device=device, dtype=dtype)
            )
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiled:
        call()
    events = profiled.profiler.kineto_results.events()
    live = peak = 0
    for event in sorted((x for x in events if x.name() == "[memory]"), key=lambda x: x.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@contextlib.contextmanager
def deterministic():
    """Enable torch's deterministic mode for our kernels; cuBLAS needs its own variable."""
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


def check_device_assert(program: str, message: str) -> None:
    """Check that a program prints ``fine``, and asserts before it prints ``not seen``.

    It runs in its own process, because no other test could run after it.
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    printed = done.stdout.splitlines()  # also of compilers
    assert done.returncode != 0 and "fine" in printed and "not seen" not in printed, done.stderr
    assert message in done.stderr


def skip_unless_they_run(*pairs):
    """Skip if an implementation of an operation cannot run."""
    for operation, name in pairs:
        (candidate,) = (c for c in OPERATIONS[operation].candidates if c.name == name)
        shape = {"heads": 64, "qk_dim": 128, "v_dim": 0, "topk": 64}
        taken = candidate.support.dtypes or (torch.bfloat16,)
        dtype = torch.bfloat16 if torch.bfloat16 in taken else taken[0]
        reason = candidate.reason(describe_call("cuda", dtype=dtype, **shape))
        if reason is not None:
            pytest.skip(reason)
