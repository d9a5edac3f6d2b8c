#!/usr/bin/env bash
# Launches training of a model with the attention shapes of DeepSeek-V4-Flash; see v4_launch.sh and
# launch.sh for the variables to set and for what released Megatron lacks. Arguments override flags.
set -euo pipefail
shape=(
  --num-layers 43 --hidden-size 4096 --num-attention-heads 64 --q-lora-rank 1024
  --o-groups 8 --dsa-indexer-topk 512
)
first=(0 0 4) pairs=20 # the ratios: the first layers, then pairs of HCA and CSA, then MTP
source "$(dirname "$0")/v4_launch.sh"
