# Sourced by the scripts of this folder: sizes, flags, and the function `train`. runs.sh has the runs.
#   RUN_DIR  where data, checkpoints, logs and the table go       (runs/conversion)
#   SMALL    1: a small model and corpus, minutes on a CPU        (one GPU, 160 M parameters)
#   GPU30    1: the model of full size, fewer tokens: 16 minutes on one H200
#   STEPS    optimizer steps: dense, warm-up, sparse  ("1500 100 500", small "60 20 40", GPU30 "840 60 120")
#   BATCH    sequences of an optimizer step                        (64, small 2, GPU30 4)
#   RATE     highest learning rate of a dense model; the last is 1/30 of it, small 1/3
#            (6e-4, small 3e-3, GPU30 1e-3)
#   LENGTH   tokens of a sequence, 512 to those of a document       (8192 of 32768, small 512 of 2048,
#            GPU30 8192 of 16384)
#   TOPK     keys that a query selects; a run of the sparse stage for each of several
#            ("2048 1024", small 64)
#   SEED     of weights and data                                  (1)
#   PYTHON   interpreter with everything installed                (sets up .venv and takes that)
# Arguments of the scripts are appended to Megatron's flags. A script that is called again continues
# from the last checkpoints of its runs, also after SIGTERM (`timeout --foreground`), which saves one.
# Another size, SEED, STEPS, BATCH, RATE, LENGTH or first TOPK needs another RUN_DIR, and is refused.
source examples/log.sh
python=${PYTHON:-$(scripts/environment.sh)}
run=${RUN_DIR:-runs/conversion${SMALL:+_small}${GPU30:+_gpu30}}
data=$run/data
# Learning rates: the dense model's highest and last, and the warm-up's. Stages after a dense model
# keep its last rate, as in DeepSeek's report (there 2.2e-4, 7.3e-6 = 1/30 of it, and 1e-3).
if [[ -n ${SMALL:-} ]]; then
  read -r dense_steps warmup_steps sparse_steps <<<"${STEPS:-60 20 40}"
  topks=${TOPK:-64} vocabulary=1024 document_tokens=2048 seq_length=${LENGTH:-512} batch=${BATCH:-2} micro_batch=2
  peak=${RATE:-3e-3} fall=3 last= warmup_rate=3e-3 lr_warmup=5 eval_interval=50 save_interval=100000 log_interval=10
  measures=(--probe-sequences 8 --selection-sequences 4) seconds="0.2 0.2 0.3" start_seconds=15
  model=(
    --num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4
    --q-lora-rank 64 --kv-lora-rank 64 --qk-head-dim 32 --qk-pos-emb-head-dim 16 --v-head-dim 32
    --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 32 --init-method-std 0.05
  )
  v4=(
    --kv-lora-rank 32 --v-head-dim 48 --o-groups 2 --o-lora-rank 32
    --csa-compress-ratios 4 16 --csa-window-size 32 --dsa-indexer-topk 16
  )
else
  topks=${TOPK:-2048 1024} vocabulary=16384 seq_length=${LENGTH:-8192} micro_batch=1 fall=30 last=
  warmup_rate=1e-3 log_interval=10 measures=() start_seconds=65
  if [[ -n ${GPU30:-} ]]; then
    read -r dense_steps warmup_steps sparse_steps <<<"${STEPS:-840 60 120}"
    document_tokens=16384 batch=${BATCH:-4} peak=${RATE:-1e-3} lr_warmup=$((dense_steps / 14))
    eval_interval=$(((warmup_steps + sparse_steps) / 3))
    if [[ -z ${RATE:-} ]]; then last=3.3e-5; fi # as in the runs of docs/evidence.md
    save_interval=$((dense_steps / 2)) dense_eval_interval=$((dense_steps / 2))
  else
    read -r dense_steps warmup_steps sparse_steps <<<"${STEPS:-1500 100 500}"
    document_tokens=32768 batch=${BATCH:-64} peak=${RATE:-6e-4} lr_warmup=100 eval_interval=100 save_interval=250
  fi
  seconds=$(awk -v n="$batch" -v s="$seq_length" 'BEGIN {n *= s / 8192; print n * 0.068, n * 0.178, n * 0.145}')
  model=(
    --num-layers 12 --hidden-size 768 --ffn-hidden-size 2048 --num-attention-heads 16
    --q-lora-rank 384 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
    --dsa-indexer-n-heads 16 --dsa-indexer-head-dim 128 --init-method-std 0.02 --bf16
  )
  v4=( # 12 layers like the first of V4-Flash; 157 M parameters, the model above has 160 M
    --q-lora-rank 256 --kv-lora-rank 448 --qk-head-dim 448 --v-head-dim 512 --o-groups 4 --o-lora-rank 192
    --csa-compress-ratios 0 0 4 128 4 128 4 128 4 128 4 128 --dsa-indexer-topk 512
  )
