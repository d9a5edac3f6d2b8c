#!/usr/bin/env bash
# Launches training of DeepSeek-V4-Flash: 284B parameters, 43 layers and one that predicts one more token.
# v4_launch.sh says what the model is made of, launch.sh explains the variables; its defaults are those of
# 16 nodes of 8 GPUs here. Arguments override flags.
set -euo pipefail
: "${NODES:=16}" "${TP:=8}" "${PP:=4}" "${CP:=1}" "${EP:=32}"
# Embedding and 11 layers, twice 11 layers, 10 layers with MTP (m) and loss (L).
if [[ $PP == 4 ]]; then : "${PIPELINE_LAYOUT:=Et*11|(t*11|)*2t*10mL}"; fi
shape=(
  --num-layers 43 --hidden-size 4096 --num-attention-heads 64 --q-lora-rank 1024
  --o-groups 8 --dsa-indexer-topk 512
)
experts=(
  --num-experts 256 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048
  --moe-router-topk-scaling-factor 1.5
)
first=(0 0 4) pairs=20 # the ratios: the first layers, then pairs of HCA and CSA, then MTP
source "$(dirname "$0")/v4_launch.sh"
