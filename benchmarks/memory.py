"""Planned peak memory of training steps beside what they take on this GPU.

    python -m benchmarks.memory

Whole small models of V3.2's and V4's attention, built as the entry point does, with Megatron's data
parallel wrapper and optimizer: two microbatches, one step to settle, one that is measured
(``torch.cuda.max_memory_allocated``). ``--tiny``: tiny models; on a machine without a GPU the bytes
of all tensors are followed instead (:mod:`megatron_dsa.planning.tally`).
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import gc
import logging
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path

import torch

OUTPUT = Path(__file__).with_suffix(".csv")
COLUMNS = (
    "date", "gpu", "torch", "megatron_core", "case", "tokens", "weights_mib", "gradients_mib",
    "optimizer_mib", "activations_mib", "step_mib", "planned_mib", "measured_mib", "ratio",
)  # fmt: skip

_BASE = """
  --num-layers 4 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 64
  --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512
  --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm
  --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
  --init-method-std 0.02 --rope-type rope --position-embedding-type rope
  --untie-embeddings-and-output-weights --attention-backend dsa_fused
  --dsa-indexer-n-heads 64 --dsa-indexer-head-dim 128 --dsa-indexer-topk 2048
  --dsa-indexer-loss-coeff 1e-3 --dsa-indexer-use-sparse-loss --dsa-health-rows 0
  --micro-batch-size 1 --global-batch-size 2 --train-iters 10 --lr 1e-5
  --tokenizer-type NullTokenizer --vocab-size 32768 --eval-iters 0
"""
_HYBRID = """
  --kv-lora-rank 448 --qk-head-dim 448 --v-head-dim 512 --q-lora-rank 1024
  --o-groups 8 --o-lora-rank 1024 --csa-compress-ratios 0 4 128 4 --csa-window-size 128
  --csa-compress-rotary-base 10000 --dsa-indexer-topk 512 --dsa-indexer-rope-interleaved
"""
_TINY = """
  --num-layers 4 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --q-lora-rank 32
  --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 16 --dsa-indexer-topk 16 --vocab-size 500
  --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --dsa-workspace-mib 1
"""
_TINY_HYBRID = """
  --v-head-dim 24 --csa-compress-ratios 0 4 16 4 --csa-window-size 16 --o-groups 2 --o-lora-rank 16
  --csa-compress-rotary-base 10000 --dsa-indexer-rope-interleaved
"""
_SELECTIVE = "--recompute-granularity selective --recompute-modules core_attn mla_up_proj"
_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_EXPERTS = """
  --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 1408 --moe-layer-freq [0]*1+[1]*3
  --moe-shared-expert-intermediate-size 1408 --moe-token-dispatcher-type alltoall
"""
#: Name, thousands of tokens, hybrid attention, flags.
CASES = (
    ("sparse", 4, False, "--bf16"),
    ("sparse", 16, False, "--bf16"),
    ("sparse, core and up projection recomputed", 32, False, f"--bf16 {_SELECTIVE}"),
    ("sparse, all recomputed", 32, False, f"--bf16 {_FULL}"),
    ("sparse, distributed optimizer", 8, False, "--bf16 --use-distributed-optimizer"),
    ("sparse, experts", 8, False, f"--bf16 {_EXPERTS}"),
    ("sparse, prediction of a second token", 8, False, "--bf16 --mtp-num-layers 1"),
    ("dense", 8, False, "--bf16 --dsa-stage dense"),
    ("warmup", 8, False, "--bf16 --dsa-stage warmup"),
    ("warmup, all trained", 8, False, "--bf16 --dsa-stage warmup --dsa-warmup-train-all"),
    ("hybrid", 8, True, "--bf16"),
    ("hybrid", 32, True, "--bf16"),
    ("hybrid, core and up projection recomputed", 32, True, f"--bf16 {_SELECTIVE}"),
)


def command(thousands: int, hybrid: bool, flags: str, tiny: bool) -> list[str]:
    """Return the command line of a case."""
    tokens = 64 * thousands if tiny else 1024 * thousands
    parts = [_BASE, _TINY if tiny else "", flags]
    if hybrid:
        parts.insert(2, _TINY_HYBRID if tiny else _HYBRID)
    length = f"--seq-length {tokens} --max-position-embeddings {tokens}"
    return ["memory", *" ".join([*parts, length]).split()]


def planned(argv: list[str]):
    """Return the planned :class:`~megatron_dsa.planning.memory.RankMemory`."""
    from megatron_dsa.planning.command import plan_of
    from megatron_dsa.planning.gpus import GPU, GPUS, gpu_here

    gpu = GPUS[gpu_here()] if torch.cuda.is_available() else GPU("CPU", None, 1e3)
    return plan_of(argv, 1, gpu).stages[0].memory


def planned_peak(memory) -> int:
    """Return the planned peak; a CPU has no workspaces of matrix products."""
    from megatron_dsa.planning.memory import LIBRARIES

    return memory.peak if torch.cuda.is_available() else memory.peak - LIBRARIES


class Peak:
    """The most bytes that torch holds inside of the context, on top of what was there before."""

    def __enter__(self) -> Peak:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            self._before = torch.cuda.memory_allocated()
            return self
        from megatron_dsa.planning.tally import Tally

        self._tally = Tally()
        self._tally.__enter__()
        return self

    def settled(self) -> None:
        """Count from here on."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        else:
            self._tally.restart()

    def __exit__(self, *error) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            self.bytes = torch.cuda.max_memory_allocated() - self._before
        else:
            self._tally.__exit__(*error)
            self.bytes = self._tally.peak


