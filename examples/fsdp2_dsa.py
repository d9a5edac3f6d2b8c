"""Training of a small DeepSeek-V3.2 with FSDP2: MLA, indexer, selection and loss, no Megatron.

Needs torch and this package (``pip install "megatron-dsa[torch]"``). On CPUs (gloo) or GPUs (NCCL):

    torchrun --nproc-per-node 2 examples/fsdp2_dsa.py

Trains on Python's documentation, a byte per token. Parameters have Hugging Face's names:
``--load FOLDER`` starts from a checkpoint with dense MLPs (needs safetensors), for example one
from ``python -m megatron_dsa export-hf``.
"""

import argparse
import json
import os
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy, silu

from megatron_dsa.extras.torch_library import indexer_topk, sparse_attention, sparse_indexer_loss

#: Names as in config.json.
CONFIG = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 8, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "index_n_heads": 8, "index_head_dim": 32, "index_topk": 48,
}  # fmt: skip


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def rotated(x: Tensor, rope: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """Rotate pairs of dims of ``x [tokens, heads, R]``: neighbours (interleaved) or halves."""
    cos, sin = (table[:, None].to(x.dtype) for table in rope)
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, -1)
    a, b = a * cos - b * sin, a * sin + b * cos
    return torch.stack([a, b], -1).flatten(-2) if interleaved else torch.cat([a, b], -1)


class Indexer(nn.Module):
    """Inputs of the index scores (DeepSeek-V3.2, eq. 1)."""

    def __init__(self, c):
        super().__init__()
        self.heads, self.dim, self.rope_dim = c.index_n_heads, c.index_head_dim, c.qk_rope_head_dim
        self.wq_b = linear(c.q_lora_rank, self.heads * self.dim)
        self.wk = linear(c.hidden_size, self.dim)
        self.k_norm = nn.LayerNorm(self.dim, eps=c.rms_norm_eps)
        self.weights_proj = linear(c.hidden_size, self.heads)

    def forward(self, x: Tensor, q_latent: Tensor, rope) -> tuple[Tensor, Tensor, Tensor]:
        q = self.wq_b(q_latent).unflatten(-1, (self.heads, self.dim))
        k = self.k_norm(self.wk(x))[:, None]
        q, k = (
            torch.cat([rotated(t[..., : self.rope_dim], rope, False), t[..., self.rope_dim :]], -1)
            for t in (q, k)
        )
        return q, k[:, 0], self.weights_proj(x) * (self.heads * self.dim) ** -0.5


class Attention(nn.Module):
    """MLA over the keys that the indexer selects, in the latent space."""

    def __init__(self, c):
        super().__init__()
        self.c, heads = c, c.num_attention_heads
        self.q_a_proj = linear(c.hidden_size, c.q_lora_rank)
        self.q_a_layernorm = nn.RMSNorm(c.q_lora_rank, eps=c.rms_norm_eps)
        self.q_b_proj = linear(c.q_lora_rank, heads * (c.qk_nope_head_dim + c.qk_rope_head_dim))
        self.kv_a_proj_with_mqa = linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim)
        self.kv_a_layernorm = nn.RMSNorm(c.kv_lora_rank, eps=c.rms_norm_eps)
        self.kv_b_proj = linear(c.kv_lora_rank, heads * (c.qk_nope_head_dim + c.v_head_dim))
        self.o_proj = linear(heads * c.v_head_dim, c.hidden_size)
        self.indexer = Indexer(c)

    def forward(self, x: Tensor, rope, cu_seqlens: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return ``[tokens, hidden]`` and the sum of the indexer's KL over the tokens."""
        c, heads = self.c, self.c.num_attention_heads
        q_latent = self.q_a_layernorm(self.q_a_proj(x))
        # Detached: the model does not learn from the indexer's loss.
        index = self.indexer(x.detach(), q_latent.detach(), rope)
        indices, count = indexer_topk(
            *index, c.index_topk, cu_seqlens=cu_seqlens, max_seqlen=length
        )

        latent, k_pe = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        k_pe = rotated(k_pe[:, None], rope, True)[:, 0]
        kv = torch.cat([self.kv_a_layernorm(latent), k_pe], -1)  # one key for all heads
        q = self.q_b_proj(q_latent).unflatten(-1, (heads, -1))
        q_nope, q_pe = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
        # Absorption: q . (W_uk latent) = (q W_uk) . latent; W_uv is applied to the output.
        up = self.kv_b_proj.weight.unflatten(0, (heads, -1))
        w_uk, w_uv = up.split([c.qk_nope_head_dim, c.v_head_dim], 1)
        q_nope = torch.einsum("thn,hnr->thr", q_nope, w_uk)
        out, _, p_sum = sparse_attention(
            torch.cat([q_nope, rotated(q_pe, rope, True)], -1), kv, indices,
            softmax_scale=q.shape[-1] ** -0.5, v_dim=c.kv_lora_rank, topk_length=count,
            want_p_sum=True, in_order=True,
        )  # fmt: skip
        loss = sparse_indexer_loss(*index, indices, p_sum, topk_length=count)
        return self.o_proj(torch.einsum("thr,hvr->thv", out, w_uv).flatten(1)), loss


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = linear(c.hidden_size, c.intermediate_size)
        self.up_proj = linear(c.hidden_size, c.intermediate_size)
        self.down_proj = linear(c.intermediate_size, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, *sequences) -> tuple[Tensor, Tensor]:
        out, loss = self.self_attn(self.input_layernorm(x), *sequences)
        x = x + out
        return x + self.mlp(self.post_attention_layernorm(x)), loss


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.model = nn.ModuleDict({
            "embed_tokens": nn.Embedding(c.vocab_size, c.hidden_size),
            "layers": nn.ModuleList([Layer(c) for _ in range(c.num_hidden_layers)]),
            "norm": nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps),
        })  # fmt: skip
        self.lm_head = linear(c.hidden_size, c.vocab_size)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits ``[b * s, vocabulary]`` and the indexers' loss, summed over layers."""
        (batch, length), c = ids.shape, self.c
        position = torch.arange(length, device=ids.device).repeat(batch)
        pair = torch.arange(0, c.qk_rope_head_dim, 2, device=ids.device)
        angles = position[:, None] * c.rope_theta ** (-pair / c.qk_rope_head_dim)
        rope = angles.cos(), angles.sin()
        # Operations take flattened tokens: a batch is packed sequences of equal length.
        cu_seqlens = length * torch.arange(batch + 1, device=ids.device, dtype=torch.int32)
        x, losses = self.model["embed_tokens"](ids.flatten()), []
        for layer in self.model["layers"]:
            x, loss = layer(x, rope, cu_seqlens, length)
            losses.append(loss)
        return self.lm_head(self.model["norm"](x)), sum(losses) / position.numel()


