"""Data that a model cannot take is named before it reaches the embedding."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.datasets.utils import Split

from megatron_dsa.errors import ConfigError
from megatron_dsa.training.data import GPTDataset, check_prefixes, check_tokens, write_byte_dataset


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


def test_tokens_of_the_vocabulary_pass():
    check_tokens(batch(0, 263, 5), 264)
    check_tokens({"tokens": None}, 264)  # a pipeline stage that has none


def test_device_tensors_are_not_read():
    """That would be a synchronisation; Megatron's loaders give tensors of the host."""
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
    """Megatron would add epochs of no tokens for ever."""
    empty = SimpleNamespace(
        num_samples=4,
        config=SimpleNamespace(sequence_length=8, add_extra_token_to_sequence=1),
        index_split=Split.valid,
        dataset=SimpleNamespace(path_prefix="topics"),
    )
    with pytest.raises(ConfigError, match="--split gives the valid data no document of topics"):
        GPTDataset._get_num_epochs(empty, 0)
