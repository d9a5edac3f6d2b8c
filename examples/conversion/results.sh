#!/usr/bin/env bash
# Tables and charts of the runs so far. common.sh explains the variables.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/conversion/common.sh
"$python" examples/conversion/table.py "$run" --warmup-steps "$warmup_steps" \
  --tokens-per-step $((batch * seq_length))
if "$python" -c 'import matplotlib' 2>/dev/null; then
  "$python" examples/conversion/charts.py "$run" "$run" >/dev/null
fi
