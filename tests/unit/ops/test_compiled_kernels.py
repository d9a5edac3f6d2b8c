"""Our TileLang kernels compiled without a GPU: instructions, registers, shared memory, rejected
arguments.
"""

import importlib
import re
from dataclasses import dataclass

import pytest
import torch

from megatron_dsa.ops.hopper.sums import in_column_order, in_column_order_transposed
from megatron_dsa.ops.sparse_attention.tilelang.kernels import TARGETS, Kernels, Way
from tests.helpers import dynamic_shared_memory, needs_compiler, ptxas

OPS = "megatron_dsa.ops"
SPARSE = "sparse_attention.tilelang.hopper"
PORTABLE = "sparse_attention.tilelang.portable"
MASKED = "masked_attention.tilelang"
TEACHER = "indexer_loss.tilelang.teacher"
LOSS = "indexer_loss.tilelang.program"
SCORES = "indexer_topk.tilelang.scores"
SELECTION = "indexer_topk.tilelang.selection"
#: Dims of a key without rope, of its rope, and of a value.
V3_2, GLM_5, NO_ROPE = (128, 64, 128), (192, 64, 256), (256, 0, 256)
BF16, FP8 = "bfloat16", "float8_e4m3fn"
#: Bytes of shared memory of a thread block; of an SM; the system's part of a block.
SHARED, PER_SM, RESERVED = 227 * 1024, 228 * 1024, 1024
REGISTERS = 65536
#: Bytes that sparse attention may spill.
FEW = (64, 64)


def module_of(name):
    pytest.importorskip("tilelang")
    return importlib.import_module(f"{OPS}.{name}")


@dataclass(frozen=True)
class Kernel:
    """A kernel for sm_90a: ``compiled(*arguments)`` of a module below ``ops``.

    Attributes:
        wgmma: products in its source; ``from_registers`` of them read P or dS from registers.
        spilled: bytes that may be stored and loaded.
        threads: of each of two thread blocks that share an SM; ``None``: it has one.
    """

    module: str
    arguments: tuple
    wgmma: int
    from_registers: int | None = None
    spilled: tuple[int, int] = (0, 0)
    threads: int | None = None


