"""End one thread of another process, and nothing else of it: made to call ``exit`` where it waits in the kernel."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_ATTACH, _DETACH, _GETREGS, _SETREGS = 16, 17, 12, 13
_RAX, _ORIG_RAX, _RDI, _RIP, _COUNT = 10, 15, 14, 16, 27  # of struct user_regs_struct on x86-64
_SYS_EXIT = 60
_WAIT_ALL = 0x40000000  # __WALL


def end_thread(tid: int) -> None:
    """``tid`` as this process counts; the thread waits in a system call. Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    registers = (ctypes.c_ulong * _COUNT)()

    def ptrace(request: int, data: object = None) -> None:
        if libc.ptrace(request, tid, None, data) < 0:
            raise OSError(ctypes.get_errno(), f"ptrace({request}) of thread {tid}")

    ptrace(_ATTACH)
    os.waitpid(tid, _WAIT_ALL)
    ptrace(_GETREGS, ctypes.cast(registers, ctypes.c_void_p))
    registers[_RIP] -= 2  # the instruction that brought it into the kernel
    registers[_RAX], registers[_ORIG_RAX], registers[_RDI] = _SYS_EXIT, ctypes.c_ulong(-1).value, 0
    ptrace(_SETREGS, ctypes.cast(registers, ctypes.c_void_p))
    ptrace(_DETACH)
    while Path(f"/proc/{tid}/stat").exists():
        os.sched_yield()
