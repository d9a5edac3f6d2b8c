"""Our Hopper kernels without a GPU: they compile for it, to the intended instructions."""

import functools
import importlib
import itertools
import re

import pytest
import torch

from megatron_dsa.ops.hopper.sums import in_column_order, in_column_order_transposed
from megatron_dsa.ops.sparse_attention.tilelang.kernels import Kernels, Way
from tests.helpers import dynamic_shared_memory, needs_compiler, ptxas

#: Module and arguments: heads, dim, v_dim, group, with_sink; of unions the group.
KERNELS = {
    "forward of 64 heads": ("forward", 64, 576, 512, 1, False),
    "forward of 4 x 16 heads": ("forward", 16, 576, 512, 4, False),
    "forward of 2 x 32 heads and a sink": ("forward", 32, 512, 512, 2, True),
    "backward of 64 heads": ("backward", 64, 576, 512, 1),
    "backward of 2 x 24 heads": ("backward", 24, 512, 512, 2),
    "backward of 4 x 16 heads": ("backward", 16, 576, 512, 4),
    "queries' half of 128 heads": ("query_gradient", 128, 576, 512),
    "queries' half of 96 heads, with sums": ("query_gradient", 96, 512, 512, True),
    "keys' half of 128 heads": ("key_gradient", 128, 576, 512),
    "keys' half of 64 heads, in fixed point": ("key_gradient", 64, 512, 512, True),
    "unions of 4": ("unions", 4),
}
#: Bytes of shared memory that a thread block can have.
SHARED = 227 * 1024


def hopper(module):
    return importlib.import_module(f"megatron_dsa.ops.sparse_attention.tilelang.hopper.{module}")


@functools.cache
def kernel(name):
    """The kernel compiled for sm_90a."""
    module, *arguments = KERNELS[name]
    return hopper(module).compiled(*arguments)


def ptxas_of(name):
    return ptxas(kernel(name).get_kernel_source(), "sm_90a")


def products(module, heads, dim, *_):
    """The wgmma products of the algorithm, and those with P from registers."""
    tail, tiles = dim > 512, -(-heads // 64)
    return {
        # EVEN: S in halves, before the loop and in it, P0 V0 and P1 V1; ODD: S in halves, and
        # those. Each warpgroup's own P comes from its registers.
        "forward": (2 * 2 + 2 + 2 + 2, 2),
        # S and dP in two parts each, dQ in quarters (and a tail), dKV per slab of columns.
        "backward": (4 + 4 + tail + dim // 64 + 8, 0),
        # S and dP in four parts each, dQ in quarters (and a tail).
        "query_gradient": (4 + 4 + 4 + tail, 0),
        # Of both consumers: P dO and dS Q of two accumulators (and dS Q of a tail) per tile.
        "key_gradient": (2 * tiles * (4 + tail), 0),
    }[module]


@needs_compiler
@pytest.mark.parametrize("name", [name for name in KERNELS if not name.startswith("unions")])
def test_products_are_wgmma(name):
    source = kernel(name).get_kernel_source()
    assert "mma_sync" not in source and "mma.sync" not in source
    found = (len(re.findall(rf"tl::{each}", source)) for each in ("wgmma_", "wgmma_rs"))
    assert tuple(found) == products(*KERNELS[name])


@needs_compiler
@pytest.mark.parametrize("name", KERNELS)
def test_registers_suffice(name):
    """No product waits for the one before it, and next to nothing spills.

    Where registers do not suffice, ptxas says that it serialized the products and goes on.
    """
    said = ptxas_of(name)
    serialized = re.search(r".*(instructions are serialized|Potential Performance Loss).*", said)
    assert serialized is None, serialized.group()
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert spills and all(int(n) <= 64 for pair in spills for n in pair), spills


@needs_compiler
@pytest.mark.parametrize("name", KERNELS)
def test_shared_memory_fits(name):
    """What is asked for at the launch, and what barriers take."""
    static = re.search(r"(\d+) bytes smem", ptxas_of(name))
    dynamic = dynamic_shared_memory(kernel(name))
    assert dynamic + (int(static.group(1)) if static else 0) <= SHARED


@pytest.mark.parametrize("module", ["query_gradient", "key_gradient"])
def test_what_does_not_fit_the_two_is_refused(module):
    pytest.importorskip("tilelang")
    with pytest.raises(ValueError, match=r"got \(320, 256"):
        hopper(module).build(128, 320, 256)
    with pytest.raises(ValueError, match="heads must be 1 to 128, got 129"):
        hopper("key_gradient").build(129, 576, 512)


@pytest.mark.parametrize("module", ["forward", "backward"])
def test_what_does_not_fit_a_tile_is_refused(module):
    pytest.importorskip("tilelang")
    build = hopper(module).build
    with pytest.raises(ValueError, match=r"must be \(576, 512\) or \(512, 512\), got \(320, 256"):
        build(64, 320, 256)
    with pytest.raises(ValueError, match=r"got \(576, 256\)"):
        build(64, 576, 256)
    for heads, group, most in ((16, 5, 4), (24, 3, 2), (64, 2, 1), (128, 2, 1), (4, 9, 8)):
        with pytest.raises(ValueError, match=rf"{most} queries of {heads} heads, got {group}"):
            build(heads, 576, 512, group)


@pytest.mark.parametrize(
    ("heads", "queries"),
    [(1, 8), (2, 8), (8, 8), (9, 7), (16, 4), (24, 2), (32, 2), (33, 1), (64, 1), (128, 1)],
)
def test_queries_of_a_tile(heads, queries):
    """Their heads fit in 64 rows, and their bits in a byte."""
    pytest.importorskip("tilelang")
    from megatron_dsa.ops.hopper.tiles import queries_per_tile

    assert queries_per_tile(heads) == queries


def test_column_order():
    """Thread t of a row holds columns 2t, 2t+1, 8+2t, 9+2t of 16 and adds them side by side."""
    held = [column for t in range(4) for column in (2 * t, 2 * t + 1, 8 + 2 * t, 9 + 2 * t)]
    order = torch.tensor(held + [16 + column for column in held])
    columns = torch.arange(32.0).expand(3, 32) + 100 * torch.arange(3.0)[:, None]
    assert torch.equal(in_column_order(columns[:, order]), columns)


@pytest.mark.parametrize("dim", [576, 512])
def test_column_order_transposed(dim):
    """A thread holds columns w 16 + line + {0, 8}, of both fragments of 128, and adds four."""
    held = []
    for first in range(0, 512, 128):
        for warp, line in itertools.product(range(4), range(8)):
            column = first + warp * 16 + line
            held += [column, column + 8, column + 64, column + 72]
    for warp, line in itertools.product(range(4), range(8)):
        held += [512 + warp * 16 + line, 512 + warp * 16 + line + 8] if dim > 512 else []
    columns = torch.arange(float(dim)).expand(3, dim) + 1000 * torch.arange(3.0)[:, None]
    assert torch.equal(in_column_order_transposed(columns[:, held], 512), columns)


@pytest.mark.parametrize(("fixed", "heads"), [(False, (65, 128)), (True, (33, 64, 65, 128))])
def test_heads_whose_backward_is_two_kernels(fixed, heads):
    hopper_kernels, portable = Kernels("sm_90a", None), Kernels("sm_90a", "sm_90a")
    for each in (32, 33, 64, 65, 128):
        expected = Way.TWO if each in heads else Way.ONE
        assert hopper_kernels.way(each, fixed) is expected
        assert portable.way(each, fixed) is Way.PORTABLE
