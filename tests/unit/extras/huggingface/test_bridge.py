"""Megatron-Bridge's conversion compared with ours, tensor by tensor; skipped without
Megatron-Bridge.
"""

import importlib.util
import re

import pytest
import torch

from megatron_dsa.config.model import DSAOptions, is_indexer_parameter
from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.huggingface.config_json import check_model, parse_config, read_config
from megatron_dsa.extras.huggingface.convert import export_model, import_model, model_tensors
from megatron_dsa.extras.huggingface.files import CheckpointReader
from megatron_dsa.extras.huggingface.load_hf import parallel_rank_of
from megatron_dsa.extras.huggingface.models import MODELS
from megatron_dsa.extras.huggingface.names import INDEXER, V3, V4, Split
from megatron_dsa.patches import cpu_host
from tests.cases.bridge import stand_ins
from tests.host import start
from tests.ranks import spawn
from tests.tiny_models import (
    assert_equal_tensors,
    tensors_of,
    tiny_config,
    tiny_model,
    tiny_v4,
)

if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("Megatron-Bridge is not installed", allow_module_level=True)

with stand_ins():
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    from megatron_dsa.extras.huggingface.bridge import DeepSeekV32Bridge, sparse_provider

#: The other kind of rope than V3.2's, and two norm epsilons.
GLM = {"n_group": 1, "topk_group": 1, "rms_norm_eps": 0.01, "indexer_rope_interleave": True}
SHARED = GLM | {"num_hidden_layers": 4, "index_topk_freq": 2, "index_skip_topk_offset": 2}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0}
#: Bridge's requirements that need GPUs or transformer-engine.
HERE = {
    "dsa_indexer_loss_coeff": 1.0,
    "transformer_impl": "local",
    "persist_layer_norm": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "cross_entropy_loss_fusion": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_shared_expert_overlap": False,
    "moe_token_dispatcher_type": "alltoall",
}


def config_of(kind, **changes):
    return tiny_config(kind, architectures=[MODELS[kind].architecture], **changes)


def checkpoint(config, folder, stage="sparse", **changes):
    """Write a random model without padding of the vocabulary, which Bridge adds only on request."""
    export_model(tiny_model(config, stage, vocab=70, **changes), folder, config)


def stage_of(kind):
    return "dense" if kind == "deepseek_v3" else "sparse"


CPU = {"use_cpu_initialization": True}
META = {"init_model_with_meta_device": True}


def built(provider, on=CPU, **changes):
    """Build a provider's model with its weights, if set."""
    if not torch.distributed.is_initialized():
        start()
    for name, value in (HERE | changes).items():
        setattr(provider, name, value)
    provider.finalize()
    return provider.provide_distributed_model(
        wrap_with_ddp=False, mixed_precision_wrapper=None, **on
    )


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("deepseek_v3", {"num_nextn_predict_layers": 1}),
        ("deepseek_v3", {"rope_scaling": YARN | {"mscale_all_dim": 1.0}}),
        ("deepseek_v32", {"num_nextn_predict_layers": 1}),
        ("deepseek_v32", {"rope_scaling": YARN | {"mscale_all_dim": 1.0}}),
        ("glm_moe_dsa", GLM | {"num_nextn_predict_layers": 1}),
        ("glm_moe_dsa", SHARED),
    ],
    ids=["v3", "v3-yarn", "v3.2", "v3.2-yarn", "glm-5", "glm-5.2"],
)
def test_bridge_and_we_convert_alike(kind, changes, tmp_path):
    config, stage = config_of(kind, **changes), stage_of(kind)
    prediction = config.get("num_nextn_predict_layers")
    checkpoint(config, tmp_path, stage, mtp_num_layers=prediction)
    bridge = AutoBridge.from_hf_pretrained(tmp_path)
    models = built(sparse_provider(bridge, DSAOptions(stage=stage)), mtp_num_layers=prediction)
    ours = tiny_model(config, stage, vocab=70, seed=6, mtp_num_layers=prediction)
    assert not import_model(ours, tmp_path).fresh
    check_model(read_config(tmp_path), models[0].config)
    blocks = [*models[0].decoder.layers, *(x.mtp_model_layer for x in mtp_layers(models[0]))]
    assert {type(layer.self_attention).__name__ for layer in blocks} == {"DSASelfAttention"}

    count = assert_equal_tensors(models[0], ours)
    reader = CheckpointReader(tmp_path)
    written = dict(bridge.export_hf_weights(models, show_progress=False))
    names = set(reader.names())
    if kind == "glm_moe_dsa":  # Bridge's class, without duplicates
        names -= {V3.prefix(0, True, config["num_hidden_layers"]) + name for name in V3.copies}
    assert set(written) == names
    assert all(torch.equal(reader.read(name), written[name]) for name in written)
    print(f"{kind} {sorted(changes)}: {count} parameters, {len(written)} tensors back")


def mtp_layers(model):
    """Return layers of multi-token prediction, if any."""
    return model.mtp.layers if getattr(model, "mtp", None) is not None else []


