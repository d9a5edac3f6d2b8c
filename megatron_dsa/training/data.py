"""Megatron's data sets, and batches for a training step."""

import contextlib
import functools
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets import gpt_dataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.utils import get_batch_on_this_tp_rank
from megatron.training import get_args, get_tokenizer, print_rank_0
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_dsa.config.model import options_of
from megatron_dsa.errors import ConfigError, require
from megatron_dsa.ops.layout.sharding import Sharding, global_positions_of
from megatron_dsa.training.data_files import check_data_sets
from megatron_dsa.training.launching import this_rank
from megatron_dsa.training.sft import sft_datasets

#: End-of-document id of the byte tokenizer, whose other ids are bytes.
BYTE_EOD = 256
BYTE_VOCAB = 257


class GPTDataset(gpt_dataset.GPTDataset):
    """Megatron's data set, with an error for empty splits instead of an endless loop.

    Names of cached indices contain the class name.
    """

    unique_description_hash: str

    def _get_num_epochs(self, num_tokens_per_epoch: int) -> int:
        require(
            num_tokens_per_epoch > 0,
            f"--split gives the {self.index_split.name} data no document of "
            f"{self.dataset.path_prefix}, and it is cut between documents: give it a larger share "
            "or data of more documents, or set --eval-iters 0",
        )
        return super()._get_num_epochs(num_tokens_per_epoch)

    def _build_document_sample_shuffle_indices(self):
        # Megatron names cached indices by path only; add a digest of the content.
        index = Path(f"{self.dataset.path_prefix}.idx")
        if index.is_file():
            text = f"{self.unique_description_hash} {_digest(index)}"
            self.unique_description_hash = hashlib.md5(
                text.encode(), usedforsecurity=False
            ).hexdigest()
        return super()._build_document_sample_shuffle_indices()


@functools.cache
def _digest(index: Path) -> str:
    most, size = 2**20, index.stat().st_size
    with index.open("rb") as file:
        head = file.read(most)
        file.seek(max(0, size - most))
        return hashlib.sha256(b"%d" % size + head + file.read()).hexdigest()


def train_valid_test_datasets(samples: list[int], vp_stage: int | None = None) -> Any:
    """Build Megatron's GPT data sets from the global arguments."""
    args = get_args()
    with _naming_lists(args):
        blend, blend_per_split = get_blend_and_blend_per_split(args)
    if blend is None and blend_per_split is None and not args.mock_data:
        raise ConfigError(
            "no data: give --data-path PREFIX of an indexed data set (make one from text with "
            "'python -m megatron_dsa prepare-data'), or --mock-data"
        )

    def on_this_rank() -> bool:
        ends = mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()
        # Every stage needs the lengths of packed batches.
        return mpu.get_tensor_model_parallel_rank() == 0 and (
            ends or _has_mtp_layers(args) or args.dataloader_inter_document_masking
        )

    shared = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "split": args.split,
        "num_dataset_builder_threads": args.num_dataset_builder_threads,
        "mmap_bin_files": args.mmap_bin_files,
        "mid_level_dataset_surplus": args.mid_level_dataset_surplus,
        "multiple_validation_sets": args.multiple_validation_sets,
        "full_validation": args.full_validation,
    }
    if _packs_conversations(args):
        return sft_datasets(args, samples, shared, on_this_rank)
    for part in filter(None, [blend, *(blend_per_split or ())]):
        check_prefixes(part[0])
        if this_rank() == 0:
            check_data_sets(part[0])
    config = gpt_dataset.GPTDatasetConfig(
        **shared,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        inter_document_masking=args.dataloader_inter_document_masking,
    )
    if args.mock_data:
        dataset_class = gpt_dataset.MockGPTDataset
    else:
        dataset_class = GPTDataset
    print_rank_0("> building train, validation and test data sets")
    return BlendedMegatronDatasetBuilder(dataset_class, samples, on_this_rank, config).build()


train_valid_test_datasets.is_distributed = True  # type: ignore[attr-defined]


@contextlib.contextmanager
def _naming_lists(args) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError, AssertionError, AttributeError) as error:
        flag, rule = "--data-path", "prefixes, or pairs of a weight and a prefix"
        if args.data_args_path is not None:
            flag = f"--data-args-path {args.data_args_path}"
        elif args.per_split_data_args_path is not None:
            flag = f"--per-split-data-args-path {args.per_split_data_args_path}"
            rule = "a JSON object of train, valid and test, each a list of " + rule
        raise ConfigError(f"{flag} must hold {rule} ({error!r}): correct it") from error


