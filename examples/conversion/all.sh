#!/usr/bin/env bash
# Measures the cost of making a dense model sparse: prepares the corpus, trains all runs, and prints
# tables of held-out losses and other measures. Writes CSVs to RUN_DIR, and charts if matplotlib is
# installed. Completed runs are not repeated.
#   SMALL=1 examples/conversion/all.sh    the same in minutes on a CPU
#   GPU30=1 examples/conversion/all.sh    in 16 minutes on one H200, without the model from scratch
#   all.sh NAME...                        these runs and those that they start from; runs.sh has the names
#   PLAN=1 all.sh ...                     only says what is done, and how many minutes are left
# common.sh explains the variables; arguments from the first one with a dash on are appended to
# Megatron's flags.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/conversion/common.sh
names=()
while [[ $# -gt 0 && $1 != -* ]]; do
  names+=("$1")
  shift
done
if ((${#names[@]} == 0)); then names=("${default_runs[@]}"); fi
runs=$(with_parents "${names[@]}")
read -ra runs <<<"$runs"
list_runs "${runs[@]}"
if [[ -n ${PLAN:-} ]]; then exit; fi
examples/conversion/data.sh
stopped=false
# Pass signals on to the run, which saves a checkpoint.
trap 'stopped=true; kill -TERM "$child" 2>/dev/null || true' INT TERM
for name in "${runs[@]}"; do
  (run "$name" "$@") &
  child=$! status=0
  wait "$child" || status=$?
  if $stopped; then
    wait "$child" || true # the signal ended the first wait
    exit 143
  fi
  if [[ $status != 0 ]]; then exit "$status"; fi
done
examples/conversion/results.sh
