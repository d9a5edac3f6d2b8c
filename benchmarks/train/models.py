"""Training steps of small whole models of V3.2's and V4's attention.

Built like the entry point's, with Megatron's data parallel wrapper and optimizer.
"""

import functools
import os
import subprocess
from pathlib import Path

import torch

_BASE = """
  --num-layers 4 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 64
  --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512
  --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm
  --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
  --init-method-std 0.02 --rope-type rope --position-embedding-type rope
  --untie-embeddings-and-output-weights --attention-backend dsa_fused
  --dsa-indexer-n-heads 64 --dsa-indexer-head-dim 128 --dsa-indexer-topk 2048
  --dsa-indexer-loss-coeff 1e-3 --dsa-indexer-use-sparse-loss --dsa-health-tokens 0
  --dsa-selected-attention sparse
  --micro-batch-size 1 --global-batch-size 2 --train-iters 10 --lr 1e-5
  --tokenizer-type NullTokenizer --vocab-size 32768 --eval-iters 0
"""
_HYBRID = """
  --kv-lora-rank 448 --qk-head-dim 448 --v-head-dim 512 --q-lora-rank 1024
  --o-groups 8 --o-lora-rank 1024 --csa-compress-ratios 0 4 128 4 --csa-window-size 128
  --csa-compress-rotary-base 10000 --dsa-indexer-topk 512 --dsa-indexer-rope-interleaved
"""
TINY = """
  --num-layers 4 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --q-lora-rank 32
  --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 16 --dsa-indexer-topk 16 --vocab-size 500
  --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 --dsa-workspace-mib 1
"""
TINY_HYBRID = """
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


def model_of(name: str, tokens: int) -> tuple[int, bool, str]:
    """Return the entry of :data:`CASES` after its name.

    Raises:
        KeyError: there is none.
    """
    return {(case[0], 1024 * case[1]): case[1:] for case in CASES}[name, tokens]


def command(thousands: int, hybrid: bool, flags: str, tiny: bool) -> list[str]:
    """Return the command line of a model; ``tiny`` has 64 tokens for each 1024."""
    tokens = 64 * thousands if tiny else 1024 * thousands
    parts = [_BASE, TINY if tiny else "", flags]
    if hybrid:
        parts.insert(2, TINY_HYBRID if tiny else _HYBRID)
    length = f"--seq-length {tokens} --max-position-embeddings {tokens}"
    return ["memory", *" ".join([*parts, length]).split()]


def plan(argv: list[str]):
    """Return the plan of a command line's step on this machine, like ``--dsa-dry-run``."""
    from megatron_dsa.config.gpus import GPU, GPUS, gpu_here
    from megatron_dsa.extras.planner.command import plan_of

    gpu = GPUS[gpu_here()] if torch.cuda.is_available() else GPU("CPU", None, 1e3)
    return plan_of(argv, 1, gpu)


def launch(command: list[str], log: Path, **variables: str) -> None:
    """Run training in its own process; append its output to ``log``.

    Raises:
        RuntimeError: it failed; the text is the end of its log.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        done = subprocess.run(
            command, env=os.environ | {"MASTER_PORT": "0"} | variables, stdout=file,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
    if done.returncode:
        said = [line.strip() for line in log.read_text().split("\n") if line.strip()][-3:]
        raise RuntimeError(f"training ended with {done.returncode}: " + " | ".join(said))


def trainer(args):
    """Build model and optimizer like Megatron's training; return a function that runs a step."""
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
