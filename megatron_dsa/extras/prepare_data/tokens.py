"""Tokenizers of ``prepare-data``: bytes, or Hugging Face's as the training loads them."""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy
from megatron.core.datasets.indexed_dataset import DType
from megatron.core.tokenizers import MegatronTokenizer

from megatron_dsa.errors import require
from megatron_dsa.training.data import BYTE_EOD, BYTE_VOCAB

#: Suffixes of tokenizer files, whose content determines ids.
_FILES = {".json", ".txt", ".model", ".tiktoken"}


@dataclass(frozen=True)
class Tokens:
    """Tokenizer of ``prepare-data``.

    Attributes:
        end: ids appended to every document.
        vocabulary: exclusive upper bound of ids.
        identity: text that differs if ids may differ.
        flags: training flags for the data.
    """

    encode: Callable[[str], Sequence[int]]
    end: tuple[int, ...]
    vocabulary: int
    identity: str
    flags: str
    note: str = ""

    @property
    def dtype(self) -> type[numpy.number]:
        return DType.optimal_dtype(self.vocabulary)

    def document(self, text: str) -> numpy.ndarray:
        """Return the ids ``[n]`` of a document, in :attr:`dtype`.

        Raises:
            OverflowError: an id is above the dtype's range.
        """
        return numpy.array([*self.encode(text), *self.end], dtype=self.dtype)


def byte_tokens() -> Tokens:
    return Tokens(
        encode=lambda text: text.encode("utf-8"),
        end=(BYTE_EOD,),
        vocabulary=BYTE_VOCAB,
        identity="bytes",
        flags=f"--tokenizer-type NullTokenizer --vocab-size {BYTE_VOCAB}",
    )


def hugging_face_tokens(folder: str, append_eod: bool) -> Tokens:
    """Load the tokenizer of ``--tokenizer-type HuggingFaceTokenizer``.

    Raises:
        ConfigError: there is no such folder, or no token for ``append_eod``.
        ValueError: from Megatron, if the folder holds no readable tokenizer.
    """
    path = Path(folder)
    require(
        path.is_dir(),
        f"--tokenizer {folder} is no folder: give the one of tokenizer.json and "
        "tokenizer_config.json, for example a downloaded checkpoint's",
    )
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = MegatronTokenizer.from_pretrained(folder, metadata_path={"library": "huggingface"})
    special = tokenizer.tokenize("")  # every text gets these special tokens
    end, note = tokenizer.eod, ""
    if append_eod:
        require(
            end is not None,
            f"--append-eod: the tokenizer of {folder} has no end-of-document token: name one as "
            "eos_token in its tokenizer_config.json, or leave the flag out",
        )
        require(
            special[-1:] != [end],
            f"--append-eod: the tokenizer of {folder} ends every text with its end-of-document "
            f"token {end} by itself: leave the flag out",
        )
    elif special[-1:] != [end]:
        note = "no token marks where documents end (--append-eod adds one)"
    digest = hashlib.sha256()
    for file in sorted(file for file in path.iterdir() if file.suffix in _FILES and file.is_file()):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode() + file.read_bytes())
    versions = [f"{name} {version(name)}" for name in ("transformers", "tokenizers")]
    return Tokens(
        encode=tokenizer.tokenize,
        end=(end,) if append_eod else (),
        vocabulary=tokenizer.vocab_size,
        identity=" ".join([*versions, digest.hexdigest(), f"eod {append_eod}"]),
        flags=f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}",
        note=note,
    )
