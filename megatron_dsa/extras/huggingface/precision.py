"""Released precision of an exported checkpoint."""

from collections.abc import Iterator
from typing import Any

import torch

from megatron_dsa.errors import ConfigError, require
from megatron_dsa.extras.huggingface.config_json import HFModel
from megatron_dsa.extras.huggingface.files import CheckpointReader, Scales
from megatron_dsa.extras.huggingface.quantised import Format, quantise

#: Values of ``export-hf --quantise``.
MODES = ("fp8", "released")
#: Default length of an fp4 block.
_FP4_COLUMNS = 32
#: DeepSeek-V3.2's quantisation, the default for a config.json without one.
_USUAL = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}


class ReleasedPrecision:
    """Quantisation and dtypes of a release, read from its tensors, else from the table of names.

    Attributes:
        config: keys of config.json.
        blocks, kept: counts of quantised blocks, and of blocks with released scales.
    """

    def __init__(self, hf: HFModel, mode: str, release: CheckpointReader | None = None):
        require(mode in MODES, f"quantise must be {' or '.join(MODES)}, got {mode!r}")
        said: dict[str, Any] | None = hf.text.get("quantization_config")
        fp4 = hf.quantisation.fp4_experts
        if mode == "fp8":
            require(
                not fp4,
                'quantise is fp8, and config.json says "expert_dtype": "fp4": choose released, or '
                "give a config.json that says fp8",
            )
            said = said or _USUAL
        if said is None:
            raise ConfigError(
                "quantise is released, and config.json has no quantization_config: give the "
                "config.json of the release, or choose fp8"
            )
        kind = said.get("fmt", "e4m3")
        require(
            kind == "e4m3",
            f"quantization_config.fmt = {kind!r}: must be e4m3, no other fp8 is written",
        )
        scales = said.get("scale_fmt")
        require(
            scales in (None, "ue8m0"),
            f"quantization_config.scale_fmt = {scales!r}: must be ue8m0 or absent",
        )
        self._names, self._fp4, self._dtype = hf.names, fp4, hf.quantisation.dtype
        self._block: tuple[int, int] = tuple(said["weight_block_size"])
        self._powers = scales == "ue8m0"
        self._plain = tuple(said.get("modules_to_not_convert") or ())
        self.config: dict[str, Any] = {"quantization_config": said}
        if hf.names.features and "expert_dtype" not in said:
            # Without expert_dtype, readers assume fp4 in DeepSeek-V4.
            self.config["expert_dtype"] = "fp4" if fp4 else "fp8"
        self.uses_release = release is not None and release.is_quantised
        self._release = release if self.uses_release else None
        self.blocks = self.kept = 0

    def tensors(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors to store for a parameter, ``name`` first."""
        released = self._release is not None and name in self._release
        scales = self._released_scales(name, tensor) if released else None
        if released and scales is None:
            assert self._release is not None
            yield name, tensor.to(self._release.read_dtype(name))
            return
        if scales is None and not self._is_quantised(name):
            yield name, tensor
            return
        form, block, dtype = self._format(name, tensor, scales)
        done = quantise(
            tensor,
            form,
            block,
            powers_of_two=self._powers or dtype == torch.float8_e8m0fnu,
            given=None if scales is None else scales.values,
            dtype=self._dtype,
        )
        self.blocks += done.scales.numel()
        self.kept += done.kept
        base = name.removesuffix(".weight")
        yield name, done.weight
        yield scales.name if scales else self._names.scale.format(base), done.scales.to(dtype)

    def _released_scales(self, name: str, tensor: torch.Tensor) -> Scales | None:
        assert self._release is not None
        shape = self._release.shape(name)
        require(
            shape == tuple(tensor.shape),
            f"{name} is {shape} in {self._release.directory} and {tuple(tensor.shape)} in the "
            "model: give the config.json of the model that was trained",
        )
        return self._release.scales(name)

    def _is_quantised(self, name: str) -> bool:
        module = f"{name.removesuffix('.weight')}."
        plain = any(module.startswith(f"{each}.") for each in self._plain)
        return self._names.quantised.fullmatch(name) is not None and not plain

    def _format(
        self, name: str, tensor: torch.Tensor, scales: Scales | None
    ) -> tuple[Format, tuple[int, int], torch.dtype]:
        if scales is not None:
            return scales.form, scales.block, scales.values.dtype
        dtype = torch.float8_e8m0fnu if self._fp4 else torch.float32
        if not (self._fp4 and ".experts." in name):
            return Format.FP8, self._block, dtype
        columns = tensor.shape[1]
        require(
            columns % _FP4_COLUMNS == 0,
            f"{name} has {columns} columns, no multiple of the {_FP4_COLUMNS} that share a scale "
            'in fp4: give a config.json with "expert_dtype": "fp8"',
        )
        return Format.FP4, (1, _FP4_COLUMNS), dtype
