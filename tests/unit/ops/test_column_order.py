"""Column orders of summed gradients: the kernel against torch."""

import pytest
import torch

from megatron_dsa.ops.hopper.sums import in_column_order, in_column_order_transposed
from tests.cases.triton_kernels import assembly, interpret, recorded

#: Keys, dims and value dims: of the indexer, of latents with and without a tail.
SHAPES = [(5, 128, 128), (3, 576, 512), (7, 512, 512), (2, 256, 128)]


def numbered(keys, dim, device="cpu"):
    return torch.arange(keys * dim, dtype=torch.float32, device=device).view(keys, dim)


def test_columns_are_permuted_within_their_fragment(device):
    for keys, dim, v_dim in SHAPES:
        x = numbered(keys, dim, device)
        for got, part in ((in_column_order(x), 16), (in_column_order_transposed(x, v_dim), 64)):
            assert torch.equal(got.sort(1).values, x)
            if part == 16 or v_dim < dim:
                tail = got[:, v_dim:] if part == 64 else got
                want = x[:, v_dim:] if part == 64 else x
                assert torch.equal(tail.unflatten(1, (-1, part)).sort(2).values.flatten(1), want)


def test_triton_interpreted():
    interpret(__file__)


def main():
    from megatron_dsa.ops.hopper.sums_triton import reorder

    for keys, dim, v_dim in SHAPES:
        x = numbered(keys, dim)
        assert torch.equal(reorder(x, dim, False), in_column_order(x))
        assert torch.equal(reorder(x, v_dim, True), in_column_order_transposed(x, v_dim))
    assert reorder(x[:0], v_dim, True).shape == (0, dim)


def test_compiles_once_for_all_batches(monkeypatch):
    kernels = pytest.importorskip("megatron_dsa.ops.hopper.sums_triton")
    (recorder,) = recorded(monkeypatch, kernels, ["_reorder"])
    for keys in (1, 16, 33):
        kernels.reorder(numbered(keys, 576), 512, True)
    for capability in (80, 90, 100):
        compiled = [assembly(recorder.kernel, *one, capability) for one in recorder.launches]
        assert len({one.hash for one in compiled}) == 1


@pytest.mark.gpu
def test_kernel_on_a_gpu():
    for keys, dim, v_dim in (*SHAPES, (5000, 576, 512)):
        x = numbered(keys, dim)
        assert torch.equal(in_column_order(x.cuda()).cpu(), in_column_order(x))
        got = in_column_order_transposed(x.cuda(), v_dim).cpu()
        assert torch.equal(got, in_column_order_transposed(x, v_dim))


if __name__ == "__main__":
    main()
