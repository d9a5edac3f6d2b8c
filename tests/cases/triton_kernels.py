"""Triton kernels without a GPU: interpreted, recorded and compiled; and repeated on one."""

import functools
import inspect
import os
import subprocess
import sys

import pytest
import torch

from tests.helpers import no_synchronisation


def interpret(file):
    """Run ``file`` as a script with interpreted Triton kernels on the CPU."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, file], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def prepare_interpreter():
    """Patch the interpreter for loops, where numpy 2.5 rejects ``int()`` of an array.

    Unwritten memory is noticed from then on.
    """
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True

    patch = interpreter._patch_lang_tensor

    def patch_and_repair(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_repair

    # The interpreter would look up hundreds of names per call.
    names = functools.cache(
        lambda package: [name for name, x in inspect.getmembers(package) if is_builtin(x)]
    )

    def patch_builtins(package, builder, scope):
        for name in names(package):
            member = getattr(package, name)
            if is_builtin(member):  # already patched otherwise
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtins


def let_interpreter_use_bf16():
    """Round to bf16 and multiply it correctly, unlike triton 3.6."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def cast_impl(self, source, to):
        if (source.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, to)
        rounded = torch.tensor(source.data).bfloat16().view(torch.int16)
        return TensorHandle(rounded.numpy().view("uint16"), tl.bfloat16)

    def create_dot(self, a, b, *rest):
        a, b = (cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(self, a, b, *rest)

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = cast_impl, create_dot


class Recorder:
    """Replaces a kernel and keeps the arguments of its launches."""

    def __init__(self, kernel):
        self.kernel, self.launches = kernel, []

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.launches.append((args, kwargs))


def recorded(monkeypatch, module, names):
    recorders = [Recorder(getattr(module, name)) for name in names]
    for name, recorder in zip(names, recorders, strict=True):
        monkeypatch.setattr(module, name, recorder)
    return recorders


def assembly(kernel, args, kwargs, capability):
    """Compile a launch for a GPU of ``capability``; return the compiled kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
    names |= {torch.float8_e4m3fn: "fp8e4nv", torch.uint8: "u8"}
    names |= {torch.float64: "fp64", torch.float16: "fp16"}
    bound = dict(zip(kernel.arg_names, args, strict=False))
    bound |= {k: v for k, v in kwargs.items() if k in kernel.arg_names}
    options = {k: v for k, v in kwargs.items() if k not in kernel.arg_names}
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value, free = bound[parameter.name], parameter.do_not_specialize
        one = isinstance(value, int) and value == 1 and not free
        if parameter.is_constexpr or value is None or one:
            signature[parameter.name], constants[(i,)] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + names[value.dtype]
            aligned = value.data_ptr() % 16 == 0
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            aligned = isinstance(value, int) and value % 16 == 0
        if aligned and not free and not parameter.do_not_specialize_on_alignment:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def assert_repeatable(call, inputs):
    """Check 20 forwards and backwards for equal bits, without synchronisation."""
    with no_synchronisation():
        first, same = None, []
        for _ in range(20):
            out = call()
            results = [out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out))]
            first = first or results
            same += [(x == y).all() for x, y in zip(first, results, strict=True)]
    assert torch.stack(same).all()
