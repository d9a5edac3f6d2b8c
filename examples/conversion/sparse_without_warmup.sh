#!/usr/bin/env bash
# Adds indexers to the dense model and trains with the keys that they select from the first step.
# common.sh explains the variables.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/conversion/common.sh
run sparse_without_warmup "$@"
