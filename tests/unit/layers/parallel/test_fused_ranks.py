"""Layers with the head dims of DeepSeek-V3.2 and V4 on two ranks equal one rank.

On GPUs in bf16 by fused kernels, over NCCL; on the CPU few tokens and heads in fp32, by torch.
"""

import dataclasses

import pytest
import torch

from megatron_dsa.config.model import DSAOptions
from tests.cases.layers import DSA, HYBRID
from tests.helpers import relative_error
from tests.ranks import run

V32 = {
    "hidden_size": 512, "num_attention_heads": 32, "q_lora_rank": 256, "kv_lora_rank": 512,
    "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "dsa_indexer_n_heads": 16,
    "dsa_indexer_head_dim": 128, "dsa_indexer_topk": 512,
}  # fmt: skip
V4 = {
    "hidden_size": 512, "num_attention_heads": 64, "q_lora_rank": 256, "kv_lora_rank": 448,
    "qk_head_dim": 448, "qk_pos_emb_head_dim": 64, "v_head_dim": 512, "o_groups": 8,
    "o_lora_rank": 32, "csa_window_size": 128, "dsa_indexer_n_heads": 16,
    "dsa_indexer_head_dim": 128, "dsa_indexer_topk": 128,
}  # fmt: skip
#: Smaller sizes for a CPU.
FEW = {"hidden_size": 64, "num_attention_heads": 8, "dsa_indexer_n_heads": 4}
MASKED = {"selected_attention": "masked"}
WARM_UP = {"stage": "warmup", "freeze_main": False, "cp_exchange": "latents"}
#: Layer: case, arguments of its configuration, options.
LAYERS = {
    "sparse": (DSA, (), {"selected_attention": "sparse"}),
    "sparse, latent output recomputed": (
        DSA, (), {"selected_attention": "sparse", "recompute": "latent_output"},
    ),
    "masked": (DSA, (), MASKED),
    "warm-up": (DSA, (), WARM_UP),
    "CSA": (HYBRID, (4,), {}),
    "HCA": (HYBRID, (128,), {}),
}  # fmt: skip
#: Tensor- and context-parallel ranks -> layers, packed or not, and modes.
RANKS = {
    (2, 1): [
        ("sparse", False, "heads"),
        ("sparse", True, "sequence"),
        ("sparse, latent output recomputed", False, "heads"),
        ("masked", False, "select"),
        ("masked", True, "select"),
        ("masked", False, "heads"),
        ("warm-up", False, "heads"),
        ("CSA", True, "sequence"),
        ("HCA", False, "heads"),
    ],
    (1, 2): [
        ("sparse", False, "zigzag"),
        ("sparse", False, "contiguous"),
        ("sparse, latent output recomputed", True, "zigzag"),
        ("masked", False, "zigzag"),
        ("masked", True, "zigzag"),
        ("warm-up", True, "zigzag"),
        ("CSA", False, "contiguous"),
        ("CSA", True, "zigzag_rows"),
        ("HCA", True, "zigzag"),
    ],
}
#: Largest relative error of outputs and gradients, of the indexer's gradients (the relu jumps where
#: scores round differently), and share of differing keys.
BOUNDS = {"nccl": (2e-2, 0.1, 0.01), "gloo": (1e-5, 1e-5, 0.0)}
#: Operations with a fused kernel for these layers on Hopper.
FUSED = (
    "sparse_attention_forward", "sparse_attention_backward", "masked_attention_forward",
    "masked_attention_backward",
)  # fmt: skip


def names_of(tp, cp, backend):
    """Return the cases of a number of ranks: on the CPU a few, because test_ranks.py has all."""
    return RANKS[tp, cp] if backend == "nccl" else RANKS[tp, cp][::3]


