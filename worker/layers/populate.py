"""What moorage itself puts into a pod's root file system before the pod starts."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path, PurePosixPath

from moorage.errors import NotFound
from moorage.worker.layers.layer import Layer
from moorage.worker.layers.tree import OVERLAY_PREFIX
from moorage.worker.layers.view import PodView


def start_like(lower: Path, upper: Path) -> None:
    """Give a folder of an upper layer the owner, mode, attributes and times of the one that it covers.

    A folder in the upper layer decides how the merged one looks: without this the root of every pod would be 0700.
    """
    status = lower.stat()
    os.chown(upper, status.st_uid, status.st_gid)
    upper.chmod(stat.S_IMODE(status.st_mode))
    for name in os.listxattr(lower):
        if not os.fsencode(name).startswith(OVERLAY_PREFIX):
            with suppress(OSError):  # the two file systems need not know the same attributes
                os.setxattr(upper, name, os.getxattr(lower, name))
    os.utime(upper, ns=(status.st_atime_ns, status.st_mtime_ns))


def hide(layer: Layer, path: str) -> None:
    """Make ``path`` of the lower layer absent from the pod, unless the upper layer already covers it.

    Before the layer is mounted. It is done with a whiteout, as if the pod had deleted it; `capture` leaves it out.
    """
    if not os.path.lexists(layer.lower / path):
        return
    parents = [parent for parent in reversed(PurePosixPath(path).parents) if parent.name]
    for parent in parents:
        upper = layer.upper / parent
        if not os.path.lexists(upper):
            before = upper.parent.stat()
            upper.mkdir(0o700)
            start_like(layer.lower / parent, upper)
            os.utime(upper.parent, ns=(before.st_atime_ns, before.st_mtime_ns))
        elif not stat.S_ISDIR(upper.lstat().st_mode) or _covers(upper):
            return
    target = layer.upper / path
    if not os.path.lexists(target):
        before = target.parent.stat()
        os.mknod(target, stat.S_IFCHR, 0)
        os.utime(target.parent, ns=(before.st_atime_ns, before.st_mtime_ns))


def _covers(upper: Path) -> bool:
    with suppress(OSError):
        return os.getxattr(upper, OVERLAY_PREFIX + b"opaque") == b"y"
    return False


def make_folder(view: PodView, path: str, mode: int, uid: int, gid: int) -> int:
    """Create a folder and its parents where absent. Returns an O_PATH descriptor of it."""
    try:
        fd = view.open(path)
    except NotFound:
        parent, name = _split(path)
        above = make_folder(view, parent, mode, uid, gid)
        try:
            with suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=above)
                os.chown(name, uid, gid, dir_fd=above, follow_symlinks=False)
                os.chmod(name, mode, dir_fd=above)
        finally:
            os.close(above)
        fd = view.open(path)
    if not stat.S_ISDIR(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    return fd


def put_file(view: PodView, path: str, data: bytes, mode: int, uid: int, gid: int) -> None:
    """Write a file, in place of whatever has its name; a symlink there is replaced, not followed."""
    parent, name = _split(path)
    folder = make_folder(view, parent, 0o755, 0, 0)
    try:
        temporary = f".{name}.moorage"
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fchown(fd, uid, gid)
            os.fchmod(fd, mode)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.close(folder)


def _split(path: str) -> tuple[str, str]:
    parent, _, name = path.rstrip("/").rpartition("/")
    return parent or "/", name
