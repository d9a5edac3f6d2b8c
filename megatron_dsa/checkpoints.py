"""Loading checkpoints of an earlier stage, or of a plain dense MLA model.

A ``dense`` checkpoint has no indexers; a ``warmup`` or ``sparse`` run starts with fresh ones. A
change of stage also changes which parameters are trained, so the optimizer starts anew. Both are
decided here, by looking at the checkpoint, and said in the log. Anything else that is missing is
an error.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from unittest import mock

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.training import checkpointing, print_rank_0

from megatron_dsa.errors import ConfigError
from megatron_dsa.stages import is_indexer_parameter

# In transformer-engine's plain MLA the latent norms are part of the up projections.
_FUSED_NORMS = {
    "q_layernorm.weight": "linear_q_up_proj.layer_norm_weight",
    "kv_layernorm.weight": "linear_kv_up_proj.layer_norm_weight",
}


def prepare_loading(args: argparse.Namespace):
    """Set the loading flags for a change of stage; return a context manager for the run.

    Inside it, Megatron's loader accepts that a checkpoint has no indexers.
    """
    directory = _checkpoint_directory(args)
    if directory is not None:
        saved = dist_checkpointing.load_common_state_dict(str(directory)).get("args")
        stage = getattr(saved, "dsa_stage", "dense")
        if stage != args.dsa_stage and not args.finetune and not args.no_load_optim:
            args.no_load_optim = True
            if _rank() == 0:
                print(
                    f"> checkpoint {directory} is of stage '{stage}', this run of stage "
                    f"'{args.dsa_stage}': the optimizer starts anew"
                )
    return mock.patch.object(checkpointing.dist_checkpointing, "load", _load)


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _checkpoint_directory(args) -> Path | None:
    """The distributed checkpoint that Megatron is going to load, or ``None``."""
    for root in filter(None, (args.load, args.pretrained_checkpoint)):
        tracker = Path(root) / "latest_checkpointed_iteration.txt"
        if not tracker.is_file():
            continue
        text = tracker.read_text().strip()
        name = text if text == "release" else f"iter_{args.ckpt_step or int(text):07d}"
        directory = Path(root) / name
        if dist_checkpointing.check_is_distributed_checkpoint(str(directory)):
            return directory
    return None


_original_load = dist_checkpointing.load


def _load(sharded_state_dict, checkpoint_dir, *args, **kwargs):
    """Megatron's ``dist_checkpointing.load`` for checkpoints that may lack indexers."""
    available = set(dist_checkpointing.load_tensors_metadata(checkpoint_dir))
    fresh, missing, renamed = [], [], 0
    for parent, name, entry in list(_model_tensors(sharded_state_dict)):
        if entry.key in available:
            continue
        if is_indexer_parameter(entry.key):
            fresh.append(entry.key)
            del parent[name]
        elif (fused := _fused_name(entry.key)) in available:
            entry.key = fused
            renamed += 1
        else:
            missing.append(entry.key)
    if missing:
        raise ConfigError(
            f"checkpoint {checkpoint_dir} does not hold {', '.join(sorted(set(missing)))}; only "
            "indexers may be missing. Compare the model flags with those of the checkpoint."
        )
    if fresh:
        print_rank_0(
            f"> checkpoint {checkpoint_dir} has no indexers: {len(fresh)} tensors keep their "
            "initial values"
        )
    if renamed:
        print_rank_0(f"> {renamed} latent norms read from fused up projections")
    return _original_load(sharded_state_dict, checkpoint_dir, *args, **kwargs)


def _fused_name(key: str) -> str | None:
    for plain, fused in _FUSED_NORMS.items():
        if key.endswith(f".self_attention.{plain}"):
            return key.removesuffix(plain) + fused
    return None


def _model_tensors(sharded_state_dict):
    """Yield ``(dict, name, sharded tensor)`` of every model chunk."""
    for part, content in sharded_state_dict.items():
        if part.startswith("model") and isinstance(content, dict):
            for name, entry in content.items():
                # Extra states are optional in Megatron itself.
                if isinstance(entry, ShardedTensor) and not name.endswith("_extra_state"):
                    yield content, name, entry
