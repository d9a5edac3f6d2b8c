#!/usr/bin/env bash
# The dense model gains indexers, which learn while it is frozen; then all of it trains with selected
# keys. The warm-up attends to all keys and serves every number of selected keys: after `sparse`, with
# the first of TOPK, come `sparse_1024` and so on. common.sh explains the variables.
#   ONLY   one of TOPK: no other run of the sparse stage   (all)
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/conversion/common.sh
train warmup dense warmup $((dense_steps + warmup_steps)) $(constant "$warmup_rate") "$@"
for topk in "${topks[@]}"; do
  if [[ ${ONLY:-$topk} != "$topk" ]]; then continue; fi
  name=sparse
  if [[ $topk != "${topks[0]}" ]]; then name=sparse_$topk; fi
  train "$name" warmup sparse $((dense_steps + on_steps)) $(constant "$last") \
    --dsa-indexer-topk "$topk" "$@"
done
