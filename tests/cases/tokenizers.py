"""Small Hugging Face tokenizers, trained on demand."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

BEGIN, END = "<|begin|>", "<|end|>"


def train_tokenizer(texts: Iterable[str], vocabulary: int, special: Sequence[str]):
    """Train byte-pair encoding that prepends the first special token."""
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=list(special), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    model.train_from_iterator(texts, trainer)
    model.post_processor = processors.TemplateProcessing(
        single=f"{special[0]} $A", special_tokens=[(special[0], 0)]
    )
    return model


def write_tokenizer(folder: Path, texts: Iterable[str], vocabulary: int = 1000) -> Path:
    """Save a tokenizer that prepends :data:`BEGIN` (0); :data:`END` is 1."""
    model = train_tokenizer(texts, vocabulary, (BEGIN, END))
    from transformers import PreTrainedTokenizerFast

    # Longer documents must neither be cut nor warn.
    PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token=END, model_max_length=16
    ).save_pretrained(folder)
    return folder
