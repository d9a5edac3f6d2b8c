"""Attention masks other than the causal one are rejected."""

import pytest
import torch
from megatron.core.transformer import cuda_graphs

from megatron_dsa.errors import ConfigError
from megatron_dsa.layers import from_megatron
from megatron_dsa.layers.from_megatron import require_causal_mask
from megatron_dsa.ops.layout.sharding import CP_LAYOUTS, Sharding
from tests.host import attention_module, hidden_like, packed, small_config, small_csa_config

ROWS = 12


def causal(*leading, rows=ROWS):
    return torch.ones(rows, rows).triu(1).bool().expand(*leading, rows, rows).clone()


def left_padded():
    mask = causal(2, 1)
    mask[1, :, :, :3] = True
    return mask


def changed(query, key):
    mask = causal(1, 1)
    mask[..., query, key] ^= True
    return mask


WRONG = {
    "left padding": left_padded(),
    "one key less": changed(5, 2),
    "one key more": changed(5, 6),
    "full": torch.zeros(1, 1, ROWS, ROWS, dtype=torch.bool),
    "True where keys are seen": ~causal(1, 1),
    "numbers": causal(1, 1).float(),
    "one per key": torch.ones(2, ROWS, dtype=torch.bool),
    "no padding, one per key": torch.zeros(2, 1, 1, ROWS, dtype=torch.bool),
    "right padding": left_padded().flip(-1),
    "padding behind": causal(2, 1) | (torch.arange(ROWS) >= 9),
    "added to scores": torch.zeros(2, 1, ROWS, ROWS).masked_fill(causal(2, 1), float("-inf")),
    "integers": causal(1, 1).long(),
    "other length": causal(1, 1, rows=8),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("block", [1, 1 << 24])
def test_refused(name, block, monkeypatch):
    monkeypatch.setattr(from_megatron, "_MASK_BLOCK", block)
    with pytest.raises(ConfigError, match=r"attention_mask must be None.*packed_seq_params"):
        require_causal_mask(WRONG[name], ROWS, Sharding(), packed=False)


@pytest.mark.parametrize("leading", [(), (1, 1), (2, 1), (2, 4)])
def test_causal_masks_are_taken_and_read_once(leading, monkeypatch):
    mask = causal(*leading)
    require_causal_mask(mask, ROWS, Sharding(), packed=False)
    with monkeypatch.context() as patch:
        patch.setattr(from_megatron, "_is_causal", None)
        require_causal_mask(mask, ROWS, Sharding(), packed=False)
    mask[..., 3, 1] = True  # changed in place: read again
    with pytest.raises(ConfigError, match="attention_mask"):
        require_causal_mask(mask, ROWS, Sharding(), packed=False)


def test_masks_in_inference_mode():
    """Their tensors have no version counters."""
    with torch.inference_mode():
        mask = causal(1, 1)
        require_causal_mask(mask, ROWS, Sharding(), packed=False)
        mask[..., 3, 1] = True
        with pytest.raises(ConfigError, match="attention_mask"):
            require_causal_mask(mask, ROWS, Sharding(), packed=False)


@pytest.mark.parametrize("state", ["warmup", "capture"])
def test_masks_of_a_capture_are_not_read(state):
    """Megatron passes buffers without content, or the first tokens' mask on every rank."""
    module = attention_module(small_config())
    x, mask = hidden_like(module, ROWS), WRONG["full"]
    getattr(cuda_graphs, f"_set_{state}_start")()
    try:
        module(x, mask)
    finally:
        getattr(cuda_graphs, f"_set_{state}_end")()
    with pytest.raises(ConfigError, match="attention_mask"):
        module(x, mask)


@pytest.mark.parametrize("layout", CP_LAYOUTS)
def test_masks_of_context_parallel_ranks(layout):
    for rank in range(3):
        sharding = Sharding(cp=3, cp_rank=rank, cp_layout=layout, sp=2)
        require_causal_mask(causal(1, 1), ROWS, sharding, packed=False)
        table = sharding.whole().global_positions(ROWS, None, "cpu")
        require_causal_mask(causal(1, 1)[:, :, table[rank]], ROWS, sharding, packed=False)
        with pytest.raises(ConfigError, match="attention_mask"):
            require_causal_mask(causal(1, 1)[:, :, table[rank - 1]], ROWS, sharding, packed=False)


@pytest.mark.parametrize("make", [small_config, lambda: small_csa_config(4)], ids=["dsa", "csa"])
def test_layers_refuse_them(make):
    module = attention_module(make())
    x = hidden_like(module, ROWS, 2)
    out, _ = module(x, None)
    assert out.equal(module(x, causal(2, 1))[0])
    with pytest.raises(ConfigError, match="attention_mask must be None"):
        module(x, left_padded())
    samples, row = packed(5, 7, 12), hidden_like(module, 2 * ROWS)
    module(row, causal(2, 1), packed_seq_params=samples)
    with pytest.raises(ConfigError, match="attention_mask must be None"):
        module(row, left_padded(), packed_seq_params=samples)
