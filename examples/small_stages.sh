# Sourced by the train_small scripts, which set `run` (a folder) before and the arrays `model` and
# `attention` (flags) after. Prepares the data, and gives them the functions `stage`, `report` and `lines`.
source examples/log.sh
python=${PYTHON:-$(scripts/environment.sh)}
data=$run/data/topics
mkdir -p "$run"
rm -rf "$run/checkpoints" "$run/events" "$run/train.log"
export PYTHONWARNINGS=ignore
"$python" -m megatron_dsa prepare-data --output "$data" 2>"$run/prepare.log"

training=(
  --seq-length 256 --max-position-embeddings 256 --micro-batch-size 4 --global-batch-size 8
  --lr-decay-style constant --weight-decay 0.01 --clip-grad 1.0 --adam-beta2 0.95 --seed 1
  --data-path "$data" --tokenizer-type NullTokenizer --vocab-size 257 --split 95,5,0
  --load "$run/checkpoints" --save "$run/checkpoints" --save-interval 100000
  --override-opt_param-scheduler --log-interval 10 --eval-interval 100000 --eval-iters 4
  --tensorboard-dir "$run/events" --log-timers-to-tensorboard --log-throughput
  --dsa-time-operations
)
export RANK=${RANK:-0} LOCAL_RANK=${LOCAL_RANK:-0} WORLD_SIZE=${WORLD_SIZE:-1}
export MASTER_ADDR=${MASTER_ADDR:-localhost} MASTER_PORT=${MASTER_PORT:-0} # 0: any that is free

training_lines() { # in place of log.sh's: of a step the losses and milliseconds
  sed -nuE -e '/^ *\[[^]]*\] *iteration/{
      s/^ *\[[^]]*\] *//
      s/ elapsed time per iteration \(ms\): ([0-9.]+)(.*)/\2@ \1 ms/
      s/\| *((lm|mtp_1|indexer) loss:)/@ \1/g
      s/\|[^@|]*//g
      s/ *@/ |/gp
    }' \
    -e '/^ validation loss/p' -e '/^> (megatron_dsa|checkpoint|no |warning)|^>   /p' -e '/(WARNING|ERROR|CRITICAL):|^error: /p'
}

stage() { # name, last step, learning rate, more flags
  local name=$1 last=$2 rate=$3 status=0
  shift 3
  echo "== stage $name, up to step $last"
  logged "$run/train.log" "$python" -m megatron_dsa.pretrain \
    "${model[@]}" "${attention[@]}" "${training[@]}" \
    --dsa-stage "$name" --train-iters "$last" --lr "$rate" --min-lr "$rate" "$@" || status=$?
  if [[ $status != 0 ]]; then
    echo "stage $name failed" >&2
    return "$status"
  fi
}

report() { # a page on the run
  "$python" -m megatron_dsa report "$run/events" --output "$run/report.html" 2>>"$run/train.log"
}

lines() { # that the model writes, from the most probable byte to the next
  echo "== three lines"
  "$python" -m megatron_dsa generate --load "$run/checkpoints" --tokens 60 \
    --prompt "The " "An expression" "class " 2>>"$run/train.log"
}
