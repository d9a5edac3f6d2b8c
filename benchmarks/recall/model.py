"""A small DSA model trained on text, and the inputs of its indexers and attentions."""

from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.train.text import held_out, library_texts
from megatron_dsa.patches import cpu_host

#: Preset -> widths.
WIDTHS = {
    "small": {
        "num_layers": 4, "hidden_size": 1024, "ffn_hidden_size": 2048, "num_attention_heads": 16,
        "q_lora_rank": 512, "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64,
        "v_head_dim": 128, "dsa_indexer_n_heads": 16, "dsa_indexer_head_dim": 128,
        "dsa_indexer_topk": 512,
    },
    "tiny": {
        "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4,
        "q_lora_rank": 32, "kv_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8,
        "v_head_dim": 16, "dsa_indexer_n_heads": 8, "dsa_indexer_head_dim": 16,
        "dsa_indexer_topk": 16,
    },
}  # fmt: skip
HELD_OUT_CHARACTERS = 100_000
PEAK_RATE, WARM_UP_STEPS, SEED = 1e-3, 50, 1


def build(preset: str, tokens: int, engine: bool, device: torch.device) -> torch.nn.Module:
    """Return the model in bf16, with transformer-engine's or Megatron's linears."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megatron_dsa.config.model import DSAOptions
    from megatron_dsa.config.transformer import DSATransformerConfig
    from megatron_dsa.specs import dsa_block_spec

    torch.manual_seed(SEED)
    config = DSATransformerConfig(
        **WIDTHS[preset], qk_layernorm=True, normalization="RMSNorm", gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, attention_dropout=0.0,
        hidden_dropout=0.0, rope_type="rope", persist_layer_norm=False, bias_dropout_fusion=False,
        gradient_accumulation_fusion=False, use_cpu_initialization=cpu_host.needed(),
        params_dtype=torch.bfloat16, bf16=True, init_method_std=0.02,
        transformer_impl="transformer_engine" if engine else "local",
        dsa_indexer_loss_coeff=1.0, dsa_indexer_use_sparse_loss=True,
        dsa=DSAOptions(selected_attention="sparse"),
    )  # fmt: skip
    config.finalize_model_grads_func = None
    model = GPTModel(
        config, dsa_block_spec(config), 256, tokens, position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )  # fmt: skip
    return model.to(device).bfloat16().train()


class Text:
    """Pieces of Python's standard library, by bytes; whole files are held out."""

    def __init__(self, tokens: int, device: torch.device):
        texts = library_texts()
        apart = held_out(texts, HELD_OUT_CHARACTERS)
        self._parts = [
            torch.frombuffer(
                bytearray("".join(t for n, t in texts.items() if (n in apart) == out).encode()),
                dtype=torch.uint8,
            ).long()
            for out in (False, True)
        ]
        self._tokens, self._device = tokens, device
        self._generator = torch.Generator().manual_seed(SEED)

    def batch(self, held_out: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and labels ``[1, tokens]`` of a random piece."""
        part = self._parts[held_out]
        last = len(part) - self._tokens - 1
        at = int(torch.randint(last, (), generator=self._generator))
        piece = part[at : at + self._tokens + 1].to(self._device)
        return piece[None, :-1].contiguous(), piece[None, 1:].contiguous()


def losses_of(model: torch.nn.Module, batch) -> torch.Tensor:
    tokens, labels = batch
    places = torch.arange(tokens.shape[1], device=tokens.device)[None]
    return model(tokens, places, None, labels=labels).float().mean()


def train(model: torch.nn.Module, text: Text, steps: int) -> None:
    """Train by AdamW with fp32 main parameters."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    main = [p.detach().float().clone().requires_grad_() for p in parameters]
    adam = torch.optim.AdamW(main, lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(steps):
        adam.param_groups[0]["lr"] = PEAK_RATE * min(1, (step + 1) / WARM_UP_STEPS)
        losses_of(model, text.batch()).backward()
        for p, m in zip(parameters, main, strict=True):
            m.grad = None if p.grad is None else p.grad.float()
            p.grad = None
        torch.nn.utils.clip_grad_norm_(main, 1.0)
        adam.step()
        with torch.no_grad():
            for p, m in zip(parameters, main, strict=True):
                p.copy_(m)


@dataclass
class Recorded:
    """Inputs of one layer in a forward pass.

    Attributes:
        core: its attention core.
        indexer: arguments of its indexer.
        layout, q, kv, w_uk: of its attention; ``q [tokens, H, dims]``, ``kv [tokens, latent]``.
    """

    core: Any
    indexer: tuple = ()
    layout: Any = None
    q: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    kv: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    w_uk: torch.Tensor = field(default_factory=lambda: torch.empty(0))


@torch.no_grad()
def recorded(model: torch.nn.Module, batch) -> tuple[float, list[Recorded]]:
    """Run a forward pass; return its loss and each layer's inputs."""
    found, undo = [], []
    for layer in model.decoder.layers:
        core = layer.self_attention.core_attention
        entry = Recorded(core)
        found.append(entry)

        def keep_index(_module, given, entry=entry):
            entry.indexer = given

        def keep(result, index, layout, selection, q, kv, *rest, entry=entry, after, **more):
            entry.layout, entry.q, entry.kv, entry.w_uk = layout, q, kv, more["w_uk"]
            return after(result, index, layout, selection, q, kv, *rest, **more)

        undo.append((core.indexer.register_forward_pre_hook(keep_index), core))
        after = core._trained_and_measured
        core._trained_and_measured = lambda *a, keep=keep, after=after, **k: keep(
            *a, after=after, **k
        )
    loss = losses_of(model, batch).item()
    for hook, core in undo:
        hook.remove()
        del core._trained_and_measured
    return loss, found
