"""Head sums in the order of the caller's lists: torch's and Triton's against plain loops."""

import pytest
import torch

from tests.cases.triton_kernels import assembly, interpret, prepare_interpreter, recorded

ORDER = "megatron_dsa.ops.sparse_attention.tilelang.order"
#: queries, entries of a list, entries of a kernel's list; lists of several programs, no query.
SHAPES = [(7, 5, 12), (1, 1, 1), (3, 2500, 4000), (0, 4, 9), (5, 0, 3)]
KEYS = 50


def make_case(queries, width, wide, device="cpu"):
    """Draw sums of more lists than queries, slots, lists with invalid entries, lengths."""
    generator = torch.Generator().manual_seed(queries + width)
    draw = lambda low, high, *shape: torch.randint(  # noqa: E731
        low, high, shape, generator=generator, dtype=torch.int32
    ).to(device)
    sums = torch.rand(queries + 2, wide, generator=generator).to(device)
    return (
        sums, draw(0, max(1, wide), queries, width), draw(-2, KEYS + 3, queries, width),
        draw(0, width + 1, queries),
    )  # fmt: skip


def expected(sums, places, indices, length):
    out = torch.zeros(indices.shape)
    for row, own in enumerate(indices.tolist()):
        count = len(own) if length is None else int(length[row])
        for entry, key in enumerate(own[:count]):
            if 0 <= key < KEYS:
                place = entry if places is None else int(places[row, entry])
                out[row, entry] = sums[row, place]
    return out


def check(order, shape, device="cpu"):
    """Check with and without slots and lengths."""
    sums, places, indices, length = make_case(*shape, device)
    for some in (places, None):
        for lengths in (length, None):
            out = torch.full(indices.shape, 9.0, device=device)
            order(out, sums, some, indices, lengths, KEYS, 1000)
            assert torch.equal(out.cpu(), expected(sums, some, indices, lengths))


@pytest.mark.parametrize("shape", SHAPES)
def test_torch(shape):
    check(pytest.importorskip(ORDER).to_callers_lists, shape)


def test_triton_interpreted():
    interpret(__file__)


def main():
    """Run in the interpreter, on CPU tensors."""
    from megatron_dsa.ops.sparse_attention.tilelang import order

    prepare_interpreter()

    def fused(out, sums, places, indices, length, keys, _workspace_bytes):
        if out.numel():
            grid = len(indices), -(-indices.shape[1] // 1024)
            order._order[grid](
                out, sums, places, indices, length, keys, *indices.shape[1:], sums.shape[1],
                BLOCK=1024,
            )  # fmt: skip

    for shape in SHAPES:
        check(fused, shape)


def test_compiles_without_a_gpu(monkeypatch):
    order = pytest.importorskip(ORDER)
    (recorder,) = recorded(monkeypatch, order, ("_order",))
    for shape in ((7, 5, 12), (16, 16, 32), (1, 1, 1)):
        sums, places, indices, length = make_case(*shape)
        for some in (places, None):
            order._order[1](
                torch.zeros(indices.shape), sums, some, indices, length, KEYS, *indices.shape[1:],
                sums.shape[1], BLOCK=1024,
            )  # fmt: skip
    for capability in (80, 90, 100):
        assert len({assembly(recorder.kernel, *x, capability).hash for x in recorder.launches}) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (300, 2048, 8192)])
def test_triton_on_the_gpu(shape):
    check(pytest.importorskip(ORDER).to_callers_lists, shape, "cuda")


if __name__ == "__main__":
    main()
