"""Our Hopper kernels without a GPU: they compile for it, and to what they are meant to."""

import importlib.util
import re
import shutil

import pytest
import torch

from megatron_dsa.ops.sparse_attention.fragments import in_column_order

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("tilelang") is None or shutil.which("nvcc") is None,
    reason="needs tilelang and nvcc",
)


@needs_compiler
@pytest.mark.parametrize(("heads", "dim"), [(64, 576), (24, 512)])
def test_backward_compiles_to_warpgroup_instructions(heads, dim):
    """23: not one mma.sync, and every product that the algorithm has."""
    from megatron_dsa.ops.sparse_attention.hopper.backward import compiled

    source = compiled(heads, dim, 512).get_kernel_source()
    assert "mma_sync" not in source and "mma.sync" not in source
    products = len(re.findall(r"tl::wgmma_", source))
    slabs, tail = dim // 64, dim > 512
    # S and dP in two parts each, dQ in quarters (and a tail), dKV per slab of columns.
    assert products == 4 + 4 + tail + slabs + 8
    # What is in shared memory fills it (227 KiB) for 576.
    offsets = [int(x) for x in re.findall(r"buf_dyn_shmem \+ (\d+)", source)]
    assert max(offsets) + 64 * 64 * 2 <= 227 * 1024


def test_other_dims_are_refused():
    pytest.importorskip("tilelang")
    from megatron_dsa.ops.sparse_attention.hopper.backward import build

    with pytest.raises(ValueError, match=r"must be \(576, 512\) or \(512, 512\), got \(320, 256"):
        build(64, 320, 256)


def test_column_order():
    """Thread t of a row holds columns 2t, 2t+1, 8+2t, 9+2t of 16 and adds them side by side."""
    held = [column for t in range(4) for column in (2 * t, 2 * t + 1, 8 + 2 * t, 9 + 2 * t)]
    order = torch.tensor(held + [16 + column for column in held])
    columns = torch.arange(32.0).expand(3, 32) + 100 * torch.arange(3.0)[:, None]
    assert torch.equal(in_column_order(columns[:, order]), columns)
