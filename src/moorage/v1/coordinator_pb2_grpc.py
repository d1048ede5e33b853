"""Client stub and server registration of ``moorage.v1.Coordinator``; typed by the stub file beside this one."""

from moorage.v1 import POOL

CoordinatorStub = CoordinatorAsyncStub = POOL.stub("moorage.v1.Coordinator")
CoordinatorServicer = object
add_CoordinatorServicer_to_server = POOL.adder("moorage.v1.Coordinator")
