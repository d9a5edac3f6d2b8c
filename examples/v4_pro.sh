#!/usr/bin/env bash
# Launches training of DeepSeek-V4-Pro: 1.6T parameters, 61 layers and one that predicts one more token.
# launch.sh explains the variables; its defaults are those of 64 nodes of 8 GPUs here. Arguments override
# flags. The script has not been run at full size; look at the plan first:
#   examples/v4_pro.sh --dsa-dry-run
# The comments in v4_flash.sh on model and training also hold here; there are 16 output groups.
set -euo pipefail
: "${NODES:=64}" "${TP:=8}" "${PP:=8}" "${CP:=1}" "${EP:=64}"
# Embedding and 7 layers, 6 times 8 layers, 6 layers with MTP (m) and loss (L).
if [[ $PP == 8 ]]; then : "${PIPELINE_LAYOUT:=Et*7|(t*8|)*6t*6mL}"; fi
# All flags of the model and of its losses: python -m megatron_dsa flags v4-pro
model=(--dsa-model v4-pro)
source "$(dirname "$0")/launch.sh"
