"""Weights in fp8 and fp4: scales, rounding, and released scales of unchanged blocks."""

import json
import math

import pytest
import torch

from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.huggingface import quantised
from megatron_dsa.extras.huggingface.config_json import parse_config, read_config
from megatron_dsa.extras.huggingface.convert import export_model, import_model, open_checkpoint
from megatron_dsa.extras.huggingface.precision import ReleasedPrecision
from megatron_dsa.extras.huggingface.quantised import (
    Format,
    Quantisation,
    dequantise,
    quantise,
    unpack,
)
from tests.cases.released_formats import BLOCK, CODES, stored_bytes, write_v4, write_v32
from tests.tiny_models import there_and_back, tiny_config, tiny_model, tiny_v4

pytest.importorskip("safetensors")

FP8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
#: Block and largest number of a format.
FORMATS = {Format.FP8: ((16, 8), 448.0), Format.FP4: ((1, 32), 6.0)}


#: Parts of the names of V3.2's tensors that stay unquantised.
PLAIN = ("norm", "embed", "head", "gate.", "weights_proj", "eh_proj")


def values_of(done, form):
    return done.weight.float() if form is Format.FP8 else unpack(done.weight)


def wide(scales, block, shape):
    out = scales.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return out[: shape[0], : shape[1]]


def nearest(values, form):
    """Find the nearest number of a format exhaustively; ties to the even code."""
    if form is Format.FP8:
        numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    else:
        numbers = CODES[:8].double()
    distance = (values.abs().double()[..., None] - numbers).abs()
    least = distance.amin(-1, keepdim=True)
    even = torch.arange(len(numbers)) % 2 == 0
    code = torch.where(distance == least, even + 1, 0).argmax(-1)
    return torch.copysign(numbers[code], values.double())