KERNELS = {
    # heads, dim, v_dim, group, with_sink. S in halves, before the loop and in it, P0 V0 and P1 V1;
    # S in halves, and those. Each warpgroup's P comes from its registers.
    "forward of 64 heads": Kernel(f"{SPARSE}.forward", (64, 576, 512, 1, False), 10, 2, FEW),
    "forward of 4 x 16 heads": Kernel(f"{SPARSE}.forward", (16, 576, 512, 4, False), 10, 2, FEW),
    "forward of 2 x 32 heads, sink": Kernel(
        f"{SPARSE}.forward", (32, 512, 512, 2, True), 10, 2, FEW
    ),
    # S and dP in two parts each, dQ in quarters (and a tail), dKV per slab of columns; without
    # rope those are from registers.
    "backward of 64 heads": Kernel(f"{SPARSE}.backward", (64, 576, 512, 1), 26, 0, FEW),
    "backward of 2 x 24 heads": Kernel(f"{SPARSE}.backward", (24, 512, 512, 2), 24, 16, FEW),
    "backward of 64 heads, in fixed point, with sums": Kernel(
        f"{SPARSE}.backward", (64, 512, 512, 1, True, True), 24, 16, FEW
    ),
    "backward of 4 x 16 heads": Kernel(f"{SPARSE}.backward", (16, 576, 512, 4), 26, 0, FEW),
    # S and dP in four parts each, dQ in quarters (and a tail).
    "queries' half of 128 heads": Kernel(f"{SPARSE}.query_gradient", (128, 576, 512), 13, 0, FEW),
    "queries' half of 96 heads, with sums": Kernel(
        f"{SPARSE}.query_gradient", (96, 512, 512, True), 12, 0, FEW
    ),
    # In both consumers: P dO and dS Q of two accumulators (and dS Q of a tail) per tile.
    "keys' half of 128 heads": Kernel(f"{SPARSE}.key_gradient", (128, 576, 512), 20, 0, FEW),
    "keys' half of 64 heads, in fixed point": Kernel(
        f"{SPARSE}.key_gradient", (64, 512, 512, True), 8, 0, FEW
    ),
    "unions of 4": Kernel(f"{SPARSE}.unions", (4,), 0, 0, FEW),
    "masked forward": Kernel(f"{MASKED}.forward", V3_2, 6, 2),
    "masked backward": Kernel(f"{MASKED}.backward", V3_2, 6, 2),
    "masked backward in order": Kernel(f"{MASKED}.backward", (*V3_2, True), 6, 2, (32, 112)),
    "masked probabilities": Kernel(f"{MASKED}.probabilities", V3_2, 2, 0),
    # A query is in one buffer: S before the loop and in it, P V in it and after it.
    "masked forward, wide": Kernel(f"{MASKED}.forward", GLM_5, 4, 2),
    # S, dP and dK, and dQ in the loop and after it.
    "masked backward, wide": Kernel(f"{MASKED}.backward", GLM_5, 5, 1),
    "masked backward in order, wide": Kernel(f"{MASKED}.backward", (*GLM_5, True), 5, 1),
    "masked values' gradient, wide": Kernel(f"{MASKED}.value_gradient", GLM_5, 4, 2),
    # A product per slab of 64 dims.
    "masked probabilities, wide": Kernel(f"{MASKED}.probabilities", GLM_5, 4, 0),
    "masked forward without rope": Kernel(f"{MASKED}.forward", NO_ROPE, 4, 2),
    "masked backward without rope": Kernel(f"{MASKED}.backward", NO_ROPE, 5, 1),
    "masked backward in order, without rope": Kernel(f"{MASKED}.backward", (*NO_ROPE, True), 5, 1),
    "masked values' gradient without rope": Kernel(f"{MASKED}.value_gradient", NO_ROPE, 4, 2),
    "masked probabilities without rope": Kernel(f"{MASKED}.probabilities", NO_ROPE, 4, 0),
    # Dims without and with rope, dims behind those without it, and whether these are its rope key.
    # Products: one without and one with rope, or one per slab of 64 dims.
    "teacher, expanded": Kernel(TEACHER, (128, 64, 128, False), 2),
    "teacher from latents": Kernel(TEACHER, (128, 64, 0, False), 2),
    "teacher of every head": Kernel(TEACHER, (128, 64, 64, True), 2),
    "teacher of GLM-5, expanded": Kernel(TEACHER, (192, 64, 256, False), 4),
    "teacher of GLM-5 from latents": Kernel(TEACHER, (192, 64, 0, False), 4),
    "teacher of GLM-5, every head": Kernel(TEACHER, (192, 64, 64, True), 4),
    "teacher without rope, expanded": Kernel(TEACHER, (192, 64, 320, True), 4),
    # Heads, gradients, in fixed point: S, the keys' gradient and G, of which the value needs S.
    "loss of 64 heads": Kernel(LOSS, (64, True, False), 3, threads=256),
    "loss of 5 heads": Kernel(LOSS, (5, True, False), 3, threads=256),
    "loss of 64 heads in fixed point": Kernel(LOSS, (64, True, True), 3, threads=256),
    "loss of 64 heads without gradients": Kernel(LOSS, (64, False, False), 1, threads=256),
} | {
    # Heads, dtype, relu: two accumulators of both consumers.
    f"scores {arguments}": Kernel(SCORES, arguments, 4)
    for arguments in (
        (64, BF16, True), (32, BF16, True), (16, BF16, True), (64, BF16, False),
        (64, FP8, True), (32, FP8, True), (16, FP8, True),
    )
}  # fmt: skip


def sizes(compiled, source, target="sm_90a"):
    """Return the most bytes stored and loaded by spills, registers, and bytes of shared memory.

    If registers are short for concurrent products, ptxas only reports that it serialized them.
    """
    said = ptxas(source, target)
    serialized = re.search(r".*(serialized|Potential Performance Loss).*", said)
    assert serialized is None, serialized.group()
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    static = sum(int(n) for n in re.findall(r"(\d+) bytes smem", said))
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", said))
    shared = 0 if compiled is None else dynamic_shared_memory(compiled) + static
    spilled = tuple(max(int(n) for n in column) for column in zip(*spills, strict=True))
    return spilled, registers, shared


@needs_compiler
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_for_hopper(name):
    """Products must be wgmma without waits; registers and shared memory must suffice."""
    kernel = KERNELS[name]
    compiled = module_of(kernel.module).compiled(*kernel.arguments)
    source = compiled.get_kernel_source()
    assert "mma_sync" not in source and "mma.sync" not in source
    assert len(re.findall(r"tl::wgmma_", source)) == kernel.wgmma
    if kernel.from_registers is not None:
        assert len(re.findall(r"tl::wgmma_rs", source)) == kernel.from_registers
    spilled, registers, shared = sizes(compiled, source)
    assert spilled[0] <= kernel.spilled[0] and spilled[1] <= kernel.spilled[1]
    assert shared <= SHARED
    if kernel.threads is not None:
        assert 2 * registers * kernel.threads <= REGISTERS
        assert 2 * (shared + RESERVED) <= PER_SM


