"""``docs/design/kept_for_backward.md``: tensors that autograd saves in one layer's attention.

Its CSVs are parsed. Their shapes, in the sizes of a small layer, are compared with what
autograd saves there; their figures with the same shapes in the sizes of the released models.
"""

import csv
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from megatron.core import tensor_parallel

from megatron_dsa.config.model import DSAOptions, is_indexer_parameter
from megatron_dsa.config.presets import PRESETS
from megatron_dsa.ops.masked_attention.spec import BACKWARD, FORWARD, VISIBLE_BITS
from tests.host import attention_module, hidden_like, small_config, small_csa_config, start

PAGE = Path(__file__).resolve().parents[3] / "docs/design/kept_for_backward.md"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "int32": torch.int32, "int64": torch.int64}
MODES = {
    "none": (),
    "out": (),
    "core": ("core_attn",),
    "up": ("mla_up_proj",),
    "both": ("core_attn", "mla_up_proj"),
}
#: Stages of DSA; "masked" is stage sparse, "visible" stage dense, by masked dense attention.
STAGES = ("dense", "warmup", "frozen", "sparse", "masked", "visible")
RATIOS = (0, 4, 128)


def has_mode(kind: str, mode: str) -> bool:
    """Return whether a stage or ratio has a mode."""
    if mode == "out":
        return kind in ("sparse", "CSA", *map(str, RATIOS))
    # A frozen model has no selective recompute, see layers/freezing.py.
    return kind != "frozen" or mode == "none"


@dataclass(frozen=True)
class Row:
    """A line of a table: ``count`` tensors, device, and bytes per token by model."""

    tensor: str
    count: int
    shape: str
    dtype: torch.dtype
    kinds: tuple[str, ...]  # stages or compression ratios
    modes: tuple[str, ...]
    device: str  # "": both
    figures: dict[str, str]

    def elements(self, sizes: dict[str, int]) -> float:
        """Return the number of elements of one tensor for these ``sizes``."""
        count = 1
        for size in self.shape.strip("[]").split(","):
            assert re.fullmatch(r"[\w+*/ ]+", size), size
            count *= eval(size, {"__builtins__": {}}, sizes)
        return count

    def bytes_per_token(self, sizes: dict[str, int]) -> float:
        """Return the bytes per additional token."""
        one, two = (self.elements(sizes | {"s": tokens}) for tokens in (1, 2))
        return self.count * (two - one) * self.dtype.itemsize

    def is_kept(self, kind: str, mode: str, device: str) -> bool:
        return kind in self.kinds and mode in self.modes and self.device in ("", device)


def totals() -> list[dict[str, str]]:
    """Return the table of the page, as dicts by column."""
    text = PAGE.read_text(encoding="utf-8").split("| model, stage or ratio")[1]
    columns = ["model, stage or ratio", *(cell.strip() for cell in text.split("|")[1:6])]
    lines = [line for line in text.split("\n\n")[0].splitlines() if line.startswith("| ")]
    return [
        dict(zip(columns, (cell.strip() for cell in line.strip("|").split("|")), strict=True))
        for line in lines
    ]


