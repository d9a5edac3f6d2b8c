# Sourced by v4_flash.sh and v4_pro.sh, which set `shape`, `first` and `pairs`.
#
# A template; launch.sh explains the variables that are not here. It gives the model the attention of
# DeepSeek-V4, not the whole model: hyper-connections (the residual streams between layers) and
# hash-routed experts are not in released Megatron-Core; layers have plain residuals and learned
# routing. Neither script has been run at full size.
#
# What the attention is made of is set here. Everything else is for you to set, from the model's own
# configuration or to your liking; launch.sh names all variables without a default that are not set,
# these among them, and stops. The output groups limit tensor parallelism.
#
# With --dsa-dry-run none is needed: the plan leaves out the experts if nothing is known of them, and rope
# values, which change no figure of it, have fake kernels. Both are said.

# Public sources disagree on these: take them from the model's own configuration.
rope=(
  "ROTARY_BASE base of layers with a window only (rope_theta)"
  "COMPRESS_ROTARY_BASE base of layers with compression (compress_rope_theta)"
  "YARN_FACTOR YaRN factor of layers with compression (rope_scaling.factor)"
  "YARN_ORIGINAL_LENGTH length that YaRN extends (rope_scaling.original_max_position_embeddings)"
)
experts=(
  "MOE_LAYER_FREQ which layers have experts, in the notation of --moe-layer-freq, e.g. 1 for all"
  "NUM_EXPERTS routed experts per layer"
  "EXPERTS_PER_TOKEN routed experts per token"
  "EXPERT_SIZE hidden size of an expert"
  "SHARED_EXPERT_SIZE hidden size of all shared experts of a layer together"
)
# Hidden size of layers without experts, where there are any: --ffn-hidden-size in MORE_FLAGS.
# How experts are scored and balanced is Megatron's default unless MORE_FLAGS says otherwise.

# A plan of what is known: sets rope values that are not set, and leaves out experts if none of their
# variables is set.
plan_what_is_known() {
  local entry name assumed=() given=()
  for entry in ROTARY_BASE=10000 COMPRESS_ROTARY_BASE=10000 YARN_FACTOR=1 \
    YARN_ORIGINAL_LENGTH="${SEQ_LENGTH:-4096}"; do
    name=${entry%%=*}
    if [[ -z ${!name:-} ]]; then
      printf -v "$name" %s "${entry#*=}"
      assumed+=("$entry")
    fi
  done
  if ((${#assumed[@]})); then
    echo "$(basename "$0"): not set, these change no figure of the plan: ${assumed[*]}" >&2
  fi
  for entry in "${experts[@]}"; do
    name=${entry%% *}
    if [[ -n ${!name:-} ]]; then given+=("$name"); fi
  done
  if ((${#given[@]})); then return; fi
  echo "$(basename "$0"): not set, experts are left out of the plan: ${experts[*]%% *}" >&2
  attention_alone=true
  needed_by_model=()
  more+=(--dsa-dry-run-attention-only)
}

# Called by launch.sh, which then refuses what is not set ("${X-}"), all of it at once.
describe_model() {
  attention_alone=false
  needed_by_model=("${rope[@]}" "${experts[@]}")
  if $dry_run; then plan_what_is_known; fi
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
    # Rope: one base for layers with a window only, another and YaRN for those with compression.
    --position-embedding-type rope --rope-type yarn --rotary-base "${ROTARY_BASE-}"
    --csa-compress-rotary-base "${COMPRESS_ROTARY_BASE-}" --rotary-scaling-factor "${YARN_FACTOR-}"
    --yarn-original-max-position-embeddings "${YARN_ORIGINAL_LENGTH-}"
  )
  model=(
    # Layers, sizes, and the number of selected keys: of the script that sources this.
    "${shape[@]}"
    # One more layer predicts one more token; its ratio is the last one.
    --mtp-num-layers 1
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights
  )
  if $attention_alone; then return; fi
  model+=(
    --num-experts "${NUM_EXPERTS-}" --moe-layer-freq "${MOE_LAYER_FREQ-}"
    --moe-router-topk "${EXPERTS_PER_TOKEN-}" --moe-ffn-hidden-size "${EXPERT_SIZE-}"
    --moe-shared-expert-intermediate-size "${SHARED_EXPERT_SIZE-}"
  )
}
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
