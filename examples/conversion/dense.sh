#!/usr/bin/env bash
# Pretrains the dense model that the other runs start from. common.sh explains the variables.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/conversion/common.sh
run dense "$@"
