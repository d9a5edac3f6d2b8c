"""Entries of some tokens, taken from several tensors."""

import pytest
import torch

from megatron_dsa.ops.common.tokens import select_tokens
from tests.cases.triton_kernels import assembly, interpret, recorded

#: Around a program's blocks, one element, and none.
SHAPES = [(3, 700), (), (1024,), (5000,), (0,), (2, 3)]
DTYPES = [torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.float64, torch.float16]


def tensors(device, total=70):
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(-99, 99, (total, *shape), generator=generator).to(device, dtype)
        for shape, dtype in zip(SHAPES, DTYPES, strict=True)
    ]


@pytest.mark.parametrize("count", [0, 1, 7, 70])
def test_select(device, count):
    tokens = torch.randperm(70, generator=torch.Generator().manual_seed(1))[:count].to(device)
    whole = tensors(device)
    whole[1].requires_grad_(whole[1].is_floating_point())
    first, none, *rest = select_tokens(tokens, whole[0], None, *whole[1:])
    assert none is None
    for got, x in zip((first, *rest), whole, strict=True):
        assert torch.equal(got, x[tokens]) and not got.requires_grad


def test_what_is_not_contiguous(device):
    x = tensors(device)[3].t()
    tokens = torch.tensor([4, 2, 3], device=device)
    assert torch.equal(select_tokens(tokens, x)[0], x[tokens])


def test_triton_interpreted():
    interpret(__file__)


def main():
    from megatron_dsa.ops.common.tokens_triton import select

    tokens = torch.tensor([5, 69, 0, 5])
    whole = tensors("cpu")
    for first in range(len(whole)):
        some = whole[first:] + whole[:first]
        for given in (some, some[:1], some[:3]):
            for got, x in zip(select(tokens, given), given, strict=True):
                assert torch.equal(got, x[tokens])
    assert select(tokens[:0], whole)[0].shape == (0, 3, 700)


def test_compiles_once_for_all_sizes(monkeypatch):
    kernels = pytest.importorskip("megatron_dsa.ops.common.tokens_triton")
    (recorder,) = recorded(monkeypatch, kernels, ["_select"])
    for size in (1, 16, 4097):
        x = [torch.ones(9, size, dtype=torch.bfloat16), torch.ones(9, 2 * size)]
        kernels.select(torch.tensor([3, 4]), [*x, *x])
    for capability in (80, 90, 100):
        compiled = [assembly(recorder.kernel, *one, capability) for one in recorder.launches]
        assert len({one.hash for one in compiled}) == 1


if __name__ == "__main__":
    main()
