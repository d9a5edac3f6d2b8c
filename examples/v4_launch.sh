# Sourced by v4_flash.sh and v4_pro.sh, which set `shape`, `first` and `pairs`.
#
# A template for torchrun, run once per node; with its defaults for one node. It gives the model the
# attention of DeepSeek-V4, not the whole model: hyper-connections (the residual streams between
# layers) and hash-routed experts are not in released Megatron-Core; layers have plain residuals and
# learned routing. Neither script has been run at full size.
#
# What the attention is made of is set here. Everything else is for you to set, from the model's own
# configuration or to your liking; a variable without a default that is not set stops the script.
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Rope. Public sources disagree on these: take them from the model's own configuration.
: "${ROTARY_BASE:?base of layers with a window only (rope_theta)}"
: "${COMPRESS_ROTARY_BASE:?base of layers with compression (compress_rope_theta)}"
: "${YARN_FACTOR:?YaRN factor of layers with compression (rope_scaling.factor)}"
: "${YARN_ORIGINAL_LENGTH:?length that YaRN extends (rope_scaling.original_max_position_embeddings)}"

# Experts.
: "${MOE_LAYER_FREQ:?which layers have experts, in the notation of --moe-layer-freq, e.g. 1 for all}"
: "${NUM_EXPERTS:?routed experts per layer}"
: "${EXPERTS_PER_TOKEN:?routed experts per token}"
: "${EXPERT_SIZE:?hidden size of an expert}"
: "${SHARED_EXPERT_SIZE:?hidden size of all shared experts of a layer together}"
# Hidden size of layers without experts, where there are any: --ffn-hidden-size in MORE_FLAGS.
# How experts are scored and balanced is Megatron's default unless MORE_FLAGS says otherwise.

# Training.
: "${DATA_PATH:?--data-path of a data set in the format of Megatron}"
: "${TOKENIZER:?folder or name of the Hugging Face tokenizer}"
: "${CHECKPOINTS:?folder to load from, if it holds a checkpoint, and to save to}"
: "${TRAIN_STEPS:?optimizer steps}" "${GLOBAL_BATCH:?sequences per step}" "${LR:?learning rate}"
read -ra more <<<"${MORE_FLAGS:-}"

# Nodes, and how the model is spread over their GPUs. The output groups limit tensor parallelism.
nodes=${NODES:-1} gpus=${GPUS_PER_NODE:-8}
parallel=(
  --tensor-model-parallel-size "${TP:-8}" --sequence-parallel
  --pipeline-model-parallel-size "${PP:-1}"
  --expert-model-parallel-size "${EP:-8}" --expert-tensor-parallel-size 1
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
if [[ -n ${PIPELINE_LAYOUT:-} ]]; then # needed where PP does not divide the number of layers
  parallel+=(--pipeline-model-parallel-layout "$PIPELINE_LAYOUT")
fi

attention=(
  --attention-backend dsa_fused --dsa-stage "${STAGE:-sparse}"
  --multi-latent-attention --qk-layernorm --normalization RMSNorm --norm-epsilon 1e-6
  # The one key/value head: 448 + 64 (rotated) dims.
  --qk-head-dim 448 --qk-pos-emb-head-dim 64 --v-head-dim 512 --kv-lora-rank 448
  --o-lora-rank 1024 --csa-window-size 128 --mtp-num-layers 1
  --csa-compress-ratios "${first[@]}" $(for ((i = 0; i < pairs; i++)); do echo 128 4; done) 0
  --dsa-indexer-n-heads 64 --dsa-indexer-head-dim 128 --dsa-indexer-rope-interleaved
  --dsa-indexer-loss-coeff "${INDEXER_LOSS_COEFF:-1.0}" --dsa-indexer-use-sparse-loss
  --position-embedding-type rope --rope-type yarn --rotary-base "$ROTARY_BASE"
  --csa-compress-rotary-base "$COMPRESS_ROTARY_BASE" --rotary-scaling-factor "$YARN_FACTOR"
  --yarn-original-max-position-embeddings "$YARN_ORIGINAL_LENGTH"
)
rest=(
  --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
  --untie-embeddings-and-output-weights
  --num-experts "$NUM_EXPERTS" --moe-layer-freq "$MOE_LAYER_FREQ"
  --moe-router-topk "$EXPERTS_PER_TOKEN" --moe-ffn-hidden-size "$EXPERT_SIZE"
  --moe-shared-expert-intermediate-size "$SHARED_EXPERT_SIZE"
  --moe-grouped-gemm --moe-token-dispatcher-type alltoall
)
training=(
  --bf16 --seq-length "${SEQ_LENGTH:-4096}" --max-position-embeddings "${SEQ_LENGTH:-4096}"
  --micro-batch-size 1 --global-batch-size "$GLOBAL_BATCH" --train-iters "$TRAIN_STEPS"
  --lr "$LR" --recompute-granularity selective --recompute-modules core_attn mla_up_proj
  --data-path "$DATA_PATH" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER"
  --load "$CHECKPOINTS" --save "$CHECKPOINTS" --save-interval "${SAVE_INTERVAL:-500}"
  --log-interval 10 --eval-iters 0
)
export CUDA_DEVICE_MAX_CONNECTIONS=1
python=${PYTHON:-$(scripts/environment.sh)}
exec "$python" -m torch.distributed.run \
  --nnodes "$nodes" --node-rank "${NODE_RANK:-0}" --nproc-per-node "$gpus" \
  --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}" \
  -m megatron_dsa.pretrain "${shape[@]}" "${attention[@]}" "${rest[@]}" "${parallel[@]}" \
  "${training[@]}" "${more[@]}" "$@"