def tensors(name: str) -> list[dict[str, str]]:
    """Return the lines of a CSV next to the page, as dicts by column."""
    with (PAGE.parent / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def rows_of(table: list[dict[str, str]], kind: str) -> list[Row]:
    rows = []
    for cells in table:
        known = {"tensor", "shape", "dtype", kind, "recompute", "device"}
        count, _, shape = cells["shape"].rpartition(" x ")
        modes = tuple(MODES) if cells["recompute"] == "any" else cells["recompute"].split(", ")
        assert set(modes) <= set(MODES), cells
        rows.append(
            Row(
                cells["tensor"],
                int(count or 1),
                shape,
                DTYPES[cells["dtype"]],
                tuple(cells[kind].split(", ")),
                tuple(modes),
                cells["device"],
                {name: text for name, text in cells.items() if name not in known},
            )
        )
    return rows


def dsa_rows() -> list[Row]:
    return rows_of(tensors("kept_dsa.csv"), "stage")


def csa_rows() -> list[Row]:
    return rows_of(tensors("kept_csa.csv"), "ratio")


def saved(module, tokens: int, call=None) -> Counter:
    """Return ``(elements, dtype)`` of each storage that autograd keeps after a forward pass.

    Without parameters, the layer's input, and discarded storages.
    """
    x = hidden_like(module, tokens).detach().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = (call or module)(x, None)
    left_out = {t.untyped_storage().data_ptr() for t in (x, *module.parameters())}
    storages = {}
    for tensor in kept:
        storage = tensor.untyped_storage()
        if storage.nbytes() > 0 and storage.data_ptr() not in left_out:
            storages[storage.data_ptr()] = (storage.nbytes() // tensor.itemsize, tensor.dtype)
    del out
    return Counter(storages.values())


def check(rows: list[Row], found: Counter, sizes: dict[str, int], kind: str, mode: str) -> None:
    device = "CPU" if start().type == "cpu" else "GPU"
    listed = [row for row in rows if row.is_kept(kind, mode, device)]
    wanted = Counter()
    for row in listed:
        wanted[round(row.elements(sizes)), row.dtype] += row.count
    names = {(round(row.elements(sizes)), row.dtype): row.tensor for row in listed}
    assert not found - wanted, f"saved, not on the page: {found - wanted}"
    assert not wanted - found, f"not saved: {[(names[k], k) for k in wanted - found]}"


def recomputing(mode: str) -> dict:
    if not MODES[mode]:
        return {}
    return {"recompute_granularity": "selective", "recompute_modules": list(MODES[mode])}


def small_dsa(stage: str, mode: str = "none"):
    """Return a DSA layer with few common products of sizes, and its sizes by symbol."""
    frozen, attention = stage == "frozen", "masked" if stage == "masked" else "auto"
    length = 61 if stage == "visible" else None
    stage = {"frozen": "warmup", "masked": "sparse", "visible": "dense"}.get(stage, stage)
    config = small_config(
        dtype=torch.bfloat16,
        options=DSAOptions(
            stage=stage,
            freeze_main=frozen,
            selected_attention=attention,
            sequence_length=length,
            recompute="latent_output" if mode == "out" else "nothing",
        ),
        hidden_size=35,
        num_attention_heads=5,
        q_lora_rank=23,
        kv_lora_rank=17,
        qk_head_dim=10,
        qk_pos_emb_head_dim=6,
        v_head_dim=13,
        dsa_indexer_topk=7,
        dsa_indexer_use_sparse_loss=stage == "sparse",
        **recomputing(mode),
    )
    sizes = {"s": 61, "H": 5, "L": 23, "R": 17, "N": 10, "P": 6, "V": 13}
    sizes |= {"HI": 3, "DI": 16, "K": 7, "G": 1}
    return attention_module(config).train(), sizes


def small_csa(ratio: int, mode: str = "none"):
    """Return a CSA layer with few common products of sizes, and its sizes by symbol."""
    config = small_csa_config(
        ratio,
        options=DSAOptions(recompute="queries" if mode == "out" else "nothing"),
        dtype=torch.bfloat16,
        hidden_size=42,
        num_attention_heads=6,
        q_lora_rank=23,
        qk_head_dim=16,
        qk_pos_emb_head_dim=6,
        v_head_dim=22,
        o_groups=3,
        o_lora_rank=5,
        **recomputing(mode),
    )
    tokens = {0: 61, 4: 4 * 31, 128: 3 * 128}[ratio]
    sizes = {"s": tokens, "m": ratio, "H": 6, "D": 22, "L": 23, "P": 6, "O": 15}
    sizes |= {"HI": 3, "DI": 16, "K": 5}
    return attention_module(config).train(), sizes


@pytest.mark.parametrize(
    ("stage", "mode"),
    [
        (stage, mode)
        for stage in STAGES
        for mode in MODES
        if stage != "frozen" and has_mode(stage, mode)
    ],
)
def test_dsa(stage, mode, add):
    if stage == "visible":  # with kernels
        for operation in (VISIBLE_BITS, FORWARD, BACKWARD):
            add(operation.name, lambda torchs: torchs)
    module, sizes = small_dsa(stage, mode)
    assert module.choice.masked == (stage in ("masked", "visible"))
    check(dsa_rows(), saved(module, sizes["s"]), sizes, stage, mode)


def test_dsa_with_a_frozen_main_model():
    module, sizes = small_dsa("frozen")
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(is_indexer_parameter("." + name))
    module.core_attention.keeps_loss = True
    kept_loss = []

    def call(x, mask):
        out = module(x.detach(), mask)
        kept_loss.append(module.core_attention.take_loss())
        return out

    found = saved(module, sizes["s"], call)
    check(dsa_rows(), found, sizes, "frozen", "none")
    kept_loss[0].backward()


@pytest.mark.parametrize("mode", [mode for mode in MODES if has_mode("CSA", mode)])
@pytest.mark.parametrize("ratio", RATIOS)
def test_csa(ratio, mode):
    module, sizes = small_csa(ratio, mode)
    check(csa_rows(), saved(module, sizes["s"]), sizes, str(ratio), mode)


@pytest.mark.parametrize("build", [lambda: small_dsa("sparse"), lambda: small_csa(4)])
def test_full_recompute_keeps_the_input_only(build):
    module, sizes = build()

    def call(x, mask):
        return tensor_parallel.checkpoint(lambda x: module(x, mask)[0], False, x)

    assert not saved(module, sizes["s"], call)


def real_sizes(preset: str) -> dict[str, int]:
    """Return the sizes of a released model by symbol, except ``m``."""
    p = PRESETS[preset]
    sizes = {
        "H": p["num_attention_heads"],
        "L": p["q_lora_rank"],
        "P": p["qk_pos_emb_head_dim"],
        "HI": p["dsa_indexer_n_heads"],
        "DI": p["dsa_indexer_head_dim"],
        "K": p["dsa_indexer_topk"],
        "G": 64,  # 8192 tokens
    }
    if "o_groups" in p:
        return sizes | {"D": p["v_head_dim"], "O": p["o_groups"] * p["o_lora_rank"]}
    return sizes | {"R": p["kv_lora_rank"], "N": p["qk_head_dim"], "V": p["v_head_dim"]}


MODELS = {"V3.2": "v3.2", "Flash": "v4-flash", "Pro": "v4-pro"}


def test_figures_of_every_tensor():
    for row in dsa_rows() + csa_rows():
        for model, text in row.figures.items():
            # Lines with m have one ratio.
            ratio = int(row.kinds[0]) if row.kinds[0].isdigit() else 0
            assert "m" not in row.shape or len(row.kinds) == 1, row
            figure = row.bytes_per_token(real_sizes(MODELS[model]) | {"m": ratio})
            assert text == f"{figure:g}", (row.tensor, row.shape, model, f"{figure:g}")


def test_totals():
    dsa, csa = dsa_rows(), csa_rows()
    table = totals()
    expected = [("V3.2", stage) for stage in STAGES]
    expected += [(model, str(ratio)) for model in ("Flash", "Pro") for ratio in RATIOS]
    assert [tuple(cells["model, stage or ratio"].split(", ")) for cells in table] == expected
    for (model, kind), cells in zip(expected, table, strict=True):
        sizes = real_sizes(MODELS[model]) | {"m": int(kind) if kind.isdigit() else 0}
        for mode in MODES:
            rows = [r for r in (dsa if model == "V3.2" else csa) if r.is_kept(kind, mode, "GPU")]
            total = sum(row.bytes_per_token(sizes) for row in rows)
            text = f"{total / 1024:.1f}" if has_mode(kind, mode) else "-"
            assert cells[mode] == text, (model, kind, mode, text)
