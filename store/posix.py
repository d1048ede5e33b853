"""A store in a folder, local or shared by several hosts (NFS and the like).

Small objects are written to ``tmp/``, synced, and linked to their name: `link` is atomic and fails if the name exists,
on NFS too, where an exclusive create followed by a write would show half an object. Packs are created exclusively at
their final name: nothing refers to a pack before its index object exists, so half a pack is only garbage.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from moorage.errors import Conflict, EnvironmentLacking, MoorageError, NoCapacity, NotFound, Unavailable, UsageError
from moorage.store.backend import Data, Entry

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_IOV_MAX = 1000


@contextlib.contextmanager
def translated(what: str) -> Iterator[None]:
    """Turn an `OSError` in the block into the error of ours that says what to do."""
    try:
        yield
    except OSError as error:
        raise translate(error, what) from error


def translate(error: OSError, what: str) -> MoorageError:
    """The error of ours for ``error``, which happened while working on ``what``."""
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        return NoCapacity(f"{what}: {reason}", "free space there, or run `moorage prune`; nothing half-done is left")
    if error.errno == errno.ENOENT:
        return NotFound(f"{what} does not exist", "")
    if error.errno in _DENIED:
        return EnvironmentLacking(f"{what}: {reason}", "run as a user who may read and write there")
    return Unavailable(f"{what}: {reason}", "check that the file system is mounted and healthy, then try again")


class PosixSink:
    """One pack file. See `backend.Sink`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise Conflict(f"{path} exists already", "packs are never written twice") from None
        except OSError as error:
            raise translate(error, str(path)) from error

    def write(self, buffers: Sequence[Data]) -> None:
        with translated(str(self._path)):
            write_all(self._fd, buffers)

    def finish(self) -> None:
        with translated(str(self._path)):
            try:
                os.fsync(self._fd)
            finally:
                os.close(self._fd)
                self._fd = -1
            _sync_folder(self._path.parent)

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            if self._fd >= 0:
                os.close(self._fd)
        self._fd = -1
        with contextlib.suppress(OSError):
            self._path.unlink()


class PosixSource:
    """One open file. See `backend.Source`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with translated(str(path)):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        done = 0
        with translated(str(self._path)):
            while done < len(buffer):
                got = os.preadv(self._fd, [buffer[done:]], offset + done)
                if not got:
                    break
                done += got
        return done

    def close(self) -> None:
        os.close(self._fd)


class PosixBackend:
    """See `backend.Backend`. ``root`` is an absolute path."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._network: bool | None = None

    @property
    def location(self) -> str:
        return str(self.root)

    @property
    def settle_seconds(self) -> float:
        if self._network is None:
            self._network = _is_network(self.root)
        return 60.0 if self._network else 0.0

    @property
    def pack_size(self) -> int:
        return 64 << 20

    def make_folders(self, folders: Sequence[str]) -> None:
        """Create the root and ``folders`` in it, all 0700. Raises `UsageError` when the root holds something else."""
        if self.root.exists() and not self.root.is_dir():
            raise UsageError(f"store {self.location} is a file", "name a folder; it is made if it is not there")
        if self.root.is_dir() and self.stat("config") is None:
            foreign = sorted({entry.name for entry in self.root.iterdir()} - set(folders))
            if foreign:
                raise UsageError(
                    f"store {self.location}: the folder is not a store and holds {foreign[0]}", "name an empty folder"
                )
        with translated(str(self.root)):
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in folders:
                (self.root / folder).mkdir(mode=0o700, exist_ok=True)
            _sync_folder(self.root)

    def put(self, name: str, data: Data, *, durable: bool = True) -> bool:
        path = self.root / name
        temporary = self.root / "tmp" / secrets.token_hex(16)
        with translated(str(path)):
            for folder in reversed(Path(name).parents[:-2]):  # below the store's own folders
                (self.root / folder).mkdir(mode=0o700, exist_ok=True)
            try:
                fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                try:
                    write_all(fd, [data])
                    if durable:
                        os.fsync(fd)
                finally:
                    os.close(fd)
                made = self._link(temporary, path)
                if made and durable:
                    _sync_folder(path.parent)
                return made
            finally:
                with contextlib.suppress(FileNotFoundError):
                    temporary.unlink()

    def _link(self, temporary: Path, path: Path) -> bool:
        try:
            os.link(temporary, path)
        except FileExistsError:
            # An NFS server may have done the link and lost the answer; the repeated request then fails.
            # The link count of our own file tells.
            if temporary.stat().st_nlink < 2:
                return False
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise EnvironmentLacking(
                    f"{self.root}: the file system has no hard links", "choose a store on another file system"
                ) from error
            raise
        return True

    def create(self, name: str) -> PosixSink:
        return PosixSink(self.root / name)

    def open(self, name: str) -> PosixSource:
        return PosixSource(self.root / name)

    def get(self, name: str) -> bytes:
        with translated(str(self.root / name)):
            return (self.root / name).read_bytes()

    def stat(self, name: str) -> Entry | None:
        with translated(str(self.root / name)):
            try:
                found = (self.root / name).stat()
            except FileNotFoundError:
                return None
        return Entry(name, found.st_size, found.st_mtime)

    def list(self, folder: str) -> Iterator[Entry]:
        with translated(str(self.root / folder)):
            yield from self._walk(folder)

    def _walk(self, folder: str) -> Iterator[Entry]:
        try:
            found = list(os.scandir(self.root / folder))
        except FileNotFoundError:
            return
        for item in found:
            name = f"{folder}/{item.name}"
            try:
                status = item.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISDIR(status.st_mode):
                yield from self._walk(name)
            else:
                yield Entry(name, status.st_size, status.st_mtime)

    def delete(self, name: str) -> bool:
        with translated(str(self.root / name)):
            try:
                (self.root / name).unlink()
            except FileNotFoundError:
                return False
        return True

    def touch(self, name: str) -> bool:
        with translated(str(self.root / name)):
            try:
                os.utime(self.root / name)
            except FileNotFoundError:
                return False
        return True

    def now(self) -> float:
        # The clock of a file server is not ours: ask it for the time of a file that it has just made.
        path = self.root / "tmp" / secrets.token_hex(16)
        with translated(str(path)):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            try:
                return path.stat().st_mtime
            finally:
                path.unlink()

    def free_bytes(self) -> int:
        with translated(str(self.root)):
            space = os.statvfs(self.root)
        return space.f_bavail * space.f_frsize


def write_all(fd: int, buffers: Sequence[Data], offset: int | None = None) -> None:
    """Write all of ``buffers`` to ``fd``, at ``offset`` if given. Raises `OSError`."""
    rest: list[Data] = list(buffers)
    while rest:
        some = rest[:_IOV_MAX]
        done = os.writev(fd, some) if offset is None else os.pwritev(fd, some, offset)
        if offset is not None:
            offset += done
        while rest and done >= len(rest[0]):
            done -= len(rest[0])
            del rest[0]
        if rest and done:
            rest[0] = memoryview(rest[0])[done:]


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EROFS):  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(fd)


def _is_network(path: Path) -> bool:
    """Whether ``path`` is on a file system that several hosts may share, by its type in /proc/self/mountinfo."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == wanted:
            kind = fields[fields.index("-") + 1]
            return kind.partition(".")[0] in _NETWORK_TYPES
    return False


_NETWORK_TYPES = {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "fuse", "lustre", "gpfs", "afs", "beegfs", "glusterfs"}
