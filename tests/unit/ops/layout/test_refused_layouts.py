"""Invalid layouts are rejected: on the CPU at once, on a GPU by an assertion."""

import dataclasses
import os
from types import SimpleNamespace

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.multiprocessing import ProcessExitedException

from megatron_dsa.errors import ConfigError
from megatron_dsa.layers.from_megatron import layout_from_megatron
from megatron_dsa.ops.common import checks
from megatron_dsa.ops.dense_attention.ring.shards import PackedZigzagShard
from megatron_dsa.ops.layout.compressed import compressed_keys
from megatron_dsa.ops.layout.layout import Layout, QueryRange, bshd_layout, packed_layout
from megatron_dsa.ops.layout.sharding import KeyOwnership, Sharding, sharded_layout
from tests.helpers import no_synchronisation
from tests.host import attention_module, hidden_like, packed, small_config
from tests.processes import run_ranks

CPU = torch.device("cpu")


def ends(*values, dtype=torch.int32, device="cpu"):
    return torch.tensor(values, dtype=dtype, device=device)


#: Cumulative lengths, the longest one, cumulative lengths with padding, message; 16 tokens.
VALUES = {
    "max_seqlen too small": ((0, 3, 11), 5, None, "max_seqlen must be at least the longest .* 5"),
    "decreasing": ((0, 9, 4, 12), None, None, "cu_seqlens must never decrease"),
    "negative": ((0, -3, 12), None, None, "cu_seqlens must never decrease"),
    "late start": ((2, 9, 12), None, None, "cu_seqlens must start at 0"),
    "beyond the tokens": ((0, 9, 17), None, None, "end at or before the 16 tokens"),
    "padding beyond the tokens": ((0, 9, 12), None, (0, 12, 20), "before the 16 tokens"),
    "less than no padding": ((0, 9, 12), None, (0, 8, 12), "cu_seqlens_padded must give every"),
    "padding starts late": ((0, 9, 12), None, (1, 10, 13), "cu_seqlens must start at 0"),
}


def make(case, device="cpu"):
    cu_seqlens, longest, padded, _ = VALUES[case]
    padded = None if padded is None else ends(*padded, device=device)
    return packed_layout(ends(*cu_seqlens, device=device), 16, longest, padded)


@pytest.mark.parametrize("case", VALUES)
def test_lengths_of_no_batch_are_refused(case):
    with pytest.raises(ConfigError, match=VALUES[case][-1]):
        make(case)


@pytest.mark.parametrize("case", VALUES)
def test_megatron_s_parameters_are_refused_alike(case):
    cu_seqlens, longest, padded, message = VALUES[case]
    params = SimpleNamespace(
        qkv_format="thd",
        cu_seqlens_q=ends(*cu_seqlens),
        cu_seqlens_q_padded=None if padded is None else ends(*padded),
        max_seqlen_q=longest,
    )
    with pytest.raises(ConfigError, match=message):
        layout_from_megatron(16, 1, CPU, params)


#: Fields of ``PackedSeqParams`` for other readers, and the message.
FIELDS = {
    "cu_seqlens_kv": (ends(0, 4, 12), "cu_seqlens_kv must be None or equal cu_seqlens_q"),
    "cu_seqlens_kv_padded": (ends(0, 9, 16), "cu_seqlens_kv_padded must be None or equal"),
    "local_cp_size": (2, "local_cp_size must be of the context-parallel size"),
    "cp_group": (SimpleNamespace(size=lambda: 2), "cp_group must be of the context-parallel size"),
    "tokens_per_sample": (5, "tokens_per_sample must divide the 16 tokens"),
    "pad_between_seqs": (True, "cu_seqlens_q_padded must be given with pad_between_seqs=True"),
}


@pytest.mark.parametrize("field", FIELDS)
def test_fields_that_say_something_else_are_refused(field):
    value, message = FIELDS[field]
    cu_seqlens = ends(0, 9, 16)
    params = PackedSeqParams("thd", cu_seqlens, cu_seqlens.clone(), max_seqlen_q=9)
    layout_from_megatron(16, 1, CPU, dataclasses.replace(params, total_tokens=16))
    setattr(params, field, value)
    with pytest.raises(ConfigError, match=message):
        layout_from_megatron(16, 1, CPU, params)


