#!/usr/bin/env bash
# Creates (or updates) the virtual environment .venv and prints the path of its Python.
# Everything else goes to standard error. A second call is quick: it only compares a stamp.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { echo "$*" >&2; }

find_python() {
  # The newest usable interpreter wins nothing: 3.12 is what megatron-core has wheels for.
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

# The lock of versions that the tests were run with; torch's CUDA build also runs on the CPU,
# and tilelang compiles for GPUs that are not there.
packages=("torch==2.11.0" "megatron-core==0.19.2" -e ".[train,tilelang,muon,test]")
# What some tests compare with; they are skipped without it.
peers=("transformers==5.23.0" "peft==0.21.2" "pyarrow==26.0.1" "playwright==1.65.2" -r docs/requirements.txt)
stamp=$(printf '%s\n' "${packages[@]}" "${peers[@]}" "$(cksum setup.py docs/requirements.txt)")
if [[ -x .venv/bin/python && -f .venv/stamp && $(cat .venv/stamp) == "$stamp" ]]; then
  echo "$PWD/.venv/bin/python"
  exit
fi

python=$(find_python)
say "> creating .venv with $("$python" --version) ($python)"
if command -v uv >/dev/null; then
  say "> installing with uv (torch is a few GB; the download is the long part)"
  uv venv --quiet --allow-existing --python "$python" .venv >&2
  install=(uv pip install --python .venv/bin/python)
else
  say "> installing with pip (uv is faster; torch is a few GB, the download is the long part)"
  "$python" -m venv .venv
  .venv/bin/python -m pip install --upgrade pip >&2
  install=(.venv/bin/python -m pip install)
fi
"${install[@]}" "${packages[@]}" >&2
"${install[@]}" "${peers[@]}" >&2 || say "> went without ${peers[*]}: tests that need it are skipped"
printf '%s' "$stamp" > .venv/stamp
echo "$PWD/.venv/bin/python"
