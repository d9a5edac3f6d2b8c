"""The lists of a selection: columns of a block as key rows, torch's and Triton's."""

import pytest
import torch

from megatron_dsa.ops.indexer_topk.torch import put
from megatron_dsa.ops.layout.blocks import Seen
from tests.cases.triton_kernels import assembly, interpret, prepare_interpreter, recorded

KERNELS = "megatron_dsa.ops.indexer_topk.triton"
#: tokens, width of the block, keys to select: lists of more than a program, no token, no key seen.
SHAPES = [(7, 60, 5), (1, 1, 1), (33, 40, 64), (3, 3000, 2500), (0, 9, 4)]


def make_case(tokens, width, topk, device="cpu"):
    """What queries see, with queries that see nothing, and their sorted selections."""
    generator = torch.Generator().manual_seed(tokens)
    ends = torch.randint(0, width + 1, (tokens,), generator=generator)
    start = (ends - torch.randint(0, width + 1, (tokens,), generator=generator)).clamp_min(0)
    columns = torch.full((tokens, topk), -1)
    for row, (first, last) in enumerate(zip(start.tolist(), ends.tolist(), strict=True)):
        some = torch.randperm(last - first, generator=generator)[:topk].sort().values + first
        if last - first > topk:  # else what the selection says is not read
            columns[row] = some
    seen = Seen(start.int().to(device), ends.int().to(device))
    return columns.int().to(device), seen


def expected(columns, seen, first, key_rows):
    """The lists by plain loops."""
    lists = []
    for row, own in enumerate(columns.tolist()):
        begin, end = int(seen.start[row]), int(seen.end[row])
        if end - begin <= len(own):
            own = list(range(begin, end)) + [-1] * (len(own) - end + begin)
        slots = [x + first if x >= 0 else -1 for x in own]
        lists.append([int(key_rows[x]) if x >= 0 and key_rows is not None else x for x in slots])
    return torch.tensor(lists, dtype=torch.int32).view(columns.shape)


def check(put, tokens, width, topk, device="cpu"):
    """Every combination, into rows that lie apart."""
    columns, seen = make_case(tokens, width, topk, device)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randperm(width + 7, generator=generator).to(device)
    for first in (0, 7):
        for key_rows in (None, rows):
            out = torch.full((2 * tokens, topk), 99, dtype=torch.int32, device=device)
            put(out[::2], columns.clone(), seen, first, key_rows)
            assert torch.equal(out[::2].cpu(), expected(columns, seen, first, key_rows))
            assert (out[1::2] == 99).all()
            few = (seen.end - seen.start <= topk).cpu()
            put(out[::2], None, seen, first, key_rows)
            want = expected(columns, seen, first, key_rows)
            assert torch.equal(out[::2].cpu()[few], want[few])


@pytest.mark.parametrize("shape", SHAPES)
def test_unfused(shape):
    check(put, *shape)


def test_triton_interpreted():
    """The kernel, see :func:`main`."""
    interpret(__file__)


def main():
    """What runs in the interpreter."""
    from megatron_dsa.ops.indexer_topk import triton

    prepare_interpreter()
    for shape in SHAPES:
        check(triton.put, *shape)


def test_compiles_without_a_gpu(monkeypatch):
    """The same code for all sizes; with and without columns and key rows."""
    kernels = pytest.importorskip(KERNELS)
    (recorder,) = recorded(monkeypatch, kernels, ("_put",))
    for tokens, width, topk in ((1, 1, 1), (16, 64, 16), (7, 60, 5)):
        columns, seen = make_case(tokens, width, topk)
        for some in (None, columns):
            for rows in (None, torch.arange(width + 16)):
                kernels.put(torch.empty_like(columns), some, seen, 16, rows)
    assert len(recorder.launches) == 12
    for capability in (80, 90, 100):
        compiled = {assembly(recorder.kernel, *one, capability).hash for one in recorder.launches}
        assert len(compiled) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (5000, 9000, 2048)])
def test_triton_on_the_gpu(shape):
    kernels = pytest.importorskip(KERNELS)
    check(kernels.put, *shape, device="cuda")


if __name__ == "__main__":
    main()
