#!/usr/bin/env bash
# The dense model gains indexers, which learn while it is frozen; then all of it trains with selected
# keys. The warm-up attends to all keys and serves every number of selected keys: after `sparse`, with
# the first of TOPK, come `sparse_1024` and so on. common.sh explains the variables.
#   ONLY   one of TOPK: no other run of the sparse stage   (all)
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/conversion/common.sh
run warmup "$@"
for topk in "${topks[@]}"; do
  if [[ ${ONLY:-$topk} != "$topk" ]]; then continue; fi
  if [[ $topk == "${topks[0]}" ]]; then run sparse "$@"; else run "sparse_$topk" "$@"; fi
done
