# Sourced by the train_small scripts, which set `run` (a folder) and `stages` (their number) before and the
# arrays `model` and `attention` (flags) after. Prepares the data, and gives them the functions below.
if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then # needs no installation
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "examples/$(basename "$0")"
  exit
fi
echo "$(basename "$0"): data, checkpoints, log and report go to $run"
source examples/log.sh
python=${PYTHON:-$(scripts/environment.sh)}
data=$run/data/topics log=$run/train.log number=0
mkdir -p "$run"
export PYTHONWARNINGS=ignore

noted() { # command: standard error goes to the log, whose end is shown where it fails
  local status=0
  "$@" 2>>"$log" || status=$?
  if ((status)); then show_end "$log" "$status"; fi
  return "$status"
}
if [[ ! -f $data.idx ]]; then
  noted "$python" -m megatron_dsa prepare-data --output "$data" | sed -n "1s/ (.*/ of Python's documentation/p"
fi

training=(
  --seq-length 256 --max-position-embeddings 256 --micro-batch-size 4 --global-batch-size 8
  --lr-decay-style constant --weight-decay 0.01 --clip-grad 1.0 --adam-beta2 0.95 --seed 1
  --data-path "$data" --tokenizer-type NullTokenizer --vocab-size 257 --split 95,5,0
  --load "$run/checkpoints" --save "$run/checkpoints" --save-interval 100000
  --override-opt_param-scheduler --log-interval 10 --eval-interval 100000 --eval-iters 4
  --tensorboard-dir "$run/events" --log-timers-to-tensorboard --log-throughput
  --dsa-time-operations
  # Workers would not outlive a signal to the process group; a sequence takes a millisecond.
  --exit-signal-handler --num-workers 0
)
export RANK=${RANK:-0} LOCAL_RANK=${LOCAL_RANK:-0} WORLD_SIZE=${WORLD_SIZE:-1}
export MASTER_ADDR=${MASTER_ADDR:-localhost} MASTER_PORT=${MASTER_PORT:-0} # 0: any that is free

training_lines() { # in place of log.sh's
  "$python" examples/progress.py "stage $number/$stages"
}

train() { # stage, last step, learning rate, more flags
  local name=$1 last=$2 rate=$3
  shift 3
  logged "$log" "$python" -m megatron_dsa.pretrain \
    "${model[@]}" "${attention[@]}" "${training[@]}" \
    --dsa-stage "$name" --train-iters "$last" --lr "$rate" --min-lr "$rate" "$@"
}

stage() { # the same; goes on from the last checkpoint
  local name=$1 last=$2 status=0 at kept="no step is saved yet"
  number=$((number + 1))
  if (($(last_step "$run/checkpoints") >= last)); then
    echo "== stage $number/$stages, $name: trained up to step $last (remove $run to train anew)"
    return
  fi
  echo "== stage $number/$stages, $name, up to step $last"
  train "$@" || status=$?
  at=$(last_step "$run/checkpoints")
  # 143: the signal came before Megatron's handler.
  if { $stopped && ((status == 0 || status == 143)); } || ((status == 0 && at < last)); then
    if ((at)); then kept="step $at is saved, ${again:-the same command continues from there}"; fi
    echo "stopped; $kept" >&2
    return 3
  elif ((status)); then
    echo "stage $name failed" >&2
    return "$status"
  fi
}

report() { # a page on the run
  noted "$python" -m megatron_dsa report "$run/events" --output "$run/report.html" >>"$log"
}

lines() { # that the model writes; the most probable bytes alone would repeat themselves
  echo "== three lines"
  noted "$python" -m megatron_dsa generate --load "$run/checkpoints" --tokens 60 --temperature 0.7 \
    --prompt "The " "An expression" "class "
}

ending() { # script to run next
  local again=${PYTHON:+PYTHON=$PYTHON }
  echo "== done"
  printf '%-11s %s\n' page "$run/report.html" log "$log" \
    checkpoint "$(printf '%s/iter_%07d' "$run/checkpoints" "$(last_step "$run/checkpoints")")"
  echo "next, in $PWD:"
  printf '  %s\n' \
    "${python#"$PWD/"} -m megatron_dsa generate --load $run/checkpoints --temperature 0.7 --tokens 200 --prompt 'The '" \
    "$again$1" "${again}examples/v3_2.sh --dsa-dry-run  # plans DeepSeek-V3.2, whole, without a GPU"
}
