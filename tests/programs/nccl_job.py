"""A rank that works with NCCL through ctypes: `nccl_job.py RANK SIZE FOLDER STEPS`, with its libraries by variable.

Two threads: one on the world's communicator, with all-reduces, a ring of sends and receives in groups and a reduction
of its own, at a pace of its own; one on a communicator of half the ranks, made by a split in the midst. Results are
checked when a stream has run dry, some steps after they were issued. Ends with 0 when all were right.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
import threading
import time
from pathlib import Path

INT64 = 4
COUNT = 16


class UniqueId(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = (("bytes", ctypes.c_char * 128),)


cuda = ctypes.CDLL(os.environ["FAKE_CUDA"], mode=ctypes.RTLD_GLOBAL)
nccl = ctypes.CDLL(os.environ["NCCL_PROXY"])
P, Z, N = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
nccl.ncclCommInitRank.argtypes = [P, N, UniqueId, N]
nccl.ncclAllReduce.argtypes = [P, P, Z, N, N, P, P]
nccl.ncclSend.argtypes = [P, Z, N, N, P, P]
nccl.ncclRecv.argtypes = [P, Z, N, N, P, P]
nccl.ncclCommSplit.argtypes = [P, N, N, P, P]
nccl.ncclCommRegister.argtypes = [P, P, Z, P]
nccl.ncclCommDeregister.argtypes = [P, P]
nccl.ncclRedOpCreatePreMulSum.argtypes = [P, P, N, N, P]
nccl.ncclRedOpDestroy.argtypes = [N, P]
nccl.ncclCommCount.argtypes = nccl.ncclCommUserRank.argtypes = nccl.ncclCommGetAsyncError.argtypes = [P, P]
nccl.ncclCommDestroy.argtypes = [P]
cuda.cuStreamCreate.argtypes = [P, N]
cuda.cuStreamSynchronize.argtypes = [P]


def ok(result: int) -> None:
    """Ends the process when NCCL says no."""
    if result != 0:
        print(f"NCCL answered {result}", flush=True)
        os._exit(3)


def right(found: object, expected: object, what: str) -> None:
    """Ends the process when a result is wrong."""
    if found != expected:
        print(f"{what}: {found} instead of {expected}", flush=True)
        os._exit(4)


def stream() -> ctypes.c_void_p:
    """A fresh stream."""
    made = P()
    ok(cuda.cuStreamCreate(ctypes.byref(made), 0))
    return made


def numbers(value: int = 0) -> ctypes.Array[ctypes.c_int64]:
    """A buffer."""
    return (ctypes.c_int64 * COUNT)(*([value] * COUNT))


class Rank:
    """What the threads share."""

    def __init__(self, rank: int, size: int, folder: Path, steps: int) -> None:
        self.rank, self.size, self.folder, self.steps = rank, size, folder, steps
        self.random = random.Random(rank)

    def communicator(self, name: str) -> ctypes.c_void_p:
        """A communicator of all ranks; the first makes its id, and all find it in a file."""
        path, identity = self.folder / name, UniqueId()
        if self.rank == 0:
            ok(nccl.ncclGetUniqueId(ctypes.byref(identity)))
            path.with_suffix(".new").write_bytes(bytes(identity))
            path.with_suffix(".new").rename(path)
        while not path.exists():
            time.sleep(0.002)
        ctypes.memmove(ctypes.byref(identity), path.read_bytes(), 128)
        made = P()
        ok(nccl.ncclCommInitRank(ctypes.byref(made), self.size, identity, self.rank))
        return made

    def told(self, thread: int, step: int) -> None:
        """Show how far a thread is."""
        path = self.folder / f"progress{self.rank}.{thread}"
        path.with_suffix(f".{thread}new").write_text(str(step))
        path.with_suffix(f".{thread}new").rename(path)

    def pace(self) -> None:
        """Every rank is slow at other times."""
        if self.random.random() < 0.3:
            time.sleep(self.random.random() * 0.01)

    def ring(self) -> None:
        """The first thread."""
        comm, own, size = self.communicator("world"), stream(), self.size
        handle, reduction, factor = P(), N(), ctypes.c_int64(3)
        buffer = numbers()
        ok(nccl.ncclCommRegister(comm, buffer, ctypes.sizeof(buffer), ctypes.byref(handle)))
        ok(nccl.ncclRedOpCreatePreMulSum(ctypes.byref(reduction), ctypes.byref(factor), INT64, 1, comm))
        right(reduction.value > 4, True, "a reduction of one's own")
        for step in range(1, self.steps + 1):
            sent = [numbers(self.rank + step), numbers(self.rank * step)]
            got = [numbers(), numbers(), numbers()]
            ok(nccl.ncclAllReduce(sent[0], got[0], COUNT, INT64, 0, comm, own))
            self.pace()
            ok(nccl.ncclGroupStart())
            ok(nccl.ncclSend(sent[1], COUNT, INT64, (self.rank + 1) % size, comm, own))
            ok(nccl.ncclRecv(got[1], COUNT, INT64, (self.rank - 1) % size, comm, own))
            ok(nccl.ncclGroupEnd())
            self.pace()
            ok(nccl.ncclAllReduce(sent[0], got[2], COUNT, INT64, reduction.value, comm, own))
            if step % 3 == 0 or step == self.steps:
                ok(cuda.cuStreamSynchronize(own))
                total = sum(other + step for other in range(size))
                right(got[0][0], total, "a sum")
                right(got[1][COUNT - 1], (self.rank - 1) % size * step, "a receipt")
                right(got[2][0], 3 * total, "a weighted sum")
            keep.append((sent, got))
            self.told(0, step)
        answer = N(-1)
        ok(nccl.ncclCommGetAsyncError(comm, ctypes.byref(answer)))
        right(answer.value, 0, "the error")
        ok(nccl.ncclCommDeregister(comm, handle))
        ok(nccl.ncclRedOpDestroy(reduction, comm))
        ok(nccl.ncclCommDestroy(comm))

    def halves(self) -> None:
        """The second thread."""
        whole, own, half = self.communicator("second"), stream(), P()
        for step in range(1, self.steps + 1):
            if step == self.steps // 4:
                ok(nccl.ncclCommSplit(whole, self.rank % 2, -self.rank, ctypes.byref(half), None))
                count, place = N(), N()
                ok(nccl.ncclCommCount(half, ctypes.byref(count)))
                ok(nccl.ncclCommUserRank(half, ctypes.byref(place)))
                members = [other for other in range(self.size) if other % 2 == self.rank % 2]
                right((count.value, place.value), (len(members), members[::-1].index(self.rank)), "the split")
            comm = half if half.value and step % 2 else whole
            members = [other for other in range(self.size) if comm is whole or other % 2 == self.rank % 2]
            sent, got = numbers(self.rank * step), numbers()
            ok(nccl.ncclAllReduce(sent, got, COUNT, INT64, 0, comm, own))
            self.pace()
            ok(cuda.cuStreamSynchronize(own))
            right(got[0], sum(other * step for other in members), "a sum of a half")
            self.told(1, step)
        ok(nccl.ncclCommDestroy(half))
        ok(nccl.ncclCommDestroy(whole))


keep: list[object] = []  # buffers that a stream may still read

if __name__ == "__main__":
    job = Rank(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    second = threading.Thread(target=job.halves)
    second.start()
    job.ring()
    second.join()
    print("all right", flush=True)
    sys.stdout.flush()
    os._exit(0)
