"""Import and export against the classes of the package transformers: logits are equal."""

import json

import pytest
import torch

from megatron_dsa.huggingface.convert import export_model, import_model
from tests.helpers import relative_error
from tests.host import start
from tests.tiny_models import tiny_config, tiny_model

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

CLASSES = {
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
    "deepseek_v32": ("DeepseekV32Config", "DeepseekV32ForCausalLM"),
    "glm_moe_dsa": ("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM"),
}

YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

#: The third layer reuses the selection of the second.
SHARED = {"num_hidden_layers": 4, "index_topk_freq": 2, "index_skip_topk_offset": 2}


def published(config, folder, seed=2):
    """A random model of transformers, saved as it would be released; return it."""
    config = dict(config)
    kind = config.pop("model_type")
    config_class, model_class = (getattr(transformers, name, None) for name in CLASSES[kind])
    if model_class is None:
        pytest.skip(f"this transformers has no {CLASSES[kind][1]}")
    model = model_class._from_config(config_class(**config), attn_implementation="eager").float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            values = torch.randn(tensor.shape, generator=generator)
            scale, mean = (0.1, float("norm" in name)) if tensor.dim() == 1 else (0.25, 0.0)
            tensor.copy_(values * scale + mean)
    model.save_pretrained(folder, max_shard_size="40KB")
    return model.eval()


def tokens():
    return torch.randint(0, 70, (1, 24), generator=torch.Generator().manual_seed(1))


def megatron_logits(model):
    model.to(start())
    ids = tokens().to(start())
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    with torch.no_grad():
        return model(ids, positions, None)[..., :70].cpu()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("deepseek_v3", {}),
        ("deepseek_v3", {"rope_scaling": YARN}),
        ("deepseek_v32", {}),
        ("deepseek_v32", {"rope_scaling": YARN}),
        ("glm_moe_dsa", {"n_group": 1, "topk_group": 1}),
        ("glm_moe_dsa", SHARED),
    ],
    ids=["v3", "v3-yarn", "v3.2", "v3.2-yarn", "glm-5", "glm-5.2"],
)
def test_logits_equal_those_of_transformers(kind, changes, tmp_path):
    """Six of up to 24 keys are selected: a wrong rope of the indexer shows."""
    theirs = published(tiny_config(kind, **changes), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    ours = tiny_model(config, stage="dense" if kind == "deepseek_v3" else "sparse")
    report = import_model(ours, tmp_path)
    assert not report.fresh and not report.rounded and not report.unused
    with torch.no_grad():
        reference = theirs(tokens()).logits
    assert relative_error(megatron_logits(ours), reference) < 1e-5

    export_model(ours, tmp_path / "back", config, shard_bytes=40_000)
    again = type(theirs).from_pretrained(tmp_path / "back", attn_implementation="eager").float()
    before, after = theirs.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)

    if kind != "deepseek_v3":
        # The comparison above would have seen the other rope.
        ours.config.dsa_indexer_rope_interleaved ^= True
        assert relative_error(megatron_logits(ours), reference) > 1e-3
