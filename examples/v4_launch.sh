# Sourced by v4_flash.sh and v4_pro.sh, which set the arrays `shape` and `experts`, and `first` and `pairs`.
#
# The whole model: window, CSA and HCA attention, hyper-connections, hash-routed and learned experts,
# multi-token prediction. Values are those of the released config.json and, for training, of DeepSeek's
# report on V4; `python -m megatron_dsa flags` prints the same model flags for the config.json. No variable
# describes the model; launch.sh explains those of training. Neither script has been run at full size; look
# at the plan first:
#   examples/v4_flash.sh --dsa-dry-run
# DeepSeek trained with sequences of 4k tokens (STAGE=dense), then of 16k and 64k; at 64k came a short warm-up
# of the indexers (STAGE=warmup) and sparse attention (STAGE=sparse), and later sequences of 1M tokens.
# It trained with Muon, for which docs/guide/muon.md has the flags; the scripts have Megatron's AdamW.
# The first three layers look experts up by token id and have to be on the first pipeline stage.
# TP is limited by the output groups (--o-groups).
model=(
  # Layers, sizes, and the number of selected keys: of the script that sources this.
  "${shape[@]}"
  # All layers have experts: a token goes to 6, by scores whose share is scaled, and to one that all share.
  --moe-layer-freq 1 "${experts[@]}" --moe-router-topk 6
  --moe-router-score-function sqrtsoftplus --moe-router-dtype fp32
  # In the first three layers they are looked up by token id: tables of the checkpoint, or made from a seed.
  --moe-hash-layers 3
  # SwiGLU's parts are bounded by 10, which Megatron's fused one leaves out.
  --swiglu --activation-func-clamp-value 10 --no-bias-swiglu-fusion
  # Load is balanced by a bias per expert, and a little by a loss within sequences.
  --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
  --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
  # Four residual streams, mixed by matrices that 20 iterations make doubly stochastic.
  --hc-mult 4 --hc-sinkhorn-iters 20 --hc-eps 1e-6
  # One more layer predicts one more token; its ratio is the last one. DeepSeek's weight of its loss is 0.1
  # once the learning rate decays.
  --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3
  --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear
  --init-method-std 0.02 --untie-embeddings-and-output-weights --padded-vocab-size 129280
)
attention=(
  # The one key/value head: 448 + 64 (rotated) dims.
  --multi-latent-attention --qk-head-dim 448 --qk-pos-emb-head-dim 64 --v-head-dim 512
  --kv-lora-rank 448 --qk-layernorm
  # The output projection of a group of heads goes through this many dims.
  --o-lora-rank 1024
  # Every layer sees the last 128 positions. Ratio 0: nothing else; 4 (CSA): selected keys, each
  # compressed of 4; 128 (HCA): all keys, each compressed of 128.
  --csa-window-size 128
  --csa-compress-ratios "${first[@]}" $(for ((i = 0; i < pairs; i++)); do echo 128 4; done) 0
  # The indexer of CSA layers: 64 heads of 128 dims; its rope pairs neighbouring dims.
  --dsa-indexer-n-heads 64 --dsa-indexer-head-dim 128 --dsa-indexer-rope-interleaved
  # Rope: one base for layers with a window only; another and YaRN, from 64k positions to 1M, for the others.
  --position-embedding-type rope --rope-type yarn --rotary-base 10000
  --csa-compress-rotary-base 160000 --rotary-scaling-factor 16
  --yarn-original-max-position-embeddings 65536 --yarn-beta-fast 32 --yarn-beta-slow 1
)
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
