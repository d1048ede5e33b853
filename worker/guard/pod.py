"""The pod in the guard's hands: what the worker and the fence order, one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import structlog

from moorage import failpoints
from moorage.errors import Conflict, Fenced, MoorageError, Refused
from moorage.worker.guard.container import KILLED, Changed, Container
from moorage.worker.guard.kernel import set_link
from moorage.worker.guard.messages import GuardConfig, GuardStatus, PodPhase, RankState
from moorage.worker.guard.state import Story
from moorage.worker.sandbox import criu, vfork
from moorage.worker.sandbox import images as image_files

log = structlog.get_logger(__name__)

_OPERATIONS = ("start", "restore", "freeze", "thaw", "drain", "checkpoint", "kill", "fence", "lift", "adopt")
failpoints.declare(*(f"guard.{name}.{step}" for name in _OPERATIONS for step in ("before", "after")))

#: Operations in which CRIU or runc works inside the pod's cgroup: freezing it then would stop them, not the pod.
_INSIDE = ("start", "restore", "checkpoint")
_VFORK_SECONDS = 5.0


class Pod:
    """One pod. ``changed(kind, rank)`` is called after every change that the worker wants to hear of.

    What the pod shall be is written down (`Story`) before it is made so: whatever the point at which a guard dies,
    `adopt` in the next one finishes it.
    """

    def __init__(self, folder: Path, config: GuardConfig, changed: Changed) -> None:
        self.folder = folder
        self.config = config
        self.deadline = config.deadline  # for the status only; fencing keeps its own
        self._changed = changed
        self._story = Story(folder)
        self.container = Container(folder, config, self._story, changed)
        self._lock = asyncio.Lock()
        self._busy = ""
        self._frozen = False
        self._cut = False

    @property
    def alive(self) -> bool:
        """Whether it has a process."""
        return self.container.alive

    @property
    def over(self) -> bool:
        """Whether it has ended, or was killed before it began."""
        return self._story.now.exit_code is not None

    @property
    def fenced(self) -> bool:
        return self._story.now.fenced

    @property
    def unsettled(self) -> bool:
        """Whether it should stand still and may not: the freezer failed, or runc is at work inside."""
        return self.alive and self._must_stand and not self._frozen and self._busy not in _INSIDE

    @property
    def _must_stand(self) -> bool:
        return self._story.now.fenced or self._story.now.desired == "freeze"

    def status(self) -> GuardStatus:
        """The status now."""
        now, journal = self._story.now, self.container.journal
        living: PodPhase = "frozen" if self._frozen else "running"
        exits = journal.ranks.exits
        return GuardStatus(
            job=self.config.job,
            pod=self.config.pod,
            incarnation=self.config.incarnation,
            guard_pid=os.getpid(),
            phase="exited" if self.over else living if now.init_pid else "empty",
            desired=now.desired,
            reason=now.reason,
            fenced=now.fenced,
            cut=self._cut,
            busy=self._busy,
            init_pid=now.init_pid if self.alive else 0,
            ranks=[
                RankState(rank=rank, pid=pid, exited=rank in exits, exit_code=exits.get(rank, 0))
                for rank, pid in sorted(journal.ranks.pids.items())
            ],
            exit_code=now.exit_code,
            killed=now.killed,
            deadline=self.deadline,
            journal_start=journal.start,
            journal_end=journal.end,
            sequence=journal.sequence,
            lost_frames=journal.lost,
            output_bytes=journal.output_bytes,
            cpu_seconds=self.container.cgroup.cpu_seconds(),
        )

    async def adopt(self) -> None:
        """Take over what the folder's last guard left, and make the pod what it was to be."""
        if not self._story.now.begun or self.over:
            return
        await failpoints.hit("guard.adopt.before")
        if await self.container.adopt():
            self._frozen = self.container.cgroup.state() == "frozen"
            await self._settle()
            self._story.tell(operation=None)
        await failpoints.hit("guard.adopt.after")

    # What the worker orders

    async def start(self) -> dict[str, float]:
        """Run the bundle. Raises `Fenced` when the deadline has passed, `Conflict` when the pod has ended."""
        async with self._operation("start") as timings:
            if self._may_begin():
                if self.fenced:
                    raise Fenced("the pod cannot start: its node's lease has run out", "wait until it is renewed")
                self._story.tell(begun=True, desired="run", reason="started")
                await self._launch(self.container.runc.run, "start")
        return timings

    async def restore(self, images: Path, work: Path) -> dict[str, float]:
        """Restore it; no process of it runs an instruction before `thaw`."""
        async with self._operation("restore") as timings:
            if self._may_begin():
                _make_folders(work)
                criu.write_for_restore(self.folder, self.container.cgroup)
                self._story.tell(begun=True, desired="freeze", reason="restored, not released yet")
                await self._launch(functools.partial(self.container.runc.restore, images=images, work=work), "restore")
        return timings

    async def freeze(self, reason: str) -> dict[str, float]:
        """Freeze. Raises `Conflict` when there is nothing to freeze."""
        async with self._operation("freeze") as timings:
            self._need_alive("frozen")
            self._story.tell(desired="freeze", reason=reason)
            await self._settle()
            await self._outside_vfork()
        return timings

    async def thaw(self, reason: str) -> dict[str, float]:
        """Let it run on; a fenced pod only takes note."""
        async with self._operation("thaw") as timings:
            self._need_alive("thawed")
            self._story.tell(desired="run", reason=reason)
            await self._settle()
        return timings

    async def drain(self) -> dict[str, float]:
        """Empty the frozen pod's pipe into the journal."""
        async with self._operation("drain") as timings:
            self._need_frozen("drained")
            self.container.output.drain()
        return timings

    async def checkpoint(self, images: Path, work: Path, *, leave_running: bool) -> tuple[dict[str, float], int]:
        """Dump the frozen pod. Returns timings and the size of the images in bytes."""
        async with self._operation("checkpoint") as timings:
            self._need_frozen("saved")
            self.container.output.drain()
            _make_folders(images, work)
            criu.write_for_dump(self.folder)
            if not leave_running:
                self._story.tell(killed=True, reason="saved and removed")
            try:
                await self.container.runc.checkpoint(
                    self.config.container,
                    images=images,
                    work=work,
                    leave_running=leave_running,
                    started=self.container.noting("checkpoint"),
                )
            except MoorageError:
                if not leave_running and self.alive:
                    self._story.tell(killed=False, reason="could not be saved")
                raise
            finally:
                # CRIU thaws the cgroup while it holds every task, and may have died before it froze it again.
                if not self._story.now.killed:
                    await self._settle(again=True)
            if not leave_running:
                await self.container.wait_gone()
            size = sum(entry.stat().st_size for entry in os.scandir(images))
        return timings | image_files.dump_times(work), size

    async def kill(self, grace: float, reason: str) -> dict[str, float]:
        """End the pod, whatever is under way. Nothing of it runs afterwards, and it cannot be started any more."""
        if self._busy in _INSIDE:
            self.container.interrupt()
        async with self._operation("kill") as timings:
            if self.over:
                return timings
            self._story.tell(killed=True, reason=reason)
            if self._story.now.begun:
                await self.container.end(0.0 if self._frozen else grace)
            else:
                self._story.tell(exit_code=KILLED)
                self._changed("ended", -1)
        return timings

    # What the fence orders

    async def fence(self) -> None:
        """Cut the network and freeze; idempotent. Raises `MoorageError` when a process does not stand still."""
        await failpoints.hit("guard.fence.before")
        if not self.fenced:
            self._story.tell(fenced=True, reason="its node's lease has run out")
        self._links(up=False)
        if self._busy not in _INSIDE:  # else that operation's end settles
            async with self._lock:
                await self._settle()
        self._changed("fenced", -1)
        await failpoints.hit("guard.fence.after")

    async def lift(self) -> None:
        """Undo `fence`: the network first, so that the pod finds it whole."""
        await failpoints.hit("guard.lift.before")
        async with self._lock:
            self._links(up=True)
            self._story.tell(fenced=False, reason="its incarnation was confirmed")
            await self._settle()
        self._changed("unfenced", -1)
        await failpoints.hit("guard.lift.after")

    # Inside

    def _links(self, *, up: bool) -> None:
        for name in self.config.cut_links:
            set_link(name, up=up)
        self._cut = not up

    @contextlib.asynccontextmanager
    async def _operation(self, name: str) -> AsyncIterator[dict[str, float]]:
        async with self._lock:
            begin = time.monotonic()
            timings: dict[str, float] = {}
            await failpoints.hit(f"guard.{name}.before")
            self._busy = name
            log.info("operation begins", operation=name)
            try:
                yield timings
            except MoorageError as error:
                log.warning("operation failed", operation=name, error=str(error))
                raise
            finally:
                self._busy = ""
                self._story.tell(operation=None)
                timings[name] = time.monotonic() - begin
            log.info("operation done", operation=name, seconds=round(timings[name], 4))
            await failpoints.hit(f"guard.{name}.after")

    async def _outside_vfork(self) -> None:
        """Let a pod that was frozen in the middle of a vfork, where it cannot be saved, run on until it stands outside
        of one. A fenced pod stays as it is. Raises `Refused`, with the pod frozen, when it never does."""
        end = time.monotonic() + _VFORK_SECONDS
        pause = 0.001
        while (found := vfork.pending(self.container.cgroup.processes())) and not self.fenced:
            if time.monotonic() >= end:
                who = f"process {found[0].name} (pid {found[0].parent})"
                raise Refused(
                    f"{who} has a child in its memory that does not call exec", "see what the child waits for"
                )
            await self.container.cgroup.thaw()
            await asyncio.sleep(pause)
            await self.container.cgroup.freeze()
            pause = min(pause * 2, 0.1)

    async def _launch(self, run: Callable[..., Awaitable[None]], name: str) -> None:
        try:
            await self.container.launch(run, name)
        except MoorageError:
            self._story.tell(begun=False)
            raise
        await self._settle(again=True)

    def _may_begin(self) -> bool:
        """Whether a container is to be made now; False when it is there already. Raises `Conflict`."""
        if self.over:
            raise Conflict(f"the pod has ended with code {self._story.now.exit_code}", "use a new incarnation")
        return not self._story.now.begun

    def _need_alive(self, wanted: str) -> None:
        if not self.alive:
            raise Conflict(f"the pod cannot be {wanted}: it has {'ended' if self.over else 'not begun'}")

    def _need_frozen(self, wanted: str) -> None:
        self._need_alive(wanted)
        if not self._frozen or self._story.now.desired != "freeze":
            raise Conflict(f"the pod cannot be {wanted}: it is not frozen", "freeze it first")

    async def _settle(self, *, again: bool = False) -> None:
        """Make the freezer what it must be. ``again``: something else may have turned it."""
        if not self.alive or (self._must_stand == self._frozen and not again):
            return
        stand = self._must_stand
        if stand:
            await self.container.cgroup.freeze()
        else:
            await self.container.cgroup.thaw()
        if self._frozen != stand:
            self._frozen = stand
            self._changed("frozen" if stand else "thawed", -1)


def _make_folders(*folders: Path) -> None:
    for folder in folders:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
