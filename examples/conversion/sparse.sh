#!/usr/bin/env bash
# The dense model gains indexers, which learn while it is frozen; then all of it trains with selected
# keys. common.sh explains the variables.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/conversion/common.sh
train warmup dense warmup $((dense_steps + warmup_steps)) $(constant "$warmup_rate") "$@"
train sparse warmup sparse $((dense_steps + on_steps)) $(constant "$last") "$@"
