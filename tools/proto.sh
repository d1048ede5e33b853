#!/usr/bin/env bash
# Writes the descriptor set and the type stubs of src/moorage/v1 and barrier/etcdpb anew. Run after editing a .proto.
# What is committed is a serialized descriptor set, not generated Python: it loads into a private descriptor pool under
# any protobuf runtime, so a job that brings its own protobuf or etcd stubs cannot clash (docs/decisions/0002).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
bin=$(cd "$(dirname "$python")" && pwd)
export PATH=$bin:$PATH
(
  cd src
  "$bin/python" -m grpc_tools.protoc -I. --include_imports --descriptor_set_out=moorage/v1/descriptors.binpb \
    --mypy_out=. --mypy_grpc_out=. moorage/v1/types.proto moorage/v1/worker.proto moorage/v1/coordinator.proto
  rm -f moorage/v1/types_pb2_grpc.pyi
)
(
  cd src
  "$bin/python" -m grpc_tools.protoc -I. --include_imports \
    --descriptor_set_out=moorage/barrier/etcdpb/descriptors.binpb --mypy_out=. \
    moorage/barrier/etcdpb/kv.proto moorage/barrier/etcdpb/auth.proto moorage/barrier/etcdpb/rpc.proto
)
