"""As whom the ranks run, and where their command lies on this host."""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from moorage.errors import EnvironmentLacking, Forbidden, MoorageError, UsageError
from moorage.v1.types_pb2 import JobSpec, Mount
from moorage.worker.layers import syscalls
from moorage.worker.layers.owner import acting_as, owner_of
from moorage.worker.pod_environment import DEFAULT_PATH


class User(NamedTuple):
    """A user of this host, or a bare number that no account has (then ``name`` is the number and ``home`` is ``/``)."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    name: str
    home: str

    def environment(self) -> dict[str, str]:
        """The variables that tell a program as whom it runs."""
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name}


def resolve(spec: JobSpec) -> User:
    """The user of the job: ``spec.user`` (``uid[:gid]`` or a name), else the owner's account on this host.

    Raises `UsageError` when there is no such account, `Forbidden` for root's unless its owner's role allows that.
    """
    user = _resolve(spec)
    if user.uid == 0 and not spec.as_root:
        raise Forbidden(f"job {spec.name} may not run as root", "its owner would need the role administer")
    return user


def _resolve(spec: JobSpec) -> User:
    wanted = spec.user or spec.owner.removeprefix("user:") or "root"
    first, colon, second = wanted.partition(":")
    if first.isdigit() and (second.isdigit() or not colon):
        return _numbered(int(first), int(second) if second else None)
    try:
        return _account(pwd.getpwnam(wanted))
    except KeyError:
        hint = "name another with --user" if spec.user else "name an account of the nodes with --user"
        raise UsageError(f"user {wanted} does not exist on this node", hint) from None


def _numbered(uid: int, gid: int | None) -> User:
    try:
        user = _account(pwd.getpwuid(uid))
    except KeyError:
        group = uid if gid is None else gid
        return User(uid, group, (group,), str(uid), "/")
    if gid is None or gid == user.gid:
        return user
    return user._replace(gid=gid, groups=(gid, *user.groups))


def _account(entry: pwd.struct_passwd) -> User:
    groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
    return User(entry.pw_uid, entry.pw_gid, groups, entry.pw_name, entry.pw_dir)


class Opened:
    """The host's folders and files that a job names, opened with its user's rights (O_PATH).

    A mount or an image does away with the way that leads to it: behind a folder that the user may not enter he could
    read what is readable in it. And what he named may be another thing by the time that root uses its name, so root
    uses these descriptors. They live until `close`.
    """

    def __init__(self, spec: JobSpec, user: User) -> None:
        """Raises `UsageError` for an image, `EnvironmentLacking` for a mount's source that is not on this node,
        `Forbidden` for one that the user may not reach."""
        self.image: int | None = None
        self._mounts: list[int] = []
        self._bound: list[Path] = []
        self._owner = owner_of(user.uid, user.gid, user.groups)
        try:
            if spec.image:
                self.image = self._open(spec.image, user, os.O_DIRECTORY)
                if self.image is None:
                    raise UsageError(
                        f"image {spec.image} is no folder of this node", "name a root file system that every node has"
                    )
            for mount in spec.mounts:
                found = self._open(mount.source, user)
                if found is None:
                    raise EnvironmentLacking(
                        f"{mount.source}, which is to be mounted, does not exist on this node",
                        "make it on the nodes, or name those that have it with --on",
                    )
                self._mounts.append(found)
        except BaseException:
            self.close()
            raise

    def add(self, path: Path, user: User) -> None:
        """One file more to be bound. Raises `EnvironmentLacking` if it is not there, `Forbidden`."""
        found = self._open(str(path), user)
        if found is None:
            raise EnvironmentLacking(f"{path}, which the job uses, is not on this node", "install it there as well")
        self._mounts.append(found)

    def _open(self, path: str, user: User, flags: int = 0) -> int | None:
        try:
            with acting_as(self._owner):
                return os.open(path, os.O_PATH | os.O_CLOEXEC | flags)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PermissionError:
            raise Forbidden(
                f"user {user.name} may not reach {path} on this node", "name what that user may read"
            ) from None

    def bind(self, folder: Path) -> list[Path]:
        """Places below ``folder`` where what is to be mounted can be reached until `close`: the spec's mounts in
        their order, then what was added.

        The kernel does not bind what another mount namespace's descriptor stands for, and runc looks from one of its
        own: so each is bound here first. ``folder`` must be one that nobody ever removes with all that is in it.
        """
        for number, fd in enumerate(self._mounts):
            target = folder / str(number)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                target.mkdir(mode=0o700, exist_ok=True)
            else:
                target.touch(0o600)
            syscalls.mount(f"/proc/self/fd/{fd}", target, "", syscalls.MS_BIND | syscalls.MS_REC)
            self._bound.append(target)
            syscalls.mount("", target, "", syscalls.MS_PRIVATE | syscalls.MS_REC)
        return list(self._bound)

    def close(self) -> None:
        """Unbind and close them all. Idempotent."""
        bound, self._bound = self._bound, []
        for target in bound:
            unbind(target)
        if bound:
            with contextlib.suppress(OSError):
                bound[0].parent.rmdir()
        fds = [*self._mounts, *([] if self.image is None else [self.image])]
        self._mounts, self.image = [], None
        for fd in fds:
            os.close(fd)


def unbind(target: Path) -> None:
    """Unmount what `Opened.bind` bound there, and remove the empty place. Raises nothing."""
    with contextlib.suppress(OSError):
        syscalls.unmount(target, syscalls.MNT_DETACH)
    with contextlib.suppress(OSError):  # not empty: it is still mounted, and nothing of it is removed
        if target.is_dir():
            target.rmdir()
        else:
            target.unlink()


def sweep(folder: Path) -> None:
    """Unbind what a worker that died left bound below ``folder``. Nothing that is still mounted is removed."""
    for target in folder.glob("*/*"):
        unbind(target)
    for place in (*folder.glob("*"), folder):
        with contextlib.suppress(OSError):
            place.rmdir()


def command_paths(spec: JobSpec) -> list[str]:
    """Absolute paths of this host (in the image or a mount, if it is there) that the command needs: itself, what it
    links to, and the prefix of a virtual environment.

    To be called with the rights of the job's user (`acting_as`): what the answer tells must not be more than the user
    could find out. Raises `UsageError` when there is no command or it cannot be found in the job's ``PATH``,
    `Forbidden` for one where the user may not look.
    """
    if not spec.command or not spec.command[0]:
        raise UsageError(f"job {spec.name} has no command")
    root = Path(spec.image or "/")
    found = _find(spec, root)
    if found is None:
        raise _not_found(spec, root)
    return list(dict.fromkeys(map(str, _with_targets(found, spec, root))))


def _not_found(spec: JobSpec, root: Path) -> MoorageError:
    name = spec.command[0]
    where = f"in image {spec.image}" if spec.image else "on this node"
    if "/" not in name:
        path = spec.env.get("PATH", DEFAULT_PATH)
        hint = f"PATH is {path}; give its path or set PATH with --env"
        return UsageError(f"command {name} does not exist {where}", hint)
    inside = _inside(spec, "")
    if (mount := _mount_of(spec, inside)) is not None:
        where = f"in {mount.source} (which is mounted at {mount.destination})"
    try:
        status = _on_host(spec, root, inside).stat()
    except PermissionError:
        return Forbidden(f"the job's user may not reach {name} {where}", "name what that user may execute")
    except OSError:
        return UsageError(f"command {name} does not exist {where}", "give its path")
    what, hint = (
        ("is a folder", "name a program") if stat.S_ISDIR(status.st_mode) else ("is not executable", "chmod +x it")
    )
    return UsageError(f"command {name} {what}", hint)


def _executable(path: Path) -> bool:
    # `shutil.which` asks with the real user's rights, and this thread has those of another.
    return _is_file(path) and os.access(path, os.X_OK, effective_ids=True)


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:  # `Path.is_file` raises some
        return False


def _is_link(path: Path) -> bool:
    try:
        return stat.S_ISLNK(path.lstat().st_mode)
    except OSError:
        return False


def _find(spec: JobSpec, root: Path) -> Path | None:
    name = spec.command[0]
    if "/" in name:
        folders = [spec.working_directory or "/"]
    else:
        folders = [folder for folder in spec.env.get("PATH", DEFAULT_PATH).split(":") if folder]
    for folder in folders:
        inside = _inside(spec, folder)
        on_host = _on_host(spec, root, inside)
        if _executable(on_host):
            return inside
        if (spec.image or spec.mounts) and _is_link(on_host):
            return inside  # a link that leads nowhere here may well lead somewhere in the pod
    return None


def _inside(spec: JobSpec, folder: str) -> Path:
    """Where the pod would have the command if it lay in ``folder``."""
    return Path(spec.working_directory or "/", folder, spec.command[0])


def _mount_of(spec: JobSpec, inside: Path) -> Mount | None:
    """The mount of the job that this path of the pod lies in."""
    place = Path(os.path.normpath(inside))
    covering = [mount for mount in spec.mounts if place.is_relative_to(mount.destination)]
    return max(covering, key=lambda mount: len(Path(mount.destination).parts), default=None)


def _on_host(spec: JobSpec, root: Path, inside: Path) -> Path:
    """Where a path of the pod lies on this host."""
    if (mount := _mount_of(spec, inside)) is not None:
        return Path(mount.source) / Path(os.path.normpath(inside)).relative_to(mount.destination)
    # Joined by hand: an absolute path would throw the root away.
    return root / str(inside).lstrip("/")


def _with_targets(found: Path, spec: JobSpec, root: Path) -> Iterator[Path]:
    yield found
    if root != Path("/") or _mount_of(spec, found) is not None:
        return
    yield found.resolve()
    prefix = found.parent.parent
    if _is_file(prefix / "pyvenv.cfg"):
        yield prefix
