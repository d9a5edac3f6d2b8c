#!/usr/bin/env bash
# Launches training of GLM-5: 744B parameters, 78 layers and one that predicts one more token.
# launch.sh explains the variables; its defaults are those of 32 nodes of 8 GPUs here. The script has
# not been run at full size; look at the plan first:
#   examples/glm_5.sh --dsa-dry-run
# GLM-5 and 5.1 have the rotary base below. Later versions are told apart by their config.json: for
# rope_theta 8000000 and indices shared by four layers (index_topk_freq, index_skip_topk_offset)
#   ROTARY_BASE=8000000 examples/glm_5.sh --dsa-indexer-topk-freq 4 --dsa-indexer-skip-topk-offset 3
# with a PIPELINE_LAYOUT whose stages begin with a layer that selects (1, 2, 3, 7, 11, ...).
set -euo pipefail
: "${NODES:=32}" "${TP:=8}" "${PP:=8}" "${CP:=1}" "${EP:=32}"
# Embedding and 9 layers, 6 times 10 layers, 9 layers with MTP (m) and loss (L).
if [[ $PP == 8 ]]; then : "${PIPELINE_LAYOUT:=Ettttttttt|(tttttttttt|)*6tttttttttmL}"; fi
model=(
  # 3 layers with a dense MLP, then 75 with experts.
  --num-layers 78 --hidden-size 6144 --ffn-hidden-size 12288
  # Of 256 experts a token goes to 8, by sigmoid scores that sum to 2.5; and to one that all share.
  --num-experts 256 --moe-layer-freq '([0]*3+[1]*75)' --moe-ffn-hidden-size 2048
  --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8
  --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32
  # Load is balanced by a bias per expert, and a little by a loss.
  --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
  --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
  --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1
  --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
  --init-method-std 0.02 --untie-embeddings-and-output-weights --padded-vocab-size 154880
)
attention=(
  # MLA: 64 heads of 192 + 64 (rotated) dims over latents of 2048 (queries) and 512 (keys, values).
  --multi-latent-attention --num-attention-heads 64 --q-lora-rank 2048 --kv-lora-rank 512
  --qk-head-dim 192 --qk-pos-emb-head-dim 64 --v-head-dim 256
  # The norms of the latents have an epsilon of their own.
  --qk-layernorm --dsa-latent-norm-epsilon 1e-6
  --position-embedding-type rope --rope-type rope --rotary-base "${ROTARY_BASE:-1000000}"
  # The indexer: 32 heads of 128 dims choose 2048 keys per token; its rope pairs neighbouring dims.
  --dsa-indexer-n-heads 32 --dsa-indexer-head-dim 128 --dsa-indexer-topk 2048
  --dsa-indexer-rope-interleaved --dsa-indexer-k-norm-epsilon 1e-6
)
source "$(dirname "$0")/launch.sh"
