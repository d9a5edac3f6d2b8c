"""Import and export compared with transformers' classes: equal logits.

``pytest -s`` prints the table of ``docs/guide/huggingface.md``.
"""

import json

import pytest
import torch

from megatron_dsa.extras.huggingface.config_json import parse_config
from megatron_dsa.extras.huggingface.convert import export_model, import_model
from megatron_dsa.extras.huggingface.names import HYPER_CONNECTIONS
from tests import tiny_models
from tests.helpers import relative_error
from tests.tiny_models import (
    logits_of,
    published,
    tiny_config,
    tiny_model,
    tokens,
    transformers_v4,
)

pytest.importorskip("safetensors")

YARN = tiny_models.YARN | {"beta_fast": 32, "mscale_all_dim": 1.0}
YARN4 = {key: x for key, x in YARN.items() if "mscale" not in key}

#: The third layer reuses the second's selection.
SHARED = {"num_hidden_layers": 4, "index_topk_freq": 2, "index_skip_topk_offset": 2}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("deepseek_v3", {}),
        ("deepseek_v3", {"rope_scaling": YARN}),
        ("deepseek_v32", {}),
        ("deepseek_v32", {"rope_scaling": YARN}),
        ("glm_moe_dsa", {"n_group": 1, "topk_group": 1, "rms_norm_eps": 0.01}),
        ("glm_moe_dsa", SHARED),
    ],
    ids=["v3", "v3-yarn", "v3.2", "v3.2-yarn", "glm-5", "glm-5.2"],
)
def test_logits_equal_those_of_transformers(kind, changes, tmp_path):
    """Only six of 24 keys are selected, so a wrong rope of the indexer is noticed."""
    theirs = published(tiny_config(kind, **changes), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
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
        # The other rope would have failed above.
        ours.config.dsa_indexer_rope_interleaved ^= True
        assert relative_error(logits_of(ours, tokens()), reference) > 1e-3


MLA = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
#: Redundant or missing keys: models, keys, number of notes.
TWICE = {
    "theta-and-yarn": (
        MLA,
        {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5}, "rope_scaling": YARN},
        1,
    ),
    "two-yarns": (
        MLA,
        {
            "rope_parameters": YARN | {"factor": 8.0, "rope_theta": 1e4},
            "rope_scaling": YARN | {"rope_theta": 1e4, "mscale": 0.5},
        },
        1,
    ),
    "no-base": (MLA, {"rope_theta": None, "rope_scaling": YARN | {"factor": 2.0}}, 2),
    "no-mscale": (MLA, {"rope_scaling": {k: x for k, x in YARN.items() if k != "mscale"}}, 0),
    "one-mscale": (MLA, {"rope_scaling": YARN4 | {"mscale": 0.5}}, 0),
    "base-in-rope": (MLA, {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, 1),
    "lists": (
        ("glm_moe_dsa",),
        {
            "num_hidden_layers": 4,
            "indexer_types": ["full", "full", "shared", "full"],
            "index_topk_pattern": "FSFS",
            "index_topk_freq": 1,
            "first_k_dense_replace": 1,
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
        },
        3,
    ),
    "v4-two-yarns": (
        ("deepseek_v4",),
        {
            "rope_parameters": {"main": {"rope_theta": 5e5}, "compress": {"rope_theta": 5e5}},
            "rope_scaling": YARN4,
        },
        1,
    ),
    "v4-nested": (
        ("deepseek_v4",),
        {
            "partial_rotary_factor": 0.5,
            "rope_parameters": YARN4,
            "rope_scaling": {
                "main": {"rope_theta": 5e5},
                "compress": YARN4 | {"rope_theta": 6e5, "attention_factor": 1.0},
            },
        },
        3,
    ),
    "v4-no-base": (("deepseek_v4",), {"rope_theta": None, "rope_scaling": YARN4}, 1),
    "v4-lists": (
        ("deepseek_v4",),
        {"compress_ratios": [0, 4, 4, 128], "num_hash_layers": 1, "rope_scaling": YARN4},
        2,
    ),
}


@pytest.mark.parametrize(
    ("kind", "changes", "count"),
    [
        pytest.param(kind, changes, count, id=f"{kind}-{name}")
        for name, (kinds, changes, count) in TWICE.items()
        for kind in kinds
    ],
)
def test_logits_equal_where_keys_say_one_thing_twice(kind, changes, count, tmp_path):
    v4 = kind == "deepseek_v4"
    config = transformers_v4() if v4 else tiny_config(kind)
    config = {key: x for key, x in (config | changes).items() if x is not None}
    theirs = published(config, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    stage, features = "dense" if kind == "deepseek_v3" else "sparse", [HYPER_CONNECTIONS] * v4
    ours = tiny_model(config, stage, features=features)
    import_model(ours, tmp_path)
    ids = tokens()
    with torch.no_grad():
        reference = theirs(ids).logits
    assert relative_error(logits_of(ours, ids), reference) < 1e-5
    notes = parse_config(config).remarks
    assert len(notes) == count and all("used" in note for note in notes), notes
