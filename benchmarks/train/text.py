"""The training text: Python's standard library and language reference, by bytes."""

import hashlib
import sysconfig
from pathlib import Path

from megatron_dsa.extras.prepare_data.inputs import python_documentation
from megatron_dsa.extras.prepare_data.shards import write_byte_dataset

#: Folders of the standard library that are tables, tests, or third-party.
LEFT_OUT = {"encodings", "test", "tests", "site-packages", "dist-packages", "pydoc_data"}


def library_texts() -> dict[str, str]:
    """Return the texts of this Python's standard library, sources and reference, by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = {f"topic {i}": text for i, text in enumerate(python_documentation())}
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if LEFT_OUT.isdisjoint(inside.parts):
            texts[str(inside)] = path.read_text(encoding="utf-8", errors="ignore")
    return texts


def held_out(texts: dict[str, str], size: int) -> set[str]:
    """Choose whole texts of at least ``size`` characters together, reproducibly."""
    chosen: set[str] = set()
    for name in sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if sum(len(texts[other]) for other in chosen) >= size:
            break
        chosen.add(name)
    return chosen


def prepare_text(folder: Path, size: int) -> None:
    """Write the data sets ``train`` and ``held_out`` of at least ``size`` characters."""
    texts = library_texts()
    apart = held_out(texts, size)
    for name, wanted in (("held_out", True), ("train", False)):
        documents = [text for key, text in texts.items() if (key in apart) == wanted]
        write_byte_dataset(documents, folder / name)
