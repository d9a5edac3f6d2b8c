#!/usr/bin/env bash
# Launches training of GLM-5: 744B parameters, 78 layers and one that predicts one more token.
# launch.sh explains the variables; its defaults are those of 32 nodes of 8 GPUs here. The script has
# not been run at full size; look at the plan first:
#   examples/glm_5.sh --dsa-dry-run
# GLM-5 and 5.1 have the rotary base 1000000. Later versions are told apart by their config.json: for
# rope_theta 8000000 and indices shared by four layers (index_topk_freq, index_skip_topk_offset)
#   ROTARY_BASE=8000000 examples/glm_5.sh --dsa-indexer-topk-freq 4 --dsa-indexer-skip-topk-offset 3
# with a PIPELINE_LAYOUT whose stages begin with a layer that selects (1, 2, 3, 7, 11, ...).
set -euo pipefail
: "${NODES:=32}" "${TP:=8}" "${PP:=8}" "${CP:=1}" "${EP:=32}"
# Embedding and 9 layers, 6 times 10 layers, 9 layers with MTP (m) and loss (L).
if [[ $PP == 8 ]]; then : "${PIPELINE_LAYOUT:=Ettttttttt|(tttttttttt|)*6tttttttttmL}"; fi
# 78 layers of hidden size 6144, 3 with a dense MLP and 75 with 256 experts, MLA with 64 heads, and indexers
# that choose 2048 keys per token.
# All flags of the model and of its losses: python -m megatron_dsa flags glm-5
model=(--dsa-model glm-5 ${ROTARY_BASE:+--rotary-base "$ROTARY_BASE"})
source "$(dirname "$0")/launch.sh"
