"""Plans of jobs: memory like real modules, schedules, checks, the command."""

import contextlib
import os
import re
import shlex
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

from megatron_dsa import specs
from megatron_dsa.config.gpus import GPU, GPUS
from megatron_dsa.errors import ConfigError
from megatron_dsa.extras.planner import chunks
from megatron_dsa.extras.planner.command import dry_run
from megatron_dsa.extras.planner.memory import LIBRARIES
from megatron_dsa.extras.planner.memory_tracker import MemoryTracker
from megatron_dsa.layers import backends
from megatron_dsa.metrics.log import NAMES, IndexerLog
from megatron_dsa.ops import dispatch
from megatron_dsa.ops.compressor.spec import COMPRESSOR
from tests import host
from tests.plans import BF16, CPU, EXPERTS, HYBRID, command, forget_layouts, only_chunk, plan


@pytest.fixture(autouse=True, scope="module")
def no_process_groups():
    """Plans need their own process groups."""
    host.stop()


@pytest.fixture(autouse=True)
def no_layouts_yet():
    """Layout tables are cached per process, and would not be counted again."""
    forget_layouts()


MASKED = {"--dsa-selected-attention": "masked"}
CORE = {"--recompute-granularity": "selective", "--recompute-modules": "core_attn"}
UP = {"--recompute-granularity": "selective", "--recompute-modules": "mla_up_proj"}
HASH = EXPERTS | {"--moe-layer-freq": "[1,1]", "--moe-hash-layers": 1}
WHOLE_V4 = HYBRID | EXPERTS | {
    "--moe-layer-freq": "1", "--moe-hash-layers": 1, "--hc-mult": 4, "--mtp-num-layers": 1,
    "--csa-compress-ratios": "0 4 16 0",
}  # fmt: skip
CASES = {
    "sparse": {},
    "masked": MASKED,
    "masked, dense loss": MASKED | {"--dsa-indexer-use-sparse-loss": None},
    "masked, core recomputed": MASKED | CORE,
    "masked, up projection recomputed": MASKED | UP,
    "dense loss": {"--dsa-indexer-use-sparse-loss": None},
    "warmup": {"--dsa-stage": "warmup"},
    "dense": {"--dsa-stage": "dense"},
    "shared selection": {"--dsa-indexer-topk-freq": 2},
    "hybrid": HYBRID,
    "hybrid warmup": HYBRID | {"--dsa-stage": "warmup"},
    "experts": EXPERTS,
    "hash routing": HASH,
    "hash routing, experts recomputed": HASH
    | {"--recompute-granularity": "selective", "--recompute-modules": "moe"},
    "whole V4": WHOLE_V4,
    "prediction": {"--mtp-num-layers": 1},
    "prediction on streams": {"--mtp-num-layers": 2, "--hc-mult": 4},
    "bf16": {"--bf16": True},
    "engine numerics": BF16 | {"--dsa-indexer-numerics": "deepgemm-fp8"},
    "engine numerics of V4": HYBRID | BF16 | {"--dsa-indexer-numerics": "deepgemm-fp8"},
    "cached keys": BF16 | {"--dsa-kv-rounding": "fp8-cache", "--kv-lora-rank": 128},
    "core recomputed": CORE,
    "up projection recomputed": UP,
    "all recomputed": {
        "--recompute-granularity": "full",
        "--recompute-method": "uniform",
        "--recompute-num-layers": 1,
    },
}


def test_fp8_is_planned_as_bf16(monkeypatch):
    engine = BF16 | {"--transformer-impl": "transformer_engine"}
    fp8 = {
        "--fp8-format": "e4m3", "--fp8-recipe": "blockwise", "--fp8-param-gather": True,
        "--use-distributed-optimizer": True, "--dsa-fp8-indexer": True, "--dsa-indexer-n-heads": 8,
    }  # fmt: skip
    backend = specs.get_backend
    monkeypatch.setattr(specs, "get_backend", lambda _kind: backend("local"))
    same = {"--use-distributed-optimizer": True, "--dsa-indexer-n-heads": 8}
    expected, found = plan(engine | same), plan(engine | fp8)
    assert found.config.fp8 == "e4m3" and found.config.dsa.fp8_indexer
    # The first plan of a process builds tables that the second one finds.
    for size in ("weights", "gradients", "optimizer", "activations", "step"):
        got, wanted = (getattr(each.stages[0].memory, size) for each in (found, expected))
        assert got == pytest.approx(wanted, rel=1e-5), size
    assert set(found.remarks) - set(expected.remarks) == {"FP8 and FP4 are planned as bf16"}


