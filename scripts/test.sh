#!/usr/bin/env bash
# Lint, types and tests; arguments go to pytest:
#   scripts/test.sh                        the push tier (tests/tiers.py), ten minutes on two cores
#   scripts/test.sh --all                  every case
#   scripts/test.sh tests/unit/ops/layout  every case of a path, or of -k NAME, and nothing else
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$(scripts/environment.sh)}
"$python" -m ruff check . && "$python" -m ruff format --check .
"$python" -m mypy
# Two files at a time where there is no GPU to share; every process gets one thread.
workers=$("$python" -c 'import os, torch; print(0 if torch.cuda.is_available() or os.cpu_count() < 2 else 2)')
export OMP_NUM_THREADS=1
# Container images set it: every process of a test would compile torch and Megatron anew.
unset PYTHONDONTWRITEBYTECODE
exec "$python" -m pytest -W ignore -n "$workers" --dist loadfile "$@"
