"""etcd's messages and stubs, written anew as far as moorage speaks them, in a private pool.

The usual generated modules register ``etcdserverpb`` in protobuf's process-wide pool, where two clients of etcd clash.
"""

from __future__ import annotations

from pathlib import Path

from moorage.protopool import PrivatePool

POOL = PrivatePool(Path(__file__).with_name("descriptors.binpb"))