def test_a_storage_that_is_emptied_counts_no_more():
    """Megatron empties storages that it recomputes."""
    with MemoryTracker() as tracker:
        x = torch.empty(1000, device="meta")
        before = tracker.restart()
        x.untyped_storage().resize_(0)
        assert tracker.live == before - 4000
        x.untyped_storage().resize_(4000)
        y = torch.empty(10, device="meta")
        assert tracker.live == tracker.peak == before + 40
        del x, y
    assert tracker.live == 0


class Term(torch.autograd.Function):
    """Its gradient is a new tensor, passed to ``seen``."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return x.new_zeros(())

    @staticmethod
    def backward(ctx, gradient):
        new = gradient.new_zeros(1000)
        ctx.seen(new)
        return new, None


class OwnSum(torch.autograd.Function):
    """Adds two tensors in its backward."""

    @staticmethod
    def forward(ctx, x):
        return x.new_zeros(())

    @staticmethod
    def backward(ctx, gradient):
        return gradient.new_zeros(1000) + gradient.new_zeros(1000)


def terms(x, count, seen=lambda _: None):
    return sum(Term.apply(x, seen) for _ in range(count))


#: Differentiated function, and tensors that its backward holds at once.
SUMS = {
    "one term": (lambda x, kept: terms(x, 1), 1),
    "two terms": (lambda x, kept: terms(x, 2), 2),
    "three terms": (lambda x, kept: terms(x, 3), 2),
    "two terms that stay": (lambda x, kept: terms(x, 2, kept.append), 3),
    # The first sum is a new tensor, the second is accumulated into it.
    "three terms that stay": (lambda x, kept: terms(x, 3, kept.append), 4),
    "a node in Python": (lambda x, kept: OwnSum.apply(x), 3),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_gradients(name):
    """Autograd accumulates into a term without other references; a node's own sum is new."""
    differentiate, expected = SUMS[name]
    x = torch.zeros(1000, device="meta", requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda x: setattr(x, "grad", None))
    loss = differentiate(x, [])
    tracker = MemoryTracker()
    with tracker:
        loss.backward()
    assert tracker.peak == expected * x.nbytes + 4  # and the gradient of the loss


def test_autograd_writes_sums_to_terms():
    for mode, is_written in ((contextlib.nullcontext(), True), (MemoryTracker(), False)):
        x, places = torch.zeros(1000, requires_grad=True), []
        loss = terms(x, 2, lambda term, places=places: places.append(term.data_ptr()))
        x.register_hook(lambda sum_, places=places: places.append(sum_.data_ptr()))
        with mode:
            loss.backward()
        assert (places[2] in places[:2]) == is_written


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, real modules take other kernels")
@pytest.mark.parametrize("name", CASES)
def test_what_is_kept_is_what_real_modules_keep(name, monkeypatch):
    # Wide enough that saved tensors outweigh tables and masks.
    changes = {"--seq-length": 192, "--max-position-embeddings": 192, "--dsa-workspace-mib": 1}
    changes |= CASES[name]
    expected = only_chunk(plan(changes, gpu=CPU))

    measure = chunks._measure

    def with_values(args, chunk, names):
        with torch.no_grad():
            for parameter in chunk.parameters():
                torch.nn.init.normal_(parameter, std=0.02)
        return measure(args, chunk, names)

    monkeypatch.setattr(chunks, "_measure", with_values)
    real = only_chunk(plan(changes, gpu=CPU, device=torch.device("cpu")))
    assert expected.kept == pytest.approx(real.kept, rel=0.02)
    for layer, real_layer in zip(expected.layers, real.layers, strict=True):
        assert layer.kept == pytest.approx(real_layer.kept, rel=0.03), layer
    # Fakes of kernels take the whole workspace, torch's implementations only what they need.
    workspace = 2**20
    assert real.forward_peak - 0.02 * real.kept <= expected.forward_peak
    assert expected.forward_peak <= real.forward_peak + workspace
    assert abs(expected.backward_peak - real.backward_peak) <= 0.05 * real.kept + workspace


def test_tally_counts_what_autograd_saves():
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(64, 32, requires_grad=True)
    weight = torch.randn(16, 32, requires_grad=True)
    tracker = MemoryTracker()
    tracker.ignore(x, weight)
    with tracker, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = torch.nn.functional.silu(x @ weight.t()).square().sum()
    own = {x.untyped_storage().data_ptr(), weight.untyped_storage().data_ptr()}
    expected = sum(size for place, size in saved.items() if place not in own)
    assert tracker.live == expected + out.nbytes
    assert tracker.peak >= tracker.live
    del out
    assert tracker.live <= expected


