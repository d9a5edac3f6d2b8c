#!/usr/bin/env bash
# Trains a small DeepSeek-V4-style model on Python's own documentation: hybrid attention with one
# compression ratio per layer, and a layer that predicts one more token (MTP).
#   ratio 0   attention to the last 32 positions (the window) only; also the MTP layer
#   ratio 4   CSA: the window, and 12 of up to 64 compressed keys that the indexer selects
#   ratio 16  HCA: the window, and all compressed keys, up to 16
# First dense (CSA layers see all compressed keys, there is no indexer), then sparse.
# Arguments are appended to each stage's flags and override them.
#   RUN_DIR  where data, checkpoints, log and report go   (runs/train_small_v4)
#   STEPS    optimizer steps of the two stages            ("70 80")
#   PYTHON   interpreter with everything installed        (sets up .venv and takes that)
set -euo pipefail
cd "$(dirname "$0")/.."
run=${RUN_DIR:-runs/train_small_v4}
read -r dense_steps sparse_steps <<<"${STEPS:-70 80}"
source examples/small_stages.sh

model=(
  --num-layers 5 --mtp-num-layers 1 --hidden-size 128 --ffn-hidden-size 256
  --num-attention-heads 8 --multi-latent-attention --q-lora-rank 64
  # The one key/value head: 32 + 16 (rotated) dims. --kv-lora-rank has no meaning here.
  --qk-head-dim 32 --qk-pos-emb-head-dim 16 --v-head-dim 48 --kv-lora-rank 32 --qk-layernorm
  --o-groups 4 --o-lora-rank 32
  --normalization RMSNorm --swiglu --disable-bias-linear
  --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.05
  --rope-type rope --position-embedding-type rope --untie-embeddings-and-output-weights
)
attention=(
  --attention-backend dsa_fused  # fused kernels where they can run, else torch; the log says which
  --csa-compress-ratios 0 4 16 4 16 0 --csa-window-size 32 --csa-compress-rotary-base 10000
  --dsa-indexer-n-heads 8 --dsa-indexer-head-dim 32 --dsa-indexer-topk 12
  --dsa-indexer-rope-interleaved --dsa-indexer-loss-coeff 1.0 --dsa-indexer-use-sparse-loss
)
stage dense "$dense_steps" 3e-3 "$@"
stage sparse $((dense_steps + sparse_steps)) 1e-3 "$@"
report
