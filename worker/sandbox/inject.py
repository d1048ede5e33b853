"""System calls made in the place of a process that stands still: by ptrace, as a debugger calls a function.

A frozen process cannot be made to do anything, and a thawed pod would run. So all of its threads are stopped first
(`held`), the cgroup is thawed while they stand, and frozen again before they are let go: no thread runs an instruction
of its own, and what it was doing (a call that waits) goes on afterwards as after any signal that it does not see.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from moorage.errors import MoorageError
from moorage.worker.borrow import libc
from moorage.worker.sandbox.cgroup import PodCgroup

_SETOPTIONS, _GETREGSET, _SETREGSET, _SEIZE, _INTERRUPT = 0x4200, 0x4204, 0x4205, 0x4206, 0x4207
_GETSIGMASK, _SETSIGMASK = 0x420A, 0x420B
_CONT, _SYSCALL, _DETACH = 7, 24, 17
_SYSGOOD, _EXITKILL, _SUSPEND_SECCOMP = 1, 1 << 20, 1 << 21
#: Whoever dies in between leaves no program that runs half of another call: it is killed, and the job goes back.
_USUAL = _SYSGOOD | _EXITKILL
_PRSTATUS = 1
_WALL = 0x40000000
_STOP = 128  # PTRACE_EVENT_STOP
_SIGTRAP = 5
_SECONDS: Final = 5.0

#: Only this one is tried. Registers are those of `struct user_regs_struct`.
MACHINE: Final = "x86_64"
_REGISTERS: Final = 27
_RAX, _ORIG_RAX, _RIP = 10, 15, 16
_ARGUMENTS: Final = (14, 13, 12, 7, 9, 8)  # rdi, rsi, rdx, r10, r8, r9
_INSTRUCTION: Final = b"\x0f\x05"
_WORD = (1 << 64) - 1
_LAST_ERROR = 4095

MMAP, MUNMAP, CLOSE, SOCKET, CONNECT, EPOLL_CTL, OPENAT, DUP3 = 9, 11, 3, 41, 42, 233, 257, 292
FACCESSAT2: Final = 439


def possible() -> bool:
    """Whether it can be done on this kind of machine."""
    return platform.machine() == MACHINE


def _ptrace(request: int, tid: int, address: int = 0, data: object = 0) -> None:
    pointer = data if not isinstance(data, int) else ctypes.c_void_p(data)
    if libc.ptrace(request, tid, ctypes.c_void_p(address), pointer) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace of thread {tid}: {os.strerror(number)}")


@contextlib.contextmanager
def held(cgroup: PodCgroup, host_pids: Iterable[int]) -> Iterator[None]:
    """All threads of the frozen pod stop for this thread, which alone may use `Stopped` in the block; frozen again
    afterwards. Raises `MoorageError` when one does not stop (nothing was changed then), `OSError`."""
    stopped: dict[int, bool] = {}
    try:
        _seize(host_pids, stopped)
        cgroup.order(frozen=False)
        _wait(stopped)
        yield
    finally:
        _freeze(cgroup)
        for tid in stopped:
            with contextlib.suppress(OSError):  # it was killed meanwhile
                _ptrace(_DETACH, tid)


def _seize(host_pids: Iterable[int], stopped: dict[int, bool]) -> None:
    for pid in host_pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in Path("/proc", str(pid), "task").iterdir():
                tid = int(task.name)
                try:
                    _ptrace(_SEIZE, tid, 0, _USUAL)
                except OSError as error:
                    if error.errno == errno.ESRCH or _ended(task):
                        continue
                    raise
                stopped[tid] = False
                _ptrace(_INTERRUPT, tid)


def _ended(task: Path) -> bool:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _wait(stopped: dict[int, bool]) -> None:
    end = time.monotonic() + _SECONDS
    for tid in list(stopped):
        if _next_stop(tid, end) is None:
            del stopped[tid]
        else:
            stopped[tid] = True


def _next_stop(tid: int, end: float) -> int | None:
    """The status of the next stop of this thread; None if it has ended. Raises `MoorageError`."""
    pause = 0.0001
    while True:
        found, status = os.waitpid(tid, _WALL | os.WNOHANG)
        if found:
            return status if os.WIFSTOPPED(status) else None
        if time.monotonic() > end:
            raise MoorageError(f"thread {tid} of the pod does not stop", "see its state in /proc/PID/stack")
        time.sleep(pause)
        pause = min(pause * 2, 0.005)


def _freeze(cgroup: PodCgroup) -> None:
    end = time.monotonic() + _SECONDS
    while True:
        with contextlib.suppress(OSError):
            cgroup.order(frozen=True)
        if cgroup.state() in ("frozen", "absent"):
            return
        if time.monotonic() > end:
            raise MoorageError("the pod does not stand still again")
        time.sleep(0.0005)


class Stopped:
    """The first thread of a process that `held` stopped, as a place to make calls in: ``with Stopped(pid) as it``."""

    def __init__(self, host_pid: int) -> None:
        self.host_pid = self._pid = host_pid
        self._registers: list[int] = []
        self._mask = ctypes.c_uint64()
        self._instruction = 0
        self._scratch = 0

    def __enter__(self) -> Self:
        self._registers = self._read()
        self._instruction = self._find_instruction()
        with contextlib.suppress(OSError):  # or a filter of the program's own decides about these calls
            _ptrace(_SETOPTIONS, self._pid, 0, _USUAL | _SUSPEND_SECCOMP)
        # A signal that comes now waits until the process is what it was.
        _ptrace(_GETSIGMASK, self._pid, 8, ctypes.byref(self._mask))
        _ptrace(_SETSIGMASK, self._pid, 8, ctypes.byref(ctypes.c_uint64(_WORD)))
        try:
            # Readable and writable, private and without a file.
            self._scratch = self.call(MMAP, 0, 8192, 3, 0x22, -1, 0)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.call(MUNMAP, self._scratch, 8192)
        finally:
            self._leave()

    def put(self, data: bytes) -> int:
        """The address of these bytes (and a zero) in the process, until the next one."""
        with Path("/proc", str(self._pid), "mem").open("r+b", buffering=0) as memory:
            memory.seek(self._scratch)
            memory.write(data + b"\0")
        return self._scratch

    def call(self, number: int, *arguments: int) -> int:
        """What the kernel answers. Raises `OSError` for an error, `MoorageError` if the process ended meanwhile."""
        registers = list(self._registers)
        for place, value in zip(_ARGUMENTS, arguments, strict=False):
            registers[place] = value & _WORD
        registers[_RAX], registers[_ORIG_RAX], registers[_RIP] = number, _WORD, self._instruction
        self._write(registers)
        self._run(_SYSCALL)
        self._run(_SYSCALL)
        result = self._read()[_RAX]
        if result > _WORD - _LAST_ERROR:
            code = _WORD + 1 - result
            raise OSError(code, os.strerror(code))
        return result

    def _run(self, request: int) -> None:
        _ptrace(request, self._pid)
        status = _next_stop(self._pid, time.monotonic() + _SECONDS)
        if status is None:
            raise MoorageError(f"process {self._pid} of the pod ended")
        if request == _SYSCALL and os.WSTOPSIG(status) != _SIGTRAP | 0x80:
            self._run(request)  # something else first, such as the end of the stop that it was in

    def _leave(self) -> None:
        # Back to a stop of the kind that it was in: only from there the kernel begins an interrupted call anew.
        with contextlib.suppress(OSError, MoorageError):
            _ptrace(_INTERRUPT, self._pid)
            self._run(_CONT)
            _ptrace(_SETOPTIONS, self._pid, 0, _USUAL)
            self._write(self._registers)
            _ptrace(_SETSIGMASK, self._pid, 8, ctypes.byref(self._mask))

    def _read(self) -> list[int]:
        buffer = ctypes.create_string_buffer(_REGISTERS * 8)
        _ptrace(_GETREGSET, self._pid, _PRSTATUS, ctypes.byref(_Vector(ctypes.addressof(buffer), len(buffer))))
        return list(struct.unpack(f"={_REGISTERS}Q", buffer.raw))

    def _write(self, registers: list[int]) -> None:
        buffer = ctypes.create_string_buffer(struct.pack(f"={_REGISTERS}Q", *registers), _REGISTERS * 8)
        _ptrace(_SETREGSET, self._pid, _PRSTATUS, ctypes.byref(_Vector(ctypes.addressof(buffer), len(buffer))))

    def _find_instruction(self) -> int:
        """Where the process has the instruction that makes a call: in the kernel's own page, or where it stands."""
        with Path("/proc", str(self._pid), "mem").open("rb", buffering=0) as memory:
            for line in Path("/proc", str(self._pid), "maps").read_text().splitlines():
                if line.endswith("[vdso]"):
                    low, high = (int(number, 16) for number in line.partition(" ")[0].split("-"))
                    memory.seek(low)
                    at = memory.read(high - low).find(_INSTRUCTION)
                    if at >= 0:
                        return low + at
            before = self._registers[_RIP] - len(_INSTRUCTION)
            memory.seek(before)
            if memory.read(len(_INSTRUCTION)) == _INSTRUCTION:
                return before
        raise MoorageError(f"process {self._pid} has no place to make a call from")


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))