@pytest.mark.parametrize("form", FORMATS)
def test_numbers_are_the_nearest(form):
    numbers = FP8[:127].float() if form is Format.FP8 else CODES[:8]
    middles = (numbers[1:] + numbers[:-1]) / 2
    generator = torch.Generator().manual_seed(2)
    some = torch.randn(2000, generator=generator) * numbers.max() / 3
    values = torch.cat([numbers, middles, numbers.max() * torch.ones(1), some])
    values = torch.cat([values, -values]).clamp(-numbers.max(), numbers.max())
    values = values[: len(values) // 32 * 32].view(-1, 32)
    values[:, 0] = numbers.max()  # so that scales are 1
    done = quantise(values, form, (1, 32), powers_of_two=False)
    assert torch.equal(done.scales, torch.ones(len(values), 1)) and done.kept == 0
    assert torch.equal(values_of(done, form).double(), nearest(values, form))
    signs = values_of(done, form).signbit()
    assert torch.equal(signs, values.signbit())  # also of zeros


@pytest.mark.parametrize("powers", [True, False])
@pytest.mark.parametrize("form", FORMATS)
def test_scales_are_those_of_the_largest_number(form, powers, monkeypatch):
    monkeypatch.setattr(quantised, "_ELEMENTS", 700)
    (height, width), largest = FORMATS[form]
    shape = (37, 20 if form is Format.FP8 else 64)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.02
    weight[:16, :8] = 0
    weight[0, 32:] = 0
    done = quantise(weight.bfloat16(), form, (height, width), powers_of_two=powers)
    weight = weight.bfloat16().float()
    for i in range(done.scales.shape[0]):
        for j in range(done.scales.shape[1]):
            block = weight[i * height : (i + 1) * height, j * width : (j + 1) * width].double()
            exact, scale = float(block.abs().max()) / largest, float(done.scales[i, j])
            if exact == 0:
                assert scale == 1
            elif powers:
                assert exact <= scale < 2 * exact and math.frexp(scale)[0] == 0.5
            else:
                assert abs(scale / exact - 1) < 1e-7
    scaled = weight / wide(done.scales, (height, width), shape)
    expected = nearest(scaled.clamp(-largest, largest), form)
    assert torch.equal(values_of(done, form).double(), expected)


@pytest.mark.parametrize("form", FORMATS)
def test_blocks_keep_the_scales_that_they_came_from(form):
    """Unchanged blocks keep released scales; a changed block gets a new one."""
    block, _ = FORMATS[form]
    generator = torch.Generator().manual_seed(4)
    shape = (40, 96)
    counts = [-(-size // each) for size, each in zip(shape, block, strict=True)]
    scales = torch.rand(counts, generator=generator) / 100 + 1e-3
    if form is Format.FP8:
        codes = torch.randint(0, 127, shape, generator=generator, dtype=torch.uint8)
        codes += 128 * torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8)
        numbers = codes.view(torch.float8_e4m3fn)
    else:
        numbers = CODES[torch.randint(0, 16, shape, generator=generator)]
    weight = dequantise(numbers, scales, block, torch.bfloat16)
    done = quantise(weight, form, block, powers_of_two=False, given=scales)
    assert torch.equal(done.scales, scales) and done.kept == scales.numel()
    before, after = numbers.float(), values_of(done, form)
    assert torch.equal(before, after) and torch.equal(before.signbit(), after.signbit())

    changed = weight.clone()
    changed[3, 5] += 0.01 * changed[3, 5]  # no number of the format with this scale
    again = quantise(changed, form, block, powers_of_two=False, given=scales)
    assert again.kept == done.kept - 1
    other = (again.scales != done.scales).nonzero().tolist()
    assert other == [[3 // block[0], 5 // block[1]]]
    moved = again.weight.view(torch.uint8) != done.weight.view(torch.uint8)
    rows = slice(other[0][0] * block[0], (other[0][0] + 1) * block[0])
    assert not moved[: rows.start].any() and not moved[rows.stop :].any()
    for useless in (torch.full_like(scales, float("nan")), torch.zeros_like(scales)):
        own = quantise(changed, form, block, powers_of_two=False, given=useless)
        plain = quantise(changed, form, block, powers_of_two=False)
        assert own.kept == 0 and torch.equal(own.scales, plain.scales)


def v32(tmp_path, **changes):
    """Write a DeepSeek-V3.2 with multi-token prediction in fp8; return its path."""
    config = tiny_config(num_nextn_predict_layers=1, **changes)
    model = tiny_model(config, mtp_num_layers=1, dtype=torch.bfloat16)
    export_model(model, tmp_path / "wide", config)
    write_v32(config, tmp_path / "wide", tmp_path / "hf")
    return tmp_path / "hf"


@pytest.mark.parametrize("mode", ["fp8", "released"])
def test_fp8_comes_back_to_the_byte(mode, tmp_path, capsys):
    """Scales are arbitrary, so they cannot be derived from the weights."""
    there = v32(tmp_path)
    back = there_and_back(there, tmp_path, "--quantise", mode)
    before, after = stored_bytes(there), stored_bytes(back)
    assert before.keys() == after.keys() and sum("scale_inv" in name for name in after) == 78
    assert [name for name in before if before[name] != after[name]] == []
    said, again = (json.loads((x / "config.json").read_text()) for x in (there, back))
    assert again == said
    blocks = sum(x[1][0] * x[1][1] for name, x in after.items() if "scale_inv" in name)
    assert f"{blocks} of {blocks} quantised blocks are those of the release" in (
        capsys.readouterr().out
    )


def test_without_the_release_blocks_get_scales_of_their_own(tmp_path, capsys):
    config = tiny_config(num_nextn_predict_layers=1, torch_dtype="bfloat16")
    model = tiny_model(config, mtp_num_layers=1, dtype=torch.bfloat16)
    first = tmp_path / "first"
    method = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "scale_fmt": "ue8m0"}
    precision = ReleasedPrecision(parse_config(config | {"quantization_config": method}), "fp8")
    export_model(model, first, config, precision=precision)
    assert precision.kept == 0 < precision.blocks and not precision.uses_release
    described = json.loads((first / "config.json").read_text())
    assert described["quantization_config"] == method and "expert_dtype" not in described
    path = tmp_path / "config.json"
    path.write_text(json.dumps(described))
    second = there_and_back(first, tmp_path, "--quantise", "fp8", config=path)
    assert "note: no quantised checkpoint lies in" in capsys.readouterr().err
    one, two = (open_checkpoint(x, read_config(x)) for x in (first, second))
    assert set(one.names()) == set(two.names())
    wide = model.decoder.layers[1].self_attention.linear_proj.weight
    for name in one.names():
        assert torch.equal(one.read(name), two.read(name)), name
        scales = one.scales(name)
        plain = any(x in name for x in PLAIN)
        assert (scales is None) == plain, name
    small = one.read("model.layers.1.self_attn.o_proj.weight").float()
    error = (small - wide.float().cpu()).abs()
    assert error.max() > 0 and (error <= wide.float().cpu().abs() / 16 + 1e-3).all()


def test_fp4_without_the_release(tmp_path):
    config = tiny_v4(moe_intermediate_size=64)
    method = {"quant_method": "fp8", "weight_block_size": [16, 8], "scale_fmt": "ue8m0"}
    config |= {"quantization_config": method, "expert_dtype": "fp4", "torch_dtype": "bfloat16"}
    model = tiny_model(config, dtype=torch.bfloat16)
    precision = ReleasedPrecision(parse_config(config), "released")
    export_model(model, tmp_path, config, precision=precision)
    described = json.loads((tmp_path / "config.json").read_text())
    assert described["expert_dtype"] == "fp4" and described["quantization_config"] == method
    stored = stored_bytes(tmp_path)
    expert = "layers.1.ffn.experts.3.w2."
    assert stored[f"{expert}weight"][:2] == (torch.int8, (32, 32))
    assert stored[f"{expert}scale"][:2] == (torch.float8_e8m0fnu, (32, 2))
    assert stored["layers.1.ffn.shared_experts.w2.weight"][0] is torch.float8_e4m3fn
    assert stored["layers.1.attn.indexer.weights_proj.weight"][0] is torch.bfloat16
    other = tiny_model(config, dtype=torch.bfloat16, seed=6)
    import_model(other, tmp_path)
    pairs = zip(model.decoder.layers, other.decoder.layers, strict=True)
    for ours, theirs in pairs:
        a, b = (x.mlp.experts.local_experts[3].linear_fc2.weight.float() for x in (ours, theirs))
        largest = a.view(32, 2, 32).abs().amax(2, keepdim=True)
        assert ((a - b).abs().view(32, 2, 32) <= largest / 3).all() and not torch.equal(a, b)


def test_other_tensors_have_the_dtypes_of_the_release(tmp_path):
    there = v32(tmp_path)
    name = "model.layers.0.self_attn.indexer.weights_proj.weight"
    from safetensors.torch import load_file, save_file

    shard = next(x for x in there.glob("*.safetensors") if name in load_file(x))
    tensors = load_file(shard)
    tensors[name] = tensors[name].float()
    save_file(tensors, shard)
    back = there_and_back(there, tmp_path, "--quantise", "fp8")
    before, after = stored_bytes(there), stored_bytes(back)
    assert after[name][0] is torch.float32 and before == after


def test_modules_that_config_json_excludes_stay_as_they_are():
    config = tiny_config(
        quantization_config={
            "quant_method": "fp8",
            "weight_block_size": [16, 8],
            "modules_to_not_convert": ["lm_head", "model.layers.0"],
        }
    )
    precision = ReleasedPrecision(parse_config(config), "released")
    weight = torch.randn(32, 32)
    names = [f"model.layers.{i}.self_attn.o_proj.weight" for i in (0, 1, 10)]
    assert [len(list(precision.tensors(name, weight))) for name in names] == [1, 2, 2]


def quantised_config(**changes):
    method = {"quant_method": "fp8", "weight_block_size": [16, 8]}
    return tiny_v4(quantization_config=method, **changes)


@pytest.mark.parametrize(
    ("config", "mode", "message"),
    [
        (tiny_config(), "released", "config.json has no quantization_config: .* or choose fp8"),
        (quantised_config(expert_dtype="fp4"), "fp8", '"expert_dtype": "fp4": choose released'),
        (tiny_config(), "int8", "must be fp8 or released, got 'int8'"),
    ],
)
def test_what_cannot_be_quantised_is_refused(config, mode, message):
    with pytest.raises(ConfigError, match=message):
        ReleasedPrecision(parse_config(config), mode)


def test_other_fp8_and_narrow_fp4_are_refused():
    config = quantised_config()
    config["quantization_config"]["fmt"] = "e5m2"
    with pytest.raises(ConfigError, match=r"quantization_config\.fmt = 'e5m2': must be e4m3"):
        ReleasedPrecision(parse_config(config), "fp8")
    config["quantization_config"] |= {"fmt": "e4m3", "scale_fmt": "float"}
    with pytest.raises(ConfigError, match=r"scale_fmt = 'float': must be ue8m0 or absent"):
        ReleasedPrecision(parse_config(config), "fp8")
    config["quantization_config"] |= {"modules_to_not_convert": "lm_head"}
    with pytest.raises(ConfigError, match=r"modules_to_not_convert = .* must be a JSON list"):
        parse_config(config)
    config = quantised_config(expert_dtype="fp4")
    precision = ReleasedPrecision(parse_config(config), "released")
    with pytest.raises(ConfigError, match=r"experts\.0\.w2\.weight has 20 columns, no multiple"):
        list(precision.tensors("layers.0.ffn.experts.0.w2.weight", torch.ones(32, 20)))
    with pytest.raises(ConfigError, match="fp4 weights of 3 columns do not fill bytes"):
        quantise(torch.ones(4, 3), Format.FP4, (1, 3), powers_of_two=True)


def test_a_release_of_another_shape_is_refused(tmp_path):
    config = tiny_v4()
    export_model(tiny_model(config).bfloat16(), tmp_path / "wide", config)
    write_v4(config, tmp_path / "wide", tmp_path / "hf")
    hf = read_config(tmp_path / "hf")
    precision = ReleasedPrecision(hf, "released", open_checkpoint(tmp_path / "hf", hf))
    with pytest.raises(ConfigError, match=r"is \(24, 32\) in .* and \(24, 40\) in the"):
        list(precision.tensors("layers.0.attn.wq_a.weight", torch.ones(24, 40)))


def test_packed_weights_are_those_of_fp4_experts():
    expert, scale = "layers.1.ffn.experts.3.w2.weight", "layers.1.ffn.experts.3.w2.scale"
    fp4 = Quantisation(fp4_experts=True)
    assert fp4.format(expert, "I8", scale) is Format.FP4
    assert fp4.scale_block(expert, Format.FP4, (20, 64), (20, 2), "F8_E8M0") == (1, 32)
    for quantisation, name in ((Quantisation(), expert), (fp4, "layers.1.attn.wq_a.weight")):
        with pytest.raises(ConfigError, match=r'where config\.json says "expert_dtype": "fp4"'):
            quantisation.format(name, "I8", scale)
    with pytest.raises(ConfigError, match=r"scales of shape \(20, 3\) .* need \(20, 4\)"):
        fp4.scale_block(expert, Format.FP4, (20, 64), (20, 3), "F8_E8M0")
    for at_top in (True, False):
        quantised = {"quant_method": "fp8", "weight_block_size": [8, 8]}
        config = tiny_config(quantization_config=quantised)
        assert not parse_config(config).quantisation.fp4_experts
        (config if at_top else quantised)["expert_dtype"] = "fp4"
        assert parse_config(config).quantisation.fp4_experts
