"""The runc driver: every call of runc that moorage makes, and what its failures mean."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from moorage.errors import EnvironmentLacking, MoorageError
from moorage.worker.sandbox import criu, criulog, process

_SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DUMP_LOG: Final = "dump.log"
RESTORE_LOG: Final = "restore.log"


_RESTORE_ROOT: Final = "criu-root"
_MNT_DETACH: Final = 2
_libc = ctypes.CDLL(None, use_errno=True)


def _is_mount(path: Path) -> bool:
    wanted = str(path).replace("\\", "\\134").replace(" ", "\\040")
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(line.split(" ")[4] == wanted for line in lines)


class ContainerState(NamedTuple):
    """A container as runc knows it. ``status``: created, running, paused or stopped. ``pid`` 0: none."""

    status: str
    pid: int


class Runc:
    """runc with a ``--root`` of its own.

    Every method raises `MoorageError` with runc's last words when runc fails, and `EnvironmentLacking` when a program
    that it needs is missing.
    """

    def __init__(self, *, root: Path, runc: Path, criu: Path, log: Path) -> None:
        """``log``: a file to which runc appends what it has to say."""
        self.root = root
        self.program = runc
        self.criu = criu
        self.log = log

    @classmethod
    def installed(cls, *, root: Path, log: Path) -> Runc:
        """With the programs that `moorage.runtime.programs` finds."""
        from moorage.runtime import programs

        return cls(root=root, runc=programs.find("runc"), criu=programs.find("criu"), log=log)

    def environment(self) -> dict[str, str]:
        """runc finds CRIU by PATH; CRIU finds tar (contents of tmpfs mounts) there."""
        return {"PATH": f"{self.criu.parent}:{_SYSTEM_PATH}", "HOME": "/", "LANG": "C.UTF-8"}

    def command(self, *arguments: str) -> list[str]:
        """The whole command line."""
        return [str(self.program), "--root", str(self.root), "--log", str(self.log), "--log-format", "json", *arguments]

    async def run(
        self,
        container: str,
        bundle: Path,
        *,
        stdout: int,
        pid_file: Path,
        started: Callable[[int], None] | None = None,
    ) -> None:
        """Create and start the container, detached; its stdout is the descriptor given, ``pid_file`` gets the host
        pid of its pid 1. ``started`` hears runc's own pid."""
        arguments = ["run", "--detach", "--bundle", str(bundle), "--pid-file", str(pid_file), container]
        await self._do(*arguments, stdout=stdout, started=started)

    async def restore(
        self,
        container: str,
        bundle: Path,
        *,
        images: Path,
        work: Path,
        stdout: int,
        pid_file: Path,
        started: Callable[[int], None] | None = None,
    ) -> None:
        """Restore it, detached. The bundle's ``org.criu.config`` decides whether it stays frozen. Raises as
        `criulog.explain` says."""
        self._need_tar()
        arguments = ["restore", "--detach", "--bundle", str(bundle), "--pid-file", str(pid_file)]
        arguments += [*self._image_options(images, work), container]
        await self._do(*arguments, stdout=stdout, started=started, criu_log=work / RESTORE_LOG)

    async def checkpoint(
        self,
        container: str,
        *,
        images: Path,
        work: Path,
        leave_running: bool,
        started: Callable[[int], None] | None = None,
    ) -> None:
        """Dump it; a frozen container stays frozen. Raises as `criulog.explain` says."""
        self._need_tar()
        arguments = ["checkpoint", *self._image_options(images, work), *(["--leave-running"] * leave_running)]
        await self._do(*arguments, container, started=started, criu_log=work / DUMP_LOG)

    async def pause(self, container: str) -> None:
        """Freeze (`cgroup.PodCgroup.freeze` does the same without runc)."""
        await self._do("pause", container)

    async def resume(self, container: str) -> None:
        """Thaw."""
        await self._do("resume", container)

    async def kill(self, container: str, signal: str = "KILL") -> None:
        """Signal pid 1."""
        await self._do("kill", container, signal)

    async def delete(self, container: str, *, force: bool = False) -> None:
        """Forget a stopped container and remove its cgroup; ``force`` kills it first. Nothing to do if unknown."""
        if (self.root / container).exists():
            self._detach_restore_root(container)
            await self._do("delete", *(["--force"] * force), container)

    def _detach_restore_root(self, container: str) -> None:
        """While runc restores, the pod's root file system is mounted in its state folder. A runc that was killed then
        leaves it there, and the next one's `delete` would empty the whole root file system through it."""
        root = self.root / container / _RESTORE_ROOT
        while _is_mount(root):
            if _libc.umount2(os.fsencode(root), _MNT_DETACH):
                code = ctypes.get_errno()
                raise MoorageError(f"{root} cannot be unmounted: {os.strerror(code)}", "unmount it, then try again")

    async def state(self, container: str) -> ContainerState | None:
        """What runc knows of it; None when it does not."""
        if not (self.root / container / "state.json").exists():
            return None
        state: dict[str, Any] = json.loads(await self._do("state", container))
        return ContainerState(str(state["status"]), int(state.get("pid", 0)))

    async def processes(self, container: str) -> list[int]:
        """Host pids of its processes."""
        return [int(pid) for pid in json.loads(await self._do("ps", "--format", "json", container)) or []]

    def exec_command(self, container: str, spec: Path) -> list[str]:
        """The command line that runs the process of ``spec`` (see `oci.write_exec`) inside the container, with the
        stdio that it is started with; its exit code is the process's.

        A pod with such a process cannot be saved: its parent and its stdio are outside the pod.
        """
        return self.command("exec", "--process", str(spec), container)

    def _need_tar(self) -> None:
        if shutil.which("tar", path=_SYSTEM_PATH) is None:
            raise EnvironmentLacking("tar is missing: CRIU needs it for the pod's /dev", "install the package tar")

    @staticmethod
    def _image_options(images: Path, work: Path) -> list[str]:
        # The pod's tasks stay in the cgroup that runc made: its name may differ on the next node.
        options = ["--image-path", str(images), "--work-path", str(work), "--manage-cgroups-mode", "ignore"]
        return [*options, "--tcp-established", "--file-locks"]

    async def _do(
        self,
        *arguments: str,
        stdout: int | None = None,
        started: Callable[[int], None] | None = None,
        criu_log: Path | None = None,
    ) -> str:
        logged = self._log_size()
        try:
            env = self.environment() | (criu.environment(criu_log.parent) if criu_log is not None else {})
            ended = await process.run(self.command(*arguments), env=env, stdout=stdout, started=started)
        except OSError as error:
            raise EnvironmentLacking(f"{self.program}: {error.strerror}", "run `moorage doctor`") from error
        if ended.code == 0:
            return ended.output
        words = last_words(self._log_since(logged)) or f"exit code {ended.code}"
        if criu_log is not None:
            raise criulog.explain(_text(criu_log), arguments[0], words, criu_log)
        raise MoorageError(f"runc {arguments[0]} failed: {words}", f"see {self.log}")

    def _log_size(self) -> int:
        try:
            return self.log.stat().st_size
        except OSError:
            return 0

    def _log_since(self, offset: int) -> str:
        try:
            descriptor = os.open(self.log, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return ""
        with os.fdopen(descriptor, "rb") as file:
            file.seek(offset)
            return file.read().decode(errors="replace")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""


def last_words(log: str) -> str:
    """The last error in runc's JSON log, without its own preamble. Pure."""
    for line in reversed(log.splitlines()):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("level") in ("error", "fatal"):
            words = str(entry.get("msg", ""))
            for preamble in (
                "runc run failed: ",
                "exec failed: ",
                "unable to start container process: ",
                "error during container init: ",
            ):
                words = words.removeprefix(preamble)
            return words
    return ""
