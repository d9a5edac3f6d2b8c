#!/usr/bin/env bash
# Trains a small DeepSeek-V3.2-style model on Python's own documentation, in DeepSeek's three stages:
#   dense   plain MLA, no indexer
#   warmup  the model is frozen, the indexer learns to predict its attention
#   sparse  every token attends to the 48 keys (of up to 256) that the indexer selects
# Every flag is Megatron's or this package's; on a GPU cluster the same entry point and flags are
# launched with torchrun. Arguments are appended to each stage's flags and override them.
#   RUN_DIR  where data, checkpoints and the log go       (runs/train_small)
#   STEPS    optimizer steps of the three stages          ("150 100 150")
#   PYTHON   interpreter with everything installed        (sets up .venv and takes that)
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$(scripts/environment.sh)}
run=${RUN_DIR:-runs/train_small}
read -r dense_steps warmup_steps sparse_steps <<<"${STEPS:-150 100 150}"
data=$run/data/topics
mkdir -p "$run"
rm -rf "$run/checkpoints" "$run/train.log"
export PYTHONWARNINGS=ignore
"$python" -m megatron_dsa prepare-data --output "$data" 2>"$run/prepare.log"

model=(
  --num-layers 4 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 8
  --multi-latent-attention --q-lora-rank 64 --kv-lora-rank 64
  --qk-head-dim 32 --qk-pos-emb-head-dim 16 --v-head-dim 32 --qk-layernorm
  --normalization RMSNorm --swiglu --disable-bias-linear
  --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.05
  --rope-type rope --position-embedding-type rope --untie-embeddings-and-output-weights
)
attention=(
  --attention-backend dsa_fused  # fused kernels where they can run, else torch; the log says which
  --dsa-indexer-n-heads 8 --dsa-indexer-head-dim 32 --dsa-indexer-topk 48
  --dsa-indexer-loss-coeff 1.0 --dsa-indexer-use-sparse-loss
)
training=(
  --seq-length 256 --max-position-embeddings 256 --micro-batch-size 4 --global-batch-size 8
  --lr-decay-style constant --weight-decay 0.01 --clip-grad 1.0 --adam-beta2 0.95 --seed 1
  --data-path "$data" --tokenizer-type NullTokenizer --vocab-size 257 --split 95,5,0
  --load "$run/checkpoints" --save "$run/checkpoints" --save-interval 100000
  --override-opt_param-scheduler --log-interval 10 --eval-interval 100000 --eval-iters 4
)
export RANK=${RANK:-0} LOCAL_RANK=${LOCAL_RANK:-0} WORLD_SIZE=${WORLD_SIZE:-1}
export MASTER_ADDR=${MASTER_ADDR:-localhost} MASTER_PORT=${MASTER_PORT:-29500}

stage() { # name, last step, learning rate
  local name=$1 last=$2 rate=$3
  shift 3
  echo "== stage $name, up to step $last"
  local status=0
  "$python" -m megatron_dsa.pretrain "${model[@]}" "${attention[@]}" "${training[@]}" \
    --dsa-stage "$name" --train-iters "$last" --lr "$rate" --min-lr "$rate" "$@" 2>&1 |
    tee -a "$run/train.log" |
    sed -nuE -e 's/^ *\[[^]]*\] *(iteration +[0-9]+\/ *[0-9]+) .*elapsed time per iteration \(ms\): ([0-9.]+).*(lm loss: [^|]*)\|( indexer loss: [^|]*)?.*/\1 | \3|\4 \2 ms/p' \
      -e '/^ validation loss/p' -e '/^> (megatron_dsa|checkpoint|no )|^>   /p' -e '/megatron_dsa [a-z_]+: /p' ||
    status=$?
  if [[ $status != 0 ]]; then
    echo "stage $name failed; the whole log is in $run/train.log" >&2
    tail -n 20 "$run/train.log" >&2
    return "$status"
  fi
}
stage dense "$dense_steps" 3e-3 "$@"
stage warmup $((dense_steps + warmup_steps)) 3e-3 "$@"
stage sparse $((dense_steps + warmup_steps + sparse_steps)) 1e-3 "$@"
