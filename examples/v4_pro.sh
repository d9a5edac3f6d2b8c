#!/usr/bin/env bash
# Launches training of a model with the attention shapes of DeepSeek-V4-Pro; see v4_launch.sh and
# launch.sh for the variables to set and for what released Megatron lacks. Arguments override flags.
set -euo pipefail
shape=(
  --num-layers 61 --hidden-size 7168 --num-attention-heads 128 --q-lora-rank 1536
  --o-groups 16 --dsa-indexer-topk 1024
)
first=(128 128 4) pairs=29 # the ratios: the first layers, then pairs of HCA and CSA, then MTP
source "$(dirname "$0")/v4_launch.sh"