def device_of_rank() -> torch.device:
    """Return this rank's GPU, made current, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def global_batch(step: int, size: int, length: int) -> Tensor:
    """Return the sequences ``[size, length + 1]`` of a step, the same on every rank."""
    text = torch.frombuffer(bytearray("".join(topics.values()).encode()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - length - 1, (size,), generator=generator)
    return torch.stack([text[s : s + length + 1] for s in starts.tolist()]).long()


def sharded_model(options, device: torch.device) -> Model:
    """Return the model, with parameters sharded over all ranks."""
    config, weights = CONFIG, None
    if options.load:
        from safetensors.torch import load_file  # needed here only

        config = json.loads((options.load / "config.json").read_text())
        weights = {
            k: v for f in options.load.glob("*.safetensors") for k, v in load_file(f).items()
        }
    torch.manual_seed(1)  # equal on all ranks before sharding
    model = Model(SimpleNamespace(**CONFIG | config))
    if weights is None:
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.05)
    else:
        model.load_state_dict(weights)
    model.to(device)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = half if options.bf16 else MixedPrecisionPolicy()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.model["layers"]:
        if options.compile:
            layer.compile(fullgraph=True, backend=options.compile)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def backward(model: Model, batch: Tensor, indexer_loss_coeff: float) -> Tensor:
    """Compute the gradients of this rank's sequences; return both losses."""
    logits, indexer_loss = model(batch[:, :-1])
    lm_loss = cross_entropy(logits.float(), batch[:, 1:].flatten())
    # FSDP averages gradients: all ranks must have equally many tokens.
    (lm_loss + indexer_loss_coeff * indexer_loss).backward()
    return torch.stack([lm_loss.detach(), indexer_loss.detach().float()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="sequences of all ranks")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--eps", type=float, default=1e-8, help="of Adam")
    parser.add_argument("--indexer-loss-coeff", type=float, default=1.0)
    parser.add_argument("--load", type=Path, help="folder with config.json and *.safetensors")
    parser.add_argument("--losses", type=Path, help="JSON file for the losses")
    parser.add_argument("--compile", help="compile layers with this backend, such as inductor")
    parser.add_argument("--bf16", action="store_true", help="compute in bf16, sum in fp32")
    options = parser.parse_args()

    device = device_of_rank()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = sharded_model(options, device)
    optimizer = torch.optim.AdamW(
        model.parameters(), options.lr, (0.9, 0.95), options.eps, weight_decay=0.0
    )
    log = []
    for step in range(options.steps):
        batch = global_batch(step, options.batch, options.length).chunk(ranks)[rank].to(device)
        losses = backward(model, batch, options.indexer_loss_coeff) / ranks
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(losses)
        log.append({"lm loss": losses[0].item(), "indexer loss": losses[1].item()})
        if rank == 0:
            figures = " | ".join(f"{name} {value:.6f}" for name, value in log[-1].items())
            print(f"step {step + 1} | {figures}", flush=True)
    if options.losses and rank == 0:
        options.losses.write_text(json.dumps(log))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
