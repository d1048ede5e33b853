"""Named network namespaces under ``/run/netns``, as ``ip netns`` lays them, and work done inside one.

A thread of its own does each piece of work: it moves into the namespace and ends there, so no thread of the caller ever
changes its namespace, and nothing forks (the worker runs gRPC threads, which a fork would leave half-copied).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from moorage.errors import EnvironmentLacking

FOLDER = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_MS_BIND, _MS_REC, _MS_SHARED = 0x1000, 0x4000, 1 << 20
_MNT_DETACH = 2
_SELF = "/proc/thread-self/ns/net"

_libc = ctypes.CDLL(None, use_errno=True)
T = TypeVar("T")


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _mount(source: str, target: str, flags: int) -> None:
    _call("mount", source.encode(), target.encode(), b"none", ctypes.c_ulong(flags), None)


def _in_thread(work: Callable[[], T]) -> T:
    result: list[T] = []
    failure: list[BaseException] = []

    def body() -> None:
        try:
            result.append(work())
        except BaseException as error:  # carried to the caller
            failure.append(error)

    thread = threading.Thread(target=body, name="netns")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


def run_in(path: Path, work: Callable[[], T]) -> T:
    """Call ``work`` in the network namespace at ``path``; programs that it starts run there too.

    Raises what ``work`` raises, and `FileNotFoundError` when there is no such namespace.
    """

    def inside() -> T:
        with path.open("rb") as file:
            _call("setns", file.fileno(), _CLONE_NEWNET)
        return work()

    return _in_thread(inside)


def _share_folder() -> None:
    # As ip-netns(8) does: a shared mount, so that a namespace deleted here is deleted for everybody. If we left it out,
    # the first `ip netns add` of somebody else would cover our namespaces with copies and keep the originals for ever.
    FOLDER.mkdir(mode=0o755, parents=True, exist_ok=True)
    for attempt in range(2):
        try:
            _mount("", str(FOLDER), _MS_SHARED | _MS_REC)
            return
        except OSError as error:
            if error.errno != errno.EINVAL or attempt:
                raise
        _mount(str(FOLDER), str(FOLDER), _MS_BIND | _MS_REC)


def create(path: Path) -> None:
    """Make the namespace ``path`` (directly below `FOLDER`). Raises `EnvironmentLacking` without the right to."""
    try:
        _share_folder()
        path.touch(mode=0o444, exist_ok=True)

        def work() -> None:
            _call("unshare", _CLONE_NEWNET)
            _mount(_SELF, str(path), _MS_BIND)

        _in_thread(work)
    except PermissionError as error:
        raise EnvironmentLacking(f"no right to make a network namespace: {error}", "run the worker as root") from error


def delete(path: Path) -> bool:
    """Take the name away; the kernel ends the namespace when its last process is gone. False if there was none."""
    with suppress(OSError):  # EINVAL: a file that never became a mount
        _call("umount2", str(path).encode(), _MNT_DETACH)
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def write_sysctl(name: str, value: str | int) -> bool:
    """Set ``net/…`` in the current namespace (within `run_in`: that one). False if this kernel has no such setting."""
    try:
        Path("/proc/sys", *name.split("/")).write_text(f"{value}\n")
    except FileNotFoundError:
        return False
    return True


@contextmanager
def host_lock() -> Iterator[None]:
    """Hold the lock of the calling thread's namespace: one change of what pods share (bridges, tables) at a time."""
    descriptor = os.open(_SELF, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
