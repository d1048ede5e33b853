"""Counts in device memory of the library that it is given, by calls that the libcuda proxy sees; checks all it has.

``gpu_counter.py LIBCUDA [PAUSE [unsaved]]``: says ``step N``; the number itself is on the device. A block of noise
beside it must stay as it is. Ends with 1 when a call fails or a byte is not right. ``unsaved``: until it gets SIGUSR1
it has memory that no checkpoint holds.
"""

import ctypes
import itertools
import os
import signal
import sys
import time

BLOCK = 4 << 20
cuda = ctypes.CDLL(sys.argv[1])
pause = float(sys.argv[2]) if len(sys.argv) > 2 else 0.02


def call(name: str, *arguments: object) -> None:
    status = getattr(cuda, name)(*arguments)
    if status:
        os.write(1, f"{name} answered {status}\n".encode())
        sys.exit(1)


def allocate(size: int) -> ctypes.c_uint64:
    pointer = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
    return pointer


context = ctypes.c_void_p()
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
count, noise = allocate(BLOCK), allocate(BLOCK)
expected = os.urandom(BLOCK)
call("cuMemcpyHtoD_v2", noise, expected, ctypes.c_size_t(BLOCK))
call("cuMemcpyHtoD_v2", count, bytes(8), ctypes.c_size_t(8))
if "unsaved" in sys.argv:
    managed = ctypes.c_uint64()
    call("cuMemAllocManaged", ctypes.byref(managed), ctypes.c_size_t(6 << 20), 1)
    signal.signal(signal.SIGUSR1, lambda *_: call("cuMemFree_v2", managed))
os.write(1, b"nonce %s\n" % os.urandom(8).hex().encode())
number, seen = ctypes.c_uint64(), ctypes.create_string_buffer(BLOCK)
for step in itertools.count(1):
    call("cuMemcpyDtoH_v2", ctypes.byref(number), count, ctypes.c_size_t(8))
    call("cuMemcpyDtoH_v2", seen, noise, ctypes.c_size_t(BLOCK))
    if number.value != step - 1 or seen.raw != expected:
        os.write(1, f"step {step}: the device says {number.value}, noise right: {seen.raw == expected}\n".encode())
        sys.exit(1)
    call("cuMemcpyHtoD_v2", count, ctypes.byref(ctypes.c_uint64(step)), ctypes.c_size_t(8))
    os.write(1, f"step {step}\n".encode())
    time.sleep(pause)