TENSOR = {"--tensor-model-parallel-size": 2, "--sequence-parallel": True}


@pytest.mark.parametrize("attention", ["sparse", "masked"])
def test_exchanged_bytes_are_those_of_the_documented_formula(attention):
    # docs/guide/parallelism.md, with the tiny model's widths.
    changes = {"--context-parallel-size": 2, "--dsa-selected-attention": attention}
    one = plan(BF16 | changes | {"--global-batch-size": 2}, world=2)
    assert one.attention.masked == (attention == "masked")
    latent, index = 32 + 8, 16
    per_token = latent * (2 + 4) + index * (2 + 4)
    tokens, layers = 2 * 96, 2
    assert one.stages[0].received["context"] == layers * tokens // 2 * per_token


def test_weights_gradients_and_states_of_the_distributed_optimizer():
    changes = BF16 | {"--use-distributed-optimizer": True}
    one, four = plan(changes), plan(changes, world=4)
    numbers = sum(weights.count for weights in only_chunk(one).weights)
    for each, ranks in ((one, 1), (four, 4)):
        memory = each.stages[0].memory
        assert (memory.weights, memory.gradients) == (2 * numbers, 4 * numbers)
        assert memory.optimizer == pytest.approx(12 * numbers / ranks, rel=1e-3)
        assert memory.peak == (
            memory.weights + memory.gradients + memory.optimizer + LIBRARIES
            + max(memory.activations, memory.step)
        )  # fmt: skip
    plain = plan(BF16, world=4).stages[0].memory
    assert plain.optimizer == one.stages[0].memory.optimizer
    # Gradients are reduced and parameters gathered: 3 / 4 of each come from other ranks.
    assert four.stages[0].received["data"] == round(numbers * (4 + 2) * 3 / 4)


def test_frozen_weights_have_no_gradients():
    memory = plan(BF16 | {"--dsa-stage": "warmup"}).stages[0].memory
    assert 0 < memory.gradients < memory.weights / 2


def test_experts_are_divided_and_their_tokens_travel():
    changes = BF16 | EXPERTS | {"--expert-model-parallel-size": 4}
    alone, sharding = plan(BF16 | EXPERTS, world=4), plan(changes, world=4)
    assert sharding.stages[0].memory.weights < alone.stages[0].memory.weights
    # There and back, forward and backward: hidden states (64) of two experts each, 3 / 4 remote;
    # and their probabilities (fp32).
    hidden = 2 * 96 * 2 * 64 * 2 * 3 // 4
    assert sharding.stages[0].received["expert"] == pytest.approx(4 * hidden, rel=0.05)


def test_a_machine_with_transformer_engine_plans_alike(monkeypatch):
    """Its routers need a GPU, and it fuses gradient accumulation."""
    from megatron.core.transformer.moe import moe_utils

    # Without --transformer-impl local and its consequences.
    job = {name: value for name, value in (BF16 | EXPERTS).items() if "impl" not in name}
    job |= {"--moe-router-dtype": "fp32", "--no-gradient-accumulation-fusion": None}
    expected = plan(job)
    presets = "megatron_dsa.training.preset_flags.why_not_transformer_engine"
    monkeypatch.setattr(presets, lambda has_gpu: None)
    monkeypatch.setattr(backends, "_te_backend", lambda: None)  # queried for importability
    monkeypatch.setattr(moe_utils, "te_general_gemm", mock.Mock(side_effect=RuntimeError("no GPU")))
    found = plan(job)
    assert found.stages[0].memory == expected.stages[0].memory
    assert any("local layers" in remark for remark in found.remarks)


NORMS = {"--recompute-granularity": "selective", "--recompute-modules": "core_attn layernorm"}


