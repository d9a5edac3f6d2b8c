"""Dense causal attention over several GPUs: distribution of keys and values.

Compares the zigzag ring of keys and values, the all-gather of MLA's latents (without overlap), and
a ring over contiguous parts: all ranks do the work of the last one, which sees every key and for
which the others would wait.
"""

import torch

from benchmarks.ranks.cases import DENSE_WAYS, ONE_RANK, Case
from benchmarks.ranks.timing import timed
from benchmarks.timing import Clock

#: MLA of DeepSeek-V3.2: key dims without rope and with rope, value dim, latent dim.
NOPE, ROPE, VALUE, RANK = 128, 64, 128, 512
RING, GATHERED, CONTIGUOUS = DENSE_WAYS


def measure(case: Case, way: str, device, settings: dict) -> dict:
    """Time forward and forward with backward of one way on this rank.

    Returns:
        The answer for :func:`benchmarks.ranks.merge.merge`; ``difference`` is the output's distance
            from the ring's.
    """
    rank, way = torch.distributed.get_rank(), RING if way == ONE_RANK else way
    cp = torch.distributed.get_world_size()
    inputs = tensors(case, cp, rank, device)
    clock = Clock(device)
    call, block = attention(case, way, rank, inputs)
    gradient = torch.ones(inputs["q"].shape[0], case.heads, VALUE, device=device).bfloat16()

    def step():
        call().backward(gradient)

    answer = {"ran": f"block={block}", "times": {}, "flop": {}}
    if way == GATHERED:
        out = call().detach().float()
        plain, _ = attention(case, RING, rank, inputs)
        answer["difference"] = float((plain().detach().float() - out).norm() / out.norm())
    for part, run in (("forward", call), ("step", step)):
        run()
        limits = settings["repeats"], settings["budget"]
        answer["times"][part] = timed(run, clock, device, *limits)
        answer["flop"][part] = flops(case, cp, part)
    return answer


def tensors(case: Case, cp: int, rank: int, device) -> dict:
    """Return queries, latent and weights; keys and values are the expanded latent."""
    generator = torch.Generator(device).manual_seed(rank)

    def normal(*shape: int, scale: float = 1.0):
        x = torch.randn(shape, generator=generator, device=device) * scale
        return x.bfloat16().requires_grad_()

    rows, heads = case.tokens // cp, case.heads
    latent = normal(rows, RANK + ROPE)
    generator.manual_seed(99)  # equal weights on all ranks
    w_uk, w_uv = (normal(heads, n, RANK, scale=RANK**-0.5) for n in (NOPE, VALUE))
    with torch.no_grad():
        k = torch.einsum("sr,hnr->shn", latent[:, :RANK], w_uk)
        k = torch.cat([k, latent[:, None, RANK:].expand(-1, heads, -1)], -1)
        v = torch.einsum("sr,hnr->shn", latent[:, :RANK], w_uv)
    return {
        "q": normal(rows, heads, NOPE + ROPE), "k": k.requires_grad_(), "v": v.requires_grad_(),
        "latent": latent, "w_uk": w_uk, "w_uv": w_uv,
    }  # fmt: skip


def attention(case: Case, way: str, rank: int, inputs: dict):
    """Return a call that computes the output, and the name of the block attention."""
    from megatron.core import parallel_state

    from megatron_dsa.layers.parallel.gather import finish_with_proxy, start_gather
    from megatron_dsa.ops.dense_attention import ring
    from megatron_dsa.ops.dense_attention.blocks import choose
    from megatron_dsa.ops.dense_attention.ring.shards import Part
    from megatron_dsa.ops.dispatch import describe_call

    group = parallel_state.get_context_parallel_group()
    cp = group.size()
    rows = ring.ZigzagShard(cp, rank, 1, case.tokens // cp)
    if way == CONTIGUOUS:

        class LastOfContiguous(ring.ZigzagShard):
            """Sees its own block causally and all of the others."""

            def parts(self, source: int) -> tuple[Part, ...]:
                whole = slice(None)
                (own,) = super().parts(rank)
                return (Part(whole, whole, source == rank, own.sequences),)

        rows = LastOfContiguous(cp, rank, 1, case.tokens // cp)
    q, scale = inputs["q"], (NOPE + ROPE) ** -0.5
    shape = {"heads": case.heads, "qk_dim": NOPE + ROPE, "v_dim": VALUE}
    kernel = choose(describe_call(q.device, dtype=q.dtype, **shape))
    weights = [inputs[name] for name in ("w_uk", "w_uv")]

    def gathered():
        latents, grad_proxy = finish_with_proxy(start_gather(inputs["latent"], group))
        return ring.gathered_latent_attention(
            q, latents, *weights, rows, scale, latent_grad=grad_proxy
        )[0]

    def over_the_ring():
        return ring.ring_attention(q, inputs["k"], inputs["v"], rows, group, scale)[0]

    return gathered if way == GATHERED else over_the_ring, kernel.name


def flops(case: Case, cp: int, part: str) -> float:
    """Return one rank's operations: two products; 2.5 times as many backward."""
    forward = case.tokens**2 / 2 * case.heads * (NOPE + ROPE + VALUE) * 2 / cp
    return forward * (3.5 if part == "step" else 1)
