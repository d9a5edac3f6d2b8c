#!/usr/bin/env bash
# Builds wheel and sdist into dist/, installs the wheel with its dependencies in a fresh environment and
# runs the first steps from it in an empty folder. Uploads nothing.
#
# To release: set __version__ (X.Y.Z instead of X.Y.Z.dev0), call the first section of CHANGELOG.md
# "X.Y.Z", commit, run this, tag the commit vX.Y.Z, and upload dist/ (python -m twine upload dist/*).
# Then set __version__ to the next X.Y.Z.dev0 and begin a section "Unreleased".
#   TORCH   what to install as torch (torch==2.11.0, as the tests)
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$(scripts/environment.sh)}
rm -rf dist build
"$python" -m build --outdir dist . # the wheel is built from the sdist

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
wheel=$(echo "$PWD"/dist/*.whl)
"$python" -m venv "$folder/env"
"$folder/env/bin/python" -m pip install --quiet "${TORCH:-torch==2.11.0}" "$wheel[train]"
DIST=$PWD/dist WHEEL_PYTHON=$folder/env/bin/python \
  "$python" -m pytest -q tests/functional/test_release.py
version=$("$folder/env/bin/python" -c 'import megatron_dsa; print(megatron_dsa.__version__)')
case $version in
  *.dev*) echo "$version is fine, and a rehearsal: for a release, see the head of $0" ;;
  *) echo "$version is ready: git tag v$version" ;;
esac