@pytest.mark.parametrize(
    ("flags", "same"),
    [
        (NORMS, NORMS | {"--recompute-modules": "core_attn"}),
        ({"--te-precision-config-file": "precision.yaml"}, {}),
        ({"--apply-layernorm-1p": True}, {}),
        (
            EXPERTS | {"--fp8-format": "e4m3", "--fp8-recipe": "blockwise",
                       "--moe-router-padding-for-quantization": True},
            EXPERTS,
        ),
    ],
    ids=["norms recomputed", "precision of linears", "norms around one", "tokens padded"],
)  # fmt: skip
def test_what_transformer_engine_alone_can_is_planned(flags, same, tmp_path, monkeypatch):
    """A plan's local layers would reject these flags."""
    from megatron.core.transformer import transformer_config

    (tmp_path / "precision.yaml").write_text("configs: {}\nmatchers: {}\n")
    monkeypatch.chdir(tmp_path)
    backend = specs.get_backend
    monkeypatch.setattr(specs, "get_backend", lambda _kind: backend("local"))
    monkeypatch.setattr(transformer_config, "is_te_min_version", lambda *_args: True)
    engine = BF16 | {"--transformer-impl": "transformer_engine"}
    expected, found = plan(engine | same), plan(engine | flags)
    for size in ("weights", "gradients", "optimizer", "activations", "step"):
        got, wanted = (getattr(each.stages[0].memory, size) for each in (found, expected))
        assert got == pytest.approx(wanted, rel=1e-5), size
    counted = any("layernorm is not counted" in remark for remark in found.remarks)
    assert counted == (flags is NORMS)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"--fine-grained-activation-offloading": True, "--offload-modules": "attn_norm"},
         "--fine-grained-activation-offloading cannot be planned"),
        (EXPERTS | {"--moe-latent-size": 16}, "--moe-latent-size cannot be planned"),
        ({"--pipeline-model-parallel-size": 2, "--defer-embedding-wgrad-compute": True},
         "--defer-embedding-wgrad-compute needs Apex's kernel"),
    ],
)  # fmt: skip
def test_what_a_plan_cannot_build_of_transformer_engine_is_named(flags, message, monkeypatch):
    presets = "megatron_dsa.training.preset_flags.why_not_transformer_engine"
    monkeypatch.setattr(presets, lambda has_gpu: None)
    monkeypatch.setattr("megatron_dsa.patches.cpu_host.needed", lambda: False)
    backend = specs.get_backend
    monkeypatch.setattr(specs, "get_backend", lambda _kind: backend("local"))
    job = {name: value for name, value in BF16.items() if "accumulation" not in name}
    with pytest.raises(ConfigError, match=message):
        plan(job | {"--transformer-impl": "transformer_engine"} | flags, world=2)


def test_routers_are_planned_unfused(monkeypatch):
    """transformer-engine's router kernel needs a GPU."""
    from megatron.core.transformer.moe import moe_utils

    job = BF16 | EXPERTS
    expected = plan(job)
    with pytest.raises(ValueError, match="fused_topk_with_score_function is not available"):
        plan(job | {"--moe-router-fusion": True})
    kernel = mock.Mock(side_effect=RuntimeError("no GPU"))
    monkeypatch.setattr(moe_utils, "HAVE_TE", True)
    monkeypatch.setattr(moe_utils, "fused_topk_with_score_function", kernel)
    found = plan(job | {"--moe-router-fusion": True})
    assert found.stages[0].memory == expected.stages[0].memory


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ({}, 2 + 4 + 4),  # 16 bits missing in the weight, and moments
        ({"--exp-avg-dtype": "bf16", "--exp-avg-sq-dtype": "bf16"}, 2 + 2 + 2),
        ({"--main-params-dtype": "fp16"}, 2 + 4 + 4),
        ({"--fp8-recipe": "blockwise"}, 4 + 4 + 4),  # kept by Megatron
    ],
)
def test_states_of_the_precision_aware_optimizer(flags, size, monkeypatch):
    """transformer-engine's, required at the job's start, not by the plan."""
    job = BF16 | {"--use-precision-aware-optimizer": True, "--use-distributed-optimizer": True}
    memory = plan(job | flags).stages[0].memory
    assert memory.optimizer == memory.weights // 2 * size


def test_tables_of_hash_routing_are_buffers():
    learned, hashed = (plan(c) for c in (HASH | {"--moe-hash-layers": None}, HASH))
    before, after = (p.stages[0].memory for p in (learned, hashed))
    assert after.weights - before.weights == 264 * 2 * 4
    assert (after.gradients, after.optimizer) == (before.gradients, before.optimizer)
    assert hashed.operations == learned.operations
    kinds = [layer.kind for layer in only_chunk(hashed).layers]
    assert kinds == [
        "DSA with indexer; 8 experts, looked up by token", "DSA with indexer; 8 experts",
    ]  # fmt: skip


