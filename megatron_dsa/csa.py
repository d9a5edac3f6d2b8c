"""Self-attention of DeepSeek-V4 around :mod:`megatron_dsa.layers.csa_core`."""

from dataclasses import dataclass

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from megatron_dsa.config.attention_choice import attention_of
from megatron_dsa.config.model import options_of, validate
from megatron_dsa.layers.frame import SelfAttentionFrame
from megatron_dsa.layers.linears import local_linear, weight_of
from megatron_dsa.layers.parallel.groups import heads_to_sequence, ranks_of, sequence_to_heads
from megatron_dsa.layers.rope import PositionRope
from megatron_dsa.layers.weight_blocks import mark_row_blocks
from megatron_dsa.ops.cached_keys import CSA_CACHE, as_cached
from megatron_dsa.ops.common.head_products import head_products
from megatron_dsa.ops.layout.layout import Layout
from megatron_dsa.ops.rope.api import norm_rope, rotate
from megatron_dsa.ops.sparse_attention.mapped import MappedQueries


@dataclass
class CSASelfAttentionSubmodules:
    """Submodules of V4's attention."""

    linear_q_down_proj: ModuleSpec | type = None
    q_layernorm: ModuleSpec | type = None
    linear_q_up_proj: ModuleSpec | type = None
    linear_kv_proj: ModuleSpec | type = None
    kv_layernorm: ModuleSpec | type = None
    core_attention: ModuleSpec | type = None
    linear_o_group_proj: ModuleSpec | type = None
    linear_proj: ModuleSpec | type = None


