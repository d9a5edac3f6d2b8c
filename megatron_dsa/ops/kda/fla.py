"""Kernels of fla-core (flash-linear-attention, Triton).

Packed documents cost one host synchronisation per microbatch: fla caches their chunks by the
identity of ``cu_seqlens``.
"""

import torch

from megatron_dsa.ops.kda.spec import ConvolutionInputs, KDAInputs, NormInputs


def kda_convolution(inputs: ConvolutionInputs) -> torch.Tensor:
    from fla.modules.causal_conv1d import causal_conv1d

    out, _ = causal_conv1d(
        inputs.x, inputs.weight.squeeze(1), activation="silu", cu_seqlens=inputs.cu_seqlens
    )
    return out


def kda_attention(inputs: KDAInputs) -> torch.Tensor:
    from fla.ops.kda import chunk_kda

    out, _ = chunk_kda(
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.g,
        inputs.beta,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=True,
        lower_bound=inputs.lower_bound,
        cu_seqlens=inputs.cu_seqlens,
        A_log=inputs.A_log,
        dt_bias=inputs.dt_bias,
    )
    return out


def kda_norm(inputs: NormInputs) -> torch.Tensor:
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    return rms_norm_gated(
        inputs.x, inputs.gate, inputs.weight, None, activation="sigmoid", eps=inputs.eps
    )
