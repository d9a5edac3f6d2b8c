"""The child process of the attention benchmark: inputs of one group, and its measurements.

Reads a request (JSON) from its standard input and writes one JSON line per event to its standard
output: ``environment`` once, then ``start`` before and ``done`` after each measurement. Whatever
ends this process can so be blamed on the measurement that was under way.
"""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
from functools import cached_property
from pathlib import Path

import torch

from benchmarks.cases import (
    CEILINGS,
    PARTS,
    PRESETS,
    Group,
    Measurement,
    flops,
    make_indices,
    neighbour_share,
)
from benchmarks.timing import Clock, measure, measure_ceiling
from benchmarks.verify import Verifier, WrongResult
from megatron_dsa import __version__
from megatron_dsa.dispatch import Policy, describe_call
from megatron_dsa.dsa_kernels import IndexerInputs, indexer_topk, sparse_indexer_loss
from megatron_dsa.errors import ImplementationError
from megatron_dsa.ops import OPERATIONS
from megatron_dsa.ops.indexer_topk.inputs import describe_index_call
from megatron_dsa.ops.sparse_attention.declaration import FORWARD
from megatron_dsa.ops.sparse_attention.inputs import SparseAttentionInputs
from megatron_dsa.sequence.layout import Layout, QueryRange

#: Columns of the CSV -> distribution and module of optional packages.
PACKAGES = {
    "flash_mla": ("flash-mla", "flash_mla"),
    "cudnn_frontend": ("nvidia-cudnn-frontend", "cudnn"),
    "cutlass_dsl": ("nvidia-cutlass-dsl", "cutlass"),
    "tilelang": ("tilelang", "tilelang"),
}


def environment(device: torch.device, packages: dict = PACKAGES) -> dict:
    """Return the columns that say what the numbers were measured on and with."""
    on_gpu = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else f"CPU ({platform.machine()})",
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
        "driver": _driver() if on_gpu else None,
        "package": __version__,
        **{column: _version(*names) for column, names in packages.items()},
    }


def _driver() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", path.read_text()) if path.exists() else None
    return found.group(1) if found else None


def _version(distribution: str, module: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        # Built in place: there is something to import but no metadata.
        return "unknown" if importlib.util.find_spec(module) is not None else None


def last_queries_layout(queries: int, skv: int, device: torch.device) -> Layout:
    """Layout of the last ``queries`` tokens of one sequence of ``skv``, seeing all before them."""
    position = torch.arange(skv - queries, skv, device=device)
    window = QueryRange(slice(0, queries, 1), 0, place=skv - queries, lookback=skv, ceiling=skv)
    return Layout(
        num_queries=queries,
        num_keys=skv,
        start=torch.zeros_like(position, dtype=torch.int32),
        end=(position + 1).int(),
        position=position,
        key_rows=None,
        real=None,
        query_ranges=(window,),
        max_length=skv,
    )


class Inputs:
    """The tensors of one group, in bf16, the same for every implementation.

    ``out``, ``lse`` and ``p_sum`` come from the torch implementation, so that a backward is not
    measured on (or blamed for) what some forward kernel made.
    """

    def __init__(self, group: Group, device: torch.device, workspace_bytes: int, seed: int = 0):
        p = PRESETS[group.preset]
        self.preset, self.v_dim, self.softmax_scale = p, p.v_dim, p.softmax_scale
        self.workspace_bytes = workspace_bytes
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape, dtype=torch.bfloat16):
            return torch.randn(*shape, dtype=dtype, device=device, generator=generator)

        self.q = normal(group.queries, p.heads, p.qk_dim)
        self.kv = normal(group.skv, p.qk_dim)
        self.dout = normal(group.queries, p.heads, p.v_dim)
        self.sink = normal(p.heads, dtype=torch.float32) if p.sink else None
        self.indices = make_indices(
            group.distribution, group.queries, group.skv, p.topk, device, seed
        )
        self.layout = last_queries_layout(group.queries, group.skv, device)
        weights = normal(group.queries, p.index_heads) * (p.index_heads * p.index_dim) ** -0.5
        self.indexer = IndexerInputs(
            normal(group.queries, p.index_heads, p.index_dim).requires_grad_(),
            normal(group.skv, p.index_dim).requires_grad_(),
            weights.requires_grad_(),
        )
        self.op_call = describe_call(
            device,
            dtype=self.q.dtype,
            heads=p.heads,
            qk_dim=p.qk_dim,
            v_dim=p.v_dim,
            topk=p.topk,
            packed=False,
            sink=p.sink,
        )
        self.describe_index_call = describe_index_call(self.indexer, self.layout, p.topk)

    def sparse_inputs(self, want_p_sum: bool = False) -> SparseAttentionInputs:
        return SparseAttentionInputs(
            self.q, self.kv, self.indices, self.v_dim, self.softmax_scale, None, self.sink,
            self.workspace_bytes, want_p_sum,
        )  # fmt: skip

    @cached_property
    def _forward(self):
        policy = self.policy(Measurement("forward", ("torch",)))
        return FORWARD.run(self.op_call, policy, self.sparse_inputs(want_p_sum=True))

    @property
    def out(self) -> torch.Tensor:
        return self._forward[0]

    @property
    def lse(self) -> torch.Tensor:
        return self._forward[1]

    @property
    def p_sum(self) -> torch.Tensor:
        return self._forward[2]

    def policy(self, measurement: Measurement) -> Policy:
        """Name the implementation of every part: it runs, or says why it cannot."""
        named = tuple(zip(PARTS[measurement.operation], measurement.names, strict=True))
        return Policy(workspace_bytes=self.workspace_bytes, named=named)

    def reason(self, measurement: Measurement) -> str | None:
        """Return why an implementation of a part cannot run these inputs, or ``None``."""
        for part, name in zip(PARTS[measurement.operation], measurement.names, strict=True):
            attends = part.startswith("sparse_attention")
            call = self.op_call if attends else self.describe_index_call
            (candidate,) = (c for c in OPERATIONS[part].candidates if c.name == name)
            if reason := candidate.reason(call):
                return reason if len(measurement.names) == 1 else f"{part}: {reason}"
        return None

    def call(self, measurement: Measurement):
        """Return a function without arguments that runs the measured operation once."""
        policy, operation = self.policy(measurement), measurement.operation
        x = self.indexer
        if operation == "topk":
            topk = self.preset.topk
            return lambda: indexer_topk(x, self.layout, topk, policy=policy)
        if operation == "loss":
            teacher = self.p_sum

            def loss():
                value = sparse_indexer_loss(x, self.indices, teacher, self.layout, policy=policy)
                return value.detach(), *torch.autograd.grad(value, (x.q, x.k, x.weights))

            return loss
        (part,) = PARTS[operation]
        tensors = {
            "forward": lambda: (),
            "teacher": lambda: (self.lse,),
            "backward": lambda: (self.out, self.lse, self.dout),
        }[operation]()
        return lambda: OPERATIONS[part].run(self.op_call, policy, self.sparse_inputs(), *tensors)