def test_padding_that_is_denied_is_refused():
    real, padded = ends(0, 9, 14), ends(0, 10, 16)
    params = PackedSeqParams("thd", real, real, padded, padded, 9, 9, pad_between_seqs=False)
    with pytest.raises(ConfigError, match="pad_between_seqs must not be False"):
        layout_from_megatron(16, 1, CPU, params)


@pytest.mark.parametrize("keys", [Sharding(cp=2), Sharding(sp=2)])
def test_samples_of_ranks_are_refused(keys):
    params = PackedSeqParams("thd", ends(0, 8, 16), max_seqlen_q=8, tokens_per_sample=8)
    with pytest.raises(ConfigError, match="tokens_per_sample must be None, or the 16 tokens"):
        layout_from_megatron(8, 1, CPU, params, keys)
    params.tokens_per_sample = 16
    layout_from_megatron(8, 1, CPU, params, keys)


@pytest.mark.parametrize("layout", ["zigzag_rows", "contiguous"])
def test_predictions_of_packed_documents_need_zigzag(layout):
    """Megatron shifts their targets from rank to rank."""
    module = attention_module(small_config(mtp_num_layers=1))
    sharding = Sharding(cp=2, cp_layout=layout)
    module.ranks = dataclasses.replace(module.ranks, sharding=sharding)
    with pytest.raises(ConfigError, match="--dsa-cp-layout must be zigzag with packed_seq_params"):
        module(hidden_like(module, 8), None, packed_seq_params=packed(7, 9))


@pytest.mark.parametrize("max_seqlen", [None, 8, 16, 99])
def test_what_fits_is_taken(max_seqlen):
    for last in (15, 16):
        layout = packed_layout(ends(0, 0, 1, 9, 9, last), 16, max_seqlen)
        assert int(layout.real_tokens()) == last
    assert int(packed_layout(ends(0, 0), 16, 0).real_tokens()) == 0
    padded = packed_layout(ends(0, 3, 8), 16, 8, ends(0, 8, 16))
    assert int(padded.real_tokens()) == 8


@pytest.mark.parametrize(
    ("cu_seqlens", "padded", "max_seqlen", "message"),
    [
        (
            ends(0.0, 16.0, dtype=torch.float32),
            None,
            None,
            "cu_seqlens must have dtype int32 or int64",
        ),
        (ends(0), None, None, "cu_seqlens must not be empty"),
        (ends(0, 16)[None], None, None, r"cu_seqlens must be \[sequences \+ 1\], got shape"),
        ([0, 16], None, None, "cu_seqlens must be a tensor"),
        (ends(0, 8, 16), ends(0, 16), None, r"cu_seqlens_padded must be \[3\], got shape \(2,\)"),
        (ends(0, 16), ends(0, 16).to("meta"), None, "cu_seqlens_padded must be on the device"),
        (ends(0, 16), None, torch.tensor(16), "max_seqlen must be an int on the host"),
        (ends(0, 16), None, -1, "max_seqlen must be an int on the host, at least 0"),
    ],
)
def test_lengths_of_another_form_are_refused(cu_seqlens, padded, max_seqlen, message):
    with pytest.raises(ConfigError, match=message):
        packed_layout(cu_seqlens, 16, max_seqlen, padded)


