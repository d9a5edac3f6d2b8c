"""Checkpoints in released formats: fp8 weights, fp4 experts, scales."""

import json
import re

import torch

from megatron_dsa.extras.huggingface.files import CheckpointReader, CheckpointWriter

_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
CODES = torch.cat([_E2M1, -_E2M1])

#: fp8 weights of released DeepSeek-V4 and V3.2.
V4_FP8 = re.compile(
    r".*\.attn\.(w\w+|indexer\.wq_b)\.weight|.*\.(shared_experts\.w\d|[eh]_proj)\..*"
)
V32_FP8 = re.compile(
    r".*\.self_attn\.(\w+proj|\w+_mqa|indexer\.w(q_b|k))\.weight|.*\.mlp\..*_proj.*"
)
#: MLPs of a GLM-5.3-Flash are fp8, these tensors fp32, the others bf16.
GLM_5_3_FP8 = re.compile(r"model\.language_model\..*\.mlp\..*_proj\.weight")
GLM_5_3_FP32 = re.compile(r".*(hc_|_conv1d|A_log|dt_bias|_compress_ape|e_score_correction).*")
#: Rows and columns of a block, small as the models; columns that share a scale in fp4.
BLOCK, FP4_COLUMNS = (16, 8), 4


def write_v4(config, source, target):
    """Write a DeepSeek-V4 with fp8 weights, e8m0 scales and fp4 experts; return them in bf16."""
    generator = torch.Generator().manual_seed(3)

    def powers(*shape):
        exponents = torch.randint(120, 131, shape, generator=generator, dtype=torch.uint8)
        return exponents.view(torch.float8_e8m0fnu)

    def quantised(name, weight):
        if ".experts." in name:
            return fp4(weight, powers(weight.shape[0], weight.shape[1] // FP4_COLUMNS), generator)
        return fp8(weight, powers(*blocks(weight))) if V4_FP8.fullmatch(name) else None

    expected = _write(source, target, quantised, "{}.scale")
    changes = {"torch_dtype": "bfloat16", "expert_dtype": "fp4"}
    _write_config(config | changes, target)
    return expected


def write_v32(config, source, target):
    """Write a DeepSeek-V3.2 in fp8 with arbitrary fp32 scales; return the weights in bf16."""
    generator = torch.Generator().manual_seed(3)

    def quantised(name, weight):
        if V32_FP8.fullmatch(name):
            return fp8(weight, torch.rand(blocks(weight), generator=generator) / 100 + 1e-4)
        return None

    expected = _write(source, target, quantised, "{}.weight_scale_inv")
    _write_config(config | {"torch_dtype": "bfloat16"}, target)
    return expected


def write_glm_5_3(config, source, target):
    """Write a GLM-5.3-Flash with fp8 MLPs and bf16 weights."""
    generator = torch.Generator().manual_seed(3)

    def quantised(name, weight):
        if GLM_5_3_FP8.fullmatch(name):
            return fp8(weight, torch.rand(blocks(weight), generator=generator) / 100 + 1e-4)
        return None

    def stored(name, weight):
        return weight if GLM_5_3_FP32.fullmatch(name) else weight.bfloat16()

    _write(source, target, quantised, "{}.weight_scale_inv", stored)
    _write_config(config | {"dtype": "bfloat16"}, target)


def blocks(weight):
    """Return the shape of a matrix's scales."""
    return (
        (-(-weight.shape[0] // BLOCK[0]), -(-weight.shape[1] // BLOCK[1]))
        if weight.dim() > 1
        else (1, 1)
    )


def fp8(weight, scale):
    """Draw fp8 numbers and a scale; return them with their value."""
    wide = scale.float().repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
    wide = wide[: weight.shape[0], : weight.shape[1]]
    small = (weight.float() / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    return small, scale, (small.float() * wide).bfloat16()


def fp4(weight, scale, generator):
    """Draw fp4 numbers and a scale; return them with their value."""
    codes = torch.randint(0, 16, weight.shape, generator=generator, dtype=torch.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    wide = scale.float().repeat_interleave(FP4_COLUMNS, 1)
    return packed.view(torch.int8), scale, (CODES[codes.long()] * wide).bfloat16()


def _write(source, target, quantised, scale_name, stored=lambda _name, weight: weight):
    reader, expected = CheckpointReader(source), {}
    with CheckpointWriter(target, shard_bytes=30_000) as writer:
        for name in reader.names():
            weight = reader.read(name)
            found = quantised(name, weight)
            if found is None:
                writer.add(name, stored(name, weight))
                continue
            small, scale, expected[name] = found
            writer.add(name, small)
            writer.add(scale_name.format(name.removesuffix(".weight")), scale)
    return expected


def _write_config(config, target):
    method = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "scale_fmt": "ue8m0"}
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": method}))


def stored_bytes(folder):
    """Return name -> dtype, shape and bytes of every tensor in a checkpoint's files."""
    from safetensors.torch import load_file

    found = {}
    for shard in sorted(folder.glob("*.safetensors")):
        for name, x in load_file(shard).items():
            raw = bytes(x.contiguous().flatten().view(torch.uint8).tolist())
            found[name] = x.dtype, tuple(x.shape), raw
    return found
