"""Time the operations of hyper-connections on a GPU: fused, torch.compile of the formulas, a copy.

Prints, per width and operation, the time of forward and backward, the bytes that cannot be avoided,
and the share of the bandwidth that a copy of the same machine reaches.

    python scripts/time_hyper_connections.py --tokens 8192 --channels 4096 7168
"""

from __future__ import annotations

import argparse

import torch

from megatron_dsa.ops.hyper_connections import torch as plain
from megatron_dsa.ops.hyper_connections.inputs import Connection, ReadInputs, WriteInputs
from megatron_dsa.ops.hyper_connections.triton import launch

STREAMS = 4
#: Elements per token and channel that a forward and a backward have to move.
TRAFFIC = {"read": (9, 19), "write": (9, 14), "head": (9, 15)}


def milliseconds(call, repeats: int = 20) -> float:
    """Return the median time of a call, with caches that other data has filled."""
    other = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        other.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def copy_bandwidth() -> float:
    """Return the bytes per millisecond that a copy of 2 GiB reads and writes."""
    source = torch.empty(2**30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source))


def inputs_of(name: str, tokens: int, channels: int):
    """Return random inputs of an operation."""

    def values(*shape, dtype=torch.float32, scale=1.0):
        return (torch.randn(shape, device="cuda") * scale).to(dtype).requires_grad_()

    x = values(tokens, STREAMS, channels, dtype=torch.bfloat16)
    if name == "write":
        output = values(tokens, channels, dtype=torch.bfloat16)
        return WriteInputs(output, x, values(tokens, STREAMS), values(tokens, STREAMS, STREAMS), 0)
    rows = STREAMS if name == "head" else STREAMS * (STREAMS + 2)
    fn = values(rows, STREAMS * channels, scale=(STREAMS * channels) ** -0.5)
    scales = 1 if name == "head" else 3
    connection = Connection(fn, values(rows), values(scales), 1e-6, 1e-6, 20)
    return ReadInputs(x, connection, values(channels, dtype=torch.bfloat16), 0)


def formulas(name: str, inputs):
    """Return the plain formulas as a function of the tensors, for autograd and torch.compile."""
    if name == "write":

        def write(output, x, post, comb):
            return plain._written(output.float(), x.float(), post, comb).to(x.dtype)

        return write

    def read(x, fn, base, scale, weight):
        results = plain._read(
            x.float(), fn, base, scale, weight.float(), inputs.settings, torch.bfloat16
        )
        normed, *rest = (result for result in results if result is not None)
        return normed.to(x.dtype), *([x.view_as(x), *rest] if rest else [])

    return read


def time_both(call, inputs) -> tuple[float, float]:
    """Return the times of forward and backward."""

    def results():
        found = call(*inputs.tensors)
        return found if isinstance(found, tuple) else (found,)

    given = [torch.randn_like(result) for result in results()]
    kept = results()
    forward = milliseconds(results)
    backward = milliseconds(
        lambda: torch.autograd.grad(kept, inputs.tensors, given, retain_graph=True)
    )
    return forward, backward


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--channels", type=int, nargs="+", default=[4096, 7168])
    arguments = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: a copy reaches {bandwidth / 1e9:.2f} TB/s")
    print("tokens channels operation  way       forward ms (share)  backward ms (share)")
    for tokens in arguments.tokens:
        for channels in arguments.channels:
            for name, elements in TRAFFIC.items():
                inputs = inputs_of(name, tokens, channels)
                ways = {
                    "triton": lambda *_, inputs=inputs, name=name: getattr(launch, name)(inputs),
                    "compiled": torch.compile(formulas(name, inputs), dynamic=False),
                }
                for way, call in ways.items():
                    times = time_both(call, inputs)
                    least = (2 * count * tokens * channels / bandwidth for count in elements)
                    cells = (
                        f"{took:8.3f} ({bound / took:4.0%})"
                        for took, bound in zip(times, least, strict=True)
                    )
                    print(f"{tokens:6} {channels:8} {name:10} {way:9} {'     '.join(cells)}")


if __name__ == "__main__":
    main()
