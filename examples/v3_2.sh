#!/usr/bin/env bash
# Launches training of DeepSeek-V3.2: 671B parameters, 61 layers and one that predicts one more token.
# launch.sh explains the variables; its defaults are those of 32 nodes of 8 GPUs here. The script has
# not been run at full size; look at the plan first:
#   examples/v3_2.sh --dsa-dry-run
# From the weights of DeepSeek-V3 to long sparse sequences, with the figures of DeepSeek's report:
#   warm-up, only the indexers are trained:
#     STAGE=warmup SEQ_LENGTH=131072 CP=4 TRAIN_STEPS=1000 GLOBAL_BATCH=16 LR=1e-3 \
#       examples/v3_2.sh --dsa-load-hf DeepSeek-V3 --lr-decay-style constant
#   sparse, everything is trained:
#     STAGE=sparse SEQ_LENGTH=131072 CP=4 TRAIN_STEPS=16000 GLOBAL_BATCH=480 LR=7.3e-6 \
#       examples/v3_2.sh --lr-decay-style constant
# At 4k tokens the same without CP, say STAGE=sparse SEQ_LENGTH=4096.
set -euo pipefail
: "${NODES:=32}" "${TP:=8}" "${PP:=8}" "${CP:=1}" "${EP:=32}"
# Embedding and 7 layers, 6 times 8 layers, 6 layers with MTP (m) and loss (L).
if [[ $PP == 8 ]]; then : "${PIPELINE_LAYOUT:=Ettttttt|(tttttttt|)*6ttttttmL}"; fi
model=(
  # 3 layers with a dense MLP, then 58 with experts.
  --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432
  # Of 256 experts a token goes to 8, in 4 of 8 groups, by sigmoid scores that sum to 2.5; and to one
  # that all tokens share.
  --num-experts 256 --moe-layer-freq '([0]*3+[1]*58)' --moe-ffn-hidden-size 2048
  --moe-shared-expert-intermediate-size 2048
  --moe-router-topk 8 --moe-router-num-groups 8 --moe-router-group-topk 4
  --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32
  # Load is balanced by a bias per expert, and a little by a loss.
  --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
  --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
  --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1
  --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
  --init-method-std 0.02 --untie-embeddings-and-output-weights --padded-vocab-size 129280
)
attention=(
  # MLA: 128 heads of 128 + 64 (rotated) dims over latents of 1536 (queries) and 512 (keys, values).
  --multi-latent-attention --num-attention-heads 128 --q-lora-rank 1536 --kv-lora-rank 512
  --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm
  # Rope, stretched from 4k positions to 160k by YaRN.
  --position-embedding-type rope --rope-type yarn --rotary-base 10000 --rotary-scaling-factor 40
  --yarn-original-max-position-embeddings 4096 --yarn-beta-fast 32 --yarn-beta-slow 1
  --mscale 1.0 --mscale-all-dim 1.0
  # The indexer: 64 heads of 128 dims choose 2048 keys per token; its rope pairs the halves of a head.
  --dsa-indexer-n-heads 64 --dsa-indexer-head-dim 128 --dsa-indexer-topk 2048
  --dsa-indexer-k-norm-epsilon 1e-6
)
source "$(dirname "$0")/launch.sh"
