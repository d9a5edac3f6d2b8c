#!/usr/bin/env bash
# Continues the dense model for as many tokens as the warm-up and the sparse stage have, as the
# baseline for sparse models. common.sh explains the variables.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/conversion/common.sh
run dense_on "$@"
