#!/usr/bin/env bash
# The dense model gains indexers and trains with the keys that they select, from the first step on.
# common.sh explains the variables.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/conversion/common.sh
run sparse_without_warmup "$@"
