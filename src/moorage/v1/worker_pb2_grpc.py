"""Client stub and server registration of ``moorage.v1.Worker``; typed by the stub file beside this one."""

from moorage.v1 import POOL

WorkerStub = WorkerAsyncStub = POOL.stub("moorage.v1.Worker")
WorkerServicer = object
add_WorkerServicer_to_server = POOL.adder("moorage.v1.Worker")
