#!/usr/bin/env bash
# Prints a folder for PYTHONPATH with links to the sources of Megatron in FOLDER, which stays untouched, and with the
# compiled dataset helper that a source tree lacks: scripts/megatron_tree.sh FOLDER
set -euo pipefail
sources=$(cd "${1:?scripts/megatron_tree.sh FOLDER}" && pwd)
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
if [[ ! -f $sources/megatron/core/package_info.py ]]; then
  echo "$1 must be a clone of NVIDIA/Megatron-LM: it has no megatron/core/package_info.py" >&2
  exit 2
fi
links=$PWD/build/megatron-$(cksum <<<"$sources" | cut -d " " -f 1)
rm -rf "$links"
mkdir -p "$links"
cp -rs "$sources/megatron" "$links"
find "$links" -name __pycache__ -prune -exec rm -rf {} +
datasets=$links/megatron/core/datasets
rm -f "$datasets/Makefile" "$datasets"/helpers_cpp*.so  # our own start-up compiles nothing without a Makefile
read -r suffix python_include torch_include < <("$python" -c '
import sysconfig, importlib.util
torch = importlib.util.find_spec("torch").submodule_search_locations[0]
print(sysconfig.get_config_var("EXT_SUFFIX"), sysconfig.get_path("include"), torch + "/include")')
# torch includes the headers of pybind11.
${CXX:-g++} -O2 -shared -std=c++17 -fPIC -I"$python_include" -I"$torch_include" \
  "$datasets/helpers.cpp" -o "$datasets/helpers_cpp$suffix"
echo "$links"