TENSOR, EXPERT = {"tensor_model_parallel_size": 2}, {"expert_model_parallel_size": 2}
GRIDS = {
    "tensor": TENSOR | {"sequence_parallel": True},
    "expert": EXPERT,
    "tensor, expert": TENSOR
    | EXPERT
    | {"expert_tensor_parallel_size": 1, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks are processes on the CPU")
def test_bridge_and_we_convert_alike_on_two_ranks(tmp_path):
    config = config_of("deepseek_v32", num_nextn_predict_layers=1)
    checkpoint(config, tmp_path / "hf", mtp_num_layers=1)
    cases = {name: (grid, tmp_path / "hf") for name, grid in GRIDS.items()}
    first, second = spawn(convert_on_a_rank, cases, 2, tmp_path)
    assert first["tensor"] == second["tensor"] == 91
    assert first["expert"] == second["expert"] == first["tensor, expert"] < 91
    assert first["pipeline"] + second["pipeline"] > 91  # both embed


def convert_on_a_rank(case, _tp, _cp):
    """Compare a rank's parameters, and Bridge's export from all ranks; return their number."""
    from megatron.core import parallel_state, tensor_parallel

    grid, folder = case
    sizes = {name: value for name, value in grid.items() if name != "sequence_parallel"}
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**sizes)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    bridge = AutoBridge.from_hf_pretrained(folder)
    models = built(sparse_provider(bridge), mtp_num_layers=1, **grid)
    found = tensors_of(models[0])
    with torch.no_grad():
        for _, tensor in model_tensors(models[0]):
            tensor.zero_()
    assert not import_model(models[0], folder, parallel_rank_of(models[0])).fresh
    expected = tensors_of(models[0])
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    reader = CheckpointReader(folder)
    written = dict(bridge.export_hf_weights(models, show_progress=False))
    assert set(written) == set(reader.names())
    assert all(torch.equal(reader.read(name), written[name]) for name in written)
    return len(expected)


def test_a_dense_checkpoint_leaves_indexers_fresh_and_alone(tmp_path):
    config = config_of("deepseek_v3")
    checkpoint(config, tmp_path, "dense")
    bridge = AutoBridge.from_hf_pretrained(tmp_path)
    provider = sparse_provider(bridge, DSAOptions(stage="warmup"))
    indexer = {"n_heads": 8, "head_dim": 16, "topk": 6, "loss_coeff": 1.0}
    (model,) = built(provider, **{f"dsa_indexer_{key}": value for key, value in indexer.items()})
    dense = tiny_model(config, "dense", vocab=70, seed=6)
    import_model(dense, tmp_path)
    expected, found = tensors_of(dense), tensors_of(model)
    fresh = found.keys() - expected.keys()
    assert fresh and all(map(is_indexer_parameter, fresh))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert {name for name, x in model.named_parameters() if x.requires_grad} == fresh


@pytest.mark.skipif(cpu_host.needed(), reason="transformer-engine's layers need a GPU")
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_mappings_fit_the_layers_of_transformer_engine(kind, grouped, monkeypatch):
    """Built without memory: every parameter must be in our table, with its sharding."""
    from transformers import AutoConfig

    config = config_of(kind, **GLM, num_nextn_predict_layers=1)
    settings = {name: value for name, value in config.items() if name != "model_type"}
    bridge = AutoBridge.from_hf_config(AutoConfig.for_model(kind, **settings))
    provider = sparse_provider(bridge, load_weights=False)
    layers = {"transformer_impl": "transformer_engine", "moe_grouped_gemm": grouped}
    start()
    # transformer-engine queries the GPU even without allocations.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, value in {"name": "none", "capability": (9, 0)}.items():
        monkeypatch.setattr(torch.cuda, f"get_device_{name}", lambda *_device, _value=value: _value)
    (model,) = built(provider, on=META, mtp_num_layers=1, perform_initialization=False, **layers)
    registry = bridge._model_bridge.mapping_registry()
    detected = {Split.WHOLE: "replicated", Split.LATENT: "replicated", Split.COLUMNS: "row"}
    seen = set()
    for name, _ in model_tensors(model):
        expected, mapping = V3.match(name, 2), registry.megatron_to_hf_lookup(name)
        hf = mapping.hf_param
        assert expected.hf == ((hf,) if isinstance(hf, str) else tuple(hf.values())), name
        module = model.get_submodule(name.rpartition(".")[0])
        seen.add(type(module).__name__)
        if isinstance(mapping, AutoMapping):
            split = detected.get(expected.entry.split, "column")
            assert mapping._detect_parallelism_type(module) == split, name
    assert {"TELinear", "TELayerNormColumnParallelLinear"} < seen
    assert ("TEColumnParallelGroupedLinear" in seen) == grouped


def registry_of(bridge_class, **fields):
    """Return Bridge's mappings for two layers, one of them of multi-token prediction."""
    bridge = bridge_class()
    known = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1} | fields
    bridge.hf_config = type("Config", (), known)
    return bridge.mapping_registry()


