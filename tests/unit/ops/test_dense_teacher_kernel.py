"""Our kernel of the dense loss's teacher: compiled without a GPU, run on one against float64."""

import dataclasses
import importlib

import pytest
import torch

from megatron_dsa.dsa_kernels import ExpandedKeys, LatentKeys
from megatron_dsa.ops.dispatch import Policy, describe_call
from megatron_dsa.ops.dispatch.support import OpCall
from megatron_dsa.ops.indexer_loss.spec import DENSE_LOSS
from megatron_dsa.ops.layout.layout import Seen, bshd_layout
from tests.cases.dense_loss import HOPPER, SCALE, Shape, make
from tests.helpers import relative_error

#: Dims without and with rope, dims after those without it, and whether these are its rope key.
KERNELS = {
    "expanded": (128, 64, 128, False),
    "from latents": (128, 64, 0, False),
    "every head": (128, 64, 64, True),
    "GLM-5's, expanded": (192, 64, 256, False),
    "GLM-5's, from latents": (192, 64, 0, False),
    "GLM-5's, every head": (192, 64, 64, True),
    "no rope, expanded": (256, 0, 256, True),
    "no rope, from latents": (256, 0, 0, True),
}
FORMS = tuple(KERNELS)


def test_for_which_calls_it_is_chosen(monkeypatch):
    call = OpCall(
        device="cuda", capability=(9, 0), dtype=torch.bfloat16, heads=64, qk_dim=128, v_dim=0,
        teacher_dim=192,
    )  # fmt: skip
    for candidate in DENSE_LOSS.candidates:
        if candidate.support.package is not None:
            monkeypatch.setattr(type(candidate.support.package), "problem", lambda *_: None)
    for changes, name in (
        ({}, "tilelang"),
        ({"heads": 1, "packed": True, "deterministic": True, "relu": False}, "tilelang"),
        ({"teacher_dim": 256}, "tilelang"),
        ({"teacher_dim": 576}, "triton"),
        ({"teacher_dim": None}, "triton"),
        ({"capability": (10, 0)}, "triton"),
        ({"dtype": torch.float32}, "torch"),
    ):
        other = dataclasses.replace(call, **changes)
        assert DENSE_LOSS.choose(other, Policy()).candidate.name == name, changes


