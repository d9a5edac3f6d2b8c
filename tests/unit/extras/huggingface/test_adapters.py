"""Adapters in PEFT's format compared with PEFT's own, and merged weights.

``pytest -s`` prints the figures of ``docs/guide/lora.md``.
"""

import json

import pytest
import torch

from megatron_dsa.config.model import DSAOptions, is_adapter_parameter
from megatron_dsa.errors import ConfigError, FileError
from megatron_dsa.extras.huggingface.adapters import export_adapter, factor_of, import_adapter
from megatron_dsa.extras.huggingface.convert import export_model, import_model
from megatron_dsa.extras.huggingface.names import HASH_ROUTING, HYPER_CONNECTIONS, V3, V4
from megatron_dsa.extras.huggingface.ranks import ParallelRank
from megatron_dsa.layers.freezing import freeze_for_stage
from tests.cases.lora import gradients_of
from tests.helpers import no_room, relative_error
from tests.host import start
from tests.tiny_models import logits_of, published, tiny_config, tiny_model, tiny_v4, tokens

pytest.importorskip("safetensors")
RANK, ALPHA = 4, 10
ALL = ("all-linear",)


def adapted_model(config, targets=ALL, stage="sparse", seed=5, **changes):
    """Return a random model with random adapters."""
    options = DSAOptions(stage=stage, lora_rank=RANK, lora_alpha=ALPHA, lora_targets=targets)
    return tiny_model(config, stage, seed=seed, dsa=options, dsa_indexer_loss_coeff=1.0, **changes)


def with_loss(logits):
    """Return the mean loss of the next tokens."""
    return torch.nn.functional.cross_entropy(logits[0, :-1].float(), tokens()[0, 1:])


#: Linears that PEFT supports, see ``docs/guide/lora.md``.
ATTENTION = (
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    *("indexer.wq_b", "indexer.wk", "indexer.weights_proj"),
)


