#!/usr/bin/env bash
# Trains a small DeepSeek-V3.2-style model on Python's own documentation, in DeepSeek's three stages:
#   dense   plain MLA, no indexer
#   warmup  the model is frozen, the indexer learns to predict its attention
#   sparse  every token attends to the 48 keys (of up to 256) that the indexer selects
# Every flag is Megatron's or this package's; on a GPU cluster the same entry point and flags are
# launched with torchrun. Arguments are appended to each stage's flags and override them.
# Ctrl-C or SIGTERM saves a checkpoint; the same command then continues from it.
#   RUN_DIR  where data, checkpoints, log and report go   (runs/train_small)
#   STEPS    optimizer steps of the three stages          ("150 100 150")
#   PYTHON   interpreter with everything installed        (sets up .venv and takes that)
set -euo pipefail
cd "$(dirname "$0")/.."
run=${RUN_DIR:-runs/train_small}
read -r dense_steps warmup_steps sparse_steps <<<"${STEPS:-150 100 150}"
stages=3
source examples/small_stages.sh
same_settings "$run" "steps $dense_steps $warmup_steps $sparse_steps, flags $*"

model=(--dsa-model v3.2-tiny) # python -m megatron_dsa flags v3.2-tiny prints the flags of the model
attention=(--attention-backend dsa_fused) # fused kernels where they can run, else torch; the log says which
stage dense "$dense_steps" 3e-3 "$@"
stage warmup $((dense_steps + warmup_steps)) 3e-3 "$@"
stage sparse $((dense_steps + warmup_steps + sparse_steps)) 1e-3 "$@"
report
lines
ending examples/train_small_v4.sh
