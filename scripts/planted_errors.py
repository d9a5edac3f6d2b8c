"""Plant errors in a copy of this clone, one at a time, and print which tier of the tests fails.

    python scripts/planted_errors.py              # the push tier, then --all where it misses
    python scripts/planted_errors.py --only 3 7

An error is one replacement in one file (:data:`ERRORS`) with the tests to run; the first failure
ends a run.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Error:
    """One replacement in a file.

    Attributes:
        what: description.
        file: in ``megatron_dsa/``.
        right, wrong: text that occurs once, and its replacement.
        tests: paths below ``tests/``.
    """

    what: str
    file: str
    right: str
    wrong: str
    tests: str


ERRORS = (
    Error(
        "wrong sign of the sink's gradient", "ops/sparse_attention/torch.py",
        "dscores.sub_(delta[..., None]).mul_(probs)", "dscores.add_(delta[..., None]).mul_(probs)",
        "unit/ops/test_sparse_attention.py unit/layers",
    ),
    Error(
        "a query sees one compressed group too many", "ops/layout/compressed.py",
        "end=(first + (layout.end - layout.start) // ratio).int()",
        "end=(first + (layout.end - layout.start + 1) // ratio).int()",
        "unit/ops/layout unit/layers",
    ),
    Error(
        "teacher not summed over tensor-parallel ranks", "ops/indexer_loss/api.py",
        "torch.distributed.all_reduce(teacher, group=head_group)", "pass",
        "unit/layers/parallel",
    ),
    Error(
        "token count not summed over context-parallel ranks", "training/setup.py",
        "torch.distributed.all_reduce(tokens, group=mpu.get_context_parallel_group())", "pass",
        "unit/layers/parallel/test_masked_tokens.py functional",
    ),
    Error(
        "cached tensors of other arguments", "ops/common/capture.py",
        "key = (*arguments, *sorted(named.items()))", "key = arguments[:1]",
        "unit/ops/common unit/ops/layout",
    ),
    Error(
        "gradients of keys rounded before the sum over ranks", "ops/common/collectives.py",
        "reduce_scatter_tensor(part, x.contiguous(),",
        "reduce_scatter_tensor(part, x.bfloat16().to(x.dtype).contiguous(),",
        "unit/layers/parallel",
    ),
    Error(
        "fp8 weights are divided by their scale", "extras/huggingface/quantised.py",
        "weight[part].float() * scale[rows[part]]", "weight[part].float() / scale[rows[part]]",
        "unit/extras/huggingface",
    ),
    Error(
        "gate and up swapped at import", "extras/huggingface/names.py",
        '_V3_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")',
        '_V3_PROJECTIONS = ("up_proj", "gate_proj", "down_proj")',
        "unit/extras/huggingface",
    ),
    Error(
        "the gradient is rotated forwards", "ops/rope/torch.py",
        "_turn(part, cos[tokens], sin[tokens], _ROPE, True)",
        "_turn(part, cos[tokens], sin[tokens], _ROPE, False)",
        "unit/ops unit/layers",
    ),
    Error(
        "one Sinkhorn iteration too few", "ops/hyper_connections/torch.py",
        "for _ in range(iterations - 1):", "for _ in range(iterations - 2):",
        "unit/ops/test_hyper_connections.py unit/layers",
    ),
    Error(
        "hash tables hold an expert of a token twice", "layers/v4/hash_table.py",
        "_keep_apart(orders[number], set(orders[number - 1][-begun:]), topk - begun)", "pass",
        "unit/layers",
    ),
    Error(
        "masked attention rescales by the wrong maximum", "ops/masked_attention/torch.py",
        "sums.mul_(torch.exp(before - shift)[..., None])",
        "sums.mul_(torch.exp(before)[..., None])",
        "unit/ops",
    ),
    Error(
        "targets of prediction cross padded documents", "patches/prediction.py",
        "rolled = torch.where(behind > 0, rolled, torch.zeros_like(rolled))",
        "rolled = torch.where(behind >= 0, rolled, torch.zeros_like(rolled))",
        "unit/patches unit/layers",
    ),
    Error(
        "a neighbour's keys are one too few", "ops/layout/halo.py",
        "needed = last - index < reach", "needed = last - index < reach - 1",
        "unit/ops/layout unit/layers/parallel",
    ),
    Error(
        "the main model is not frozen in stage warmup", "layers/freezing.py",
        "return trains_main(config) or is_indexer_parameter(name)", "return True",
        "unit/layers unit/config functional/test_stages.py",
    ),
    Error(
        "adapters without their scale", "extras/lora/lora.py",
        "return torch.addmm(weight, up, down, alpha=self.scale)",
        "return torch.addmm(weight, up, down)", "unit/extras/lora",
    ),
    Error(
        "a replayed selection is that of the next microbatch", "extras/rl/replay.py",
        "positions = self._next[layer].popleft()", "positions = self._next[layer].pop()",
        "unit/extras/rl",
    ),
    Error(
        "Muon takes blocks for whole matrices", "layers/weight_blocks.py",
        "return getattr(parameter, ROW_BLOCKS, None)", "return None", "unit/extras/muon",
    ),
    Error(
        "every loss of the log is halved", "metrics/log.py",
        "layer_sum.add_(total.detach().float())", "layer_sum.add_(total.detach().float() / 2)",
        "unit/metrics unit/layers",
    ),
    Error(
        "a plan counts fp32 gradients as 16-bit", "extras/planner/memory.py",
        "return 4 if args.accumulate_allreduce_grads_in_fp32 else weights.itemsize",
        "return weights.itemsize", "unit/extras/planner",
    ),
    Error(
        "a flag that inference alone needs is ignored", "config/rules/model.py",
        'Must("cache_mla_latents", False, "it is for inference, which this package does not do"),',
        "", "unit/config unit/test_arguments.py",
    ),
    Error(
        "the kernel that was measured fastest is not tried first", "ops/dispatch/operation.py",
        "key=lambda c: c.name != name or call.capability in c.support.not_run,", "key=lambda c: 0,",
        "unit/ops/dispatch",
    ),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", type=int, nargs="+", help="numbers of errors, from 1")
    options = parser.parse_args()
    numbers = options.only or range(1, len(ERRORS) + 1)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "clone"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", ".gpu", "*.png"))
        for number in numbers:
            print(f"{number:2} {_plant(ERRORS[number - 1], copy)}", flush=True)


def _plant(error: Error, copy: Path) -> str:
    file = copy / "megatron_dsa" / error.file
    text = file.read_text(encoding="utf-8")
    if text.count(error.right) != 1 or not error.right:
        return f"{error.what}: NOT PLANTED, {error.file} has another text"
    file.write_text(text.replace(error.right, error.wrong), encoding="utf-8")
    try:
        for tier in ("push", "all"):
            begin = time.monotonic()
            failed = _first_failure(error, tier, copy)
            if failed:
                return f"{error.what}: {tier} ({failed}, {time.monotonic() - begin:.0f} s)"
        return f"{error.what}: MISSED"
    finally:
        file.write_text(text, encoding="utf-8")


def _first_failure(error: Error, tier: str, copy: Path) -> str | None:
    paths = [f"tests/{path}" for path in error.tests.split()]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-W", "ignore", f"--{tier}", *paths],
        cwd=copy, env=os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    failures = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode in (0, 5):
        return None
    return failures[0].split(" - ")[0].split(" ", 1)[1] if failures else done.stdout[-200:]


if __name__ == "__main__":
    main()