def check_prefixes(prefixes: Iterable[str]) -> None:
    """Check that the files of ``--data-path`` exist; skip object stores."""
    for prefix in prefixes:
        if "://" in prefix:
            continue
        for file in (f"{prefix}.idx", f"{prefix}.bin"):
            require(
                Path(file).is_file(),
                f"--data-path {prefix}: there is no file {file}. Name the prefix of an indexed "
                "data set, without its ending (make one from text with 'python -m megatron_dsa "
                "prepare-data')",
            )


def vocabulary_of(args) -> int:
    return max(args.vocab_size or 0, get_tokenizer().vocab_size)


def check_tokens(batch: dict, vocabulary: int) -> None:
    """Check token ids on the host, since a GPU would end in a device assert.

    ``vocabulary`` excludes the embedding's padding.
    """
    for name in ("tokens", "labels"):
        ids = batch.get(name)
        if ids is None or ids.device.type != "cpu" or not ids.numel():
            continue
        least, most = (int(value) for value in torch.aminmax(ids))
        require(
            least >= 0 and most < vocabulary,
            f"--data-path holds the token {least if least < 0 else most}, and the vocabulary has "
            f"{vocabulary} tokens: give the tokenizer that the data was made with, or its "
            "--vocab-size",
        )


def _has_mtp_layers(args) -> bool:
    if not args.mtp_num_layers:
        return False
    layout = args.pipeline_model_parallel_layout
    if isinstance(layout, str):
        layout = PipelineParallelLayerLayout.from_str(layout, args.pipeline_model_parallel_size)
    return mtp_on_this_rank(layout, args.mtp_num_layers)


_BATCH_KEYS = (
    "tokens", "labels", "loss_mask", "position_ids", "attention_mask", "cu_seqlens",
    "cu_seqlens_padded", "max_seqlen", "local_cp_size", "hybrid_cp_group",
)  # fmt: skip
_TOKEN_KEYS = ("tokens", "labels", "loss_mask", "position_ids")


def _documents(args) -> int | None:
    return getattr(args, "dsa_packed_documents", None)


def _packs_conversations(args) -> bool:
    return getattr(args, "dsa_sft", False)


def get_batch(data_iterator, config, vp_stage: int | None = None) -> tuple[dict[str, Any], Any]:
    """Return this rank's ``(batch, packed_seq_params)``; middle stages get an empty batch.

    With ``--dataloader-inter-document-masking`` the batch packs documents (THD). Under context
    parallelism it holds local tokens, but packed parameters describe whole documents.
    """
    args = get_args()
    packed = args.dataloader_inter_document_masking
    first, last = mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()
    has_mtp = mtp_on_this_rank(
        config.pipeline_model_parallel_layout, config.mtp_num_layers, False, vp_stage
    )
    if not (first or last or has_mtp or packed):
        return dict.fromkeys(_BATCH_KEYS), None
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch = {}
    if tp_rank == 0:
        data = next(data_iterator)
        check_tokens(data, vocabulary_of(args))
        room = _documents(args)
        if room is not None:
            data["cu_seqlens"] = with_room(data["cu_seqlens"], room)
        for key in _BATCH_KEYS:
            value = data.get(key)
            batch[key] = None if value is None else value.cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=packed,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=1,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=has_mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=first,
        is_pipeline_last_stage=last,
    )
    params = None
    if packed:
        ranks = config.tensor_model_parallel_size * config.context_parallel_size
        params = _pack(
            batch,
            args.seq_length,
            fixed=_documents(args) is not None,
            whole=ranks == 1,
            padded=_packs_conversations(args),
        )
    if config.context_parallel_size > 1:
        sharding = Sharding(
            cp=config.context_parallel_size,
            cp_rank=mpu.get_context_parallel_rank(),
            cp_layout=options_of(config).cp_layout,
        )
        take_tokens(batch, sharding, None if params is None else params.cu_seqlens_q)
    return batch, params


