"""Import and export against the classes of the package transformers: logits are equal.

``pytest -s`` prints the table of ``docs/guide/huggingface.md``.
"""

import json

import pytest
import torch

from megatron_dsa.huggingface.convert import export_model, import_model
from tests.helpers import relative_error
from tests.tiny_models import logits_of, published, tiny_config, tiny_model

pytest.importorskip("safetensors")

YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

#: transformers 5 writes rope_parameters; advice on long contexts adds rope_scaling.
BOTH = {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
ONE_MSCALE = {"rope_scaling": {name: x for name, x in YARN.items() if name != "mscale"}}
#: The third layer reuses the selection of the second.
SHARED = {"num_hidden_layers": 4, "index_topk_freq": 2, "index_skip_topk_offset": 2}


def tokens():
    return torch.randint(0, 70, (1, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("deepseek_v3", {}),
        ("deepseek_v3", {"rope_scaling": YARN}),
        ("deepseek_v32", {}),
        ("deepseek_v32", {"rope_scaling": YARN}),
        ("deepseek_v3", BOTH),
        ("deepseek_v32", BOTH),
        ("glm_moe_dsa", BOTH | {"n_group": 1, "topk_group": 1}),
        ("deepseek_v3", ONE_MSCALE),
        ("glm_moe_dsa", {"n_group": 1, "topk_group": 1, "rms_norm_eps": 0.01}),
        ("glm_moe_dsa", SHARED),
    ],
    ids=[
        *("v3", "v3-yarn", "v3.2", "v3.2-yarn", "v3-both", "v3.2-both", "glm-5-both"),
        *("v3-mscale_all_dim", "glm-5", "glm-5.2"),
    ],
)
def test_logits_equal_those_of_transformers(kind, changes, tmp_path):
    """Six of up to 24 keys are selected: a wrong rope of the indexer shows."""
    theirs = published(tiny_config(kind, **changes), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    if "rope_scaling" in changes:  # transformers has made one object of it
        config = {name: value for name, value in config.items() if name != "rope_parameters"}
        config |= {"rope_theta": 10000.0} | changes
        (tmp_path / "config.json").write_text(json.dumps(config))
    ours = tiny_model(config, stage="dense" if kind == "deepseek_v3" else "sparse")
    report = import_model(ours, tmp_path)
    assert not report.fresh and not report.rounded and not report.unused
    with torch.no_grad():
        reference = theirs(tokens()).logits
    error = relative_error(logits_of(ours, tokens()), reference)
    assert error < 1e-5

    export_model(ours, tmp_path / "back", config, shard_bytes=40_000)
    again = type(theirs).from_pretrained(tmp_path / "back", attn_implementation="eager").float()
    before, after = theirs.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    print(f"logits of {kind} {sorted(changes)}: {error:.1e}; {len(before)} tensors back to the bit")

    if kind != "deepseek_v3":
        # The comparison above would have seen the other rope.
        ours.config.dsa_indexer_rope_interleaved ^= True
        assert relative_error(logits_of(ours, tokens()), reference) > 1e-3