def test_values_are_not_asked_for_on_the_meta_device():
    layout = packed_layout(ends(0, 9, 12).to("meta"), 16, 9)
    assert layout.start.device.type == "meta"
    assert compressed_keys(layout, 4).layout.num_keys == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_queries": 7}, r"start must be \[7\], got shape \(8,\)"),
        ({"end": torch.arange(8)}, "end must have dtype int32, got int64: cast it"),
        ({"end": torch.arange(2, 10).int()}, "start and end must be ranges .* within the 8 keys"),
        ({"start": torch.full((8,), -1).int()}, "start and end must be ranges of slots"),
        ({"start": torch.full((8,), 5).int()}, "start and end must be ranges of slots"),
        ({"position": torch.arange(9)}, r"position must be \[8\]"),
        ({"key_indices": torch.arange(7)}, r"key_indices must be \[8\], got shape \(7,\)"),
        ({"real": torch.ones(8)}, "real must have dtype bool, got float32"),
        (
            {"query_ranges": (QueryRange(slice(0, 7, 1), 0, 0, 8, 8),)},
            "each of the 8 query tokens once",
        ),
        (
            {"query_ranges": (QueryRange(slice(0, 8, 1), 0, 0, 7, 8),)},
            "query_ranges must cover all that",
        ),
        (
            {"query_ranges": (QueryRange(slice(0, 8, 1), 0, -1, 8, 8),)},
            "query_ranges must cover all that",
        ),
        (
            {"query_ranges": (QueryRange(slice(0, 8, 1), 0, 0, 8, 7),)},
            "query_ranges must cover all that",
        ),
    ],
)
def test_a_layout_s_own_parts_must_fit(changes, message):
    layout = bshd_layout(8, 1, CPU)
    parts = {f.name: getattr(layout, f.name) for f in dataclasses.fields(Layout) if f.init}
    Layout(**parts)
    with pytest.raises(ConfigError, match=message):
        Layout(**parts | changes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cp": 2, "cp_rank": 2}, "cp_rank must be from 0 to 1, got 2"),
        ({"sp": 2, "sp_rank": -1}, "sp_rank must be from 0 to 1, got -1"),
        ({"cp": 0}, "cp_rank must be from 0 to -1"),
        ({"cp": 2, "cp_layout": "zig"}, "cp_layout must be one of zigzag, .* got 'zig'"),
    ],
)
def test_ranks_that_do_not_exist_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Sharding(**arguments)


def test_tables_of_other_ranks_are_refused():
    two, layout = Sharding(cp=2), bshd_layout(16, 1, CPU)
    table = two.global_positions(16, None, CPU)
    with pytest.raises(ConfigError, match=r"table must be \[4, rows\], got shape \(2, 8\)"):
        KeyOwnership(Sharding(cp=4), table, 1)
    with pytest.raises(ConfigError, match="keys must be of the 16 tokens of layout, got 32"):
        sharded_layout(layout, two, KeyOwnership(two, table, 2))
    with pytest.raises(ConfigError, match="differ from that of keys in its sequence parallelism"):
        sharded_layout(layout, Sharding(cp=2, cp_rank=1), KeyOwnership(two, table, 1))
    with pytest.raises(ConfigError, match="ratio must be at least 2, got 1"):
        compressed_keys(layout, 1)


def test_uneven_sequences_of_a_zigzag_are_refused():
    with pytest.raises(ConfigError, match=r"lengths with padding must be multiples of 2 \* cp = 4"):
        PackedZigzagShard(2, 0, 8, ends(0, 6, 16), 16)


@pytest.mark.parametrize("summary", ["a rule", "x" * 400])
def test_the_device_takes_the_message(monkeypatch, summary):
    said = []
    monkeypatch.setattr(torch, "_assert_async", lambda fine, message: said.append(message))
    on_a_gpu = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    checks.require_values({"a rule": on_a_gpu}, summary)
    assert said == [summary[:254]]


@pytest.mark.gpu
def test_no_check_waits_for_the_device():
    cu_seqlens, padded = ends(0, 5, 11, device="cuda"), ends(0, 8, 16, device="cuda")
    params = SimpleNamespace(
        qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_q_padded=padded, max_seqlen_q=6
    )
    with no_synchronisation():
        layout_from_megatron(8, 1, cu_seqlens.device, params, Sharding(cp=2))
        PackedZigzagShard(2, 0, 8, cu_seqlens, 16, padded)
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("case", VALUES)
def test_the_gpu_asserts(case):
    with pytest.raises(ProcessExitedException) as ended:
        run_ranks(_until_the_assertion, (case,), 1)
    assert ended.value.exit_code == ASSERTION_FAILED


ASSERTION_FAILED = 17


def _until_the_assertion(rank, case):
    try:
        make(case, "cuda")
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "device-side assert" in str(error):
            os._exit(ASSERTION_FAILED)
        raise