def measure_operation(m: Measurement, inputs: Inputs, verifier: Verifier, clock, settings) -> dict:
    """Measure one operation, unless one of its implementations says that it cannot run."""
    if reason := inputs.reason(m):
        return {"status": "skipped", "reason": reason}
    row = measure(
        inputs.call(m), lambda result: verifier.error(m.operation, result), clock,
        settings["repeats"], settings["budget"],
    )  # fmt: skip
    if row["status"] == "ok":
        work = flops(m.operation, inputs.preset, inputs.q.shape[0], inputs.kv.shape[0])
        row["tflops"] = work / row["median_ms"] / 1e9
    return row


def outcome(function, *args) -> dict:
    """Return the row of ``function(*args)``, or one that says why there is none."""
    try:
        return function(*args)
    except ImplementationError as error:
        return {"status": "skipped", "reason": one_line(error)}
    except WrongResult as error:
        return {"status": "failed", "reason": f"wrong result: {one_line(error)}"}
    except Exception as error:
        return {"status": "failed", "reason": f"{type(error).__name__}: {one_line(error)}"}


def one_line(error: BaseException) -> str:
    """The first line of a message; some CUDA errors are followed by pages of advice."""
    lines = str(error).strip().splitlines()
    return lines[0][:500] if lines else ""


def still_works(clock: Clock) -> bool:
    """Whether the device can still be used: a kernel that faults takes its process with it."""
    try:
        gc.collect()
        if clock.on_gpu:
            torch.cuda.empty_cache()
            torch.ones(1, device="cuda").add_(1)
        clock.wait()
    except Exception:
        return False
    return True


def serve(request: dict, send) -> None:
    """Run the request's measurements in order, until all are done or the device is unusable."""
    settings = request["settings"]
    device = torch.device(settings["device"])
    send({"event": "environment", **environment(device)})
    group = Group(**request["group"])
    clock = Clock(device)
    inputs = verifier = share = None
    for place, fields in enumerate(request["measurements"]):
        m = Measurement(fields["operation"], tuple(fields["names"]))
        ceiling = m.operation in CEILINGS
        if inputs is None and not ceiling:
            # Before the start of a measurement: if the inputs do not fit, none needs to be tried.
            inputs = Inputs(group, device, settings["workspace_mib"] * 2**20)
            verifier, share = Verifier(inputs), neighbour_share(inputs.indices)
        send({"event": "start", "place": place})
        if ceiling:
            row = outcome(measure_ceiling, m.operation, device, clock, settings["repeats"])
        else:
            row = outcome(measure_operation, m, inputs, verifier, clock, settings)
            row["neighbour_share"] = share
        send({"event": "done", "place": place, **row})
        if not still_works(clock):
            return


def main() -> None:
    """Serve one request. Standard output is kept for events; compilers may print to it as well."""
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    serve(request, lambda event: print(json.dumps(event), file=events, flush=True))


if __name__ == "__main__":
    main()
