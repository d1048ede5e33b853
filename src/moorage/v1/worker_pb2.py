"""Messages of ``worker.proto``; the types stand in the stub file beside this one."""

from moorage.v1 import POOL

globals().update(POOL.export("moorage/v1/worker.proto"))