@needs_compiler
@pytest.mark.parametrize("name", ["narrow", "wide", "large"])
def test_as_many_thread_blocks_of_a_selection_fit_as_declared(name):
    tiling, compiled = module_of(SELECTION).TILINGS[name], module_of(SELECTION).compiled(name)
    spilled, registers, _ = sizes(None, compiled.get_kernel_source())
    assert spilled == (0, 0) and registers * tiling.threads * tiling.blocks <= REGISTERS
    assert f"(int64_t){4 * tiling.words})" in compiled.get_host_source()
    assert (4 * tiling.words + RESERVED) * tiling.blocks <= PER_SM


#: Module and arguments: heads, dim, group in tiles of 64 and of 32, with_sink.
PORTABLE_KERNELS = {
    "forward of 16 heads in groups": ("forward", 16, 576, (4, 2), False),
    "forward of 64 heads and a sink": ("forward", 64, 512, (1, 1), True),
    "backward of 128 heads": ("backward", 128, 576, (1, 1)),
    "backward of 16 heads in groups": ("backward", 16, 512, (4, 2)),
}


@needs_compiler
@pytest.mark.parametrize("target", TARGETS.values())
@pytest.mark.parametrize("name", PORTABLE_KERNELS)
def test_compiles_for_every_target(name, target):
    """No Hopper-only instruction, no spills, within the shared memory there."""
    module, heads, dim, groups, *rest = PORTABLE_KERNELS[name]
    tiles = module_of(f"{PORTABLE}.tiles")
    group = groups[getattr(tiles, module.upper())[target].rows == 32]
    compiled = Kernels(target, target).compiled(module, heads, dim, 512, group, *rest)
    source = compiled.get_kernel_source()
    assert "mma_sync" in source and "wgmma" not in source and "tcgen05" not in source
    spilled, _, shared = sizes(compiled, source, target)
    assert max(spilled) <= 64 and shared <= tiles.SHARED[target]


@needs_compiler
@pytest.mark.parametrize("target", TARGETS.values())
def test_unions_compile_for_every_target(target):
    source = module_of(f"{SPARSE}.unions").compiled(2, False, target=target).get_kernel_source()
    assert "dsa_union<2" in source


WHOLE_DIMS = r"must be \(576, 512\) or \(512, 512\), got"
GROUPS = ((16, 5, 4), (24, 3, 2), (64, 2, 1), (128, 2, 1), (4, 9, 8))
#: Module, arguments of its ``build``, message: argument, rule and fix.
REFUSED = [
    *(
        (f"{folder}.{module}", (64, 320, 256), rf"{WHOLE_DIMS} \(320, 256")
        for folder in (SPARSE, PORTABLE)
        for module in ("forward", "backward")
    ),
    *(
        (f"{SPARSE}.{module}", arguments, message)
        for module in ("forward", "backward")
        for arguments, message in (
            ((64, 576, 256), r"got \(576, 256\)"),
            *(
                ((heads, 576, 512, group), f"{most} queries of {heads} heads, got {group}")
                for heads, group, most in GROUPS
            ),
        )
    ),
    *(
        (f"{SPARSE}.{half}_gradient", (128, 320, 256), r"got \(320, 256")
        for half in ("query", "key")
    ),
    (f"{SPARSE}.key_gradient", (129, 576, 512), "heads must be 1 to 128, got 129"),
    *(
        (f"{MASKED}.{module}", (192, 64, 128), r"must be \(128, 64, 128\) or \(192, 64, 256\)")
        for module in ("forward", "backward", "value_gradient", "probabilities")
    ),
    (f"{MASKED}.value_gradient", V3_2, "gives dV with the other gradients"),
    (TEACHER, (160, 64, 256, False), r"dims must be \(128, 64\) or \(192, 64\) or \(256, 0\)"),
    (TEACHER, (128, 64, 32, True), "behind must be at least the 64 dims of the rope key, got 32"),
    (LOSS, (0,), "heads must be 1 to 64, got 0"),
    (LOSS, (65,), "heads must be 1 to 64, got 65"),
    (SCORES, (8,), r"heads must be one of \(16, 32, 64\), got 8: pad"),
    (SCORES, (64, "float16"), r"dtype must be one of .* got float16"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "arguments", "message"), REFUSED)
