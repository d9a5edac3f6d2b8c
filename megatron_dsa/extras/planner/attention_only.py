"""``--dsa-dry-run-attention-only``: the plan of a model of which the attention alone is known."""

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator
from unittest import mock

from megatron_dsa import specs

#: Parts of :func:`megatron_dsa.metrics.flops.model_work` that are left out.
LEFT_OUT = ("dense MLP", "experts", "router", "logits")


def leave_out_flags(args: argparse.Namespace) -> None:
    """Drop what parsed, unvalidated arguments say about experts and vocabulary."""
    args.moe_hash_layers, args.moe_hash_seed = 0, 0
    args.num_experts = args.moe_ffn_hidden_size = args.moe_shared_expert_intermediate_size = None
    args.expert_model_parallel_size = 1
    args.expert_tensor_parallel_size = None
    # The embedding and the output layer of one token per rank weigh nothing.
    args.vocab_size = None
    args.padded_vocab_size = args.tensor_model_parallel_size


@contextlib.contextmanager
def layers_without_mlp() -> Iterator[None]:
    """Build transformer layers that end after their attention; connections of streams stay."""
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp

    layer_spec, with_streams = specs._layer_spec, specs._with_streams

    class NothingBetween(IdentityOp):
        """What the connection of an MLP has read is what it writes back."""

        def forward(self, x, *_args, **_kwargs):
            return x, None

    def attention_spec(*args, **kwargs):
        spec = layer_spec(*args, **kwargs)
        spec.submodules = dataclasses.replace(
            spec.submodules, pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp
        )
        return spec

    def streams_spec(config, spec):
        spec = with_streams(config, spec)
        spec.submodules = dataclasses.replace(spec.submodules, mlp=NothingBetween)
        return spec

    with (
        mock.patch.object(specs, "_layer_spec", attention_spec),
        mock.patch.object(specs, "_with_streams", streams_spec),
    ):
        yield


def remarks(args: argparse.Namespace) -> list[str]:
    """Return what the plan says about itself.

    No figure of a plan depends on the values of rope, which may therefore be placeholders.
    """
    rope = {
        "--rotary-base": args.rotary_base,
        "--csa-compress-rotary-base": args.csa_compress_rotary_base,
        "--rotary-scaling-factor": args.rotary_scaling_factor,
        "--yarn-original-max-position-embeddings": args.yarn_original_max_position_embeddings,
    }
    values = " ".join(f"{flag} {value:g}" for flag, value in rope.items() if value is not None)
    return [
        "planned is the attention alone: MLPs, experts, embedding and output layer are left out of "
        "all figures, the job takes more",
        f"rope values change no figure of a plan; these were taken: {values}",
    ]
