#!/usr/bin/env bash
# Runs all tests; extra arguments go to pytest: scripts/test.sh -k sparse_attention
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$(scripts/environment.sh)}
"$python" -m ruff check . && "$python" -m ruff format --check .
exec "$python" -m pytest -W ignore "$@"