def test_what_no_tile_fits_is_refused(module, arguments, message):
    with pytest.raises(ValueError, match=message):
        module_of(module).build(*arguments)


@pytest.mark.parametrize("module", ["forward", "backward"])
def test_what_a_target_does_not_fit_is_refused(module):
    build = module_of(f"{PORTABLE}.{module}").build
    with pytest.raises(ValueError, match=r"1 to 2 queries of 16 heads, got 3: a tile has 32 rows"):
        build(16, 576, 512, 3, tiles="sm_89")
    with pytest.raises(ValueError, match=r"target must be one of sm_80, .*, got 'sm_75'"):
        build(64, 576, 512, tiles="sm_75")
    with pytest.raises(ValueError, match=r"must fit the 101376 bytes .* of sm_89, got one that"):
        module_of(f"{PORTABLE}.tiles").check_memory(101_377, "sm_89")


@pytest.mark.parametrize("tile", ["FORWARD", "BACKWARD"])
def test_tilings(tile):
    tiles = module_of(f"{PORTABLE}.tiles")
    tilings = getattr(tiles, tile)
    assert list(tilings) == list(TARGETS.values()) == list(tiles.SHARED)
    for tiling in tilings.values():
        assert tiling.rows % tiling.copied == 0 and tiling.keys % tiling.copied == 0
        assert tiling.keys % 16 == 0 and tiling.stages >= (2 if tile == "FORWARD" else 1)


def test_every_number_of_keys_has_a_tiling():
    selection = module_of(SELECTION)
    for width in (1, 8192, 131_072):
        for topk in (1, 64, 2048, 2049, 2560, 4096):
            name = selection.tiling_for(width, topk)
            tiling = selection.TILINGS[name]
            assert topk <= tiling.topk <= tiling.candidates - 16 * tiling.threads
            assert topk < selection.aim(name, topk) < tiling.candidates
    assert selection.tiling_for(8192, 2048) == "narrow"
    assert selection.tiling_for(131_072, 2048) == "wide"
    assert selection.TOPK == 4096


@pytest.mark.parametrize(
    ("heads", "queries"),
    [(1, 8), (2, 8), (8, 8), (9, 7), (16, 4), (24, 2), (32, 2), (33, 1), (64, 1), (128, 1)],
)
def test_queries_of_a_tile(heads, queries):
    assert module_of("hopper.tiles").queries_per_tile(heads) == queries


@pytest.mark.parametrize(("fixed", "heads"), [(False, (65, 128)), (True, (33, 64, 65, 128))])
def test_heads_whose_backward_is_two_kernels(fixed, heads):
    hopper_kernels, portable = Kernels("sm_90a", None), Kernels("sm_90a", "sm_90a")
    for each in (32, 33, 64, 65, 128):
        expected = Way.TWO if each in heads else Way.ONE
        assert hopper_kernels.way(each, fixed) is expected
        assert portable.way(each, fixed) is Way.PORTABLE


def test_column_order():
    """Thread t holds columns 2t, 2t+1, 8+2t, 9+2t of 16 and sums them pairwise."""
    held = [column for t in range(4) for column in (2 * t, 2 * t + 1, 8 + 2 * t, 9 + 2 * t)]
    order = torch.tensor(held + [16 + column for column in held])
    columns = torch.arange(32.0).expand(3, 32) + 100 * torch.arange(3.0)[:, None]
    assert torch.equal(in_column_order(columns[:, order]), columns)


@pytest.mark.parametrize("dim", [576, 512])
def test_column_order_transposed(dim):
    """A thread holds columns w 16 + line + {0, 8}, of both fragments of 128, and sums four."""
    held = []
    warps = [(warp, line) for warp in range(4) for line in range(8)]
    for first in range(0, 512, 128):
        for warp, line in warps:
            column = first + warp * 16 + line
            held += [column, column + 8, column + 64, column + 72]
    for warp, line in warps:
        held += [512 + warp * 16 + line, 512 + warp * 16 + line + 8] if dim > 512 else []
    columns = torch.arange(float(dim)).expand(3, dim) + 1000 * torch.arange(3.0)[:, None]
    assert torch.equal(in_column_order_transposed(columns[:, held], 512), columns)