@pytest.mark.parametrize(
    ("kind", "targets"),
    [("deepseek_v32", ATTENTION), ("deepseek_v32", ALL), ("glm_moe_dsa", ATTENTION)],
    ids=["v3.2", "v3.2-all-linear", "glm-5"],
)
def test_loss_and_gradients_are_those_of_peft(kind, targets, tmp_path, monkeypatch):
    """Adapters of indexers are compared in ``tests/unit/layers``: PEFT's model has no loss for
    them.
    """
    peft = pytest.importorskip("peft")
    if targets == ALL:
        # It would convert MLPs' linears to routed experts.
        name = "peft.utils.transformers_weight_conversion._convert_peft_config_moe"
        monkeypatch.setattr(name, lambda *_args, **_settings: None)
    changes = {"n_group": 1, "topk_group": 1} if kind == "glm_moe_dsa" else {}
    base = published(tiny_config(kind, **changes), tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    ours = adapted_model(config, targets)
    import_model(ours, tmp_path / "base")
    with torch.no_grad():
        before = base(tokens()).logits
    assert not export_adapter(ours, tmp_path / "adapter", V3)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    logits = theirs(tokens()).logits
    error = relative_error(logits_of(ours, tokens()), logits.detach())
    assert error < 1e-5
    assert relative_error(logits_of(ours, tokens()), before) > 0.1

    freeze_for_stage([ours])
    ours.train()
    ids = tokens().to(start())
    positions = torch.arange(24, device=ids.device)[None]
    losses = with_loss(logits), with_loss(ours(ids, positions, None)[..., :70].cpu())
    for loss in losses:
        loss.backward()
    assert relative_error(losses[1], losses[0]) < 1e-6
    wanted = {
        name.replace(".default.", "."): p.grad
        for name, p in theirs.named_parameters()
        if p.requires_grad
    }
    errors = {}
    for name, gradient in gradients_of(ours).items():
        peft_name = factor_of(name, V3, ours.config.num_layers).name
        reference = wanted.pop(peft_name)
        if ".indexer." in name:
            assert reference is None
            continue
        errors[peft_name] = relative_error(gradient.cpu(), reference)
        assert errors[peft_name] < 2e-5, peft_name
    assert not wanted and len(errors) == 2 * 2 * (8 if targets == ALL else 5)
    print(
        f"{kind} {targets[0]}: logits {error:.1e}, loss {float(losses[1].detach()):.4f}, "
        f"{len(errors)} gradients at most {max(errors.values()):.1e}"
    )


@pytest.mark.parametrize(
    ("config", "targets"),
    [
        (tiny_config(), ALL),
        (tiny_config(), ("mlp.up_proj", "wq_b", "kv_b_proj")),
        (tiny_v4(num_hash_layers=1), ALL),
        (tiny_v4(num_hash_layers=1), ("attn.wq_b", "compressor.wkv", "wo_a", "w3")),
    ],
    ids=["v3.2-all-linear", "v3.2", "v4-all-linear", "v4"],
)
def test_merged_weights_give_the_same_logits(config, targets, tmp_path):
    features = (HYPER_CONNECTIONS, HASH_ROUTING) if config["model_type"] == "deepseek_v4" else ()
    ours = adapted_model(config, targets, features=features)
    export_model(ours, tmp_path, config)
    plain = tiny_model(config, features=features)
    before = logits_of(plain, tokens())
    import_model(plain, tmp_path)
    assert relative_error(logits_of(plain, tokens()), logits_of(ours, tokens())) < 1e-5
    assert relative_error(before, logits_of(ours, tokens())) > 0.1


def test_adapters_come_back_from_their_file(tmp_path):
    from safetensors.torch import load_file

    config = tiny_config()
    ours, other = adapted_model(config), adapted_model(config, seed=6)
    export_adapter(ours, tmp_path, V3, base="the/base")
    assert import_adapter(other, tmp_path, V3) == 0
    mine = {n: p for n, p in ours.named_parameters() if is_adapter_parameter(n)}
    for name, parameter in other.named_parameters():
        if is_adapter_parameter(name):
            assert parameter.equal(mine[name]), name
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    one = "base_model.model.model.layers.1.mlp.shared_experts.up_proj.lora_B.weight"
    assert tensors[one].shape == (20, RANK) and len(tensors) == len(mine) == 2 * 2 * 11
    said = json.loads((tmp_path / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == "the/base"
    assert (said["r"], said["lora_alpha"], said["peft_type"]) == (RANK, ALPHA, "LORA")
    assert said["target_modules"] == sorted(
        ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "wq_b", "wk"]
        + ["weights_proj", "gate_proj", "up_proj", "down_proj"]
    )

    class Half(torch.nn.Module):
        """A rank's part of a linear in the second pipeline stage's first layer."""

        def __init__(self):
            super().__init__()
            up = torch.nn.Parameter(torch.zeros(10, RANK))
            up.tensor_model_parallel, up.partition_dim = True, 0
            self.linear = torch.nn.Module()
            self.linear.up_proj_lora_B = up
            self.config = ours.config

        def named_parameters(self):
            name = "decoder.layers.0.mlp.shared_experts.linear_fc1.up_proj_lora_B"
            yield name, self.linear.up_proj_lora_B

    half = Half()
    import_adapter(half, tmp_path, V3, ParallelRank(tensor=(1, 2), first_layer=1))
    assert half.linear.up_proj_lora_B.equal(tensors[one][10:])


def test_one_of_two_linears_of_a_name(tmp_path):
    """The name in adapter_config.json must select only linears with adapters."""
    export_adapter(adapted_model(tiny_config(), ("shared_experts.up_proj",)), tmp_path, V3)
    said = json.loads((tmp_path / "adapter_config.json").read_text())
    assert said["target_modules"] == ["mlp.shared_experts.up_proj"]


def test_layers_of_prediction_are_left_out(tmp_path):
    config = tiny_config(num_nextn_predict_layers=1)
    ours = adapted_model(config, ("o_proj",), mtp_num_layers=1)
    assert export_adapter(ours, tmp_path, V3) == 2
    assert import_adapter(ours, tmp_path, V3) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 8}, "--lora-rank must be 8, as .*adapter_config.json says, got 4"),
        ({"lora_alpha": 3}, "--lora-alpha must be 3, .* got 10"),
        ({"use_rslora": True}, "use_rslora must be False, got True"),
        ({"peft_type": "IA3"}, "peft_type must be LORA, got 'IA3'"),
        ({"rank_pattern": {"o_proj": 2}}, "rank_pattern must be {}"),
        ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "olora"}, "init_lora_weights = 'olora': .* base whose weights it"),
        ({"init_lora_weights": "loftq"}, "'loftq': .* merge it with PEFT into the base"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens must be None, got .3"),
        ({"use_qalora": True}, "use_qalora must be False, got True"),
        ({"a_later_method": {"x": 1}}, "a_later_method = .* is not understood"),
        ({"a_later_scale": 0.0}, "a_later_scale = 0.0 is not understood"),
    ],
)
def test_other_adapters_are_refused(changes, message, tmp_path):
    model = adapted_model(tiny_config(), ("o_proj",))
    export_adapter(model, tmp_path, V3)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=message):
        import_adapter(model, tmp_path, V3)