def names_of_table(names):
    """Yield ``(parameter, tensors)`` of a table, for all names and kinds of layers."""
    for line in names.model:
        for name in line.megatron:
            yield name, line.hf
    for prefix, table, mtp in (
        ("decoder.layers.1.", names.layer, False),
        ("mtp.layers.0.mtp_model_layer.", names.layer, True),
        ("mtp.layers.0.", names.mtp, True),
    ):
        start_of_hf = names.prefix(0 if mtp else 1, mtp, 2)
        for line in table:
            tensors = tuple(start_of_hf + x.replace("{expert}", "3") for x in line.hf)
            for name in line.megatron:
                yield prefix + name.replace("{expert}", "3"), tensors


def differences(registry, names):
    """Return our table's parameters that Bridge maps to other tensors."""
    wrong = []
    for name, tensors in names_of_table(names):
        found = registry.megatron_to_hf_lookup(name)
        hf = () if found is None else found.hf_param
        hf = (hf,) if isinstance(hf, str) else tuple(hf.values()) if hf else ()
        back = [registry.hf_to_megatron_lookup(tensor) for tensor in tensors]
        if hf != tensors or None in back:
            wrong.append(name)
    return wrong


def test_tables_agree():
    from megatron.bridge.models.glm_moe_dsa.glm5_bridge import GLM5Bridge

    assert len(list(names_of_table(V3))) > 60
    for bridge_class in (DeepSeekV32Bridge, GLM5Bridge):
        assert differences(registry_of(bridge_class), V3) == []


def test_tables_of_v4_differ_where_megatrons_branch_does():
    from megatron.bridge.models.deepseek.deepseek_v4_bridge import DeepSeekV4Bridge

    found = set(differences(registry_of(DeepSeekV4Bridge), V4))
    # Multi-token prediction has windows only: no compressors and indexers.
    found -= {name for name in found if re.search(r"mtp.*(compressor|indexer)", name)}
    streams = {name for name in found if re.search(r"hc_(attn|ffn|head)_(fn|base|scale)$", name)}
    assert len(streams) == 3 * (2 + 2 + 2)  # two layers, heads of decoder and prediction
    found -= streams
    attention, mtp = "self_attention.", "mtp.layers.0.mtp_model_layer."
    assert found == {
        f"decoder.layers.1.{attention}linear_o_group_proj.weight",
        f"{mtp}{attention}linear_o_group_proj.weight",
        # A tensor has one of two names, which Bridge resolves when reading.
        f"decoder.layers.1.{INDEXER}linear_weights_proj.weight",
        "mtp.layers.0.eh_proj.weight",
        f"{mtp}mlp.experts.local_experts.3.linear_fc1.weight",
        f"{mtp}mlp.experts.local_experts.3.linear_fc2.weight",
    }


def test_v4_is_refused():
    from types import SimpleNamespace

    from transformers import PretrainedConfig

    config = PretrainedConfig()
    config.to_dict = lambda: tiny_v4()
    with pytest.raises(ConfigError, match="conversion of DeepSeek-V4 does not fit these layers"):
        sparse_provider(SimpleNamespace(hf_pretrained=config))


def test_a_provider_without_weights_is_checked_when_finalized():
    from transformers import AutoConfig

    config = config_of("deepseek_v32")
    kind = config.pop("model_type")
    bridge = AutoBridge.from_hf_config(AutoConfig.for_model(kind, **config))
    provider = sparse_provider(bridge, load_weights=False)
    provider.attention_dropout = 0.1
    with pytest.raises(ConfigError, match="--attention-dropout must be 0"):
        built(provider)
    (model,) = built(provider, attention_dropout=0.0)
    check_model(parse_config(config | {"model_type": kind}), model.config)


def test_bridge_reads_back_the_provider_that_it_saved(tmp_path):
    training = pytest.importorskip(
        "megatron.bridge.training.utils.config_utils",
        reason="Megatron-Bridge's training loop has packages of its own, not all installed here",
        exc_type=ImportError,
    )
    import yaml
    from megatron.bridge.utils.instantiate_utils import instantiate
    from megatron.bridge.utils.yaml_utils import safe_yaml_representers

    config = config_of("glm_moe_dsa", **GLM)
    checkpoint(config, tmp_path)
    options = DSAOptions(health_tokens=3, named=(("indexer_topk", "torch"),))
    provider = sparse_provider(AutoBridge.from_hf_pretrained(tmp_path), options)
    with safe_yaml_representers():
        text = yaml.safe_dump(training._ConfigContainerBase._convert_value_to_dict(provider))
    again = instantiate(yaml.safe_load(text))
    assert type(again) is type(provider) and again.dsa == provider.dsa
    assert again.dsa.latent_norm_epsilon == 1e-6 and again.dsa.health_tokens == 3
    import_model(built(again)[0], tmp_path)
