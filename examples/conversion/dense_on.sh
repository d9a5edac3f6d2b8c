#!/usr/bin/env bash
# The dense model goes on for as many tokens as the warm-up and the sparse stage have: what sparse
# models are compared with. common.sh explains the variables.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/conversion/common.sh
run dense_on "$@"
