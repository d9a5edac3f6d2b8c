"""Arguments of a training that rebuild its model in one process."""

import argparse

import pytest

from megatron_dsa.config.fields import option_fields
from megatron_dsa.config.model import DSAOptions
from megatron_dsa.extras.generate.trained_model import adding, taken_over
from megatron_dsa.extras.planner import command
from megatron_dsa.training.setup import model_config_from_args
from tests.host import start

MODELS = {
    "v3.2-tiny": "--rope-type yarn --rotary-scaling-factor 4 --mscale 0.7 --mscale-all-dim 0.8 "
    "--yarn-original-max-position-embeddings 64 --rotary-base 5000 --norm-epsilon 1e-4 "
    "--dsa-latent-norm-epsilon 1e-3 --tensor-model-parallel-size 2 --sequence-parallel "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "v4-tiny": "--dsa-csa-teacher compressed --pipeline-model-parallel-size 2 "
    "--pipeline-model-parallel-layout Ettt|ttmL --dsa-stage dense --hc-eps 1e-5",
}
#: Differences of paths and of the run.
RUN = {
    "tensor_model_parallel_size", "sequence_parallel", "pipeline_model_parallel_size",
    "pipeline_model_parallel_layout", "recompute_granularity", "recompute_method",
    "recompute_num_layers", "pipeline_dtype", "variable_seq_lengths", "batch_p2p_comm", "dsa",
    "expert_tensor_parallel_size", "expert_tensor_parallel_num_weight_shards",
    "tensor_parallel_num_weight_shards", "microbatch_group_size_per_vp_stage",
}  # fmt: skip
TRAINING = "--seq-length 128 --micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 1e-3 "
TRAINING += "--tokenizer-type NullTokenizer --vocab-size 257 --eval-interval 9 --split 9,1,0 "
TRAINING += "--eval-iters 3 --data-path somewhere --seed 11"


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_that_of_the_training(name):
    start()
    flags = ["pretrain", "--dsa-model", name, *TRAINING.split(), *MODELS[name].split()]
    with command.parsed(flags, 4, planning=False) as saved:
        trained = model_config_from_args(saved)
    defaults = taken_over(saved, data=True)
    with command.parsed(["megatron_dsa"], 1, False, adding(defaults)) as args:
        rebuilt = model_config_from_args(args)
    different = {
        key for key, value in vars(trained.transformer).items()
        if value != getattr(rebuilt.transformer, key) and not callable(value)
    }  # fmt: skip
    assert different <= RUN
    assert rebuilt.transformer.tensor_model_parallel_size == 1
    options, others = trained.transformer.dsa, rebuilt.transformer.dsa
    for field in ("stage", "latent_norm_epsilon", "csa_teacher", "sequence_length"):
        assert getattr(options, field) == getattr(others, field)
    for key in ("data_path", "split", "seed", "eval_iters", "eval_global_batch_size", "vocab_size"):
        assert getattr(args, key) == getattr(saved, key)


def test_other_data_take_the_place_of_all_data_of_the_training():
    saved = argparse.Namespace(
        data_path=["a"], valid_data_path=["b"], seq_length=5, num_layers=2,
        dsa_fp8_selection=True,  # of an earlier version
    )  # fmt: skip
    assert taken_over(saved, data=False) == {"seq_length": 5, "num_layers": 2}
    assert taken_over(saved, data=True)["valid_data_path"] == ["b"]


def test_what_transformer_engine_alone_can_is_left_to_the_training():
    saved = argparse.Namespace(
        fp8="hybrid", moe_router_padding_for_quantization=True, moe_router_padding_for_fp8=True,
        fine_grained_activation_offloading=True, offload_modules=["attn_norm"], num_layers=2,
        fine_grained_offloading_max_inflight_offloads=1, delay_offload_until_cuda_graph=True,
        symmetric_ar_type="two_shot", use_te_activation_func=True,
    )  # fmt: skip
    assert taken_over(saved, data=True) == {"num_layers": 2}


def test_every_option_that_changes_the_model_is_taken_over():
    """A new option must be assigned to one of both sides."""
    everything = argparse.Namespace(**{about.dest: 1 for _, about in option_fields(DSAOptions)})
    taken = set(taken_over(everything, data=False))
    assert taken == {
        "dsa_stage", "dsa_latent_norm_epsilon", "dsa_csa_teacher", "dsa_indexer_pool_size",
        "dsa_output_gate",
        "dsa_indexer_numerics", "dsa_kv_rounding", "lora_rank", "lora_alpha", "lora_targets",
    }  # fmt: skip
    assert set(vars(everything)) - taken == {
        "dsa_warmup_train_all", "dsa_strict", "dsa_workspace_mib", "dsa_recompute", "dsa_impl",
        "dsa_health_tokens", "dsa_evaluate_indexer", "dsa_cp_layout", "dsa_cp_exchange",
        "dsa_tp_mode", "dsa_selected_attention", "dsa_fp8_indexer", "dsa_muon_per_head",
        "dsa_indexer_loss_queries", "dsa_indexer_loss_heads", "dsa_indexer_teacher",
    }  # fmt: skip
