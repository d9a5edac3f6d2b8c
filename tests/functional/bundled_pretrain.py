"""Training with megatron-core's own DSA (``--experimental-attention-variant dsa``).

Model, attention, losses, checkpoints and log are Megatron's, with its local layers instead of
transformer-engine's. Data sets and forward step, missing in the wheel, are the entry point's.
"""

import sys

from megatron_dsa import pretrain


def main() -> None:
    """Parse Megatron's own flags and train."""
    pretrain.prepare_host(sys.argv)
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as bundled
    from megatron.training import arguments, training
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )

    from megatron_dsa.specs import LocalBackend
    from megatron_dsa.training.data import train_valid_test_datasets

    attention_spec = bundled.get_dsa_module_spec_for_backend

    def attention_spec_of_local_layers(config, backend=None):
        spec = attention_spec(config, backend)
        # Without transformer-engine it accepts column-parallel layers only.
        down = backend.latent_linear()
        spec.submodules.linear_q_down_proj = spec.submodules.linear_kv_down_proj = down
        return spec

    bundled._get_backend_spec_provider = lambda config: LocalBackend()
    bundled.get_dsa_module_spec_for_backend = attention_spec_of_local_layers
    args = arguments.parse_and_validate_args()
    training.pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        train_valid_test_datasets,
        ModelType.encoder_or_decoder,
        pretrain.forward_step,
    )


if __name__ == "__main__":
    main()
