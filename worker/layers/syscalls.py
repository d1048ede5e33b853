"""The system calls that Python's ``os`` lacks. Every function raises `OSError` with the kernel's errno."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
from pathlib import Path
from typing import Final

_libc = ctypes.CDLL(None, use_errno=True)

MS_BIND: Final = 1 << 12
MS_REC: Final = 1 << 14
MS_PRIVATE: Final = 1 << 18
MNT_DETACH: Final = 2
UMOUNT_NOFOLLOW: Final = 8

RESOLVE_NO_XDEV: Final = 0x01
RESOLVE_NO_SYMLINKS: Final = 0x04
RESOLVE_BENEATH: Final = 0x08
RESOLVE_IN_ROOT: Final = 0x10

CLOCK_REALTIME_COARSE: Final = 5  # the clock that file systems take their stamps from

_SYS_OPENAT2: Final = 437  # the same on every architecture
_SYS_OPEN_TREE: Final = 428
_OPEN_TREE_CLONE: Final = 1
_SYS_SETGROUPS: Final = {"x86_64": 116, "aarch64": 159, "riscv64": 159, "ppc64le": 81, "s390x": 206}
_FICLONE: Final = 0x40049409
_RENAME_NOREPLACE: Final = 1


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)
    return result


def mount(source: str, target: Path, kind: str, flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    arguments = (os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), os.fsencode(data))
    _check(_libc.mount(*arguments), str(target))


def unmount(target: Path, flags: int = 0) -> None:
    """umount2(2), never through a symlink."""
    _check(_libc.umount2(os.fsencode(target), flags | UMOUNT_NOFOLLOW), str(target))


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_beneath(name: str | bytes, flags: int, dir_fd: int, *, cross_mounts: bool = False) -> int:
    """Open ``name`` below ``dir_fd`` and refuse symlinks, ``..`` out of it and (EXDEV) mount points on the way."""
    resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | (0 if cross_mounts else RESOLVE_NO_XDEV)
    how = _OpenHow(flags | os.O_CLOEXEC, 0, resolve)
    number, size = ctypes.c_long(_SYS_OPENAT2), ctypes.c_size_t(ctypes.sizeof(how))
    return _check(_libc.syscall(number, ctypes.c_int(dir_fd), os.fsencode(name), ctypes.byref(how), size), repr(name))


def open_in_root(name: str, flags: int, dir_fd: int) -> int:
    """Open ``name`` as if ``dir_fd`` were the root folder: no symlink and no ``..`` leads out of it."""
    how = _OpenHow(flags | os.O_CLOEXEC, 0, RESOLVE_IN_ROOT)
    number, size = ctypes.c_long(_SYS_OPENAT2), ctypes.c_size_t(ctypes.sizeof(how))
    return _check(_libc.syscall(number, ctypes.c_int(dir_fd), os.fsencode(name), ctypes.byref(how), size), repr(name))


def open_without_mounts(folder: Path) -> int:
    """A descriptor of ``folder`` below which nothing is seen that is mounted there, as an overlay's lower layer is."""
    number, here = ctypes.c_long(_SYS_OPEN_TREE), ctypes.c_int(-100)
    flags = ctypes.c_uint(_OPEN_TREE_CLONE | os.O_CLOEXEC)
    return _check(_libc.syscall(number, here, os.fsencode(folder), flags), str(folder))


def rename_new(source: str, target: str, dir_fd: int) -> None:
    """Rename within one folder; FileExistsError instead of replacing ``target``."""
    arguments = (ctypes.c_int(dir_fd), os.fsencode(source), ctypes.c_int(dir_fd), os.fsencode(target))
    try:
        _check(_libc.renameat2(*arguments, ctypes.c_uint(_RENAME_NOREPLACE)), target)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOSYS}:
            raise
        # A file system without the flag (NFS): a hard link never replaces anything either.
        os.link(source, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd, follow_symlinks=False)
        os.unlink(source, dir_fd=dir_fd)


def sync_filesystem(fd: int) -> None:
    """Make everything that was written to the file system of ``fd`` durable."""
    _check(_libc.syncfs(ctypes.c_int(fd)), "syncfs")


def clone(source: int, target: int) -> bool:
    """Make ``target`` share the blocks of ``source`` where the file system can; whether it did."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        return False
    return True


def set_thread_groups(groups: list[int]) -> None:
    """setgroups for the calling thread alone (the C library's changes all threads)."""
    number = _SYS_SETGROUPS.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), "setgroups")
    array = (ctypes.c_uint32 * max(1, len(groups)))(*groups)
    _check(_libc.syscall(ctypes.c_long(number), ctypes.c_long(len(groups)), array), "setgroups")


def set_thread_fsids(uid: int, gid: int) -> None:
    """User and group that the kernel checks for this thread's file accesses; with ``uid`` not 0 root's power goes.

    Raises PermissionError if the kernel did not take them (these calls report no error of their own).
    """
    unchanged = ctypes.c_uint32(0xFFFFFFFF)
    if uid == 0:  # first back to root, or the group could not be set
        _libc.setfsuid(ctypes.c_uint32(uid))
    _libc.setfsgid(ctypes.c_uint32(gid))
    _libc.setfsuid(ctypes.c_uint32(uid))
    if _libc.setfsuid(unchanged) != uid or _libc.setfsgid(unchanged) != gid:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), f"file system ids {uid}:{gid}")


class _Dirent(ctypes.Structure):
    _fields_ = (
        ("d_ino", ctypes.c_uint64),
        ("d_off", ctypes.c_int64),
        ("d_reclen", ctypes.c_ushort),
        ("d_type", ctypes.c_ubyte),
        ("d_name", ctypes.c_char * 256),
    )


def tells_types(folder: Path) -> bool:
    """Whether listing ``folder`` (which must not be empty) tells each entry's type."""
    _libc.opendir.restype = ctypes.c_void_p
    _libc.readdir.restype = ctypes.POINTER(_Dirent)
    stream = _libc.opendir(os.fsencode(folder))
    _check(0 if stream else -1, str(folder))
    handle = ctypes.c_void_p(stream)
    try:
        while entry := _libc.readdir(handle):
            if entry.contents.d_name not in {b".", b".."}:
                return bool(entry.contents.d_type)
    finally:
        with contextlib.suppress(OSError):
            _check(_libc.closedir(handle), "closedir")
    return True
