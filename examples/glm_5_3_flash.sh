#!/usr/bin/env bash
# Launches training of GLM-5.3-Flash: 320B parameters, 45 layers and one that predicts one more token.
# launch.sh explains the variables; its defaults are those of 16 nodes of 8 GPUs here. The script has
# not been run at full size; look at the plan first:
#   examples/glm_5_3_flash.sh --dsa-dry-run
# Layers of KDA take the kernels of fla-core: pip install 'megatron-dsa[kda]'.
set -euo pipefail
: "${NODES:=16}" "${TP:=8}" "${PP:=4}" "${CP:=1}" "${EP:=32}"
# Embedding and 11 layers, 2 times 12 layers, 10 layers with MTP (m) and loss (L).
if [[ $PP == 4 ]]; then : "${PIPELINE_LAYOUT:=Ettttttttttt|(tttttttttttt|)*2ttttttttttmL}"; fi
# 45 layers of hidden size 4096 on four residual streams: one in four has MLA with 64 heads without rope, and
# an indexer that chooses 512 pools of 4 keys per token, the others have KDA. 3 have a dense MLP, 42 have 288
# experts.
# All flags of the model and of its losses: python -m megatron_dsa flags glm-5.3-flash
model=(--dsa-model glm-5.3-flash)
source "$(dirname "$0")/launch.sh"
