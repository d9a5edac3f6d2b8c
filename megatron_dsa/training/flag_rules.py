"""Rules against flags without effect, and flags that Megatron ignores."""

import argparse
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_dsa.config.fields import flag_of, option_fields, said
from megatron_dsa.config.model import CSAFields, DSAOptions, StreamFields
from megatron_dsa.config.rules.sizes import TENSOR, share_rules
from megatron_dsa.config.rules.table import Must
from megatron_dsa.errors import require
from megatron_dsa.ops.dispatch import on_meta
from megatron_dsa.ops.dispatch.packages import EMERGING_OPTIMIZERS
from megatron_dsa.patches import MIXED, mixes_precisions
from megatron_dsa.training.checkpoint_files import saved_name
from megatron_dsa.training.files.system_errors import naming

MUON = ("muon", "adaptive_muon")


def check_flags(args: argparse.Namespace) -> None:
    """Check that all flags have an effect in this run."""
    for ok, message in _flag_rules(args):
        require(ok, message)
    if not on_meta():
        for folder in (None if args.skip_train else args.save, args.tensorboard_dir):
            if folder and "://" not in folder:
                _require_writable(folder)


def _require_writable(folder: str) -> None:
    os.makedirs(folder, exist_ok=True)
    with naming(folder), tempfile.TemporaryFile(dir=folder):
        pass


def _flag_rules(args: argparse.Namespace) -> Iterator[tuple[bool, str]]:
    yield (
        args.multi_latent_attention,
        "--multi-latent-attention is required: DSA is built on MLA",
    )
    for row, case, applies in ROWS:
        if applies(args):
            yield row.check(args, case=case.format_map(vars(args)))
    yield from _graph_rules(args)
    yield from _optimizer_package(args)
    packed, batch = args.dataloader_inter_document_masking, args.micro_batch_size
    yield (
        not packed or args.pipeline_model_parallel_size == 1 or batch == 1,
        "--micro-batch-size must be 1 with --dataloader-inter-document-masking and pipeline "
        f"parallelism, got {batch}: Megatron sends unpacked shapes between stages",
    )
    kinds, ranks = (
        args.moe_router_load_balancing_type,
        args.tensor_model_parallel_size * args.context_parallel_size,
    )
    balanced = "seq_aux_loss" in ([kinds] if isinstance(kinds, str) else kinds)
    yield (
        not (packed and balanced and args.num_experts and batch > 1 and ranks > 1),
        "--micro-batch-size must be 1 with --dataloader-inter-document-masking, "
        "--moe-router-load-balancing-type seq_aux_loss and tensor or context parallelism, got "
        f"{batch}: Megatron would balance the experts of all samples together",
    )
    yield from _needed_flags(args)
    yield from _fp8_parameter_rules(args)
    fp32_gradients = args.main_grads_dtype in ("fp32", torch.float32)
    yield (
        fp32_gradients or not args.use_precision_aware_optimizer or not mixes_precisions(args),
        f"--main-grads-dtype must be fp32 with {MIXED}, got {args.main_grads_dtype}: some "
        "parameters stay in fp32, and transformer-engine reads all gradients in one dtype to clip "
        "them; drop it",
    )
    yield from _rank_rules(args)


