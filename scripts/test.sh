#!/usr/bin/env bash
# Lint, types and tests; arguments go to pytest:
#   scripts/test.sh                        the push tier (tests/tiers.py), ten minutes on two cores
#   scripts/test.sh --all                  every case
#   scripts/test.sh tests/unit/ops/layout  every case of a path, or of -k NAME, and nothing else
#   scripts/test.sh --megatron FOLDER ...  the same with Megatron's sources in FOLDER, without lint and types
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$(scripts/environment.sh)}
if [[ ${1:-} == --megatron ]]; then
  PYTHONPATH=$(PYTHON=$python scripts/megatron_tree.sh "${2:?scripts/test.sh --megatron FOLDER}")${PYTHONPATH:+:$PYTHONPATH}
  export PYTHONPATH
  shift 2
else
  "$python" -m ruff check . && "$python" -m ruff format --check .
  "$python" -m mypy
fi
# Without a GPU, run two files at a time; every process gets one thread.
workers=$("$python" -c 'import os, torch; print(0 if torch.cuda.is_available() or os.cpu_count() < 2 else 2)')
export OMP_NUM_THREADS=1 NO_VCS_VERSION=1
# Container images set this variable, which would recompile torch and Megatron in every process.
unset PYTHONDONTWRITEBYTECODE
exec "$python" -m pytest -W ignore -n "$workers" --dist loadfile "$@"