def measured(argv: list[str]) -> int:
    """Return the peak bytes of a training step on this machine."""
    from megatron_dsa.planning.command import parsed

    with Peak() as peak, parsed(argv, 1, planning=False) as args:
        step = _trainer(args)
        step()
        peak.settled()
        step()
        del step
    return peak.bytes


def _trainer(args):
    """Build model and optimizer as Megatron's training does; return a function that does a step."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import training

    from megatron_dsa.pretrain import model_config_from_args

    model_config = model_config_from_args(args)
    config = model_config.transformer
    builder = model_config.get_builder_cls()(model_config)
    model = builder.build_distributed_models(
        ProcessGroupCollection.use_mpu_process_groups(),
        ddp_config=training.get_megatron_ddp_config(args),
        data_parallel_random_init=False,
    )
    settings, overrides = training.get_megatron_optimizer_config(args)
    optimizer = get_megatron_optimizer(
        settings, model, config_overrides=overrides, use_gloo_process_groups=False
    )
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    shape = (args.micro_batch_size, args.seq_length)
    tokens = torch.randint(args.vocab_size, shape, device="cuda")
    places = torch.arange(args.seq_length, device="cuda").expand(shape)
    mask = torch.ones(shape, device="cuda")

    def forward(_data, chunk):
        from megatron_dsa.pretrain import loss_function

        losses = chunk(tokens, places, None, labels=tokens, loss_mask=mask)
        return losses, functools.partial(loss_function, mask)

    def step() -> None:
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward, data_iterator=None, model=model,
            num_microbatches=get_num_microbatches(), seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size, forward_only=False,
        )  # fmt: skip
        optimizer.step()

    return step


@contextlib.contextmanager
def one_rank():
    """Megatron's process groups of one process."""
    from megatron.core import parallel_state, tensor_parallel

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            backend, init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        yield
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def main(argv: list[str] | None = None) -> list[dict]:
    """Plan and measure all cases; print a table and return (and append) its rows."""
    from megatron_dsa.versions import installed_version

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="tiny models: a trial of this script")
    parser.add_argument("--cases", type=int, nargs="+", help="numbers from 0 (default: all)")
    parser.add_argument("--output", type=Path, help=f"CSV to append to ({OUTPUT}; tiny: none)")
    options = parser.parse_args(argv)
    output = options.output or (None if options.tiny else OUTPUT)
    numbers = range(len(CASES)) if options.cases is None else options.cases
    facts = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "megatron_core": installed_version("megatron-core"),
    }
    print(f"{'case':44}{'tokens':>8}{'planned':>11}{'measured':>11}  MiB   ratio  seconds")
    rows = []
    # A process each: what is left of one model would count in the next one's favour.
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for number in numbers:
            begin = time.perf_counter()
            try:
                row = facts | pool.submit(compare, number, options.tiny).result()
            except Exception as error:  # the other cases are measured all the same
                print(f"{CASES[number][0]:44} failed: {error}", flush=True)
                continue
            rows.append(row)
            print(
                f"{row['case']:44}{row['tokens']:>8}{row['planned_mib']:>11}"
                f"{row['measured_mib']:>11}{row['ratio']:>13.3f}"
                f"{time.perf_counter() - begin:>9.1f}",
                flush=True,
            )
    if output is not None:
        write(output, rows)
    return rows


def compare(number: int, tiny: bool) -> dict:
    """Plan and measure a case; return what its row says of it."""
    from megatron_dsa import cpu_host

    if cpu_host.needed():
        cpu_host.activate()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    argv = command(*CASES[number][1:], tiny)
    memory = planned(argv)  # needs process groups of its own
    with one_rank():
        peak = measured(argv)
    row = {
        "case": CASES[number][0],
        "tokens": argv[argv.index("--seq-length") + 1],
        "planned_mib": round(planned_peak(memory) / 2**20, 1),
        "measured_mib": round(peak / 2**20, 1),
        "ratio": round(planned_peak(memory) / peak, 4),
    }
    for part in ("weights", "gradients", "optimizer", "activations", "step"):
        row[f"{part}_mib"] = round(getattr(memory, part) / 2**20, 1)
    return row


def write(output: Path, rows: list[dict]) -> None:
    """Append rows to a CSV, with a header if it is new."""
    new = not output.exists()
    with output.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