@pytest.mark.parametrize("virtual", [False, True])
def test_microbatches_in_flight(virtual):
    changes = BF16 | {"--num-layers": 8, "--pipeline-model-parallel-size": 4}
    changes |= {"--global-batch-size": 16}
    if virtual:
        changes["--num-layers-per-virtual-pipeline-stage"] = 1
    stages_of_plan = plan(changes, world=4).stages
    for rank, stage in enumerate(stages_of_plan):
        extra = max(max(c.forward_peak, c.backward_peak) - c.kept for c in stage.chunks)
        if virtual:
            # (4 - 1 - rank) * 2 in the warm-up, all microbatches of a group in the first chunk, and
            # one in progress; chunks keep about the same.
            flying = 2 * (3 - rank) + 4 + 1
            assert len(stage.chunks) == 2
        else:
            flying = min(4 - rank, 8)
        kept = max(c.kept for c in stage.chunks)
        least = min(c.kept for c in stage.chunks)
        assert flying * least <= stage.memory.activations <= flying * kept + extra


@pytest.mark.parametrize("streams", [1, 4])
def test_what_stages_exchange(streams):
    changes = BF16 | {"--num-layers": 2, "--mtp-num-layers": 2, "--hc-mult": streams}
    changes |= {"--pipeline-model-parallel-size": 4}
    changes |= {"--pipeline-model-parallel-layout": "Et|t|mm|L"}
    hidden = 4 * 96 * 2 * 64 * 2  # of four microbatches, two sequences each
    links = [streams, 1 + streams * (streams > 1), 1 + 2]
    stages_of_plan = plan(changes, world=4).stages
    for rank, stage in enumerate(stages_of_plan):
        neighbours = links[max(rank - 1, 0) : rank + 1] if rank else links[:1]
        assert stage.received["pipeline"] == sum(neighbours) * hidden, rank
    apart = {"--pipeline-model-parallel-size": 2, "--pipeline-model-parallel-layout": "Ett|mmL"}
    for stage in plan(changes | apart, world=2).stages:
        assert stage.received["pipeline"] == links[1] * hidden


@pytest.mark.parametrize(
    "changes, world, message",
    [
        ({"--tensor-model-parallel-size": 3}, 4, "not divisible by total_model_size"),
        ({"--context-parallel-size": 4, "--seq-length": 92}, 4, "multiple of"),
        (
            {"--num-layers": 4, "--pipeline-model-parallel-size": 2, "--dsa-indexer-topk-freq": 3},
            2,
            "index sharing does not cross pipeline stages",
        ),
        (
            HASH | {"--pipeline-model-parallel-size": 2, "--moe-hash-layers": 2},
            2,
            "must lie on the first pipeline stage",
        ),
        ({"--dsa-strict": True}, 1, "--dsa-strict refuses the fallback"),
        ({"--dsa-impl": "sparse_attention_backward=tilelang"}, 1, "needs dims"),
        ({"--vocab-size": None, "--padded-vocab-size": None}, 1, "--vocab-size"),
        (
            {"--micro-batch-size": 4, "--global-batch-size": 8},
            8,
            "--global-batch-size (8) must be a multiple of --micro-batch-size (4) times 8 data",
        ),
    ],
)
def test_a_plan_that_does_not_hold_says_why(changes, world, message, capsys):
    with mock.patch.dict(os.environ, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}):
        argv = [*command(BF16 | changes), "--dsa-dry-run", "--dsa-dry-run-world", str(world)]
        assert dry_run(argv) == 2
    assert message in capsys.readouterr().err


def test_the_pipeline_rank_of_an_error_is_named(capsys):
    changes = {"--num-layers": 4, "--pipeline-model-parallel-size": 2, "--dsa-indexer-topk-freq": 3}
    assert dry_run([*command(BF16 | changes), "--dsa-dry-run-world", "2"]) == 2
    assert "(pipeline rank 1)" in capsys.readouterr().err


def test_out_of_memory(capsys, monkeypatch):
    small = GPU("NVIDIA H200", (9, 0), 0.3)
    monkeypatch.setitem(GPUS, "h200", small)
    assert dry_run(command(BF16)) == 1
    captured = capsys.readouterr()
    assert "out of memory: pipeline rank 0" in captured.err and "plan for 1 x" in captured.out
    assert re.match(r"does not fit, 0\.\d of 0\.3 GiB\n", captured.out)


def test_what_is_printed(capsys):
    changes = BF16 | TENSOR | HYBRID | {"--global-batch-size": 4}
    with mock.patch.dict(os.environ, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}):
        assert dry_run([*command(changes), "--dsa-dry-run-world", "2"]) == 0
    out = capsys.readouterr().out
    for part in (
        "plan for 2 x NVIDIA H200: TP 2 (attention by sequence), DP 1",
        "0: embedding | layer 1: window; dense MLP | layer 2: CSA (ratio 4) with indexer;",
        "compressor: ",
        " in layers 2-3",
        "not flashmla: ",
        "GFLOP per token",
        "tensor ",
    ):
        assert part in out, part