_OF_MLA = "it has no effect on MLA; use --rope-type yarn with --rotary-scaling-factor"
_MASKED = "attention is masked by indices; add that, which keeps documents apart"
_APART = "they were not run together; take --use-distributed-optimizer"
_DIVIDED, _OPTIMIZER = "--use-distributed-optimizer", "with --optimizer {optimizer}"
_LAYER_WISE = "use_layer_wise_distributed_optimizer"
_PACKED = "--dataloader-inter-document-masking"
_USUAL = ("adam", "sgd")
_SFT, _PRESET = "with --sft", "megatron_dsa.pretrain sets it; add it"
#: Rule, its condition in words ("" for always) and as code.
ROWS: tuple[tuple[Must, str, Callable[[argparse.Namespace], Any]], ...] = (
    (Must("use_rope_scaling", False, _OF_MLA), "", lambda args: True),
    (Must("rotary_seq_len_interpolation_factor", None, _OF_MLA), "", lambda args: True),
    (Must("dsa_dry_run", False, "this script trains, it makes no plans; give the same flags to "
          "python -m megatron_dsa.pretrain"), "", lambda args: True),
    (Must("te_rng_tracker", False, "Megatron then keeps no copy of the generator's state, and "
          "recomputed layers would draw other query tokens; add --dsa-indexer-loss-queries 1, or "
          "drop one"),
     "with --dsa-indexer-teacher served and recomputed layers",
     lambda args: (args.dsa_indexer_teacher == "served" and args.dsa_indexer_loss_queries < 1
                   and args.recompute_granularity is not None)),
    (Must("reset_attention_mask", False, _MASKED), f"without {_PACKED}",
     lambda args: not args.dataloader_inter_document_masking),
    (Must("reset_position_ids", False, _MASKED), f"without {_PACKED}",
     lambda args: not args.dataloader_inter_document_masking),
    (Must("fp8_param_gather", False, "the optimizer would start from the random weights that are "
          "replaced; run python -m megatron_dsa import-hf, and give its output to --load"),
     "with --dsa-load-hf", lambda args: args.dsa_load_hf is not None),
    (Must("layernorm_zero_centered_gamma", False, "released norms do not add 1 to their weights; "
          "drop one of them"), "with --dsa-load-hf", lambda args: args.dsa_load_hf is not None),
    (Must("use_megatron_fsdp", False, _APART), "with --lora-rank",
     lambda args: args.lora_rank is not None),
    (Must("use_torch_fsdp2", False, _APART), "with --lora-rank",
     lambda args: args.lora_rank is not None),
    (Must("dsa_time_operations", False, "a replayed graph measures nothing; drop one of them"),
     "with --cuda-graph-impl {cuda_graph_impl}", lambda args: args.cuda_graph_impl != "none"),
    (Must("timing_log_level", 0, "Megatron's timers wait for the GPU, which a capture cannot"),
     "with --cuda-graph-impl {cuda_graph_impl}",
     lambda args: args.cuda_graph_impl == "full_iteration"),
    (Must("hybrid_layer_pattern", None, "plans are of GPTs; plan the one with the same layers"),
     "with --dsa-dry-run", lambda args: on_meta()),
    (Must("hybrid_layer_pattern", None, "its names are a GPT's; run python -m megatron_dsa "
          "import-hf, and give its output to --load"),
     "with --dsa-load-hf", lambda args: args.dsa_load_hf is not None),
    (Must("lora_rank", None, "Muon is for whole matrices, not for their factors; take adam"),
     _OPTIMIZER, lambda args: args.optimizer in MUON),
    (Must("use_distributed_optimizer", False, "megatron-core 0.19's holds the states of Adam only; "
          "drop it, or take adam"), _OPTIMIZER, lambda args: args.optimizer == "sgd"),
    (Must("fp16", False, "it scales no losses; take --bf16"), _OPTIMIZER,
     lambda args: args.optimizer not in _USUAL),
    (Must("save", None, "megatron-core 0.19 saves states of the shape of their parameter only; "
          "drop it, or take adam or muon"), _OPTIMIZER, lambda args: args.optimizer == "soap"),
    (Must(_LAYER_WISE, False, "megatron-core 0.19's layer-wise optimizer is of Muon only; drop it, "
          "or take adam or muon", _DIVIDED), _OPTIMIZER,
     lambda args: args.optimizer not in (*_USUAL, *MUON)),
    (Must("bf16", True, "megatron-core 0.19's layer-wise optimizer fails in the first step "
          f"without; add it, or drop {_DIVIDED}"), f"with {_DIVIDED} and {_OPTIMIZER[5:]}",
     lambda args: args.optimizer not in _USUAL and getattr(args, _LAYER_WISE, False)),
    *((row, _SFT, lambda args: args.dsa_sft) for row in (
        Must("dataloader_inter_document_masking", True, _PRESET),
        Must("calculate_per_token_loss", True, _PRESET),
        Must("tokenizer_type", "HuggingFaceTokenizer", "the others have no chat template that "
             "marks the assistant's text; give its folder to --tokenizer-model"),
        Must("sft_tokenizer_prompt_format", "nemotron-h-aligned", "conversations have the chat "
             "template of the tokenizer, or of --chat-template; drop it"),
        Must("mock_data", False, "it reads conversations; give --data-path FILE.jsonl"),
        Must("eod_mask_loss", False, "the loss is on the assistant's tokens"),
    )),
)  # fmt: skip