class CSASelfAttention(SelfAttentionFrame, MegatronModule):
    """Self-attention of one layer; its compression ratio comes from the configuration.

    Input and output are ``[s, b, hidden]`` (``s / tensor-parallel size`` under sequence
    parallelism; packed batches have ``b == 1``). One key/value head serves all query heads.
    Tensor-parallel ranks shard heads and output groups; other linears run on local tokens.
    """

    def __init__(
        self,
        config,
        submodules: CSASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type=AttnMaskType.causal,
        is_mtp: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
        **_megatron,
    ):
        super().__init__(config=config)
        validate(config)
        self.layer_number = layer_number
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.pg_collection = pg_collection
        choice = attention_of(config)
        self.ranks = ranks_of(config, pg_collection, choice.tp_mode)
        self.heads = config.num_attention_heads // pg_collection.tp.size()
        self.options = options_of(config)
        self.head_dim, self.policy = config.head_dim, self.options.policy
        self.softmax_scale = self.head_dim**-0.5
        self.rope = PositionRope.for_ratio(config, config.ratio(layer_number, is_mtp))
        recomputed = config.recompute_modules or ()
        selective = config.recompute_granularity == "selective"
        # Attribute names follow Megatron's MLA.
        self.checkpoint_core_attention = selective and "core_attn" in recomputed
        self.recompute_up_proj = selective and "mla_up_proj" in recomputed

        def linear(spec, inputs: int, outputs: int, init_method=config.init_method, **kind):
            return build_module(
                spec, inputs, outputs, config=config, init_method=init_method, bias=False,
                skip_bias_add=False, **kind,
            )  # fmt: skip

        def columns(spec, inputs: int, outputs: int, name: str):
            return linear(
                spec, inputs, outputs, gather_output=False, is_expert=False,
                tp_comm_buffer_name=name, tp_group=pg_collection.tp,
            )  # fmt: skip

        def norm(spec, size: int):
            return build_module(spec, hidden_size=size, config=config, eps=config.layernorm_epsilon)

        query = config.num_attention_heads * config.head_dim
        self.linear_q_down_proj = local_linear(
            submodules.linear_q_down_proj, config, config.hidden_size, config.q_lora_rank
        )
        self.q_layernorm = norm(submodules.q_layernorm, config.q_lora_rank)
        self.linear_q_up_proj = columns(
            submodules.linear_q_up_proj, config.q_lora_rank, query, "q_up_proj"
        )
        self.linear_kv_proj = local_linear(
            submodules.linear_kv_proj, config, config.hidden_size, config.head_dim
        )
        self.kv_layernorm = norm(submodules.kv_layernorm, config.head_dim)
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            softmax_scale=self.softmax_scale,
            pg_collection=pg_collection,
            is_mtp=is_mtp,
            choice=choice,
        )
        # The weight stacks one matrix per local output group.
        self.linear_o_group_proj = columns(
            submodules.linear_o_group_proj,
            query // config.o_groups,
            config.o_groups * config.o_lora_rank,
            "o_group_proj",
        )
        self.linear_proj = linear(
            submodules.linear_proj, config.o_groups * config.o_lora_rank, config.hidden_size,
            init_method=config.output_layer_init_method, input_is_parallel=True, is_expert=False,
            tp_comm_buffer_name="proj", tp_group=pg_collection.tp,
        )  # fmt: skip
        stacks = [(self.linear_o_group_proj, config.o_lora_rank)]
        if self.options.muon_per_head != "none":
            stacks.append((self.linear_q_up_proj, config.head_dim))
        for stack, size in stacks:
            mark_row_blocks(stack.weight, (size,), config.tensor_model_parallel_size)

    def attend(self, hidden_states: torch.Tensor, layout: Layout) -> torch.Tensor:
        ranks, policy = self.ranks, self.policy
        tables = self.rope.of_tokens(layout, hidden_states.dtype)
        local_tables = tables if ranks.group is None else ranks.held(tables)

        q_latent = self.q_layernorm(self.linear_q_down_proj(hidden_states)[0])
        kv = self.kv_layernorm(self.linear_kv_proj(hidden_states)[0])
        kv = rotate(kv.flatten(0, 1)[:, None], *local_tables, policy=policy).view_as(kv)
        if self.options.kv_rounding != "none":
            rope_dims = self.config.qk_pos_emb_head_dim
            kv = as_cached(kv, CSA_CACHE, policy.workspace_bytes, rope_dims)

        if self.options.recompute == "queries":
            return self._attend_in_blocks(hidden_states, q_latent, kv, layout, tables)

        def queries(q_latent):
            q, _ = self.linear_q_up_proj(q_latent)
            q = q.view(-1, self.heads, self.head_dim)
            if ranks.by_sequence:
                q = heads_to_sequence(q, ranks.tp)
            return self._normed(q, tables)

        q = self.maybe_recomputed(queries, q_latent)

        def core(hidden_states, q_latent, q, kv):
            out = self.core_attention(hidden_states, q_latent, q, kv, layout, self.rope, ranks)
            return rotate(out, *tables, inverse=True, policy=policy)

        out = self.run_core(core, hidden_states, q_latent, q, kv)
        if ranks.by_sequence:
            out = sequence_to_heads(out, ranks.tp)
        return self._project_groups(out, weight_of(self.linear_o_group_proj))

    def _attend_in_blocks(self, hidden_states, q_latent, kv, layout, tables) -> torch.Tensor:
        ranks = self.ranks

        def core(hidden_states, q_latent, kv):
            q = self._mapped_queries(q_latent, tables)
            return self.core_attention(hidden_states, q_latent, q, kv, layout, self.rope, ranks)

        out = self.run_core(core, hidden_states, q_latent, kv)
        if ranks.by_sequence:
            out = sequence_to_heads(out.unflatten(1, (-1, self.config.o_lora_rank)), ranks.tp)
        return out.flatten(1)

    def _normed(self, q: torch.Tensor, tables) -> torch.Tensor:
        # Overwrite the projection, which no other code reads.
        cos, sin = tables
        eps = self.config.layernorm_epsilon
        return norm_rope(q, cos, sin, eps, inplace=True, policy=self.policy)

    def _mapped_queries(self, q_latent: torch.Tensor, tables) -> MappedQueries:
        ranks, heads = self.ranks, self.heads
        if ranks.by_sequence:
            heads = self.config.num_attention_heads
        elif ranks.tp is not None:
            q_latent = gather_from_sequence_parallel_region(q_latent, group=ranks.tp)

        def to_queries(latents, weight, tokens):
            q = torch.nn.functional.linear(latents, weight).view(-1, heads, self.head_dim)
            return self._normed(q, [x[tokens] for x in tables])

        def to_outputs(out, weight, tokens):
            out = rotate(out, *(x[tokens] for x in tables), inverse=True, policy=self.policy)
            return self._project_groups(out, weight)

        return MappedQueries(
            q_latent.flatten(0, 1), weight_of(self.linear_q_up_proj),
            weight_of(self.linear_o_group_proj), to_queries, to_outputs, heads, self.head_dim,
            group=ranks.tp if ranks.by_sequence else None,
        )  # fmt: skip

    def _project_groups(self, out: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        groups = weight.view(-1, self.config.o_lora_rank, weight.shape[1])
        out = out.reshape(out.shape[0], len(groups), -1)
        return head_products(out, groups.transpose(1, 2)).flatten(1)

    def delayed_linears(self) -> list:
        """Return the linears that ``forward`` calls, without the output groups' linear."""
        return [
            self.linear_q_down_proj, self.linear_q_up_proj, self.linear_kv_proj, self.linear_proj,
        ]  # fmt: skip

    def set_for_recompute_input_layernorm(self) -> None:
        """Save no quantised copy of the recomputed input under FP8."""
        from megatron.core.extensions.transformer_engine import set_save_original_input

        set_save_original_input(self.linear_q_down_proj)
        set_save_original_input(self.linear_kv_proj)
