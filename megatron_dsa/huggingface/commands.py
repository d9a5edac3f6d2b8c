"""The commands ``import-hf`` and ``export-hf``: between Hugging Face and Megatron checkpoints.

Both build the whole model in one process, in the memory of the CPU. The Megatron checkpoint is a
distributed one: runs of any parallel layout load it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
from pathlib import Path

from megatron_dsa.errors import ConfigError


def add_commands(commands) -> None:
    """Add both to the subparsers of ``python -m megatron_dsa``."""
    into = commands.add_parser(
        "import-hf", help="Megatron checkpoint from a Hugging Face checkpoint (V3, V3.2, GLM-5)"
    )
    into.add_argument("--input", required=True, help="directory of config.json and safetensors")
    into.add_argument("--output", required=True, help="directory for --load")
    into.set_defaults(run=import_hf)
    out = commands.add_parser(
        "export-hf", help="Hugging Face checkpoint from a Megatron checkpoint"
    )
    out.add_argument("--input", required=True, help="what --save of the training run was")
    out.add_argument("--step", type=int, help="iteration (default: the latest)")
    out.add_argument("--config", required=True, help="config.json of the model, or its directory")
    out.add_argument("--output", required=True, help="directory for config.json and safetensors")
    out.add_argument("--shard-gb", type=float, default=5.0, help="largest size of a shard (5)")
    out.set_defaults(run=export_hf)


@contextlib.contextmanager
def _one_process():
    """Megatron's process groups with this process as the only rank."""
    from megatron_dsa import cpu_host

    if cpu_host.needed():
        cpu_host.activate()
    import torch
    from megatron.core import parallel_state

    if torch.distributed.is_initialized():
        yield
        return
    handle, store = tempfile.mkstemp()
    os.close(handle)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    try:
        parallel_state.initialize_model_parallel()
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _build(hf, stage: str, mtp: bool):
    """Build the model that config.json describes, on the CPU and without initial values."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megatron_dsa.config import DSAOptions, DSATransformerConfig
    from megatron_dsa.specs import dsa_block_spec, dsa_mtp_block_spec

    model_parallel_cuda_manual_seed(1)
    config = DSATransformerConfig(
        **hf.fields,
        attention_dropout=0.0,
        transformer_impl="local",
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=hf.dtype,
        mtp_num_layers=hf.mtp_layers if mtp else None,
        dsa=DSAOptions(stage=stage),
    )
    return GPTModel(
        config,
        dsa_block_spec(config),
        hf.vocab_size,
        hf.raw.get("max_position_embeddings", 4096),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        mtp_block_spec=dsa_mtp_block_spec(config),
    ).cpu()


def import_hf(arguments: argparse.Namespace) -> int:
    """Write a Megatron checkpoint without optimizer state; Megatron calls that a release."""
    from megatron.core import dist_checkpointing

    from megatron_dsa.huggingface.conventions import read_config
    from megatron_dsa.huggingface.convert import import_model
    from megatron_dsa.huggingface.files import CheckpointReader
    from megatron_dsa.huggingface.names import layer_of
    from megatron_dsa.stages import is_indexer_parameter

    output = Path(arguments.output)
    tracker = output / "latest_checkpointed_iteration.txt"
    if tracker.exists():
        raise ConfigError(f"--output {output} holds a checkpoint already: choose another directory")
    hf = read_config(arguments.input)
    names = CheckpointReader(arguments.input).names()
    stage = "sparse" if any(is_indexer_parameter(name) for name in names) else "dense"
    mtp = any((layer_of(name) or 0) >= hf.num_layers for name in names)
    with _one_process():
        model = _build(hf, stage, mtp)
        report = import_model(model, arguments.input)
        state = {"model": model.sharded_state_dict(), "checkpoint_version": 3.0, "iteration": 0}
        (output / "release").mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save(state, str(output / "release"))
    tracker.write_text("release")
    print(f"{len(report.filled)} tensors of {arguments.input} in {output}; load them with")
    print(f"  --load {output} --dsa-stage {stage}")
    if stage == "dense":
        print(
            "  or --dsa-stage warmup: the checkpoint has no indexers, a run starts with fresh ones"
        )
    for remark in hf.remarks:
        print(f"note: {remark}")
    return 0


def export_hf(arguments: argparse.Namespace) -> int:
    """Write a Hugging Face checkpoint in the dtype that config.json says."""
    from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

    from megatron_dsa.checkpoints import checkpoint_directory, load
    from megatron_dsa.huggingface.conventions import parse_config
    from megatron_dsa.huggingface.convert import export_model
    from megatron_dsa.stages import is_indexer_parameter

    directory = checkpoint_directory(
        argparse.Namespace(
            load=arguments.input, pretrained_checkpoint=None, ckpt_step=arguments.step
        )
    )
    if directory is None:
        raise ConfigError(
            f"--input {arguments.input} holds no distributed checkpoint: name the directory that "
            "--save of the run was, with --ckpt-format torch_dist"
        )
    path = Path(arguments.config)
    config = json.loads((path / "config.json" if path.is_dir() else path).read_text())
    hf = parse_config(config)
    keys = [entry.key for entry in load_sharded_metadata(str(directory)).values()]
    if hf.has_indexer and not any(is_indexer_parameter(key) for key in keys):
        raise ConfigError(
            f"--config is of a {config['model_type']}, whose layers have indexers, and "
            f"{directory} has none: give the config.json of the dense model"
        )
    mtp = any(key.startswith("mtp.") for key in keys)
    with _one_process():
        model = _build(hf, "sparse" if hf.has_indexer else "dense", mtp)
        state = load({"model": model.sharded_state_dict()}, str(directory))
        model.load_state_dict(state["model"], strict=False)
        export_model(
            model, arguments.output, config, shard_bytes=max(1, int(arguments.shard_gb * 1e9))
        )
    print(f"{directory} in {arguments.output}")
    return 0
