"""Megatron data sets of packed conversations for supervised fine-tuning."""

import contextlib
import hashlib
import os
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import batched
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.training import get_tokenizer, print_rank_0

from megatron_dsa.errors import ConfigError, require
from megatron_dsa.training.chat import ChatTokenizer, read_conversations
from megatron_dsa.training.data_files import check_data_set
from megatron_dsa.training.files.whole import WholeFiles
from megatron_dsa.training.launching import this_rank

_TOGETHER = 512
#: Seconds between collectives, so that waiting ranks do not time out.
_BEAT = 60.0


@dataclass
class SFTConfig(BlendedMegatronDatasetConfig):
    """Megatron's data-set configuration with settings for conversations.

    Attributes:
        prefixes: JSONL file -> prefix of its tokens, see :func:`tokenise`.
        truncate: cut conversations longer than a sequence instead of dropping them.
        documents: maximum number of conversations per sequence, if limited.
    """

    prefixes: dict[str, str] = field(default_factory=dict)
    truncate: bool = False
    documents: int | None = None


def tokenise(
    path: str, chat: ChatTokenizer, folder: str | Path, beat: Callable[[], Any] = lambda: None
) -> str:
    """Write the tokens of a JSONL file as an indexed data set in ``folder``; return its prefix.

    The name depends on file content and tokenizer, so an existing data set is reused. Documents are
    arrays of :meth:`.ChatTokenizer.encode`. Call ``beat`` every minute.

    Raises:
        ConfigError: the file is missing or empty, or a line is wrong.
        FileError: the result cannot be written.
    """
    require(Path(path).is_file(), f"--data-path: there is no file {path}, a JSONL of conversations")
    with open(path, "rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    name = hashlib.sha256((content + chat.fingerprint).encode()).hexdigest()[:16]
    name = f"{Path(path).stem}-{name}"
    prefix = os.path.join(folder, name)
    with contextlib.suppress(ConfigError, OSError):
        check_data_set(prefix)
        print(f"> {path}: tokens of an earlier run, {prefix}.bin", flush=True)
        return prefix
    trained, lengths, empty, first, last_beat = 0, [], [], "", time.monotonic()
    open_before = chat.open_turns
    with WholeFiles(folder) as files:
        builder = IndexedDatasetBuilder(str(files.path(f"{name}.bin")), dtype=np.int32)
        for part in batched(read_conversations(path), _TOGETHER):
            empty += [each.where for each in part if each.has_empty_answer]
            for marked in chat.encode(part):
                first = first or chat.show(marked)
                builder.add_document(torch.from_numpy(marked), [len(marked)])
                trained += int((marked >= 0).sum())
                lengths.append(len(marked))
            if time.monotonic() - last_beat >= _BEAT:
                print(f"> {path}: {len(lengths)} conversations tokenised", flush=True)
                beat()
                last_beat = time.monotonic()
        require(lengths, f"--data-path {path} holds no conversation: give a file with some")
        builder.data_file.flush()  # flush here, so that errors name this file
        builder.finalize(str(files.path(f"{name}.idx")))
    tokens = sum(lengths)
    print(
        f"> {path}: {len(lengths)} conversations of {tokens} tokens, {trained / tokens:.1%} of "
        f"them in the loss, the longest has {max(lengths)}; in {prefix}.bin\n"
        f"> the first one, the loss between [[ and ]]: {first!r}",
        flush=True,
    )
    if chat.open_turns > open_before:
        print(
            f"> warning: no special token ends {chat.open_turns - open_before} turns of the "
            "assistant, so that the model learns no end for them: change the chat template",
            flush=True,
        )
    if empty:
        print(
            f"> warning: {len(empty)} of {len(lengths)} have an empty message of the assistant, of "
            f"which only the end is trained; the first is {empty[0]}",
            flush=True,
        )
    return prefix


def pack(lengths: Iterable[int], room: int, most: int | None = None) -> list[list[int]]:
    """Pack indices of ``lengths`` by best fit into lists whose lengths sum to at most ``room``.

    ``most`` limits the indices per list.
    """
    packed: list[list[int]] = []
    open_lists: dict[int, list[int]] = {}  # free tokens -> indices of open lists
    left: list[int] = []  # free tokens, ascending
    for index, length in enumerate(lengths):
        at = bisect_left(left, length)
        if at == len(left):
            chosen, rest = len(packed), room
            packed.append([])
        else:
            rest = left[at]
            chosen = open_lists[rest].pop()
            if not open_lists[rest]:
                del open_lists[rest], left[at]
        packed[chosen].append(index)
        rest -= length
        if rest and len(packed[chosen]) != most:
            if rest not in open_lists:
                insort(left, rest)
            open_lists.setdefault(rest, []).append(chosen)
    return packed


class SFTDataset(MegatronDataset):
    """Sequences of packed conversations, reshuffled every epoch.

    An item has ``tokens``, ``labels`` and ``position_ids`` in int64 and ``loss_mask`` in fp32, each
    ``[s]``; int32 ``cu_seqlens [s + 1]``, padded with the number of real tokens; and int32
    ``max_seqlen``. The order depends only on the seed, not on the number of items.
    """

    config: SFTConfig

    def __init__(self, dataset, dataset_path, indices, num_samples, index_split, config) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        self.documents = self._fitting()
        lengths = np.minimum(dataset.sequence_lengths[self.documents] - 1, config.sequence_length)
        items: list[np.ndarray] = []
        epoch, wanted = 0, 1 if num_samples is None else num_samples
        if not wanted:
            # Megatron's samplers reject empty data sets.
            self.items = [np.arange(min(1, len(self.documents)))]
            return
        require(
            len(self.documents),
            f"--split gives the {index_split.name} data no conversation of {dataset_path} that "
            "fits --seq-length, and it is cut between conversations: give it a larger share, or "
            "set --eval-iters 0",
        )
        while len(items) < wanted:
            draw = np.random.default_rng((config.random_seed, index_split.value, epoch))
            order = draw.permutation(len(self.documents))
            packed = pack(lengths[order].tolist(), config.sequence_length, config.documents)
            items += [order[packed[index]] for index in draw.permutation(len(packed))]
            epoch += 1
        self.items = items

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> IndexedDataset:
        prefix = config.prefixes[dataset_path]
        require(
            os.path.isfile(f"{prefix}.idx"),
            f"rank 0 wrote {prefix}.idx, and this rank does not find it: give --data-cache-path a "
            "folder that all machines share",
        )
        return IndexedDataset(prefix, mmap=config.mmap_bin_files)

    def _fitting(self) -> np.ndarray:
        room = self.config.sequence_length
        lengths = self.dataset.sequence_lengths[self.indices] - 1
        long = lengths > room
        if not long.any():
            return self.indices
        said = f"> {self.dataset_path}, {self.index_split.name} data: {int(long.sum())} of "
        said += f"{len(long)} conversations are longer than --seq-length {room} (the longest: "
        said += f"{lengths.max()}) and are "
        left_out = long
        if self.config.truncate:
            left_out = np.array(
                [
                    is_long and not (self.dataset.get(int(index), length=room + 1)[1:] >= 0).any()
                    for index, is_long in zip(self.indices, long, strict=True)
                ]
            )
            said += f"truncated; {int(left_out.sum())} of them have no loss before and are "
        print_rank_0(said + "dropped")
        return self.indices[~left_out]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        room = self.config.sequence_length
        tokens, labels, positions = (np.zeros(room, np.int64) for _ in range(3))
        mask, ends = np.zeros(room, np.float32), [0]
        for document in self.documents[self.items[idx]]:
            marked = self.dataset.get(int(document))[: room + 1]
            ids = np.where(marked < 0, ~marked, marked)
            part = slice(ends[-1], ends[-1] + len(ids) - 1)
            tokens[part], labels[part] = ids[:-1], ids[1:]
            mask[part], positions[part] = marked[1:] >= 0, np.arange(len(ids) - 1)
            ends.append(part.stop)
        # Padding of equal tokens would route to the same experts.
        tokens[ends[-1] :] = np.resize(tokens[: ends[-1]], room - ends[-1])
        cu_seqlens = np.full(room + 1, ends[-1], np.int32)
        cu_seqlens[: len(ends)] = ends
        arrays = {"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": positions}
        arrays |= {"cu_seqlens": cu_seqlens, "max_seqlen": np.diff(cu_seqlens).max()}
        return {name: torch.as_tensor(array) for name, array in arrays.items()}


def _broadcast(value: Any = None) -> Any:
    values = [value]
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(values)
    return values[0]


def sft_datasets(
    args: Any,
    samples: list[int],
    shared: dict[str, Any],
    on_this_rank: Callable[[], bool],
) -> Any:
    """Build the data sets of ``--sft`` from JSONL files, on all ranks together.

    Rank 0 tokenises while the others wait. ``shared`` has fields common to all data sets.
    """
    parts = (shared["blend"], *(shared["blend_per_split"] or ()))
    paths = {path for part in parts if part for path in part[0]}
    prefixes: dict[str, str] | None = None
    if this_rank() == 0:
        chat = ChatTokenizer(get_tokenizer()._tokenizer.tokenizer, args.chat_template)
        prefixes = {}
        for path in sorted(paths):
            folder = args.data_cache_path or os.path.join(os.path.dirname(path), "cache")
            prefixes[path] = tokenise(path, chat, os.path.join(folder, "sft"), _broadcast)
    prefixes = _broadcast(prefixes)
    while prefixes is None:  # wait while rank 0 tokenises
        prefixes = _broadcast()
    config = SFTConfig(
        **shared,
        prefixes=prefixes,
        truncate=args.dsa_sft_long == "truncate",
        documents=args.dsa_packed_documents,
    )
    print_rank_0("> building train, validation and test data sets of conversations")
    return BlendedMegatronDatasetBuilder(SFTDataset, samples, on_this_rank, config).build()
