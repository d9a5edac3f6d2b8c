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
# 61 layers of hidden size 7168, 3 with a dense MLP and 58 with 256 experts, MLA with 128 heads, and indexers
# that choose 2048 keys per token.
# All flags of the model and of its losses: python -m megatron_dsa flags v3.2
model=(--dsa-model v3.2)
source "$(dirname "$0")/launch.sh"
