#!/usr/bin/env bash
# A sparse model from random weights, with the rates of the dense model and of what follows it.
# common.sh explains the variables.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/conversion/common.sh
run scratch "$@"
