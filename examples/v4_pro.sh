#!/usr/bin/env bash
# Launches training of DeepSeek-V4-Pro: 1.6T parameters, 61 layers and one that predicts one more token.
# v4_launch.sh says what the model is made of, launch.sh explains the variables; its defaults are those of
# 64 nodes of 8 GPUs here. Arguments override flags.
set -euo pipefail
: "${NODES:=64}" "${TP:=8}" "${PP:=8}" "${CP:=1}" "${EP:=64}"
# Embedding and 7 layers, 6 times 8 layers, 6 layers with MTP (m) and loss (L).
if [[ $PP == 8 ]]; then : "${PIPELINE_LAYOUT:=Et*7|(t*8|)*6t*6mL}"; fi
shape=(
  --num-layers 61 --hidden-size 7168 --num-attention-heads 128 --q-lora-rank 1536
  --o-groups 16 --dsa-indexer-topk 1024
)
experts=(
  --num-experts 384 --moe-ffn-hidden-size 3072 --moe-shared-expert-intermediate-size 3072
  --moe-router-topk-scaling-factor 2.5
)
first=(128 128 4) pairs=29 # the ratios: the first layers, then pairs of HCA and CSA, then MTP
source "$(dirname "$0")/v4_launch.sh"