def test_the_flags_of_the_guide_are_planned_for_eight_gpus(capsys):
    page = (Path(__file__).parents[4] / "docs/guide/start.md").read_text(encoding="utf-8")
    flags = shlex.split(re.search(r"^flags=\((.*?)^\)$", page, re.M | re.S)[1])
    status = dry_run(["pretrain", *flags, "--dsa-dry-run", "--dsa-dry-run-world", "8"])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    first, second = captured.out.splitlines()[:2]
    assert re.fullmatch(r"fits, 0\.\d of [\d.]+ GiB", first)
    assert second.startswith("plan for 8 x ") and "DP 8" in second


def test_nothing_is_left_behind(monkeypatch):
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.multi_token_prediction import (
        MTPLossAutoScaler,
        MTPLossLoggingHelper,
    )

    # As after a training in this process.
    logged = {"loss_values": torch.ones(1)}
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", logged)
    monkeypatch.setattr(get_moe_metrics_tracker(), "_metrics", {"load_balancing_loss": None})
    scales = [torch.ones(1), torch.ones(1)]
    scalers = MTPLossAutoScaler, MoEAuxLossAutoScaler
    for scaler, scale in zip(scalers, scales, strict=True):
        monkeypatch.setattr(scaler, "main_loss_backward_scale", scale)
    stream = MoEAlltoAllTokenDispatcher.cuda_dtoh_stream
    before = torch.cuda.current_device, dict(os.environ), _get_current_function_mode_stack()
    changes = EXPERTS | {"--mtp-num-layers": 1, "--moe-aux-loss-coeff": 0.1}
    plan(BF16 | changes | {"--deterministic-mode": True})
    assert not torch.distributed.is_initialized() and not parallel_state.is_initialized()
    assert not dispatch.on_meta() and not dispatch.deterministic_mode()
    after = torch.cuda.current_device, dict(os.environ), _get_current_function_mode_stack()
    assert after == before
    assert MoEAlltoAllTokenDispatcher.cuda_dtoh_stream is stream
    assert get_moe_metrics_tracker().metrics == {"load_balancing_loss": None}
    assert all(s.main_loss_backward_scale is x for s, x in zip(scalers, scales, strict=True))
    assert MTPLossLoggingHelper.tracker is logged and logged == {"loss_values": torch.ones(1)}
    assert torch.empty(1, device="cpu").device.type == "cpu"


def test_flags_of_weights_are_no_part_of_a_plan():
    assert plan(BF16 | {"--dsa-load-hf": "nowhere", "--dsa-hf-without": "hash-routing"}).stages


def test_a_model_of_this_process_keeps_its_log(monkeypatch):
    sums = torch.zeros(1, len(NAMES))
    monkeypatch.setattr(IndexerLog._state, "sums", sums)
    plan(BF16)
    assert IndexerLog._state.sums is sums and not sums.any()


def test_what_a_plan_chose_is_chosen_anew_and_logged_by_a_run(add, monkeypatch, caplog):
    """Its fakes may have chosen without the GPU for an equal call."""
    asked = []
    add("compressor", lambda torchs: torchs, probe=lambda _: asked.append(dispatch.on_meta()))
    monkeypatch.setattr(dispatch.choice_log, "_logged", set())
    caplog.set_level("INFO", "megatron_dsa.ops.dispatch")
    shape = {"heads": 4, "qk_dim": 16, "v_dim": 16, "dtype": torch.float32}
    call = dispatch.describe_call("cpu", **shape)
    with dispatch.meta_dispatch(None):
        COMPRESSOR.choose(call, dispatch.Policy())
    assert asked == [True] and not caplog.messages
    COMPRESSOR.choose(call, dispatch.Policy())
    assert asked == [True, False] and len(caplog.messages) == 1


def test_a_job_with_cuda_graphs_is_planned_uncaptured():
    """Megatron's graph managers need a GPU."""
    captured, plain = plan(BF16 | {"--cuda-graph-impl": "local"}), plan(BF16)
    assert captured.stages[0].memory == plain.stages[0].memory
    assert [remark for remark in captured.remarks if "CUDA graphs" in remark]
    assert captured.config.cuda_graph_impl == "local"
