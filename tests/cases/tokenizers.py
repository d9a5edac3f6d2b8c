"""A small Hugging Face tokenizer, trained where it is needed."""

from collections.abc import Iterable
from pathlib import Path

import pytest

BEGIN, END = "<|begin|>", "<|end|>"


def write_tokenizer(folder: Path, texts: Iterable[str], vocabulary: int = 1000) -> Path:
    """Train byte-pair encoding that puts :data:`BEGIN` (0) before texts; :data:`END` is 1.

    Skips the test where transformers is not installed.
    """
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[BEGIN, END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    model.train_from_iterator(texts, trainer)
    model.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)]
    )
    # Shorter than documents: nothing is cut off, and nothing warns.
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token=END, model_max_length=16
    ).save_pretrained(folder)
    return folder
