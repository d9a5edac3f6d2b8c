#!/usr/bin/env bash
# Creates (or updates) the virtual environment .venv and prints the path of its Python.
# Everything else goes to standard error. A second call is quick: it only compares a stamp.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { echo "$*" >&2; }

find_python() {
  # Prefer 3.12, for which megatron-core has wheels.
  local candidates=("${PYTHON:-}" python3.12 python3.13 python3 python)
  local pyenv_root=${PYENV_ROOT:-$HOME/.pyenv}
  candidates+=("$pyenv_root"/versions/3.12*/bin/python3 "$pyenv_root"/versions/3.13*/bin/python3)
  local candidate
  for candidate in "${candidates[@]}"; do
    [[ -n $candidate ]] || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  say "No Python >= 3.12 found (megatron-core 0.19 needs it). Install one, for example with"
  say "  uv python install 3.12     or     apt-get install python3.12 python3.12-venv"
  say "or name it: PYTHON=/path/to/python3.12 $0"
  return 1
}

# Locked versions of the tests; torch's CUDA build also runs on the CPU, and tilelang compiles
# without a GPU.
packages=("torch==2.11.0" "megatron-core==0.19.2" -e ".[train,tilelang,muon,test]")
# Packages that some tests compare with; without them those tests are skipped.
peers=("transformers==5.23.0" "peft==0.21.2" "pyarrow==26.0.1" "playwright==1.65.2" -r docs/requirements.txt)
stamp=$(printf '%s\n' "${packages[@]}" "${peers[@]}" "$(cksum setup.py docs/requirements.txt)")
if [[ -x .venv/bin/python && -f .venv/stamp && $(cat .venv/stamp) == "$stamp" ]]; then
  echo "$PWD/.venv/bin/python"
  exit
fi

python=$(find_python)
mkdir -p .venv
log=.venv/install.log
: >"$log"
quietly() { # command: prints to the log, whose end is shown if it fails
  local status=0
  "$@" >>"$log" 2>&1 || status=$?
  if ((status)); then say "$1 failed, all of its output is in $log, the end:" && tail -n 20 "$log" >&2; fi
  return "$status"
}
say "> installing into .venv, with $("$python" --version) ($python): 5 GB, most of it torch; see $log"
if command -v uv >/dev/null; then
  quietly uv venv --allow-existing --python "$python" .venv
  install=(uv pip install --python .venv/bin/python)
else
  quietly "$python" -m venv .venv
  quietly .venv/bin/python -m pip install --upgrade pip
  install=(.venv/bin/python -m pip install)
fi
quietly "${install[@]}" "${packages[@]}"
quietly "${install[@]}" "${peers[@]}" || say "> went without ${peers[*]}: tests that need it are skipped"
installed=(.venv/lib/python3*/site-packages/*.dist-info)
say "> installed ${#installed[@]} packages in $SECONDS s"
printf '%s' "$stamp" > .venv/stamp
echo "$PWD/.venv/bin/python"
