# Sourced by common.sh: definitions of the runs. `run NAME FLAGS...` trains one; `list_runs NAMES...`
# prints which runs are done and how many minutes the others take.
#   SECONDS_PER_STEP  of stages dense, warm-up and sparse, for the estimate of runs without a log
#                     (of an H200: 0.068, 0.178 and 0.145 times BATCH * LENGTH / 8192; small "0.2 0.2 0.3")

# Default: the runs that the gap needs. A model from scratch takes two thirds as long as all other
# runs of GPU30.
default_runs=(dense dense_on warmup sparse)
for topk in "${topks[@]:1}"; do default_runs+=("sparse_$topk"); done
default_runs+=(sparse_without_warmup)
if [[ -z ${GPU30:-} ]]; then default_runs+=(scratch); fi

no_run() {
  echo "no run is called $1: dense, dense_on, dense_on_again, warmup, sparse, sparse_without_warmup, scratch," \
    "v4, warmup with a share of the indexer's loss behind it (q8: 1/8 of the query tokens; q8h4: and 1/4" \
    "of the heads), or sparse with a number of keys, a variant (again, absorbed, masked, fp8_scores, frozen," \
    "or such a share) or both, such as sparse_512, sparse_q8 and sparse_512_masked" >&2
}

loss_on() { # qN or qNhM: adds the flags
  if [[ ! $1 =~ ^q([1-9][0-9]*)(h([1-9][0-9]*))?$ ]]; then
    no_run "..._$1"
    return 2
  fi
  flags+=(--dsa-indexer-loss-queries "$(awk "BEGIN {print 1 / ${BASH_REMATCH[1]}}")")
  if [[ -n ${BASH_REMATCH[3]} ]]; then
    flags+=(--dsa-indexer-loss-heads "$(awk "BEGIN {print 1 / ${BASH_REMATCH[3]}}")")
  fi
}

describe() { # run: sets from, stage, until, rates, flags
  from=dense stage=sparse until=$((dense_steps + on_steps)) flags=()
  read -ra rates <<<"$(constant "$last")"
  case $1 in
    dense) from='' stage=dense until=$dense_steps rates=("${falling[@]}") ;;
    dense_on | dense_on_again) stage=dense ;; # two equal runs: what differs is noise
    warmup | warmup_*)
      stage=warmup until=$((dense_steps + warmup_steps))
      read -ra rates <<<"$(constant "$warmup_rate")"
      if [[ $1 == warmup_* ]]; then loss_on "${1#warmup_}" || return; fi
      ;;
    sparse_without_warmup) ;;
    scratch) from='' rates=("${falling[@]}") ;;
    v4) from='' rates=("${falling[@]}") flags=("${v4[@]}") ;;
    *) # sparse, sparse_TOPK, sparse_VARIANT, sparse_TOPK_VARIANT
      if [[ ! $1 =~ ^sparse(_([1-9][0-9]*))?(_(again|absorbed|masked|fp8_scores|frozen|[qh].*))?$ ]]; then
        no_run "$1"
        return 2
      fi
      from=warmup flags=(--dsa-indexer-topk "${BASH_REMATCH[2]:-${topks[0]}}")
      case ${BASH_REMATCH[4]} in
        absorbed) flags+=(--dsa-selected-attention sparse) ;;
        masked) flags+=(--dsa-selected-attention masked) ;;
        fp8_scores) flags+=(--dsa-indexer-numerics deepgemm-fp8) ;;
        frozen) flags+=(--dsa-indexer-loss-coeff 0) ;;
        q* | h*) loss_on "${BASH_REMATCH[4]}" || return ;;
      esac
      ;;
  esac
}

run() { # name, flags
  local from stage until rates flags name=$1
  shift
  describe "$name" || return
  train "$name" "$from" "$stage" "$until" "${rates[@]}" "${flags[@]}" "$@"
}

with_parents() { # names: these and what they start from, each once, in the order of training
  local from stage until rates flags name found=()
  for name in "$@"; do
    describe "$name" || return
    if [[ -n $from ]]; then read -ra parents <<<"$(with_parents "$from")"; else parents=(); fi
    for name in "${parents[@]}" "$name"; do
      if [[ " ${found[*]} " != *" $name "* ]]; then found+=("$name"); fi
    done
  done
  echo "${found[@]}"
}

seconds_per_step() { # run, stage: as in its log, or as estimated
  local milliseconds of_stage
  milliseconds=$(sed -nE 's/.*elapsed time per iteration \(ms\): ([0-9.]+).*/\1/p' "$run/$1/train.log" \
    2>/dev/null | sort -n | awk '{found[NR] = $1} END {if (NR) print found[int((NR + 1) / 2)]}')
  read -r -a of_stage <<<"${SECONDS_PER_STEP:-$seconds}"
  case $2 in dense) of_stage=${of_stage[0]} ;; warmup) of_stage=${of_stage[1]} ;; *) of_stage=${of_stage[2]} ;; esac
  awk -v ms="$milliseconds" -v s="$of_stage" 'BEGIN {print ms ? ms / 1000 : s}'
}

list_runs() { # names
  local from stage until rates flags name step begins minutes total=0
  for name in "$@"; do
    describe "$name" || return
    step=$(step_of "$name") begins=0
    if ((step >= until)); then
      echo "== $name: done, step $step"
      continue
    fi
    case $from in
      dense) begins=$dense_steps ;;
      warmup) begins=$((dense_steps + warmup_steps)) ;;
    esac
    if ((step > begins)); then begins=$step; fi
    minutes=$(awk -v n=$((until - begins)) -v s="$(seconds_per_step "$name" "$stage")" \
      -v start="$start_seconds" 'BEGIN {printf "%.1f", (n * s + start) / 60}')
    total=$(awk "BEGIN {print $total + $minutes}")
    echo "== $name: $((until - begins)) of $until steps left, about $minutes minutes"
  done
  echo "== about $total minutes left"
}
