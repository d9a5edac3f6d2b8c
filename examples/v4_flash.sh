#!/usr/bin/env bash
# Launches training of DeepSeek-V4-Flash: 284B parameters, 43 layers and one that predicts one more token.
# launch.sh explains the variables; its defaults are those of 16 nodes of 8 GPUs here. Arguments override
# flags. The script has not been run at full size; look at the plan first:
#   examples/v4_flash.sh --dsa-dry-run
# The whole model: window, CSA and HCA attention, hyper-connections, hash-routed and learned experts,
# multi-token prediction.
# DeepSeek trained with sequences of 4k tokens (STAGE=dense), then of 16k and 64k; at 64k came a short warm-up
# of the indexers (STAGE=warmup) and sparse attention (STAGE=sparse), and later sequences of 1M tokens. The
# weight of the loss of multi-token prediction is 0.3, and 0.1 once the learning rate decays
# (--mtp-loss-scaling-factor 0.1).
# It trained with Muon, for which docs/guide/muon.md has the flags; the script has Megatron's AdamW.
# The first three layers look experts up by token id and have to be on the first pipeline stage.
# TP is limited by the 8 output groups.
set -euo pipefail
: "${NODES:=16}" "${TP:=8}" "${PP:=4}" "${CP:=1}" "${EP:=32}"
# Embedding and 11 layers, twice 11 layers, 10 layers with MTP (m) and loss (L).
if [[ $PP == 4 ]]; then : "${PIPELINE_LAYOUT:=Et*11|(t*11|)*2t*10mL}"; fi
# All flags of the model and of its losses: python -m megatron_dsa flags v4-flash
model=(--dsa-model v4-flash)
source "$(dirname "$0")/launch.sh"