fi
last=${last:-$(awk "BEGIN {print $peak / $fall}")}
v4+=(--csa-compress-rotary-base 160000 --dsa-indexer-rope-interleaved)
dense_eval_interval=${dense_eval_interval:-$eval_interval}
on_steps=$((warmup_steps + sparse_steps))
read -ra topks <<<"$topks"
model+=(
  --multi-latent-attention --qk-layernorm --normalization RMSNorm --swiglu --disable-bias-linear
  --attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights
  --rope-type rope --position-embedding-type rope
  --attention-backend dsa_fused --dsa-indexer-topk "${topks[0]}"
  --dsa-indexer-loss-coeff 1.0 --dsa-indexer-use-sparse-loss
)
training=(
  --seq-length "$seq_length" --max-position-embeddings "$seq_length"
  --micro-batch-size "$micro_batch" --global-batch-size "$batch" --seed "${SEED:-1}"
  --weight-decay 0.1 --clip-grad 1.0 --adam-beta2 0.95
  --train-data-path "$data/train" --valid-data-path "$data/held_out"
  # Evaluate the whole held-out set each time, sequence by sequence and as one of several sets.
  --full-validation --eval-global-batch-size 1 --eval-micro-batch-size 1
  --multiple-validation-sets --validation-set-names held_out
  --tokenizer-type NullTokenizer --vocab-size "$vocabulary"
  --eval-interval "$eval_interval" --save-interval "$save_interval" --log-interval "$log_interval"
  --override-opt_param-scheduler --log-timers-to-tensorboard --log-throughput
  # Workers would not outlive a signal to the process group; a sequence takes a millisecond.
  --exit-signal-handler --num-workers 0
)
falling=(
  --lr "$peak" --min-lr "$last" --lr-decay-style cosine --lr-warmup-iters "$lr_warmup"
  --lr-decay-iters "$dense_steps" --eval-interval "$dense_eval_interval"
)
constant() { # rate: its flags
  echo "--lr $1 --min-lr $1 --lr-decay-style constant"
}
export PYTHONWARNINGS=ignore
export RANK=${RANK:-0} LOCAL_RANK=${LOCAL_RANK:-0} WORLD_SIZE=${WORLD_SIZE:-1}
export MASTER_ADDR=${MASTER_ADDR:-localhost} MASTER_PORT=${MASTER_PORT:-0} # 0: any that is free

step_of() { # run: step of its last checkpoint
  last_step "$run/$1"
}

check_settings() { # those of RUN_DIR are what this call has; the first one sets them
  local now
  if ((seq_length < 512 || seq_length > document_tokens)); then
    echo "LENGTH must be 512 to $document_tokens, the tokens of a document, got $seq_length" >&2
    return 2
  fi
  now="seed ${SEED:-1}, steps $dense_steps $warmup_steps $sparse_steps, first TOPK ${topks[0]}, ${model[*]:0:6}, batch $batch${RATE:+, rate $RATE}${LENGTH:+, length $LENGTH}"
  same_settings "$run" "$now"
}

train() { # run, run that it starts from or "", stage, last step, flags
  local name=$1 from=$2 stage=$3 until=$4 step start=(--load "$run/$1")
  shift 4
  check_settings || return
  step=$(step_of "$name")
  if ((step >= until)); then
    echo "== $name is at step $step"
    return
  fi
  if [[ $step == 0 && -n $from ]]; then
    if [[ $(step_of "$from") == 0 ]]; then
      echo "$run/$from has no checkpoint to start from: run examples/conversion/all.sh" >&2
      return 2
    fi
    # Every run starts with a new optimizer, whether or not the stage changes.
    start=(--load "$run/$from" --no-load-optim)
  fi
  if [[ $stage != dense ]]; then start+=(--dsa-evaluate-indexer); fi
  echo "== $name, stage $stage, up to step $until"
  local program=(examples/conversion/train.py --measures "$run/$name" "${measures[@]}")
  if [[ " $* " == *" --dsa-dry-run "* ]]; then program=(-m megatron_dsa.pretrain); fi
  logged "$run/$name/train.log" "$python" "${program[@]}" \
    "${model[@]}" "${training[@]}" "${start[@]}" --save "$run/$name" \
    --tensorboard-dir "$run/$name/events" --dsa-stage "$stage" --train-iters "$until" "$@"
  if [[ ${program[0]} == -m ]]; then return; fi
  step=$(step_of "$name")
  if ((step < until)); then
    echo "== $name was stopped at step $step: run the script again to go on" >&2
    return 3
  fi
}

source examples/conversion/runs.sh