def take_tokens(batch: dict, sharding: Sharding, offsets: torch.Tensor | None = None) -> None:
    """Reduce ``batch`` in place to the tokens of a context-parallel rank, in the rank's order.

    Args:
        batch: tensors ``[b, s]`` by name; only per-token entries change.
        offsets: int ``[n + 1]``, cumulative padded lengths of packed documents, if packed.
    """
    whole = {key: batch[key] for key in _TOKEN_KEYS if batch.get(key) is not None}
    if not whole:
        return
    some = next(iter(whole.values()))
    if offsets is None:
        positions = global_positions_of(sharding, some.shape[1], some.device)
    else:
        positions = sharding.global_positions(some.shape[1], offsets, some.device)
    for key, tokens in whole.items():
        batch[key] = tokens.index_select(1, positions[sharding.rank])


def check_cp_layout(args) -> None:
    """Check that the context-parallel layout fits the data."""
    ranks, layout = args.context_parallel_size, args.dsa_cp_layout
    packed = args.dataloader_inter_document_masking
    if ranks == 1:
        return
    require(
        not packed or layout != "zigzag",
        "--dsa-cp-layout must be zigzag_rows (or contiguous) with "
        f"--dataloader-inter-document-masking and --context-parallel-size {ranks}, got zigzag: it "
        f"cuts every document into {2 * ranks} equal chunks, and the documents of Megatron's data "
        "sets have any length. Add --dsa-cp-layout zigzag_rows",
    )
    data, fix = "--dsa-cp-layout contiguous", "Use --dsa-cp-layout zigzag"
    if packed:
        data = "packed documents"
        fix = "Drop --dataloader-inter-document-masking, or pass --mtp-num-layers 0"
    require(
        not (args.mtp_num_layers and (packed or layout == "contiguous")),
        f"--mtp-num-layers must be unset with --context-parallel-size {ranks} and {data}: Megatron "
        "shifts tokens from rank to rank as if every sequence lay in zigzag order. " + fix,
    )


def with_room(cu_seqlens: torch.Tensor, documents: int) -> torch.Tensor:
    """Return cumulative lengths of the fixed size ``[b, documents + 1]``.

    ``cu_seqlens`` is int32 ``[b, n]`` on the host, padded with copies of its last entry.
    """
    most = int((cu_seqlens.diff(dim=1) > 0).sum(1).max())
    require(
        most <= documents,
        f"--dsa-packed-documents must be at least the number of documents of a sequence, got "
        f"{documents} for one of {most}: give a larger number, or longer documents",
    )
    missing = documents + 1 - cu_seqlens.shape[1]
    if missing > 0:
        filled = cu_seqlens[:, -1:].expand(-1, missing)
        cu_seqlens = torch.cat([cu_seqlens, filled], 1)
    return cu_seqlens[:, : documents + 1].contiguous()


def _pack(
    batch: dict, length: int, *, fixed: bool = False, whole: bool = True, padded: bool = False
) -> PackedSeqParams:
    """Flatten a batch of sequences of ``length`` tokens to one sequence, in place.

    Args:
        fixed: all batches have equal sizes, which avoids a host sync.
        whole: this rank holds whole samples.
        padded: sequences may end in padding.
    """
    batch["attention_mask"] = None
    for key in _TOKEN_KEYS:
        if batch.get(key) is not None:
            batch[key] = batch[key].reshape(1, -1)
    samples = len(batch["cu_seqlens"])
    cu_seqlens, starts = _joined(batch["cu_seqlens"], length, fixed)
    offsets = starts if padded and samples > 1 else None
    longest = length if fixed else int(batch["max_seqlen"].max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=offsets,
        cu_seqlens_kv_padded=offsets,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        tokens_per_sample=length if whole and samples > 1 else None,
    )


def _joined(
    cu_seqlens: torch.Tensor, length: int, fixed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int32 cumulative lengths of all documents, without and with padding.

    ``cu_seqlens`` is ``[b, n + 1]``. Empty documents are kept only if ``fixed``.
    """
    first = torch.arange(len(cu_seqlens), device=cu_seqlens.device)[:, None] * length
    lengths, starts = cu_seqlens.diff(dim=1).flatten(), (cu_seqlens[:, :-1] + first).flatten()
    if not fixed:
        kept = lengths > 0
        lengths, starts = lengths[kept], starts[kept]
    ends = lengths.cumsum(0)
    end = starts.new_full((1,), len(cu_seqlens) * length)
    return torch.cat([ends.new_zeros(1), ends]).int(), torch.cat([starts, end]).int()