def case_of(layer, is_packed, mode, backend):
    base, arguments, options = LAYERS[layer]
    on_gpu = backend == "nccl"
    dims = V32 if base is DSA else V4
    changes = dims if on_gpu else dims | FEW | {"dsa_indexer_topk": 48}
    changes = changes | {"dtype": torch.bfloat16 if on_gpu else torch.float32}
    if options.get("stage") == "warmup":
        changes["dsa_indexer_use_sparse_loss"] = False
    if mode in ("heads", "sequence", "select"):
        options, cp_layout = options | {"tp_mode": mode}, "zigzag"
    else:
        options, cp_layout = options | {"cp_layout": mode}, mode
    rows = 2048 if on_gpu else 256
    # Longer than a window, shorter than a group, empty, and with padding.
    long, short = rows * 5 // 8, rows // 4
    lengths, padded = (long - 6, 3, 0, short + 1), (long, 8, 0, short + 16)
    packing = {"lengths": lengths, "padded": padded} if is_packed else {}
    return dataclasses.replace(
        base, arguments=arguments, rows=rows, cp_layout=cp_layout,
        changes=changes | {"options": DSAOptions(**options)}, **packing,
    )  # fmt: skip


@pytest.fixture(scope="module")
def single(tmp_path_factory, backend):
    """Return one rank's results, by layer and packing."""
    every = {name[:2] for ranks in RANKS for name in names_of(*ranks, backend)}
    cases = {name: case_of(*name, "zigzag", backend) for name in sorted(every)}
    return run(cases, 1, tmp_path_factory.mktemp("one"), 1, backend)[0]


@pytest.fixture(scope="module", params=RANKS, ids=lambda ranks: f"tp{ranks[0]}-cp{ranks[1]}")
def ranks(request, tmp_path_factory, backend):
    """Return numbers of ranks, and their results by case."""
    tp, cp = request.param
    cases = {name: case_of(*name, backend) for name in names_of(tp, cp, backend)}
    return tp, cp, run(cases, tp, tmp_path_factory.mktemp("two"), cp, backend)


def test_two_ranks_equal_one(single, ranks, backend):
    tp, cp, found = ranks
    for name in names_of(tp, cp, backend):
        check(name, single[name[:2]], [rank[name] for rank in found], tp, cp, backend)


def check(name, one, several, tp, cp, backend):
    case, (bound, indexer_bound, others) = case_of(*name, backend), BOUNDS[backend]
    worst = {}

    def differs(kind, what, got, expected):
        assert expected.norm() > 0, (name, what)
        error = relative_error(got, expected)
        worst[kind] = max(worst.get(kind, (0.0, "")), (error, what))
        assert error < (indexer_bound if kind == "indexer" else bound), (name, what, error)

    for index, (tokens, local) in enumerate(case.held_by(tp, cp)):
        rank = several[index]
        for what in ("out", "dx"):
            differs(what, what, rank[what], one[what][local])
        for got, whole in zip(rank["slots"], one["slots"], strict=True):
            expected = whole[tokens if len(got) == len(tokens) else local]
            unlike = share_of_others(got, expected)
            worst["slots"] = max(worst.get("slots", (0.0, "")), (unlike, ""))
            assert unlike <= others, (name, unlike)
        for parameter, full in one["gradients"].items():
            expected = case.part(parameter, full, index % tp, tp)
            kind = "indexer" if ".indexer." in f".{parameter}" else "gradients"
            differs(kind, parameter, rank["gradients"][parameter], expected)
    found = "  ".join(f"{kind} {error:.1e} {what}" for kind, (error, what) in worst.items())
    by_torch = sorted(name for name, ran in several[0]["report"].items() if "torch" in ran)
    print(f"{backend} tp{tp} cp{cp} {name}: {found}; by torch: {' '.join(by_torch)}")
    if tp > 1:
        assert list(several[0]["report"]["tensor_parallel_attention"]) == [name[2]]
    if backend == "nccl":
        for operation in FUSED:
            assert "torch" not in several[0]["report"].get(operation, {}), (name, operation)


def share_of_others(got, expected):
    """Return the share of ``expected``'s keys missing in ``got``, per query; -1 is no key."""
    got, expected = got.long(), expected.long()
    selected = torch.zeros(len(got), int(max(got.max(), expected.max())) + 2, dtype=torch.bool)
    selected.scatter_(1, got + 1, True)  # column 0 is no key
    real = expected >= 0
    return float((real & ~selected.gather(1, expected + 1)).sum() / real.sum())
