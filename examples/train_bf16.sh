#!/usr/bin/env bash
# 50 bf16 steps of an 8-layer, 64-head model at 4096 tokens on one GPU; no transformer-engine needed.
# benchmarks/train.csv (v3.2, 8 layers) holds what it gave on one H200. Arguments override the flags below.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$(scripts/environment.sh)}
run=${RUN_DIR:-runs/train_bf16} # train.log in it holds all that is printed
data=$run/topics
source examples/log.sh
export PYTHONWARNINGS=ignore CUDA_DEVICE_MAX_CONNECTIONS=1
"$python" -m megatron_dsa prepare-data --output "$data" 2>/dev/null

flags=(
  --num-layers 8 --hidden-size 2048 --ffn-hidden-size 5632 --num-attention-heads 64
  --multi-latent-attention --q-lora-rank 768 --kv-lora-rank 512
  --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm
  --normalization RMSNorm --swiglu --disable-bias-linear
  --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
  --rope-type rope --position-embedding-type rope --untie-embeddings-and-output-weights
  --attention-backend dsa_fused
  --dsa-indexer-n-heads 32 --dsa-indexer-head-dim 128 --dsa-indexer-topk 512
  --dsa-indexer-loss-coeff 1.0 --dsa-indexer-use-sparse-loss
  --bf16 --seq-length 4096 --max-position-embeddings 4096
  --micro-batch-size 1 --global-batch-size 4 --train-iters 50
  --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 5
  --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95 --seed 1
  --data-path "$data" --tokenizer-type NullTokenizer --vocab-size 257 --split 100,0,0
  --log-interval 10 --eval-interval 1000 --eval-iters 0
)
export RANK=${RANK:-0} LOCAL_RANK=${LOCAL_RANK:-0} WORLD_SIZE=${WORLD_SIZE:-1}
export MASTER_ADDR=${MASTER_ADDR:-localhost} MASTER_PORT=${MASTER_PORT:-29500}
rm -f "$run/train.log"
logged "$run/train.log" "$python" -m megatron_dsa.pretrain "${flags[@]}" "$@"
