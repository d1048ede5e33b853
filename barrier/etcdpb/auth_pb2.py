"""Messages of ``auth.proto``; the types stand in the stub file beside this one."""

from moorage.barrier.etcdpb import POOL

globals().update(POOL.export("moorage/barrier/etcdpb/auth.proto"))
