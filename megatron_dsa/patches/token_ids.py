"""Token ids as ``context`` of hash-routed layers (``--moe-hash-layers``)."""

import functools
from typing import Any

import torch

from megatron_dsa.errors import require
from megatron_dsa.patches import replace


@functools.cache
def hand_token_ids_to_layers() -> None:
    from megatron.core.models.gpt.gpt_model import GPTModel

    @replace(GPTModel, "forward")
    def forward(original, self, input_ids=None, *args, **kwargs):
        layers = getattr(self.config, "moe_hash_layers", 0)
        if not (layers and self.pre_process):
            return original(self, input_ids, *args, **kwargs)
        _check(self, input_ids, layers)
        ids = _local_ids(self, input_ids)

        def give(_decoder, args, kwargs):
            return args, kwargs | {"context": ids}

        # Activation recompute saves token ids, so remove the hook after the forward.
        handle = self.decoder.register_forward_pre_hook(give, with_kwargs=True)
        try:
            return original(self, input_ids, *args, **kwargs)
        finally:
            handle.remove()


def _check(model: Any, input_ids: torch.Tensor | None, layers: int) -> None:
    first = list(model.decoder.layers)[:layers]
    routed = sum(getattr(layer, "takes_token_ids", False) for layer in first)
    require(
        routed == layers,
        f"--moe-hash-layers is {layers}, but {routed} of the first layers look experts up: build "
        "the model from dsa_block_spec, which has a spec for every layer, not from one layer's",
    )
    size = model.config.moe_hash_vocab_size
    require(
        size == model.vocab_size,
        f"moe_hash_vocab_size must be the vocabulary of the model, {model.vocab_size} (padded), "
        f"got {size}: set it before the model is built",
    )
    require(
        input_ids is not None,
        "input_ids must be given with --moe-hash-layers, got None: experts are looked up by token "
        "id, also where decoder_input replaces the embedding",
    )


def _local_ids(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Split token ids ``[b, s]`` like embeddings under sequence parallelism; return ``[s, b]``."""
    ids = input_ids.transpose(0, 1)
    group = model.pg_collection.tp
    if model.config.sequence_parallel and group.size() > 1:
        ids = ids.chunk(group.size())[group.rank()]
    return ids.contiguous()
