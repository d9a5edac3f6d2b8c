#!/usr/bin/env bash
# Trains a sparse model from random weights, with the learning rates of the dense model and its
# continuation.
# common.sh explains the variables.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/conversion/common.sh
run scratch "$@"
