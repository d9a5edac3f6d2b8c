#!/usr/bin/env bash
# What it costs to make a dense model sparse: prepares the corpus, trains all runs, and prints a table
# of their losses on held-out text, which is also written to RUN_DIR/validation.csv.
#   SMALL=1 examples/conversion/all.sh    the same in minutes on a CPU
# common.sh explains the variables; arguments are appended to Megatron's flags.
set -euo pipefail
cd "$(dirname "$0")/../.."
examples/conversion/data.sh
for name in dense dense_on sparse sparse_without_warmup scratch; do
  "examples/conversion/$name.sh" "$@"
done
source examples/conversion/common.sh
"$python" examples/conversion/table.py "$run" --warmup-steps "$warmup_steps" \
  --tokens-per-step $((batch * seq_length))
