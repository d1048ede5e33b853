"""The container of a pod: made, watched, taken over from a guard that died, and removed when its init has ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

import structlog

from moorage import failpoints
from moorage.errors import MoorageError
from moorage.worker.guard import output
from moorage.worker.guard.messages import JOURNAL_FILE, EventKind, GuardConfig
from moorage.worker.guard.state import Operation, Story
from moorage.worker.journal import Journal
from moorage.worker.journal_frames import Frame, Kind
from moorage.worker.sandbox import process
from moorage.worker.sandbox.cgroup import PodCgroup
from moorage.worker.sandbox.runc import Runc

log = structlog.get_logger(__name__)

failpoints.declare("guard.ended.before", "guard.ended.after")

#: A killed pod, and one whose exit code nobody could learn, ends with this: 128 + SIGKILL.
KILLED: Final = 128 + signal.SIGKILL
_PID_FILE: Final = "init.pid"
_ORPHAN_SECONDS: Final = 120.0
_REAPED_MAX: Final = 16

Changed = Callable[[EventKind, int], None]


class Container:
    """``changed(kind, rank)`` is called for what the pod's init reports, and with ``ended`` when it is gone."""

    def __init__(self, folder: Path, config: GuardConfig, story: Story, changed: Changed) -> None:
        self.folder = folder
        self.config = config
        self.story = story
        self.gone = asyncio.Event()
        self.journal = Journal(folder / JOURNAL_FILE, cap=config.journal_bytes)
        self.output = output.Output(self.journal, self._seen)
        self.cgroup = PodCgroup(config.cgroup)
        self.runc = Runc(
            root=Path(config.runc_root), runc=Path(config.runc), criu=Path(config.criu), log=folder / "runc.log"
        )
        self._changed = changed
        self._watcher: asyncio.Task[None] | None = None
        self._reaped: dict[int, int] = {}

    @property
    def alive(self) -> bool:
        """Whether the container's init has started and has not been seen to end."""
        return self.story.now.init_pid > 0 and self.story.now.exit_code is None

    async def launch(self, run: Callable[..., Awaitable[None]], name: str) -> None:
        """Call ``run`` (`Runc.run` or `Runc.restore`) with a fresh pipe, and watch what it made. A container that
        could not be made leaves nothing behind."""
        (self.folder / _PID_FILE).unlink(missing_ok=True)
        read_end, write_end = output.pipe()
        self.output.attach(read_end)
        try:
            await run(
                self.config.container,
                Path(self.config.bundle),
                stdout=write_end,
                pid_file=self.folder / _PID_FILE,
                started=self.noting(name),
            )
        except MoorageError:
            self.output.drain()
            self.output.detach()
            await self._remove()
            raise
        finally:
            os.close(write_end)
        self._watch(self._read_pid())

    def noting(self, name: str) -> Callable[[int], None]:
        """A function that writes down that runc, whose pid it is given, carries out ``name``."""

        def note(pid: int) -> None:
            self.story.tell(operation=Operation(name, pid, process.start_time(pid)))

        return note

    def interrupt(self) -> None:
        """Kill the runc and the CRIU that are under way."""
        operation = self.story.now.operation
        if operation and operation.pid in process.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(operation.pid, signal.SIGKILL)

    async def end(self, grace: float) -> None:
        """SIGTERM to the init and up to ``grace`` seconds, then SIGKILL to all; returns when nothing is left."""
        if grace > 0 and self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.story.now.init_pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.gone.wait(), grace)
        await self.cgroup.kill(self.config.kill_seconds)
        if self.alive:
            await self.wait_gone()
        elif self.story.now.exit_code is None:
            await self._finish(self._last_words())

    async def wait_gone(self) -> None:
        """Return when the init has ended and all it wrote is in the journal. Raises `MoorageError` after a while."""
        try:
            await asyncio.wait_for(self.gone.wait(), self.config.kill_seconds)
        except TimeoutError:
            raise MoorageError(f"the pod's init (pid {self.story.now.init_pid}) does not end") from None

    async def adopt(self) -> bool:
        """Take over the container that a dead guard left, after the runc that it left has ended. Returns whether
        there is a living one."""
        now = self.story.now
        if now.operation is not None:
            await self._wait_for_orphan(now.operation)
        pid = now.init_pid or self._read_pid()
        if pid and process.start_time(pid) and now.init_started in (0, process.start_time(pid)):
            log.info("adopting the pod", init=pid, desired=now.desired, fenced=now.fenced)
            with contextlib.suppress(OSError):  # it has ended meanwhile
                self.output.attach(output.reopen(pid))
            self._watch(pid)
            return True
        if pid or now.killed:
            await self._finish(self._last_words())
        else:
            log.warning("the last guard died before the pod began")
            await self._remove()
            self.story.tell(begun=False, operation=None)
        return False

    def reap(self) -> None:
        """Collect children that nobody waits for: the container's init, and what runc left behind."""
        while True:
            try:
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if info is None or info.si_pid in process.running:
                return
            self._collect(info.si_pid)

    def close(self) -> None:
        """Let go of everything; the container stays as it is."""
        if self._watcher is not None:
            self._watcher.cancel()
        self.output.close()
        self.journal.close()

    def _collect(self, pid: int) -> None:
        with contextlib.suppress(ChildProcessError):
            collected, status = os.waitpid(pid, os.WNOHANG)
            if collected:
                self._reaped[collected] = os.waitstatus_to_exitcode(status)
        for old in list(self._reaped)[:-_REAPED_MAX]:
            del self._reaped[old]

    async def _wait_for_orphan(self, operation: Operation) -> None:
        if not operation.pid or process.start_time(operation.pid) != operation.started:
            return
        log.info("waiting for the last guard's runc", operation=operation.name, pid=operation.pid)
        try:
            await asyncio.wait_for(process.wait_for_exit(operation.pid), _ORPHAN_SECONDS)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(operation.pid, signal.SIGKILL)
            await process.wait_for_exit(operation.pid)

    def _read_pid(self) -> int:
        try:
            return int((self.folder / _PID_FILE).read_text())
        except (FileNotFoundError, ValueError):
            return 0

    def _seen(self, frames: Sequence[Frame]) -> None:
        for frame in frames:
            if frame.kind == Kind.STARTED:
                self._changed("started", frame.rank)
            elif frame.kind == Kind.EXITED:
                self._changed("exited", frame.rank)
            elif frame.kind == Kind.LOST:
                log.error("output was lost", frames=int.from_bytes(frame.payload, "little"))
        self._changed("output", -1)

    def _watch(self, pid: int) -> None:
        self.story.tell(init_pid=pid, init_started=process.start_time(pid))
        self._watcher = asyncio.create_task(self._until_end(pid))

    async def _until_end(self, pid: int) -> None:
        await process.wait_for_exit(pid)
        self.output.drain()
        self.output.detach()
        self._collect(pid)
        code = self._reaped.pop(pid, None)
        if code is None:  # adopted, so not this guard's child
            code = self._last_words()
        await self._finish(code if code >= 0 else 128 - code)

    def _last_words(self) -> int:
        # An init that ends by itself waits until its last frame is in the journal: without one it was killed.
        ended = self.journal.ranks.ended
        return KILLED if ended is None else ended

    async def _finish(self, code: int) -> None:
        await failpoints.hit("guard.ended.before")
        await self._remove()  # before it is told, so that whoever hears "exited" finds nothing left
        self.story.tell(exit_code=code, operation=None)
        log.info("the pod has ended", code=code, killed=self.story.now.killed)
        self.gone.set()
        self._changed("ended", -1)
        await failpoints.hit("guard.ended.after")

    async def _remove(self) -> None:
        try:
            await self.cgroup.kill(self.config.kill_seconds)
            await self.runc.delete(self.config.container, force=True)
        except MoorageError as error:
            log.warning("the container could not be removed", error=str(error))
