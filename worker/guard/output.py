"""The pod's pipe into the journal, with nothing lost or doubled even if the guard dies between any two instructions.

What is in the pipe is first copied (``tee``), written to the journal, and only then taken off the pipe. A guard that
dies in between leaves its successor the same frames once more, and the journal knows them by their numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable, Sequence

from moorage.worker.guard.kernel import F_SETPIPE_SZ, tee
from moorage.worker.journal import Journal
from moorage.worker.journal_frames import Frame

PIPE_BYTES = 1 << 20


class Output:
    """Reads one pipe at a time. ``seen`` is called with the frames that were new in the journal."""

    def __init__(self, journal: Journal, seen: Callable[[Sequence[Frame]], None]) -> None:
        self.journal = journal
        self._seen = seen
        self._pipe = -1
        self._copy_out, self._copy_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._nowhere = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
        _enlarge(self._copy_in)

    def attach(self, pipe: int) -> None:
        """Read from this descriptor from now on; it is closed when its last writer has gone."""
        self.detach()
        os.set_blocking(pipe, False)
        _enlarge(pipe)
        self._pipe = pipe
        asyncio.get_running_loop().add_reader(pipe, self._readable)

    def detach(self) -> None:
        """Close the pipe's read end; what is still in the pipe stays there for the next reader."""
        if self._pipe >= 0:
            asyncio.get_running_loop().remove_reader(self._pipe)
            os.close(self._pipe)
            self._pipe = -1

    def close(self) -> None:
        """Close everything."""
        self.detach()
        for descriptor in (self._copy_in, self._copy_out, self._nowhere):
            os.close(descriptor)

    def drain(self) -> None:
        """Take everything that is in the pipe now."""
        while self._pipe >= 0 and self._take():
            pass

    def _readable(self) -> None:
        self._take()

    def _take(self) -> bool:
        try:
            count = tee(self._pipe, self._copy_in, PIPE_BYTES)
        except BlockingIOError:
            return False
        if count == 0:
            self.detach()
            return False
        data = self._copied(count)
        fresh = self.journal.append(data)
        self._discard(count)
        if fresh:
            self._seen(fresh)
        return True

    def _copied(self, count: int) -> bytes:
        parts = []
        while count:
            part = os.read(self._copy_out, count)
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _discard(self, count: int) -> None:
        # Whole frames only: the init writes each with one call, so the pipe never ends in the middle of one.
        while count:
            count -= os.splice(self._pipe, self._nowhere, count)


def pipe() -> tuple[int, int]:
    """A pipe for a container's stdout: read end, write end."""
    return os.pipe2(os.O_CLOEXEC)


def reopen(init_pid: int) -> int:
    """The read end of the pipe that a pod's init writes to, when the guard that held it has died. Raises `OSError`."""
    return os.open(f"/proc/{init_pid}/fd/1", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def _enlarge(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # over the user's limit: the default size works too
        fcntl.fcntl(descriptor, F_SETPIPE_SZ, PIPE_BYTES)
