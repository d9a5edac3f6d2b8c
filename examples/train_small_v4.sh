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
#   RUN_DIR  where data, checkpoints, log and report go   (runs/train_small_v4)
#   STEPS    optimizer steps of the two stages            ("70 80")
#   PYTHON   interpreter with everything installed        (sets up .venv and takes that)
set -euo pipefail
cd "$(dirname "$0")/.."
run=${RUN_DIR:-runs/train_small_v4}
read -r dense_steps sparse_steps <<<"${STEPS:-70 80}"
source examples/small_stages.sh

model=(
  --num-layers 5 --mtp-num-layers 1 --hidden-size 128 --num-attention-heads 8
  --multi-latent-attention --q-lora-rank 64
  # The one key/value head: 32 + 16 (rotated) dims. --kv-lora-rank has no meaning here.
  --qk-head-dim 32 --qk-pos-emb-head-dim 16 --v-head-dim 48 --kv-lora-rank 32 --qk-layernorm
  --o-groups 4 --o-lora-rank 32
  --hc-mult 4
  --num-experts 8 --moe-layer-freq 1 --moe-ffn-hidden-size 96 --moe-shared-expert-intermediate-size 96
  --moe-router-topk 2 --moe-router-score-function sqrtsoftplus --moe-router-topk-scaling-factor 1.5
  --moe-router-enable-expert-bias --moe-router-dtype fp32 --moe-hash-layers 1
  --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
  --swiglu --activation-func-clamp-value 10 --no-bias-swiglu-fusion
  --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear
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
