"""Training entry point: ``python -m megatron_dsa.pretrain <any Megatron flags>``.

Megatron's own ``pretrain()`` with a GPT model whose attention is sparse. The released wheel has the
training loop but no ``pretrain_gpt.py``; this is the part that a script has to bring: the model
configuration, the data sets and the forward step.
"""

from __future__ import annotations

import functools
import os
import sys

import torch

from megatron_dsa.patches import cpu_host
from megatron_dsa.training.entry_errors import told_in_a_sentence
from megatron_dsa.training.host_warnings import silence_host_warnings
from megatron_dsa.training.launching import check_launch
from megatron_dsa.training.preset_flags import preset_flags
from megatron_dsa.versions import untested_versions


def loss_function(loss_mask: torch.Tensor, losses: torch.Tensor):
    """Return the loss sum over unmasked tokens, their number, and both for the log."""
    mask = loss_mask.reshape(-1).float()
    total = torch.sum(losses.reshape(-1).float() * mask)
    tokens = mask.sum().to(torch.int)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.float()])}


def forward_step(data_iterator, model):
    """Run one microbatch; return the per-token losses and the function that reduces them."""
    from megatron.core.utils import get_attr_wrapped_model, get_model_config
    from megatron.training import get_timers

    from megatron_dsa.dispatch.times import TIMES
    from megatron_dsa.metrics.throughput import installed
    from megatron_dsa.training.data import get_batch

    TIMES.paused = not model.training
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    batch, packed = get_batch(data_iterator, get_model_config(model), vp_stage)
    timers("batch-generator").stop()
    counter = installed()
    # Every chunk of an interleaved pipeline gets the batch, and evaluation is not counted.
    if counter is not None and packed is not None and model.training and not vp_stage:
        counter.count_documents(packed.cu_seqlens_q)
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=packed,
    )
    return losses, functools.partial(loss_function, batch["loss_mask"])


def model_config_from_args(args):
    """Return the :class:`.DSAModelConfig` that the parsed flags describe."""
    from megatron.training.argument_utils import (
        core_transformer_config_from_args,
        gpt_config_from_args,
    )

    from megatron_dsa.arguments import (
        apply_yarn_flags,
        hybrid_fields,
        options_from_args,
        refuse_ignored_flags,
        refuse_unused_hybrid_flags,
    )
    from megatron_dsa.config import DSATransformerConfig
    from megatron_dsa.csa_config import HybridTransformerConfig
    from megatron_dsa.dispatch.times import TIMES
    from megatron_dsa.errors import ConfigError
    from megatron_dsa.modules.freezing import freeze_for_stage
    from megatron_dsa.tools.planner.flags import refuse_dry_run_flags
    from megatron_dsa.training.data import check_spread
    from megatron_dsa.training.model import DSAModelConfig

    if not args.multi_latent_attention:
        raise ConfigError("--multi-latent-attention is required: DSA is built on MLA")
    packed = args.dataloader_inter_document_masking
    if packed and args.pipeline_model_parallel_size > 1 and args.micro_batch_size > 1:
        raise ConfigError(
            f"--micro-batch-size must be 1 with --dataloader-inter-document-masking and pipeline "
            f"parallelism, got {args.micro_batch_size}: Megatron sends unpacked shapes between "
            "stages"
        )
    if (args.reset_attention_mask or args.reset_position_ids) and not packed:
        raise ConfigError(
            "--reset-attention-mask and --reset-position-ids have no effect here: attention is "
            "masked by indices. Use --dataloader-inter-document-masking to keep documents apart"
        )
    refuse_dry_run_flags(args)
    refuse_ignored_flags(args)
    check_spread(args)
    TIMES.on = args.dsa_time_operations
    mla = core_transformer_config_from_args(args)
    apply_yarn_flags(args, mla)
    options = options_from_args(args)
    if args.csa_compress_ratios is not None:
        config = HybridTransformerConfig.from_mla(mla, options, **hybrid_fields(args))
    else:
        refuse_unused_hybrid_flags(args)
        config = DSATransformerConfig.from_mla(mla, options)
    model = gpt_config_from_args(args, config=config, model_config_cls=DSAModelConfig)
    if args.dsa_load_hf is not None:
        from megatron_dsa.huggingface.load_hf import importing_hook

        model.pre_wrap_hooks.append(importing_hook(args))
    model.pre_wrap_hooks.append(freeze_for_stage)
    return model


def prepare_host(argv: list[str]) -> None:
    """Prepare Megatron for this machine, before it is imported; ``argv`` gets :func:`preset_flags`.

    Without a GPU, Megatron's CUDA calls go to the CPU. Warnings of Megatron and torch that call for
    nothing are silenced (:mod:`megatron_dsa.training.host_warnings`).

    Raises:
        ConfigError: what the launcher says of the processes cannot be.
    """
    silence_host_warnings()
    # A fake process group has no other processes.
    if "--fake-process-group" not in argv:
        check_launch()
    if cpu_host.needed():
        cpu_host.activate()
    preset_flags(argv)
    if os.environ.get("RANK", "0") == "0":
        for warning in untested_versions():
            print(f"> warning: {warning}")
    _use_compiled_dataset_helper()


def main() -> None:
    """Parse the command line and train, or plan; errors end the process with a sentence."""
    silence_host_warnings()
    with told_in_a_sentence():
        _main()


def _main() -> None:
    if "--dsa-dry-run" in sys.argv[1:]:
        from megatron_dsa.tools.planner.command import dry_run

        sys.exit(dry_run(sys.argv))
    prepare_host(sys.argv)
    from megatron.core.enums import ModelType
    from megatron.training import arguments, training
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from megatron_dsa.arguments import add_dsa_arguments, megatron_argv
    from megatron_dsa.training.checkpoints import prepare_loading
    from megatron_dsa.training.data import train_valid_test_datasets

    args = arguments.parse_and_validate_args(extra_args_provider=add_dsa_arguments)
    sys.argv[:] = megatron_argv(sys.argv)
    model = model_config_from_args(args)
    with prepare_loading(args):
        training.pretrain(
            pretrain_cfg_container_from_args(args, model),
            train_valid_test_datasets,
            ModelType.encoder_or_decoder,
            forward_step,
        )
    finish()


def finish() -> None:
    """End a training script: print how often each implementation ran, and leave together.

    To be called once, on every rank, as the last thing after Megatron's ``pretrain()``: the process
    group is destroyed. A run that silently did something else cannot pass for a result; the counts
    are those of rank 0 (:func:`megatron_dsa.dispatch.report` gives them as numbers, on any rank).
    """
    _print_report()
    if torch.distributed.is_initialized():
        # Without the barrier a rank may leave while another still waits for it.
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def _use_compiled_dataset_helper() -> None:
    """The wheel holds the compiled helper but not the Makefile that Megatron would run."""
    from megatron.core.datasets import utils

    makefile = os.path.join(os.path.dirname(utils.__file__), "Makefile")
    if not os.path.exists(makefile):
        utils.compile_helpers = lambda: None


def _print_report() -> None:
    """Print the counts of rank 0, one line per operation."""
    from megatron.training import print_rank_0

    from megatron_dsa.dispatch import report

    print_rank_0("> megatron_dsa ran, calls per implementation:")
    for operation, counts in report().items():
        runs = ", ".join(f"{name} {count}" for name, count in counts.items())
        print_rank_0(f">   {operation}: {runs}")


# Saving a checkpoint spawns processes that import this module again.
if __name__ == "__main__":
    main()
