"""NCCL called through ctypes, as inference engines do: torch has the memory and the streams, and shares the unique id.

A communicator of all ranks and a split of it, with a stream each; all-reduces, gathers, groups of sends and receives.
``--device cpu`` is for a library that looks like NCCL (``NCCL_SO_PATH``) with its own streams (``FAKE_CUDA``).
"""

import ctypes
import os

import torch
import torch.distributed as dist
from rank import Rank

INT64, SUM = 4, 0
P, Z, N = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class UniqueId(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 128),)


rank = Rank(width=1024)
dist.init_process_group("gloo")  # only to share the id
if not rank.cuda:
    fake = ctypes.CDLL(os.environ["FAKE_CUDA"], mode=ctypes.RTLD_GLOBAL)
nccl = ctypes.CDLL(os.environ.get("NCCL_SO_PATH", "libnccl.so.2"))
nccl.ncclGetErrorString.restype = ctypes.c_char_p
TYPES = {
    "ncclGetUniqueId": [P],
    "ncclCommInitRank": [P, N, UniqueId, N],
    "ncclCommSplit": [P, N, N, P, P],
    "ncclAllReduce": [P, P, Z, N, N, P, P],
    "ncclAllGather": [P, P, Z, N, P, P],
    "ncclSend": [P, Z, N, N, P, P],
    "ncclRecv": [P, Z, N, N, P, P],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclCommDestroy": [P],
}
for name, types in TYPES.items():
    getattr(nccl, name).argtypes = types


def call(name, *arguments):
    """Ends the process when NCCL says no."""
    if result := getattr(nccl, name)(*arguments):
        raise SystemExit(f"{name} answered {result}: {nccl.ncclGetErrorString(result)}")


class Stream:
    """One of torch's, or of the library that looks like CUDA."""

    def __init__(self):
        self._own = torch.cuda.Stream() if rank.cuda else ctypes.c_void_p()
        if not rank.cuda:
            fake.cuStreamCreate(ctypes.byref(self._own), 0)
        self.handle = ctypes.c_void_p(self._own.cuda_stream) if rank.cuda else self._own

    def wait(self):
        """Until all work of the stream is done."""
        if rank.cuda:
            self._own.synchronize()
        elif fake.cuStreamSynchronize(self._own):
            raise SystemExit("a stream failed")


identity = UniqueId()
if rank.rank == 0:
    call("ncclGetUniqueId", ctypes.byref(identity))
shared = [bytes(identity)]
dist.broadcast_object_list(shared, 0)
ctypes.memmove(ctypes.byref(identity), shared[0], 128)
world, half = P(), P()
call("ncclCommInitRank", ctypes.byref(world), rank.size, identity, rank.rank)
call("ncclCommSplit", world, rank.rank % max(1, rank.size // 2), rank.rank, ctypes.byref(half), None)
streams = Stream(), Stream()
count, size, me = rank.options.width, rank.size, rank.rank
state = torch.arange(count, dtype=torch.int64, device=rank.device) + me
rank.wait()


def at(tensor):
    return ctypes.c_void_p(tensor.data_ptr())


for step in rank.steps():
    total, of_half = torch.empty_like(state), torch.empty_like(state)
    everything = torch.empty(size * count, dtype=torch.int64, device=rank.device)
    received = torch.empty_like(state)
    rank.wait()
    call("ncclAllReduce", at(state), at(total), count, INT64, SUM, world, streams[0].handle)
    rank.uneven()
    call("ncclAllReduce", at(state), at(of_half), count, INT64, SUM, half, streams[1].handle)
    call("ncclAllGather", at(state), at(everything), count, INT64, world, streams[0].handle)
    rank.uneven()
    call("ncclGroupStart")
    call("ncclSend", at(state), count, INT64, (me + 1) % size, world, streams[0].handle)
    call("ncclRecv", at(received), count, INT64, (me - 1) % size, world, streams[0].handle)
    call("ncclGroupEnd")
    for stream in streams:
        stream.wait()
    # Wraps around: every bit counts.
    state = total * 3 + of_half * 5 + received * 7 + everything.view(size, count).sum(0) * 11 + step
    rank.note(state)
call("ncclCommDestroy", half)
call("ncclCommDestroy", world)
rank.end([state])