@pytest.fixture
def tiles():
    """Return the tile functions; skip if the kernel cannot run."""
    (candidate,) = (c for c in DENSE_LOSS.candidates if c.name == "tilelang")
    shape = {"heads": 64, "qk_dim": 128, "v_dim": 0, "teacher_dim": 192}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    reason = candidate.reason(describe_call(device, dtype=torch.bfloat16, **shape))
    if reason is not None:
        pytest.skip(reason)

    def make_tiles(heads, workspace=2**28):
        layout = bshd_layout(8, 1, torch.device("cuda"))
        inputs = make(layout, Shape(2, 128, heads, 192, 128), torch.bfloat16, "latent")
        inputs = dataclasses.replace(inputs, workspace_bytes=workspace)
        return importlib.import_module(HOPPER).HopperTiles(inputs)

    return make_tiles


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of the teacher, and its result in float64."""

    q: torch.Tensor
    keys: object
    lse: torch.Tensor
    seen: Seen

    def expected(self):
        keys = self.keys if isinstance(self.keys, torch.Tensor) else self.keys.expanded()
        mask = self.seen.columns(len(keys))
        total = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
        for head in range(self.q.shape[1]):
            logits = self.q[:, head].double() @ keys[:, head].double().t() * SCALE
            probs = (logits - self.lse[head, :, None].double()).exp()
            total += torch.where(mask, probs, 0.0)
        return total

    def check(self, teacher):
        """Check whole blocks: 0 for invisible keys, right for visible ones."""
        expected = self.expected()
        rows, width = expected.shape
        assert teacher.dtype == torch.float32 and teacher.is_contiguous()
        assert teacher.shape == tuple(-(-n // 128) * 128 for n in (rows, width))
        assert not teacher[rows:].any() and not teacher[:, width:].any()
        found = teacher[:rows, :width]
        assert (found[~self.seen.columns(width)] == 0).all()
        # Keys computed from latents may be rounded differently.
        tolerance = 2e-3 if isinstance(self.keys, LatentKeys) else 1e-4
        assert relative_error(found, expected) < tolerance


def draw_call(form, rows, width, heads, seed=0):
    """Draw tensors; some queries see nothing, with an lse of -inf or NaN, and one sees all."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape, scale=1.0):
        x = torch.randn(*shape, device="cuda", generator=generator) * scale
        return x.bfloat16()

    nope, rope, behind, _ = KERNELS[form]
    q = draw(rows, heads, nope + rope)
    if "expanded" in form:
        keys = ExpandedKeys(draw(width, heads, nope + behind), draw(width, rope), behind)
    elif "latents" in form:
        keys = LatentKeys(draw(width, 96 + rope), draw(heads, nope, 96, scale=96**-0.5))
    else:
        keys = draw(width, heads, nope + rope)
    ends = torch.randint(0, width + 1, (rows, 2), device="cuda", generator=generator)
    start, end = ends.sort(1).values.int().unbind(1)
    start, end = start.clone(), end.clone()
    start[1::4] = end[1::4]
    start[rows // 2], end[rows // 2] = 0, width
    lse = torch.randn(heads, rows, device="cuda", generator=generator) + 4
    lse[:, start == end] = float("-inf")
    lse[:, 5::8][:, (start == end)[5::8]] = float("nan")
    return Call(q, keys, lse, Seen(start, end))


def poison():
    """Leave NaN in memory that is allocated next."""
    spoilt = [torch.full((2**22,), float("nan"), device="cuda") for _ in range(8)]
    del spoilt


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", [1, 63, 64, 129, 777])
@pytest.mark.parametrize("rows", [1, 63, 64, 129, 777])
def test_sizes_that_no_tile_divides(tiles, rows, width, form):
    call = draw_call(form, rows, width, 3)
    functions = tiles(3)
    poison()
    call.check(functions.teacher(call.q, call.keys, call.lse, call.seen))


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heads", [1, 2, 3, 16, 17, 64, 128])
def test_heads(tiles, heads, form):
    call = draw_call(form, 300, 200, heads)
    for workspace in (2**28, 1):
        functions = tiles(heads, workspace)
        poison()
        call.check(functions.teacher(call.q, call.keys, call.lse, call.seen))


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_rows_that_see_nothing(tiles, form):
    call = draw_call(form, 400, 500, 4)
    start, end = call.seen.start.clone(), call.seen.end.clone()
    start[128:256], end[128:256] = 77, 77
    end.clamp_(max=300)
    start = torch.minimum(start, end)
    call = dataclasses.replace(call, seen=Seen(start, end))
    call.q[128:256] = float("nan")
    tensors = [call.keys] if isinstance(call.keys, torch.Tensor) else []
    if isinstance(call.keys, ExpandedKeys):
        tensors = [call.keys.kv, call.keys.k_pe]
    elif isinstance(call.keys, LatentKeys):
        tensors = [call.keys.latents]
    for tensor in tensors:
        tensor[300:] = float("nan")
    functions = tiles(4)
    call.check(functions.teacher(call.q, call.keys, call.lse, call.seen))
    nothing = dataclasses.replace(call, seen=Seen(end, end))
    poison()
    assert not functions.teacher(call.q, call.keys, call.lse, nothing.seen).any()


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_parts_of_tensors(tiles, form):
    call = draw_call(form, 900, 400, 5)
    some, slots = slice(7, 900, 3), slice(40, 333)
    keys = call.keys
    if isinstance(keys, ExpandedKeys):
        keys = ExpandedKeys(keys.kv[slots], keys.k_pe[slots], keys.v_dim)
    elif isinstance(keys, LatentKeys):
        keys = LatentKeys(keys.latents[slots], keys.w_uk)
    else:
        keys = keys[slots]
    seen = Seen(*((x[some] - 40).clamp(0, 293) for x in (call.seen.start, call.seen.end)))
    part = Call(call.q[some], keys, call.lse[:, some], seen)
    part.check(tiles(5).teacher(part.q, part.keys, part.lse, part.seen))


@pytest.mark.gpu
def test_equals_triton_and_itself(tiles):
    call, functions = draw_call("expanded", 1500, 1500, 32), tiles(32)
    arguments = (call.q, call.keys, call.lse, call.seen)
    first = functions.teacher(*arguments)
    assert all(torch.equal(functions.teacher(*arguments), first) for _ in range(10))
    assert relative_error(first, super(type(functions), functions).teacher(*arguments)) < 1e-5
