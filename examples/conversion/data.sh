#!/usr/bin/env bash
# Prepares the corpus in RUN_DIR/data: the source and the documentation of Linux 6.1, from Debian's
# package linux-source-6.1 (138 MB, 1.3 GB unpacked; apt-get and its package lists are needed, not root).
# Without apt, set LINUX_SOURCE to an unpacked source tree. Completed steps are not repeated. With
# GPU30=1 the corpus is the kernel without drivers and architectures; with SMALL=1, packages of
# Python's standard library, which are already installed.
#   RUN_DIR, SMALL, GPU30, PYTHON   as in common.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/conversion/common.sh
if [[ -f $data/corpus.json ]]; then
  echo "== data: $data is there"
  exit
fi
mkdir -p "$data"

if [[ -n ${SMALL:-} ]]; then
  from=$("$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
  choice=(--suffixes .py --tokenizer-files 1 --held-out 0.03
    --folders asyncio collections concurrent ctypes email html http importlib json logging
    multiprocessing re sqlite3 tomllib unittest urllib wsgiref xml xmlrpc zoneinfo)
else
  from=${LINUX_SOURCE:-}
  if [[ -z $from ]]; then
    package=linux-source-6.1 from=$data/linux-source-6.1
    if [[ ! -f $data/unpacked ]]; then
      candidate=$(apt-cache policy "$package" 2>/dev/null | sed -n 's/^ *Candidate: //p' || true)
      if [[ -z $candidate || $candidate == "(none)" ]]; then
        echo "apt knows no package $package: run 'apt-get update' on Debian 12, or fetch and unpack" \
          "Linux 6.1 (https://www.kernel.org) and set LINUX_SOURCE to its folder" >&2
        exit 2
      fi
      echo "== data: $package $candidate"
      (
        cd "$data"
        apt-get download "$package"
        dpkg-deb --fsys-tarfile "$package"_*.deb |
          tar -xO ./usr/src/linux-source-6.1.tar.xz | tar -xJ
        touch unpacked
      )
    fi
  fi
  # A quarter of all bytes are generated tables of registers.
  choice=(--without drivers/gpu/drm/amd/include)
  if [[ -n ${GPU30:-} ]]; then # 50 M tokens
    choice=(--held-out 0.025
      --folders Documentation block crypto fs init io_uring ipc kernel lib mm net security virt)
  fi
fi
"$python" examples/conversion/prepare.py --source "$from" --output "$data" \
  --vocabulary "$vocabulary" --document-tokens "$document_tokens" "${choice[@]}"
