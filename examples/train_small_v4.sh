#!/usr/bin/env bash
# Trains a small DeepSeek-V4, whole, on Python's own documentation:
#   attention          one compression ratio per layer
#     ratio 0          the last 32 positions (the window) only; also the layer of multi-token prediction
#     ratio 4          CSA: the window, and 12 of up to 64 compressed keys that the indexer selects
#     ratio 16         HCA: the window, and all compressed keys, up to 16
#   hyper-connections  four residual streams
#   experts            8 in every layer; a token goes to 2 and to a shared one. In the first layer they are
#                      looked up by token id
#   prediction         one more layer predicts one more token (MTP), from the streams
# First dense (CSA layers see all compressed keys, there is no indexer), then sparse.
# Arguments are appended to each stage's flags and override them.
# Ctrl-C or SIGTERM saves a checkpoint; the same command then continues from it.
#   RUN_DIR  where data, checkpoints, log and report go   (runs/train_small_v4)
#   STEPS    optimizer steps of the two stages            ("70 80")
#   PYTHON   interpreter with everything installed        (sets up .venv and takes that)
set -euo pipefail
cd "$(dirname "$0")/.."
run=${RUN_DIR:-runs/train_small_v4}
read -r dense_steps sparse_steps <<<"${STEPS:-70 80}"
stages=2
source examples/small_stages.sh
same_settings "$run" "steps $dense_steps $sparse_steps, flags $*"

model=(--dsa-model v4-tiny) # python -m megatron_dsa flags v4-tiny prints the flags of the model
attention=(--attention-backend dsa_fused) # fused kernels where they can run, else torch; the log says which
stage dense "$dense_steps" 3e-3 "$@"
stage sparse $((dense_steps + sparse_steps)) 1e-3 "$@"
report
lines
ending examples/dense_to_sparse.sh
