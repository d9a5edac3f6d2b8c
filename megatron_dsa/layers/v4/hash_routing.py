"""Hash routing, which chooses experts by token id (DeepSeek-V4).

Token ids travel as ``context``, Megatron's unused argument for cross attention, which recompute
saves.
"""

import dataclasses
import functools
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import (
    apply_router_token_dropping,
    topk_routing_with_score_function,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_dsa.errors import require
from megatron_dsa.layers.linears import parameter_device
from megatron_dsa.layers.v4.hash_table import balanced_table, check_table


class HashRouter(TopKRouter):
    """Router with a table of experts per token id.

    The gate's scores weight the experts. Bias and load-balancing loss could not change the table,
    so only the z-loss remains.

    Attributes:
        tid2eid: saved buffer, int32 ``[vocabulary, topk]``, drawn per layer from ``moe_hash_seed``.
        token_ids: int64 ``[s, b]`` of the next call.
    """

    tid2eid: torch.Tensor
    token_ids: torch.Tensor | None

    def __init__(self, config, pg_collection=None, is_mtp_layer: bool = False):
        super().__init__(config, pg_collection, is_mtp_layer)
        # Megatron would update these load-balancing buffers.
        del self.expert_bias, self.local_tokens_per_expert
        self.enable_expert_bias = False
        rows = config.moe_hash_vocab_size
        require(
            rows is not None,
            "moe_hash_vocab_size must be set with moe_hash_layers, to the vocabulary size that the "
            "model is built with (padded): it is the number of rows of the router's table",
        )
        device = parameter_device(config)
        table = torch.full((rows, self.topk), -1, dtype=torch.int32, device=device)
        self.register_buffer("tid2eid", table)
        self.token_ids = None
        self._checked: Any = None

    def set_layer_number(self, layer_number: int) -> None:
        if layer_number != self.layer_number and self.tid2eid.device.type != "meta":
            config, (rows, topk) = self.config, self.tid2eid.shape
            seed = config.moe_hash_seed * config.num_layers + layer_number - 1
            self.tid2eid.copy_(balanced_table(rows, topk, config.num_moe_experts, seed))
        super().set_layer_number(layer_number)

    def set_table(self, table: torch.Tensor) -> None:
        """Load a checkpoint's table ``[n, topk]``; padding tokens keep their entries."""
        name, rows = self._name(), len(self.tid2eid)
        check_table(table, self.topk, self.config.num_moe_experts, name)
        require(
            len(table) <= rows,
            f"{name} must have at most as many rows as the vocabulary, {rows}, got {len(table)}: "
            "build the model with the vocabulary of the table",
        )
        self.tid2eid[: len(table)].copy_(table)

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and routing map ``[tokens, experts]`` for logits ``[s, b, experts]``.

        Raises:
            ConfigError: missing token ids, or a wrong table.
        """
        ids, self.token_ids = self.token_ids, None
        require(
            ids is not None and ids.shape == logits.shape[:2],
            f"token ids must reach the router of layer {self.layer_number} with shape "
            f"{list(logits.shape[:2])}, got {None if ids is None else list(ids.shape)}: call the "
            "layer of experts with token_ids set, as HashRoutedLayer does",
        )
        assert ids is not None
        self._check()
        indices = self.tid2eid[ids.flatten()].long()
        logits = logits.view(-1, self.config.num_moe_experts)
        if padding_mask is not None:
            padding_mask = padding_mask.reshape(-1)
        logits = self.apply_z_loss(logits, padding_mask=padding_mask)
        probs, routing_map = topk_routing_with_score_function(
            logits,
            self.topk,
            use_pre_softmax=self.config.moe_router_pre_softmax,
            scaling_factor=self.config.moe_router_topk_scaling_factor,
            score_function=self.score_function,
            precomputed_indices=indices,
        )
        if self.config.moe_expert_capacity_factor is not None:
            probs, routing_map = apply_router_token_dropping(
                probs,
                routing_map,
                router_topk=self.topk,
                capacity_factor=self.config.moe_expert_capacity_factor,
                drop_policy=self.config.moe_token_drop_policy,
                pad_to_capacity=self.config.moe_pad_expert_input_to_capacity,
            )
        return probs, routing_map

    def _check(self) -> None:
        table = self.tid2eid
        if table.device.type == "meta":
            return
        version = 0 if table.is_inference() else table._version
        state = table.data_ptr(), version
        if state != self._checked:
            check_table(table, self.topk, self.config.num_moe_experts, self._name())
            self._checked = state

    def _name(self) -> str:
        return f"tid2eid of layer {self.layer_number}"


class HashMoELayer(MoELayer):
    """Experts with a :class:`HashRouter`; set ``token_ids [s, b]`` before each call."""

    token_ids: torch.Tensor | None = None
    moe_layer_recompute: bool

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # Megatron's activation checkpointing passes no token ids.
        self._recompute: bool = self.moe_layer_recompute
        self.moe_layer_recompute = False

    def forward(
        self, hidden_states: torch.Tensor, intermediate_tensors=None, padding_mask=None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ids, self.token_ids = self.token_ids, None

        def run(hidden_states, ids, padding_mask):
            self.router.token_ids = ids
            try:
                return super(HashMoELayer, self).forward(
                    hidden_states, intermediate_tensors, padding_mask
                )
            finally:
                self.router.token_ids = None

        if not (self._recompute and self.training):
            return run(hidden_states, ids, padding_mask)
        if self.config.fp8 or self.config.fp4:
            from megatron.core.extensions.transformer_engine import te_checkpoint

            tracker = tensor_parallel.random.get_cuda_rng_tracker
            return te_checkpoint(
                run, False, tracker, self.tp_group, hidden_states, ids, padding_mask
            )
        return tensor_parallel.checkpoint(run, False, hidden_states, ids, padding_mask)


class HashRoutedLayer:
    """Mixin for a transformer layer with a :class:`HashMoELayer`; ``context`` holds token ids."""

    takes_token_ids = True
    config: Any
    mlp: Any
    layer_number: int

    def forward(
        self, *args, context: torch.Tensor | None = None, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        require(
            context is not None,
            f"context must hold the token ids of layer {self.layer_number} (--moe-hash-layers), "
            "got None: run the layers in Megatron's GPTModel, which has them, with input_ids",
        )
        self.mlp.token_ids = context
        try:
            out, _ = super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.mlp.token_ids = None
        return out, context if self.layer_number < self.config.moe_hash_layers else None

    def _maybe_unflatten_for_moe(self, hidden_states, padding_mask, packed_seq_params):
        """Arrange token ids like hidden states, which Megatron may split by sample."""
        out = super()._maybe_unflatten_for_moe(  # type: ignore[misc]
            hidden_states, padding_mask, packed_seq_params
        )
        if out[2] is not None:
            samples = self.mlp.token_ids.view(out[2], packed_seq_params.tokens_per_sample)
            self.mlp.token_ids = samples.transpose(0, 1)
        return out


@functools.cache
def _hash_routed(layer: type) -> type:
    return type(f"HashRouted{layer.__name__}", (HashRoutedLayer, layer), {"__module__": __name__})


def with_hash_routing(spec: ModuleSpec) -> ModuleSpec:
    mlp = spec.submodules.mlp
    parts = dataclasses.replace(mlp.keywords["submodules"], router=HashRouter)
    hashed = functools.partial(HashMoELayer, *mlp.args, **mlp.keywords | {"submodules": parts})
    return ModuleSpec(
        module=_hash_routed(spec.module),
        params=spec.params,
        submodules=dataclasses.replace(spec.submodules, mlp=hashed),
    )
