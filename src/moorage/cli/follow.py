"""Stream a job's output to the terminal, and end with its exit code."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from moorage.cli.output import remark
from moorage.errors import JobFailed, MoorageError

if TYPE_CHECKING:
    from moorage.coordinator.client import Job, JobInfo, LogLine

OUT, ERR = 1, 2


def outputs(text: str, ranks: int, flag: str) -> dict[int, int]:
    """torchrun's ``--tee``/``--redirects``: ``3``, or ``0:1,1:2``. Per rank a mask of 1 (stdout) and 2 (stderr)."""
    from moorage.errors import UsageError

    if re.fullmatch(r"[0-3]", text):
        return dict.fromkeys(range(ranks), int(text))
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        raise UsageError(f"{flag} {text!r} is not 0, 1, 2, 3 or RANK:N,…")
    given = {int(rank): int(mask) for rank, mask in (part.split(":") for part in text.split(","))}
    return {rank: given.get(rank, 0) for rank in range(ranks)}


class Printer:
    """Writes whole lines to stdout and stderr, with the rank in front when there are several, and to log files."""

    def __init__(
        self,
        ranks: int,
        *,
        per_pod: int = 1,
        folder: Path | None = None,
        redirects: dict[int, int] | None = None,
        tee: dict[int, int] | None = None,
        only_local: list[int] | None = None,
    ) -> None:
        self._many = ranks > 1
        self._per_pod = per_pod
        self._folder = folder
        self._redirects = redirects or {}
        self._tee = tee or {}
        self._only = only_local or []
        self._rest: dict[tuple[int, bool], bytes] = {}
        self._files: dict[tuple[int, bool], BinaryIO] = {}

    def _file(self, rank: int, stderr: bool) -> BinaryIO | None:
        wanted = self._redirects.get(rank, 0) | self._tee.get(rank, 0)
        if self._folder is None or not wanted & (ERR if stderr else OUT):
            return None
        if (rank, stderr) not in self._files:
            target = self._folder / str(rank)
            target.mkdir(parents=True, exist_ok=True)
            self._files[rank, stderr] = (target / ("stderr.log" if stderr else "stdout.log")).open("ab")
        return self._files[rank, stderr]

    def take(self, piece: LogLine) -> None:
        """Take a piece of output; prints the lines that are whole."""
        if file := self._file(piece.rank, piece.stderr):
            file.write(piece.data)
            file.flush()
        if self._redirects.get(piece.rank, 0) & (ERR if piece.stderr else OUT):
            return
        if self._only and piece.rank % self._per_pod not in self._only:
            return
        key = (piece.rank, piece.stderr)
        data = self._rest.pop(key, b"") + piece.data
        whole, newline, rest = data.rpartition(b"\n")
        if rest:
            self._rest[key] = rest
        if newline:
            self._print(piece.rank, piece.stderr, whole + newline)

    def _print(self, rank: int, stderr: bool, data: bytes) -> None:
        stream = sys.stderr if stderr else sys.stdout
        if self._many:
            prefix = f"[rank {rank}] ".encode()
            data = b"".join(prefix + line for line in data.splitlines(keepends=True))
        stream.buffer.write(data)
        stream.flush()

    def finish(self) -> None:
        """Print what stands without a line's end, and close the files."""
        for (rank, stderr), data in self._rest.items():
            self._print(rank, stderr, data + b"\n")
        self._rest.clear()
        for file in self._files.values():
            file.close()
        self._files.clear()


def _confirm(job: Job) -> bool:
    """Whether the person wants the job stopped. Without a terminal the interrupt itself is the answer."""
    if not sys.stdin.isatty():
        return True
    sys.stderr.write(f"\nStop job {job.id}? It can also run on without you. [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def follow(job: Job, printer: Printer) -> int:
    """Print the job's output until it is over; returns its exit code.

    Ctrl-C asks, then stops the job (a second one stops it at once) and returns 130; answering no leaves the job
    running and returns 0. Raises `JobFailed` if the job ended without an exit code of its own.
    """
    try:
        try:
            for piece in job.logs(follow=True):
                printer.take(piece)
            return exit_code(job.wait())
        except KeyboardInterrupt:
            if not _confirm(job):
                remark(f"job {job.id} runs on: `moorage logs -f {job.id}` shows its output again")
                return 0
            remark(f"stopping job {job.id}")
            job.stop()
            return 130
        except BrokenPipeError:
            return 0
    except KeyboardInterrupt:
        job.stop(grace=0)
        return 130
    finally:
        printer.finish()


def exit_code(job: JobInfo) -> int:
    """The exit code that a finished job means. Raises `JobFailed` if it has none of its own."""
    if job.exit_code is not None:
        if job.phase == "failed":
            remark(_failure(job))
        return job.exit_code
    if job.phase == "stopped":
        remark(f"job {job.name or job.id} was stopped")
        return 130
    if job.phase == "finished":
        return 0
    raise failed(job)


def failed(job: JobInfo) -> MoorageError:
    """The error of a job that ended without an exit code."""
    return JobFailed(_failure(job), job.hint or f"moorage events {job.name or job.id}")


def _failure(job: JobInfo) -> str:
    """A sentence that names the job: most reasons are one."""
    name = job.name or job.id
    return job.reason if name in job.reason else f"job {name} failed: {job.reason}"
