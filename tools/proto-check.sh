#!/usr/bin/env bash
# Are the committed descriptor sets and stubs what tools/proto.sh makes of the .proto files? Changes nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(realpath -s "${PYTHON:-.venv/bin/python}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/src/moorage" "$work/tools"
cp -a src/moorage/v1 "$work/src/moorage/"
cp -a barrier "$work/barrier"
ln -s ../../barrier "$work/src/moorage/barrier"
find "$work" -name __pycache__ -prune -exec rm -rf {} +
find "$work" \( -name '*.binpb' -o -name '*.pyi' \) -delete
cp tools/proto.sh "$work/tools/"
PYTHON=$python "$work/tools/proto.sh" >"$work/log" 2>&1 || { cat "$work/log" >&2 && exit 1; }
for pair in src/moorage/v1 barrier/etcdpb; do
  [ ! -d "$pair" ] || diff -r -x __pycache__ "$pair" "$work/$pair" >&2 || {
    echo "$pair is not what its .proto files make: run tools/proto.sh and commit the result" >&2
    exit 1
  }
done
