#!/usr/bin/env bash
# Adds indexers to the dense model, trains them while it is frozen, then trains everything with
# selected keys. All numbers of selected keys share the warm-up, which attends to all keys: `sparse`
# has the first of TOPK, then come `sparse_1024` and so on. common.sh explains the variables.
#   ONLY   one of TOPK: no other run of the sparse stage   (all)
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/conversion/common.sh
run warmup "$@"
for topk in "${topks[@]}"; do
  if [[ ${ONLY:-$topk} != "$topk" ]]; then continue; fi
  if [[ $topk == "${topks[0]}" ]]; then run sparse "$@"; else run "sparse_$topk" "$@"; fi
done