def _of_v4() -> str:
    shared = {each.name for each, _ in option_fields(StreamFields)}
    names = [pair for pair in option_fields(CSAFields) if pair[0].name not in shared]
    names += [pair for pair in option_fields(DSAOptions) if pair[0].name.startswith("csa_")]
    return " ".join(about.dest for _, about in names if about.dest != "csa_compress_ratios")


#: Arguments, and the condition under which they have an effect, as code and in words.
_NEEDS: tuple[tuple[str, Callable[[argparse.Namespace], Any], str], ...] = (
    (
        "dsa_dry_run_world dsa_dry_run_gpu",
        lambda args: on_meta(),
        "with --dsa-dry-run",
    ),
    ("dsa_hf_without", lambda args: args.dsa_load_hf, "with --dsa-load-hf"),
    ("lora_load", lambda args: args.lora_rank, "with --lora-rank"),
    (
        "hc_sinkhorn_iters hc_eps hc_collapse",
        lambda args: args.hc_mult > 1,
        "with --hc-mult of 2 or more",
    ),
    ("moe_hash_seed", lambda args: args.moe_hash_layers, "with --moe-hash-layers of 1 or more"),
    (
        "kda_gate_lower_bound",
        lambda args: args.linear_attention_freq is not None,
        "with --linear-attention-freq",
    ),
    ("dsa_warmup_train_all", lambda args: args.dsa_stage == "warmup", "in --dsa-stage warmup"),
    ("dsa_indexer_numerics", lambda args: args.dsa_stage == "sparse", "in --dsa-stage sparse"),
    (
        "dsa_indexer_teacher",
        lambda args: args.dsa_stage == "sparse" and args.dsa_indexer_topk_freq > 1,
        "in --dsa-stage sparse with --dsa-indexer-topk-freq of 2 or more",
    ),
    (
        "dsa_evaluate_indexer",
        lambda args: args.dsa_stage != "dense",
        "in --dsa-stage warmup or sparse",
    ),
    (_of_v4(), lambda args: args.csa_compress_ratios is not None, "with --csa-compress-ratios"),
    (
        "dsa_muon_per_head",
        lambda args: args.optimizer in MUON,
        f"with --optimizer {' or '.join(MUON)}",
    ),
    ("dsa_sft_long", lambda args: args.dsa_sft, _SFT),
    (
        "dsa_packed_documents",
        lambda args: args.dataloader_inter_document_masking and args.cuda_graph_impl == "local",
        "with --dataloader-inter-document-masking and --cuda-graph-impl local",
    ),
)


def _needed_flags(args: argparse.Namespace) -> Iterator[tuple[Any, str]]:
    fields = (*option_fields(CSAFields), *option_fields(DSAOptions))
    defaults = {about.dest: each.default for each, about in fields if each.type is not bool}
    for names, holds, needed in _NEEDS:
        values = {name: getattr(args, name) for name in names.split()}
        given = [
            flag_of(name) if value is True else f"{flag_of(name)} {said(value)}"
            for name, value in values.items()
            # Compare by identity: 0 is a value, but 0 == False.
            if not (value is None or value is False or value == [] or value == defaults.get(name))
        ]
        yield (
            holds(args) or not given,
            f"{', '.join(given)} has a meaning only {needed}: add that or drop it",
        )


def _rank_rules(args: argparse.Namespace) -> Iterator[tuple[bool, str]]:
    if args.seq_length is None:
        return
    tensor, context = args.tensor_model_parallel_size, args.context_parallel_size
    halves = 1 if context == 1 or args.dsa_cp_layout == "contiguous" else 2
    length, unit = args.seq_length, math.lcm(halves * context, context * tensor)
    yield (
        length % unit == 0,
        f"--seq-length must be a multiple of {unit} with --tensor-model-parallel-size {tensor} and "
        f"--context-parallel-size {context} (--dsa-cp-layout {args.dsa_cp_layout}), got {length}: "
        f"ranks hold equal parts of a sequence; use {length // unit * unit or unit}",
    )
    yield from share_rules(args, {"padded_vocab_size": TENSOR})
    expert, stages = args.expert_model_parallel_size, args.pipeline_model_parallel_size
    expert_tensor = args.expert_tensor_parallel_size or tensor
    needed = expert * expert_tensor * stages
    yield (
        args.world_size % needed == 0,
        f"--expert-model-parallel-size ({expert}) times --expert-tensor-parallel-size "
        f"({expert_tensor}) times --pipeline-model-parallel-size ({stages}) must divide the number "
        f"of processes, got {args.world_size}: start a multiple of {needed}, or give smaller sizes",
    )


