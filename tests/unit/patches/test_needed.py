"""Every repair of a defect of Megatron is needed by the versions in the table, and helps.

A probe returns True if the defect shows. It runs with and without its patch, in separate processes.
If upstream fixes a defect, its test fails: narrow ``versions`` of the patch.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_dsa import patches
from megatron_dsa.config.extras import load_extra
from megatron_dsa.patches import cpu_host
from megatron_dsa.versions import host_version
from tests.processes import python_path, run_ranks

GPU = torch.cuda.is_available()


def fails(call, *errors: type[BaseException]) -> bool:
    try:
        call()
    except errors:
        return True
    return False


def no_gpu(_):
    from megatron.core.utils import GlobalMemoryBuffer

    patches.install("no GPU")
    buffer = GlobalMemoryBuffer()
    return fails(lambda: buffer.get_tensor((1,), torch.float32, "x"), RuntimeError, AssertionError)


ENGINE = """
import torch
from megatron_dsa import patches
torch.cuda.is_available = lambda: True
patches.TABLE["transformer-engine"] = patches.TABLE["transformer-engine"]._replace(versions={!r})
patches.install("transformer-engine")
import megatron.core.fp8_utils
"""


def engine(folder):
    metadata = folder / "transformer_engine-2.20.2.dist-info" / "METADATA"
    package = folder / "transformer_engine" / "__init__.py"
    for file in (metadata, package):
        file.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.20.2\n")
    package.write_text("raise OSError('libnccl.so.2: cannot open')")
    program = ENGINE.format(patches.TABLE["transformer-engine"].versions)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": python_path(folder)},
    )  # fmt: skip
    return done.returncode != 0 and "OSError: libnccl" in done.stderr


def dataset_helper(_):
    from megatron.core.datasets import utils

    patches.install("dataset helper")
    return fails(utils.compile_helpers, SystemExit)


def tracker_file(folder):
    from megatron.training import checkpointing

    from megatron_dsa.training.checkpoint_files import read_tracker

    patches.install("tracker file", read_tracker)
    tracker = Path(checkpointing.get_checkpoint_tracker_filename(str(folder)))
    tracker.write_text("1")
    with checkpointing.maybe_msc.open(str(tracker), "w") as file:
        killed_now_leaves = tracker.read_text()
        file.write("2")
    return not killed_now_leaves


def checkpoint_metadata(folder):
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
    from torch.distributed.checkpoint import metadata

    patches.install("checkpoint metadata")
    properties = metadata.TensorProperties()
    properties.strides = (1,)  # torch 2.15
    tensor = metadata.TensorStorageMetadata(properties, torch.Size([2]), [])
    saved = metadata.Metadata({"a": tensor})
    strategy = TorchDistLoadShardedStrategy()
    return fails(lambda: strategy.load_tensors_metadata(folder, saved), TypeError)


def bucket_padding(_):
    from tests.cases.optimizers import build, sharded_model, step

    model, optimizer = build(torch.float32, True)
    step(model, optimizer, 1)
    kind = {"distrib_optim_sharding_type": "fully_reshardable"}
    state = optimizer.sharded_state_dict(sharded_model(model), metadata=kind)
    moments = [tensors["exp_avg"] for tensors in state["param_state"].values()]
    gradients = {f"optimizer.state.exp_avg.decoder.layers.{name}": parameter.main_grad.cpu()
                 for name, parameter in model.module.named_parameters()}  # fmt: skip
    return not all(torch.allclose(m.data, 0.1 * gradients[m.key], rtol=1e-5) for m in moments)


def empty_optimizers(_):
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer

    patches.install("empty optimizers")
    inner = torch.optim.Adam([torch.zeros(1)])
    FP32Optimizer(inner, OptimizerConfig(optimizer="adam"), lambda *_: None)
    inner.param_groups[0]["params"] = []
    inner.step()
    return "step" not in inner.param_groups[0]


def empty_stages(folder):
    from tests import host

    host.start()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    patches.install("empty stages")
    one, two = (ShardedTensor.from_rank_offsets(name, torch.zeros(2)) for name in "ab")
    dist_checkpointing.save({"model": {"w": one}, "rest": two}, str(folder))
    return "model" not in dist_checkpointing.load({"model": {}, "rest": two}, str(folder))


def resumed(folder, distributed, **settings):
    from tests.cases.optimizers import FORMATS, build, save_and_load, step

    model, optimizer = build(torch.float32, distributed, **settings)
    step(model, optimizer, 1)
    metadata = FORMATS["distributed" if distributed else "plain"][1]
    other = build(torch.float32, distributed, seed=1, **settings)
    metadata = {**metadata, "chained_optim_avoid_prefix": True}
    save_and_load(model, optimizer, *other, folder, metadata)


def optimizer_steps(folder):
    return fails(lambda: resumed(folder, True), AssertionError)


def sgd_momentum(folder):
    return fails(lambda: resumed(folder, False, optimizer="sgd"), TypeError)


def fp32_plain(_):
    from tests.cases.optimizers import check_moments, mixed

    module, optimizer = mixed(False)
    return fails(lambda: check_moments(module, optimizer), Exception)


def fp32_distributed(_):
    from tests.cases.optimizers import mixed

    module, optimizer = mixed(True)

    def states():
        for parameter in module.parameters():
            moment = optimizer._get_main_param_and_optimizer_states(parameter)["exp_avg"]
            assert torch.allclose(moment, 0.1 * parameter.main_grad.flatten().float(), rtol=1e-5)

    return fails(states, Exception)


def packed_targets(_):
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    patches.install("packed targets")
    real, padded = torch.tensor([0, 2, 4]).int(), torch.tensor([0, 4, 8]).int()
    params = PackedSeqParams("thd", real, real, padded, padded)
    rolled, _ = roll_tensor(torch.arange(1, 9)[None], packed_seq_params=params)
    return rolled[0].tolist() != [2, 0, 0, 0, 6, 0, 0, 0]


def prediction_loss(_):
    """Two targets count on one rank, one on the other."""
    from megatron.core.transformer import multi_token_prediction as mtp

    patches.install("prediction loss")
    rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD
    config = SimpleNamespace(
        mtp_num_layers=1, mtp_detach_heads=False, mtp_loss_scaling_factor=1.0,
        calculate_per_token_loss=False,
    )  # fmt: skip
    hidden = torch.ones(8, 1, 1, requires_grad=True)
    # Two chunks of two tokens a rank; the last token of the sequence has no target.
    mask = torch.tensor([[0.0, 1.0, 1.0, 1.0]] if rank == 0 else [[0.0] * 4])
    out = mtp.process_mtp_loss(
        hidden, torch.zeros(1, 4, dtype=torch.long), mask, lambda x, **_: (x, None), None, False,
        False, lambda _labels, logits: logits[..., 0].T, config, cp_group=group,
    )  # fmt: skip
    (out.sum() * 0).backward()
    seen = {round(float(x), 6) for x in hidden.grad[4:].unique() if x}
    gathered = [None, None]
    torch.distributed.all_gather_object(gathered, seen)
    return len(set().union(*gathered)) > 1


def token_ids(_):
    from tests.cases.hash_routing import config_of, ids_of, model_of, run

    model = model_of(config_of())
    return fails(lambda: run(model, ids_of()), Exception)


def stream_pipelines(_):
    from megatron.core.pipeline_parallel import p2p_communication

    received = []

    def record(*, tensor_recv_prev, **_):
        received.append(tensor_recv_prev() if callable(tensor_recv_prev) else tensor_recv_prev)
        return []

    patches.install("stream pipelines")
    config = SimpleNamespace(
        hc_mult=2, variable_seq_lengths=False, mtp_standalone=False, pipeline_dtype=torch.float32,
        use_ring_exchange_p2p=True, batch_p2p_comm=False, batch_p2p_sync=False,
    )  # fmt: skip
    p2p_communication.torch.distributed.ring_exchange = record
    communicator = object.__new__(p2p_communication.P2PCommunicator)
    vars(communicator).update(config=config, pp_group=None, prev_rank=0, next_rank=0)
    got, *_ = communicator._communicate(
        tensor_send_next=None, tensor_send_prev=None, recv_prev=True, recv_next=False,
        tensor_shape=(3, 1, 8),
    )  # fmt: skip
    return got.shape[-1] == 8


def prediction_blocks(_):
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock

    from tests.cases.models import gpt
    from tests.host import small_config

    try:
        model = gpt(small_config(dtype=torch.float32, mtp_num_layers=1, hc_mult=2))
    except Exception:
        return True
    return type(model.mtp) is MultiTokenPredictionBlock


def prediction_without_engine(_):
    from tests.cases.models import gpt
    from tests.host import small_config

    return fails(lambda: gpt(small_config(dtype=torch.float32, mtp_num_layers=1)), TypeError)


def unfused_linears(_):
    from tests.host import small_config

    config = small_config(dtype=torch.float32)
    config.gradient_accumulation_fusion = True
    from megatron.core.tensor_parallel import layers

    patches.install("unfused linears")
    settings = {"config": config, "init_method": torch.nn.init.zeros_, "bias": False}
    return fails(lambda: layers.ColumnParallelLinear(8, 6, **settings), RuntimeError)


def graph_buffers(_):
    from megatron.core.transformer import cuda_graphs

    released = []
    cuda_graphs.make_weakref = lambda x: released.append(x) or x
    patches.install("graph buffers")
    x = torch.ones(3, requires_grad=True)
    x.cg_buffer_metadata = cuda_graphs.CudagraphBufferMetadata(is_cudagraph_input=True)
    runner = SimpleNamespace(
        fwd_graph_input_surface=[x], fwd_graph_input_args=[], fwd_graph_input_kwargs={},
        fwd_graph_outputs=[], fwd_graph_output_surface=[],
    )  # fmt: skip
    cuda_graphs._CudaGraphRunner._weakref_forward_buffers(runner, True)
    return bool(released)


def layer_wise_gather(_):
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

    patches.install("layer-wise gather")
    rank = torch.distributed.get_rank()
    parts = [torch.zeros(2), torch.zeros(3, dtype=torch.bfloat16)]
    parts[rank] += rank + 1
    optimizer = object.__new__(LayerWiseDistributedOptimizer)
    group = torch.distributed.group.WORLD
    vars(optimizer).update(
        dp_cp_params_list=[[part] for part in parts], expt_dp_params_list=None,
        pg_collection=SimpleNamespace(dp_cp=group, expt_dp=group), dp_cp=group, expt_dp=group,
    )  # fmt: skip
    if fails(optimizer.allgather_params, RuntimeError, ValueError):
        return True
    return [part.float().max().item() for part in parts] != [1.0, 2.0]


#: Entry of the table -> its probe and the number of processes.
PROBES = {
    "no GPU": (no_gpu, 1),
    "transformer-engine": (engine, 1),
    "dataset helper": (dataset_helper, 1),
    "tracker file": (tracker_file, 1),
    "checkpoint metadata": (checkpoint_metadata, 1),
    "bucket padding": (bucket_padding, 1),
    "empty optimizers": (empty_optimizers, 1),
    "empty stages": (empty_stages, 1),
    "optimizer steps": (optimizer_steps, 1),
    "SGD momentum": (sgd_momentum, 1),
    "fp32 checkpoints, plain": (fp32_plain, 1),
    "fp32 checkpoints": (fp32_distributed, 1),
    "packed targets": (packed_targets, 1),
    "prediction loss": (prediction_loss, 2),
    "token ids": (token_ids, 1),
    "stream pipelines": (stream_pipelines, 1),
    "prediction blocks": (prediction_blocks, 1),
    "prediction without engine": (prediction_without_engine, 1),
    "unfused linears": (unfused_linears, 1),
    "graph buffers": (graph_buffers, 1),
    "layer-wise gather": (layer_wise_gather, 2),
}
#: Probes of defects that do not show on every machine.
MACHINES = {
    "no GPU": not GPU,
    "transformer-engine": not GPU,
    "prediction without engine": importlib.util.find_spec("transformer_engine") is None,
    "unfused linears": importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None,
}


def probe(rank: int, ranks: int, name: str, patched: bool, folder: Path) -> None:
    if name == "layer-wise gather":
        load_extra("muon.patch", "--optimizer muon")
    if not patched:
        patches.TABLE[name] = patches.TABLE[name]._replace(versions="<0")
    if cpu_host.needed() and name != "no GPU":
        cpu_host.activate()
    if ranks > 1:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
        )
    shows = PROBES[name][0](folder)
    if rank == 0:
        (folder / "shows").write_text(str(shows))


def test_every_defect_of_megatron_has_a_probe():
    load_extra("muon.patch", "--optimizer muon")
    defects = {name for name, patch in patches.TABLE.items() if patch.upstream != patches.OURS}
    assert defects <= set(PROBES) <= set(patches.TABLE)


@pytest.mark.parametrize("name", PROBES)
def test_needed_and_enough(name, tmp_path):
    if not MACHINES.get(name, True):
        pytest.skip("this machine does not show it")
    if name == "layer-wise gather":
        pytest.importorskip("emerging_optimizers", minversion="0.3")
        load_extra("muon.patch", "--optimizer muon")
    shows = {}
    for patched in (False, True):
        folder = tmp_path / str(patched)
        folder.mkdir()
        ranks = PROBES[name][1]
        run_ranks(probe, (ranks, name, patched, folder), ranks)
        shows[patched] = (folder / "shows").read_text() == "True"
    needed = patches.TABLE[name].applies()
    assert shows == {False: needed, True: False}, f"megatron-core {host_version()}: {shows}"
