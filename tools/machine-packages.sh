#!/usr/bin/env bash
# Installs the packages of the machine that building and running moorage needs, only those that are missing.
# Usage: tools/machine-packages.sh PYTHON
set -euo pipefail
python=${1:-python3}

packages=()
need() { packages+=("$@"); }
type "$python" >/dev/null 2>&1 || need python3 python3-venv
if type "$python" >/dev/null 2>&1; then
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    { echo "$python is $("$python" -V 2>&1): moorage needs Python 3.11 or newer; name one with make PYTHON=…" >&2 && exit 206; }
  "$python" -c 'import ensurepip, venv' 2>/dev/null || need python3-venv
fi
type g++ >/dev/null 2>&1 || need g++
type git >/dev/null 2>&1 || need git
type tar >/dev/null 2>&1 || need tar

[ ${#packages[@]} -gt 0 ] || exit 0
echo "installing ${packages[*]}" >&2
if ! type apt-get >/dev/null 2>&1 || [ "$(id -u)" != 0 ]; then
  echo "these programs are missing: install ${packages[*]} by hand, or run this as root on Debian or Ubuntu" >&2
  exit 206
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
{ apt-get -qq update && apt-get -qq -y --no-install-recommends install "${packages[@]}"; } >"$log" 2>&1 ||
  { cat "$log" >&2 && exit 1; }