def _fp8_parameter_rules(args: argparse.Namespace) -> Iterator[tuple[bool, str]]:
    """Reject starts that would initialise main parameters from weights rounded to FP8."""
    # Megatron loads --pretrained-checkpoint until this run has saved a checkpoint.
    saved = args.load is not None and saved_name(Path(args.load), args.ckpt_step) is not None
    pretrained = args.pretrained_checkpoint is not None and not saved
    starts = pretrained or (args.load and (args.finetune or args.no_load_optim))
    # megatron-core 0.20 always dequantises.
    streams: bool | None = getattr(args, "stream_ckpt_dequant", None)
    flag = "" if streams is None else " --no-stream-ckpt-dequant"
    read_in_bf16 = args.load_main_params_from_ckpt and not streams
    yield (
        not args.fp8_param_gather or not starts or read_in_bf16,
        "--pretrained-checkpoint, or --load with --finetune or --no-load-optim, and "
        "--fp8-param-gather: Megatron would train from weights rounded to FP8, which small updates "
        f"do not move; add --no-load-optim --load-main-params-from-ckpt{flag}",
    )


def _optimizer_package(args: argparse.Namespace) -> Iterator[tuple[bool, str]]:
    if args.optimizer not in ("adam", "sgd"):
        missing = EMERGING_OPTIMIZERS.problem()
        yield (
            missing is None,
            f"--optimizer {args.optimizer} needs the package emerging-optimizers: {missing}",
        )


def _graph_rules(args: argparse.Namespace) -> Iterator[tuple[bool, str]]:
    impl, room = args.cuda_graph_impl, args.dsa_packed_documents
    packed = args.dataloader_inter_document_masking
    if impl == "none":
        return
    given = f"--cuda-graph-impl {impl}"
    yield (
        on_meta() or torch.cuda.is_available(),
        f"{given} needs a GPU, and there is none here: drop it",
    )
    yield (
        not packed or impl == "local",
        f"--dataloader-inter-document-masking must not be used with {given}: "
        + _WHY_NOT_PACKED.get(impl, "")
        + "; use --cuda-graph-impl local",
    )
    yield (
        not packed or impl != "local" or room is not None,
        f"--dsa-packed-documents is required with --dataloader-inter-document-masking and {given}: "
        "batches have to be of one size. Give the most documents that a sequence holds",
    )
    several_stages = args.pipeline_model_parallel_size > 1
    yield (
        not (args.rampup_batch_size or args.step_batch_size_schedule)
        or (impl == "local" and not several_stages),
        f"--rampup-batch-size and --step-batch-size-schedule must be unset with {given}"
        f"{' and pipeline parallelism' if impl == 'local' else ''}: the graphs are of as many "
        "microbatches as the first steps have; drop them",
    )


_WHY_NOT_PACKED = {
    "full_iteration": "Megatron sends the lengths of documents through the host",
    "transformer_engine": "Megatron hands these graphs tensors only, and no packed_seq_params",
}


def apply_yarn_flags(args: argparse.Namespace, config) -> None:
    """Apply Megatron's YaRN flags, which it ignores for MLA, to an MLA configuration.

    Raises:
        ConfigError: V4's attention under YaRN without the original length.
    """
    original = args.yarn_original_max_position_embeddings
    stretched = config.rope_type == "yarn" and config.rotary_scaling_factor != 1
    require(
        not (stretched and any(args.csa_compress_ratios or ())) or original is not None,
        "--yarn-original-max-position-embeddings is required with --rope-type yarn and "
        "compressed layers: take it from the model's own configuration",
    )
    for name in ("original_max_position_embeddings", "beta_fast", "beta_slow"):
        if (value := getattr(args, f"yarn_{name}")) is not None:
            setattr(config, name, value)
