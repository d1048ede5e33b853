"""Run a program to its end from asyncio, without threads and without asyncio's child watchers.

The guard is a subreaper and reaps whatever falls to it; a watcher that waits for "any child" would take its children
away, and so would the guard take the watcher's. Here the pid is known before anything can be reaped, and the end is
heard through a pidfd.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

#: Pids of children that `run` waits for.
running: set[int] = set()

_OUTPUT_MAX = 1 << 20


class Ended(NamedTuple):
    """How a program ended: exit code (negative: the signal that killed it) and the last MiB of its output."""

    code: int
    output: str


async def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    stdout: int | None = None,
    started: Callable[[int], None] | None = None,
) -> Ended:
    """Run ``argv`` in a session of its own, stdin and stderr ``/dev/null``.

    stdout is the descriptor given, or kept and returned. ``started`` hears the pid. When cancelled, the program's
    process group is killed. Raises `OSError` when it cannot be started.
    """
    kept = os.memfd_create("output", os.MFD_CLOEXEC) if stdout is None else -1
    try:
        process = subprocess.Popen(  # noqa: ASYNC220 - takes a millisecond, and the pid must be known before any reaping
            argv,
            stdin=subprocess.DEVNULL,
            stdout=kept if stdout is None else stdout,
            stderr=subprocess.DEVNULL,
            env=dict(env),
            start_new_session=True,
        )
        running.add(process.pid)
        try:
            if started:
                started(process.pid)
            await wait_for_exit(process.pid)
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            running.discard(process.pid)
        if kept < 0:
            return Ended(code, "")
        size = os.fstat(kept).st_size
        return Ended(code, os.pread(kept, _OUTPUT_MAX, max(0, size - _OUTPUT_MAX)).decode(errors="replace"))
    finally:
        if kept >= 0:
            os.close(kept)


async def wait_for_exit(pid: int) -> None:
    """Return when the process is gone (or a zombie), at once when there is none of that pid."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    try:
        loop.add_reader(descriptor, gone.set)
        await gone.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def start_time(pid: int) -> int:
    """When the process started, in clock ticks since boot: tells it from a later one of the same pid. 0: gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def inner_pid(folder: Path) -> int:
    """The number in its own pid namespace of the process or thread at ``/proc/…``. Raises `OSError` (it is gone)."""
    for line in (folder / "status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return int(folder.name)
