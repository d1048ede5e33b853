#!/usr/bin/env bash
# Installs what the tests of `tests/programs/state` need and nothing else does: gcc, Node.js, a Java compiler, Go. Only what is
# missing, and quick when nothing is.
set -euo pipefail

packages=()
type gcc >/dev/null 2>&1 || packages+=(gcc libc6-dev)
type node >/dev/null 2>&1 || packages+=(nodejs)
type javac >/dev/null 2>&1 || packages+=(default-jdk-headless)
type go >/dev/null 2>&1 || packages+=(golang-go)
[ ${#packages[@]} -gt 0 ] || exit 0

echo "installing ${packages[*]} (for the tests)" >&2
if ! type apt-get >/dev/null 2>&1 || [ "$(id -u)" != 0 ]; then
  echo "these programs are missing: install ${packages[*]} by hand, or run this as root on Debian or Ubuntu" >&2
  exit 206
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
{ apt-get -qq update && apt-get -qq -y --no-install-recommends install "${packages[@]}"; } >"$log" 2>&1 ||
  { cat "$log" >&2 && exit 1; }
