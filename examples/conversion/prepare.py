"""Conversion of text files to a tokenizer and two Megatron data sets of long documents.

``python prepare.py --source FOLDER --output FOLDER`` writes ``tokenizer.json``, ``train.bin`` and
``.idx``, ``held_out.bin`` and ``.idx``, and ``corpus.json``, which describes their content. Train
with the flags in the last printed line.

A unit is a folder two levels below the source (``drivers/net``); files above belong to their
folder, and units too small for a document join the folder above (``Documentation``). A unit's
files, sorted by path and never divided, fill documents of at least ``--document-tokens`` tokens.
The tokenizer is not trained on held-out units.
"""

import argparse
import hashlib
import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_dsa.training.files.whole import whole_file

try:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
except ModuleNotFoundError:
    sys.exit("error: the corpus needs a tokenizer: pip install tokenizers")

END = "<|end_of_document|>"


#: Files encoded at a time: the tokenizer holds a few hundred bytes per token.
AT_A_TIME = 256


def find_units(
    source: Path, folders: list[str], without: list[str], suffixes: list[str]
) -> dict[str, list[Path]]:
    """Return each unit's sorted files, relative to ``source``, without symlinks."""
    units: dict[str, list[Path]] = {}
    for folder in folders or ["."]:
        for path in sorted((source / folder).rglob("*")):
            file = path.relative_to(source)
            if any(file.is_relative_to(other) for other in without):
                continue
            if path.suffix in suffixes and path.is_file() and not path.is_symlink():
                units.setdefault("/".join(file.parts[:-1][:2]), []).append(file)
    return dict(sorted(units.items()))


def join_small(
    source: Path, units: dict[str, list[Path]], least: int
) -> tuple[dict[str, list[Path]], dict[str, int]]:
    """Join units smaller than ``least`` bytes with the folder above; return units and sizes."""
    joined: dict[str, list[Path]] = {}
    for name, files in units.items():
        small = sum((source / file).stat().st_size for file in files) < least
        joined.setdefault(name.split("/")[0] if small else name, []).extend(files)
    sizes = {
        name: sum((source / file).stat().st_size for file in files)
        for name, files in joined.items()
    }
    return {name: sorted(files) for name, files in joined.items()}, sizes


def held_out_units(sizes: dict[str, int], share: float) -> set[str]:
    """Choose units by the hash of their names until they hold ``share`` of all bytes.

    A unit of more than a fifth of these bytes stays in training, so that several are held out.
    """
    wanted = share * sum(sizes.values())
    chosen: set[str] = set()
    for name in sorted(sizes, key=lambda unit: hashlib.sha256(unit.encode()).hexdigest()):
        if sum(sizes[unit] for unit in chosen) >= wanted:
            break
        if 0 < sizes[name] <= wanted / 5:
            chosen.add(name)
    return chosen


def read(source: Path, file: Path) -> str:
    """Return a file's text after a line with its path."""
    text = (source / file).read_text(encoding="utf-8", errors="replace")
    return f"==> {file.as_posix()} <==\n{text}"


