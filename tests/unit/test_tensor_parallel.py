"""Two tensor-parallel ranks in one process each: same selection, same gradients as one rank."""

import os
import tempfile

import torch

from tests.helpers import relative_error

ROWS = 64


def _worker(rank, world, store, folder):
    from megatron_dsa import cpu_host

    if cpu_host.needed():
        cpu_host.activate()
    torch.set_num_threads(1)
    from megatron.core import parallel_state, tensor_parallel

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world
    )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    from megatron_dsa import dsa
    from tests import host

    host.start = lambda: torch.device("cpu")
    config = host.small_config(
        tensor_model_parallel_size=world, sequence_parallel=world > 1, use_cpu_initialization=True
    )
    module = host.attention_module(config, full=_slice_for(rank, world)).train()
    seen = []
    original = dsa.indexer_topk
    dsa.indexer_topk = lambda *a, **k: seen.append(original(*a, **k)) or seen[-1]
    x = host.hidden_like(module, ROWS).detach().chunk(world)[rank].requires_grad_()
    out, _ = module(x, None)
    out.square().sum().backward()
    gradients = {n: p.grad for n, p in module.named_parameters()}
    for name, parameter in module.named_parameters():
        if getattr(parameter, "sequence_parallel", False) and world > 1:
            torch.distributed.all_reduce(gradients[name])
    torch.save(
        {"indices": seen[0][0], "out": out.detach(), "dx": x.grad, "gradients": gradients},
        f"{folder}/{world}-{rank}.pt",
    )
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


#: How a full weight is cut: by rows, by columns, by rows of each of its parts, or not at all.
_ROWS = ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj")


def _slice_for(rank, world):
    def cut(name, full):
        if name.split(".")[0] in _ROWS:
            return full.chunk(world)[rank]
        if name.startswith("linear_proj"):
            return full.chunk(world, dim=1)[rank]
        return full

    return cut


def _run(world, folder):
    handle, store = tempfile.mkstemp(dir=folder)
    os.close(handle)
    os.unlink(store)
    torch.multiprocessing.spawn(_worker, (world, store, str(folder)), nprocs=world)
    return [torch.load(f"{folder}/{world}-{rank}.pt") for rank in range(world)]


def test_two_ranks_equal_one(tmp_path, monkeypatch):
    # On the CPU also where there is a GPU: NCCL wants one GPU per rank (see tests/functional).
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (one,) = _run(1, tmp_path)
    two = _run(2, tmp_path)
    # Trap 17: the selection is the same on every rank, to the last index.
    for rank in two:
        assert torch.equal(rank["indices"], one["indices"])
    assert relative_error(torch.cat([r["out"] for r in two]), one["out"]) < 1e-12
    assert relative_error(torch.cat([r["dx"] for r in two]), one["dx"]) < 1e-12
    for name, full in one["gradients"].items():
        parts = [rank["gradients"][name] for rank in two]
        for rank, part in enumerate(parts):
            assert relative_error(part, _slice_for(rank, 2)(name, full)) < 1e-12, name