def initialised(peft, method, base):
    """Return PEFT's model of ``base``, whose weights the initial adapters have changed."""
    config = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, init_lora_weights=method, target_modules=[*ATTENTION[:5]]
    )
    if method == "lora_ga":
        from peft.tuners.lora.config import LoraGAConfig
        from peft.tuners.lora.loraga import preprocess_loraga

        config.lora_ga_config = LoraGAConfig()
        preprocess_loraga(base, config, lambda: with_loss(base(tokens()).logits).backward())
    return peft.get_peft_model(base, config)


@pytest.mark.parametrize("method", ["pissa", "pissa_niter_4", "olora", "lora_ga"])
def test_adapters_with_a_changed_base_are_taken_when_converted(method, tmp_path):
    peft = pytest.importorskip("peft")
    base = published(tiny_config(), tmp_path / "base")
    before = base.state_dict()["model.layers.0.self_attn.o_proj.weight"].clone()
    model = initialised(peft, method, base)
    linear = model.base_model.model.model.layers[0].self_attn.o_proj
    assert relative_error(linear.base_layer.weight.detach(), before) > 1e-3
    settings = model.peft_config["default"]
    settings.init_lora_weights = True  # PEFT's conversion requires it of the initial adapter
    model.save_pretrained(tmp_path / "initial")
    settings.init_lora_weights = method
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "lora_" in name:
                parameter += 0.1 * torch.randn(parameter.shape)
        reference = model(tokens()).logits
    model.save_pretrained(tmp_path / "trained")
    model.save_pretrained(
        tmp_path / "converted", path_initial_model_for_weight_conversion=tmp_path / "initial"
    )
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    options = DSAOptions(
        lora_rank=2 * RANK, lora_alpha=2 * ALPHA, lora_targets=tuple(ATTENTION[:5])
    )
    ours = tiny_model(config, dsa=options, dsa_indexer_loss_coeff=1.0)
    import_model(ours, tmp_path / "base")
    with pytest.raises(
        ConfigError, match=f"'{method}': .*path_initial_model_for_weight_conversion"
    ):
        import_adapter(ours, tmp_path / "trained", V3)
    import_adapter(ours, tmp_path / "converted", V3)
    assert relative_error(logits_of(ours, tokens()), reference) < 1e-5


def test_all_settings_of_peft_are_known():
    peft = pytest.importorskip("peft")
    from megatron_dsa.extras.huggingface import adapters

    unknown = set(peft.LoraConfig().to_dict()) - adapters._PLAIN.keys() - adapters._NO_MATTER
    assert not unknown


def test_adapters_of_other_linears_are_refused(tmp_path):
    few, many = (adapted_model(tiny_config(), x) for x in (("o_proj",), ("o_proj", "wk")))
    export_adapter(few, tmp_path / "few", V3)
    export_adapter(many, tmp_path / "many", V3)
    with pytest.raises(ConfigError, match=r"indexer\.wk\.lora_A\.weight is of no linear that --lo"):
        import_adapter(few, tmp_path / "many", V3)
    with pytest.raises(ConfigError, match=r"has no tensor .*\.indexer\.wk\.lora_A\.weight: --lora"):
        import_adapter(many, tmp_path / "few", V3)
    with pytest.raises(ConfigError, match="holds an adapter already"):
        export_adapter(few, tmp_path / "few", V3)
    with pytest.raises(ConfigError, match="the model has no adapters"):
        export_adapter(tiny_model(tiny_config()), tmp_path / "none", V3)


def test_v4_is_refused(tmp_path):
    model = adapted_model(tiny_v4(), ("wo_b",))
    with pytest.raises(ConfigError, match="--adapter is not supported with DeepSeek-V4: PEFT goes"):
        export_adapter(model, tmp_path, V4)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="--lora-load is not supported with DeepSeek-V4"):
        import_adapter(model, tmp_path, V4)


def test_adapters_are_written_whole(tmp_path):
    model = adapted_model(tiny_config())
    with no_room(5_000), pytest.raises(FileError, match=r"adapter_model.safetensors: File too"):
        export_adapter(model, tmp_path / "out", V3)
    assert not (tmp_path / "out").exists()
    (tmp_path / "adapter_config.json").symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match="holds an adapter already"):
        export_adapter(model, tmp_path, V3)
    assert not (tmp_path / "target").exists()