def train_tokenizer(texts: Iterator[str], vocabulary: int) -> Tokenizer:
    """Train byte-pair encoding on bytes; the last of ``vocabulary`` ids ends a document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    found = tokenizer.get_vocab_size()
    if found != vocabulary - 1:
        sys.exit(f"error: the text gives {found + 1} tokens, not --vocabulary {vocabulary}")
    tokenizer.add_special_tokens([END])
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[numpy.ndarray]:
    """Yield the int32 ids ``[n]`` of each text."""
    texts = iter(texts)
    while some := list(itertools.islice(texts, AT_A_TIME)):
        for encoded in tokenizer.encode_batch_fast(some):
            yield numpy.array(encoded.ids, dtype=numpy.int32)


def documents(files: Iterable[numpy.ndarray], least: int) -> Iterator[list[numpy.ndarray]]:
    """Group the ids of a unit's files into documents of at least ``least`` tokens.

    The last document takes the remaining files; a small unit has no document.
    """
    last: list[numpy.ndarray] = []
    pending: list[numpy.ndarray] = []
    for ids in files:
        pending.append(ids)
        if sum(map(len, pending)) >= least:
            if last:
                yield last
            last, pending = pending, []
    if last:
        yield last + pending


class Writer:
    """Writer of a data set that also counts documents."""

    def __init__(self, prefix: Path, vocabulary: int):
        self.prefix, self.end = prefix, vocabulary - 1
        dtype = numpy.uint16 if vocabulary <= 65536 else numpy.int32
        self.builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
        self.units: list[str] = []
        self.lengths: list[int] = []

    def add(self, unit: str, found: Iterable[list[numpy.ndarray]]) -> bool:
        """Write a unit's documents; return whether it has any."""
        before = len(self.lengths)
        for files in found:
            ids = numpy.concatenate([*files, [self.end]])
            self.builder.add_document(ids, [len(ids)])
            self.lengths.append(len(ids))
        written = len(self.lengths) > before
        self.units += [unit] if written else []
        return written

    def finish(self) -> dict:
        if not self.lengths:
            sys.exit(f"error: no document for {self.prefix}: lower --document-tokens")
        self.builder.finalize(f"{self.prefix}.idx")
        return {
            "units": self.units,
            "documents": len(self.lengths),
            "tokens": sum(self.lengths),
            "shortest document": min(self.lengths),
            "median document": sorted(self.lengths)[len(self.lengths) // 2],
        }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, required=True, help="folder of the text files")
    parser.add_argument("--folders", nargs="*", default=[], help="of it (default: all)")
    parser.add_argument("--without", nargs="*", default=[], help="folders that are left out")
    parser.add_argument("--suffixes", nargs="+", default=[".c", ".h", ".S", ".rst", ".txt"])
    parser.add_argument("--output", type=Path, required=True, help="folder")
    parser.add_argument("--vocabulary", type=int, default=16384, help="tokens (16384)")
    parser.add_argument("--document-tokens", type=int, default=32768, help="at least (32768)")
    parser.add_argument("--held-out", type=float, default=0.01, help="share of the bytes (0.01)")
    parser.add_argument(
        "--tokenizer-files", type=int, default=8,
        help="the tokenizer is trained on one file in so many (8)",
    )  # fmt: skip
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    source, output, vocabulary = arguments.source, arguments.output, arguments.vocabulary
    units = find_units(source, arguments.folders, arguments.without, arguments.suffixes)
    if not units:
        sys.exit(f"error: {source} has no file that ends in {' '.join(arguments.suffixes)}")
    # Tokens rarely have more than four bytes.
    units, sizes = join_small(source, units, 4 * arguments.document_tokens)
    held_out = held_out_units(sizes, arguments.held_out)
    output.mkdir(parents=True, exist_ok=True)
    seen = [file for name, files in units.items() if name not in held_out for file in files]
    sample = seen[:: arguments.tokenizer_files]
    tokenizer = train_tokenizer((read(source, file) for file in sample), vocabulary)
    tokenizer.save(str(output / "tokenizer.json"))

    writers = {name: Writer(output / name, vocabulary) for name in ("train", "held_out")}
    too_short = []
    for name, files in units.items():
        encoded = encode(tokenizer, (read(source, file) for file in files))
        writer = writers["held_out" if name in held_out else "train"]
        if not writer.add(name, documents(encoded, arguments.document_tokens)):
            too_short.append(name)
    facts = {name: writer.finish() for name, writer in writers.items()}
    facts["left out, too short"] = too_short
    with whole_file(output / "corpus.json") as file:
        file.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    for name in writers:
        said = {key: len(v) if key == "units" else v for key, v in facts[name].items()}
        print(f"{name}: " + ", ".join(f"{value} {key}" for key, value in said.items()))
    print(f"left out: {len(too_short)} units of less than {arguments.document_tokens} tokens")
    print(
        f"--train-data-path {output}/train --valid-data-path {output}/held_out "
        f"--tokenizer-type NullTokenizer --vocab-size {vocabulary}"
    )


if __name__ == "__main__":
    main()
