"""The protobuf API ``moorage.v1``: ``coordinator_pb2`` is public, ``worker_pb2`` is spoken inside a cluster."""

from __future__ import annotations

from pathlib import Path

from moorage.protopool import PrivatePool

POOL = PrivatePool(Path(__file__).with_name("descriptors.binpb"))
