"""Index lists of hybrid attention: torch and Triton against plain loops."""

import dataclasses

import pytest
import torch

from megatron_dsa.ops.key_lists import torch as unfused
from megatron_dsa.ops.key_lists.spec import ListInputs, plain_lists
from tests.cases.triton_kernels import Recorder, assembly, interpret, prepare_interpreter
from tests.helpers import no_synchronisation

KERNELS = "megatron_dsa.ops.key_lists.triton"


def compressed(kind, rows, groups, topk, generator):
    """Return the fields of visible compressed keys; ragged, some none."""
    empty = dict.fromkeys(("selected", "selected_length", "group_start", "group_end"))
    most = groups.clamp_max(topk)
    if kind == "none":
        return empty
    if kind == "groups":
        first = torch.randint(0, 5, (rows,), generator=generator)
        return empty | {"group_start": first.int(), "group_end": (first + groups).int()}
    selected = torch.rand(rows, topk, generator=generator).argsort(1).int()
    valid = torch.arange(topk) < most[:, None]
    # Entries past the length are arbitrary.
    behind = -1 if kind == "selected without lengths" else -7
    fields = empty | {"selected": torch.where(valid, selected, behind)}
    return fields if behind == -1 else fields | {"selected_length": most.int()}


KINDS = ["none", "groups", "selected", "selected without lengths"]


def make_inputs(kind, rows=37, window=4, topk=9, width=None, mapped=True, device="cpu", seed=0):
    """Draw sequences of random length with padding; every tensor is a slice of a larger one."""
    generator = torch.Generator().manual_seed(seed)
    length = (
        torch.randint(1, 3 * window + 2, (rows,), generator=generator).cumsum(0).clamp_max(rows)
    )
    begins = torch.cat([torch.zeros(1, dtype=torch.int64), length])
    row = torch.arange(rows)
    start = begins[torch.bucketize(row, begins, right=True) - 1]
    end = row + 1
    start[rows - rows // 8 :] = end[rows - rows // 8 :] = rows - rows // 8
    groups = (torch.rand(rows, generator=generator) * (topk + 1)).long()
    fields = {"start": start.int(), "end": end.int()}
    fields |= compressed(kind, rows, groups, topk, generator)
    fields["key_indices"] = torch.randperm(rows, generator=generator) if mapped else None
    for name, x in fields.items():
        if x is None:
            continue
        if name == "key_indices":
            fields[name] = x.to(device)
            continue
        wide = torch.full((rows + 3, *(n + 5 for n in x.shape[1:])), 99, dtype=torch.int32)
        part = (slice(1, rows + 1), *(slice(0, n) for n in x.shape[1:]))
        wide[part] = x
        fields[name] = wide.to(device)[part]
    width = window + topk if width is None else width
    return ListInputs(window=window, offset=rows, width=width, **fields)


def check(build, inputs):
    """Compare with the loops."""
    for got, want in zip(build(inputs), plain_lists(inputs), strict=True):
        assert got.dtype == torch.int32 and got.shape == want.shape
        assert torch.equal(got, want)


#: Sufficient width, exact, too narrow, narrower than the window, nothing.
CHANGES = [{}, {"width": 300}, {"width": 7}, {"width": 3}, {"width": 0}, {"mapped": False}]
CHANGES += [{"rows": 0}, {"rows": 1}, {"window": 0}, {"topk": 200, "window": 130}]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_unfused(kind, change):
    check(unfused.build, make_inputs(kind, **change))


def test_an_example():
    """Two sequences by hand verify the reference itself."""
    inputs = make_inputs("none", rows=2)
    inputs = dataclasses.replace(
        inputs, start=torch.tensor([0, 3], dtype=torch.int32), window=3, width=6, offset=50,
        end=torch.tensor([5, 4], dtype=torch.int32), key_indices=torch.tensor([9, 8, 7, 6, 5]),
        selected=torch.tensor([[4, 1, -1], [-1, -1, -1]], dtype=torch.int32),
    )  # fmt: skip
    want = torch.tensor([[4, 1, 57, 56, 55, -1], [56, -1, -1, -1, -1, -1]], dtype=torch.int32)
    for build in (plain_lists, unfused.build):
        indices, length = build(inputs)
        assert torch.equal(indices, want) and length.tolist() == [5, 1]


def test_triton_interpreted():
    interpret(__file__)


def main():
    """Run in the interpreter."""
    from megatron_dsa.ops.key_lists import triton as triton_kernels

    prepare_interpreter()
    for kind in KINDS:
        for change in CHANGES:
            check(triton_kernels.build, make_inputs(kind, **change))


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_once_without_a_gpu(monkeypatch, kind):
    kernels = pytest.importorskip(KERNELS)
    recorder = Recorder(kernels._build)
    monkeypatch.setattr(kernels, "_build", recorder)
    for change in ({"rows": 1}, {"rows": 64, "topk": 1, "width": 16, "window": 16}):
        kernels.build(make_inputs(kind, **change))
    hashes = set()
    for args, kwargs in recorder.launches:
        for capability in (80, 89, 90, 100):
            compiled = assembly(recorder.kernel, args, kwargs, capability)
            assert ".local" not in compiled.asm["ptx"]
            hashes.add(compiled.hash)
    assert len(hashes) == 4  # one per capability


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "topk"), [(4099, 512), (70_001, 1024)])
def test_triton_on_the_gpu(kind, rows, topk):
    kernels = pytest.importorskip(KERNELS)
    inputs = make_inputs(kind, rows=rows, window=128, topk=topk, device="cuda")
    want = unfused.build(inputs)
    kernels.build(inputs)  # compiles
    with no_synchronisation():
        got = [kernels.build(inputs) for _ in range(2)]
        unfused.build(inputs)
    for indices, length in got:
        assert torch.equal(indices, want[0]) and torch.equal(length, want[1])
    check(kernels.build, make_inputs(kind, rows=200, window=128, topk=topk, device="cuda"))


@pytest.mark.gpu
def test_more_entries_than_int32_counts():
    kernels = pytest.importorskip(KERNELS)
    rows, width = 70_001, 31_000
    assert rows * width > 2**31
    inputs = make_inputs("groups", rows=rows, window=128, topk=width - 128, device="cuda")
    indices, length = kernels.build(inputs)
    names = ("start", "end", "group_start", "group_end")
    for part in (slice(0, 50), slice(rows - 9000, rows - 8950), slice(rows - 50, rows)):
        fields = {name: getattr(inputs, name)[part] for name in names}
        want = plain_lists(dataclasses.replace(inputs, **fields))
        assert torch.equal(indices[part], want[0]) and torch.equal(length[part], want[1])


if __name__ == "__main__":
    main()
