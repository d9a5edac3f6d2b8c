"""Unsuitable data are reported before the embedding."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.utils import Split

from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.prepare_data.shards import write_byte_dataset
from megatron_dsa.training import data
from megatron_dsa.training.data import (
    GPTDataset,
    _pack,
    check_prefixes,
    check_tokens,
    with_room,
)


def batch(*tokens):
    row = torch.tensor([tokens])
    return {
        "tokens": row[:, :-1],
        "labels": row[:, 1:],
        "loss_mask": torch.ones(1, row.numel() - 1),
    }


@pytest.mark.parametrize(
    "tokens, says",
    [
        ((1, 300, 2), "holds the token 300, and the vocabulary has 264"),
        ((1, 2, 264), "holds the token 264"),
        ((-1, 2, 3), "holds the token -1"),
        ((5, 2, -100), "holds the token -100"),
    ],
)
def test_tokens_outside_the_vocabulary(tokens, says):
    with pytest.raises(ConfigError, match=says):
        check_tokens(batch(*tokens), 264)


@pytest.mark.parametrize(
    "told, tokenizer, most", [(257, 257, 256), (None, 300, 299), (320, 300, 319), (257, 300, 299)]
)
def test_rows_of_padding_are_no_tokens(told, tokenizer, most, monkeypatch):
    """The larger of --vocab-size and the tokenizer with added tokens, without padding."""
    args = SimpleNamespace(
        dataloader_inter_document_masking=False, vocab_size=told, padded_vocab_size=384
    )
    ranks = SimpleNamespace(
        is_pipeline_first_stage=lambda: True,
        is_pipeline_last_stage=lambda: True,
        get_tensor_model_parallel_rank=lambda: 0,
    )
    monkeypatch.setattr(data, "mpu", ranks)
    monkeypatch.setattr(data, "get_args", lambda: args)
    monkeypatch.setattr(data, "get_tokenizer", lambda: SimpleNamespace(vocab_size=tokenizer))
    monkeypatch.setattr(data, "mtp_on_this_rank", lambda *_: False)
    monkeypatch.setattr(data, "_documents", _passed)
    config = SimpleNamespace(pipeline_model_parallel_layout=None, mtp_num_layers=None)
    with pytest.raises(_Passed):
        data.get_batch(iter([batch(most, most)]), config)
    for wrong in ((most + 1, 1), (1, most + 1)):
        with pytest.raises(ConfigError, match=f"holds the token {most + 1}"):
            data.get_batch(iter([batch(*wrong)]), config)


class _Passed(Exception):
    """The batch passed its checks."""


def _passed(_args):
    raise _Passed


def test_tokens_of_the_vocabulary_pass():
    check_tokens(batch(0, 263, 5), 264)
    check_tokens({"tokens": None}, 264)  # a pipeline stage without tokens


def test_device_tensors_are_not_read():
    """It would synchronise; Megatron's loaders give host tensors."""
    check_tokens({"tokens": torch.full((1, 3), 999, device="meta")}, 264)


def test_missing_data_set(tmp_path):
    prefix = str(tmp_path / "data")
    with pytest.raises(ConfigError, match=f"--data-path {prefix}: there is no file {prefix}.idx"):
        check_prefixes([prefix])
    write_byte_dataset(["text"], prefix)
    check_prefixes([prefix, "s3://bucket/data"])
    (tmp_path / "data.bin").unlink()
    with pytest.raises(ConfigError, match=r"no file .*data\.bin"):
        check_prefixes([prefix])


def test_a_split_without_documents():
    """Megatron would add empty epochs forever."""
    empty = SimpleNamespace(
        num_samples=4,
        config=SimpleNamespace(sequence_length=8, add_extra_token_to_sequence=1),
        index_split=Split.valid,
        dataset=SimpleNamespace(path_prefix="topics"),
    )
    with pytest.raises(ConfigError, match="--split gives the valid data no document of topics"):
        GPTDataset._get_num_epochs(empty, 0)


#: Cumulative lengths of two sequences of 8 tokens, like Megatron's data sets.
LENGTHS = torch.tensor([[0, 3, 8, 8, 8, 8, 8, 8, 8], [0, 2, 4, 8, 8, 8, 8, 8, 8]]).int()


def packed_batch():
    tokens = torch.arange(16).view(2, 8)
    return {"tokens": tokens, "cu_seqlens": LENGTHS, "max_seqlen": torch.tensor([5, 4])}


def test_packed_batches_of_one_size_hold_the_same_documents():
    """Remaining room must be filled with empty documents."""
    plain, fixed = packed_batch(), packed_batch()
    fixed["cu_seqlens"] = with_room(fixed["cu_seqlens"], 5)
    assert fixed["cu_seqlens"].shape == (2, 6)
    plain_params, params = _pack(plain, 8), _pack(fixed, 8, fixed=True)
    assert torch.equal(plain["tokens"], fixed["tokens"])
    assert params.cu_seqlens_q.shape == (11,) and params.cu_seqlens_q.dtype == torch.int32
    assert params.cu_seqlens_q.unique().equal(plain_params.cu_seqlens_q)
    assert bool((params.cu_seqlens_q.diff() >= 0).all())
    assert (params.max_seqlen_q, plain_params.max_seqlen_q) == (8, 5)
    assert params.tokens_per_sample == plain_params.tokens_per_sample == 8


def test_only_ranks_that_hold_whole_samples_balance_experts_by_sample():
    assert _pack(packed_batch(), 8, whole=False).tokens_per_sample is None
    one = {name: value[:1] for name, value in packed_batch().items()}
    assert _pack(one, 8).tokens_per_sample is None


def test_room_for_more_documents_than_there_are_tokens():
    assert with_room(LENGTHS, 12).shape == (2, 13)
    assert with_room(LENGTHS, 12)[:, -1].tolist() == [8, 8]


def test_a_sequence_of_too_many_documents():
    assert with_room(LENGTHS, 3).tolist() == [[0, 3, 8, 8], [0, 2, 4, 8]]
    with pytest.raises(ConfigError, match=r"--dsa-packed-documents must be at .* 2 for one of 3"):
        with_room(LENGTHS, 2)


def test_data_written_anew_under_its_name_get_new_indices(tmp_path):
    """Megatron's cache of indices is named by the path."""
    prefix = tmp_path / "data"
    seen = []
    for texts in (["a" * 40] * 10, ["b" * 60] * 20, ["b" * 60] * 20):
        write_byte_dataset(texts, prefix)
        data._digest.cache_clear()
        config = GPTDatasetConfig(
            random_seed=1, sequence_length=16, blend=([str(prefix)], None), split="1,0,0",
            reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
            tokenizer=SimpleNamespace(unique_identifiers={}, eod=256, pad=0, vocab_size=257),
        )  # fmt: skip
        stored = GPTDataset.build_low_level_dataset(str(prefix), config)
        indices = np.arange(len(texts), dtype=np.int32)
        found = GPTDataset(stored, str(prefix), indices, None, Split.train, config)
        seen.append(sorted(set(found.document_index.tolist())))
    assert seen == [list(range(10)), list(range(20)), list(range(20))]
    cached = tmp_path / "data" / "cache" / "GPTDataset_indices"
    assert len(list(cached.glob("*document_index.npy"))) == 2
