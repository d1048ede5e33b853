#!/usr/bin/env bash
# Lays CRIU, runc, etcd, nft, ip and ss under /opt/moorage/runtime (or --prefix DIR). `moorage runtime install` does the same.
exec bash "$(dirname "$0")/../src/moorage/runtime/install.sh" "$@"
