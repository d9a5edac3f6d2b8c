#!/usr/bin/env bash
# Trains a Hugging Face checkpoint on text and conversations and exports it, small enough for a CPU: the steps
# of docs/guide/continue.md with a tiny random model (tiny_checkpoint.py) instead of a released one.
#   warmup  the model is frozen, its indexers learn to predict the attention
#   sparse  every token attends to the keys that the indexers select; text, with the checkpoint's tokenizer
#   sft     conversations, the loss on the assistant's tokens
#   export  back to the format of the checkpoint
#   MODEL    glm-5, v3.2 or v4                        (glm-5)
#   RUN_DIR  where data, checkpoints and logs go      (runs/continue_small)
#   STEPS    optimizer steps of the three stages      ("20 40 40")
#   PYTHON   interpreter with everything installed, transformers included (sets up .venv and takes that)
# Arguments are appended to the flags of each stage and override them.
set -euo pipefail
cd "$(dirname "$0")/.."
run=${RUN_DIR:-runs/continue_small}
read -r warmup_steps sparse_steps sft_steps <<<"${STEPS:-20 40 40}"
source examples/log.sh
python=${PYTHON:-$(scripts/environment.sh)}
export PYTHONWARNINGS=ignore
if [[ -d $run && ! -f $run/train.log && -n $(ls -A "$run") ]]; then
  echo "$run holds something else: choose another RUN_DIR" >&2
  exit 2
fi
mkdir -p "$run"
rm -rf "$run"/{checkpoint,imported,warmup,sparse,sft,exported*,cache,train.log,data*}
tool() { # a command of the package
  "$python" -m megatron_dsa "$@" 2>>"$run/train.log" || { show_end "$run/train.log" $? && exit 1; }
}

echo "== checkpoint, import, data"
"$python" examples/tiny_checkpoint.py "${MODEL:-glm-5}" "$run" 2>>"$run/train.log" ||
  { show_end "$run/train.log" $? && exit 1; }
tool import-hf --input "$run/checkpoint" --output "$run/imported"
tool prepare-data --tokenizer "$run/checkpoint" --append-eod --input "$run/text.jsonl" --output "$run/data"

flags=$(tool flags "$run/checkpoint")
read -ra model <<<"$flags"
training=(
  --attention-backend dsa_fused --dsa-indexer-loss-coeff 1.0
  --seq-length 256 --micro-batch-size 2 --global-batch-size 4 --seed 1 --bf16
  --lr 1e-3 --min-lr 1e-3 --lr-decay-style constant --clip-grad 1.0 --split 95,5,0
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$run/checkpoint"
  --log-interval 10 --eval-interval 100000 --eval-iters 4 --save-interval 100000
)
export RANK=${RANK:-0} LOCAL_RANK=${LOCAL_RANK:-0} WORLD_SIZE=${WORLD_SIZE:-1}
export MASTER_ADDR=${MASTER_ADDR:-localhost} MASTER_PORT=${MASTER_PORT:-0} # 0: any that is free

stage() { # name, where from, steps, more flags
  local name=$1 from=$2 steps=$3
  shift 3
  echo "== $name, $steps steps"
  logged "$run/train.log" "$python" -m megatron_dsa.pretrain "${model[@]}" "${training[@]}" \
    --load "$run/$from" --finetune --save "$run/$name" --train-iters "$steps" "$@"
}
stage warmup imported "$warmup_steps" --dsa-stage warmup --data-path "$run/data" "$@"
stage sparse warmup "$sparse_steps" --dsa-indexer-use-sparse-loss --data-path "$run/data" "$@"
stage sft sparse "$sft_steps" --dsa-indexer-use-sparse-loss --sft --data-path "$run/chat.jsonl" "$@"

echo "== export"
tool export-hf --input "$run/sft" --config "$run/checkpoint" --output "$run/exported"
tool export-hf --input "$run/sft" --config "$run/checkpoint" --output "$run/exported-fp8" --quantise fp8
echo "the trained model, in the format of $run/checkpoint: $run/exported, and in fp8: $run/exported-fp8"
