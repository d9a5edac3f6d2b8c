#!/usr/bin/env bash
# What it costs to make a dense model sparse: prepares the corpus, trains all runs, and prints tables
# of their losses on held-out text and of the measures, which are also written to CSVs in RUN_DIR, and
# drawn where matplotlib is installed.
#   SMALL=1 examples/conversion/all.sh    the same in minutes on a CPU
#   GPU30=1 examples/conversion/all.sh    in 30 minutes on one GPU, without the model from scratch
# common.sh explains the variables; arguments are appended to Megatron's flags.
set -euo pipefail
cd "$(dirname "$0")/../.."
examples/conversion/data.sh
runs=(dense dense_on sparse sparse_without_warmup)
if [[ -z ${GPU30:-} ]]; then runs+=(scratch); fi
stopped=false
# A signal goes on to the run, which saves a checkpoint.
trap 'stopped=true; kill -TERM "$child" 2>/dev/null || true' INT TERM
for name in "${runs[@]}"; do
  "examples/conversion/$name.sh" "$@" &
  child=$! status=0
  wait "$child" || status=$?
  if $stopped; then
    wait "$child" || true # the signal ended the first wait
    exit 143
  fi
  if [[ $status != 0 ]]; then exit "$status"; fi
done
examples/conversion/results.sh
