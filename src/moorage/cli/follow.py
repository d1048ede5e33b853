"""Stream a job's output to the terminal, and end with its exit code."""

from __future__ import annotations

import contextlib
import signal
import string
import sys
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from moorage.cli.output import remark
from moorage.errors import JobFailed, MoorageError

if TYPE_CHECKING:
    from moorage.cli.rank_files import RankFiles
    from moorage.coordinator.client import Job, JobInfo, LogLine


_KEPT_MIB = 64  # as moorage.worker.journal has it


def tell_gap(piece: LogLine) -> None:
    """Say that something before the piece is missing, if so."""
    if piece.truncated:
        remark(f"pod {piece.pod}: older output is not kept any more (the newest {_KEPT_MIB} MiB of each pod are)")


class Printer:
    """Writes whole lines to stdout and stderr, with the rank in front when there are several, and to log files.

    ``prefix``: a template with ``${role_name}``, ``${rank}`` and ``${local_rank}``, as torchrun's
    ``TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE``. ``only``: ranks that are shown; all if empty.
    """

    def __init__(
        self,
        ranks: int,
        *,
        per_pod: int = 1,
        files: RankFiles | None = None,
        only_local: Collection[int] = (),
        only: Collection[int] = (),
        prefix: str = "",
        role: str = "default",
    ) -> None:
        self._many = ranks > 1
        self._per_pod = per_pod
        self._files = files
        self._only_local = only_local
        self._only = only
        self._prefix = prefix
        self._role = role
        self._rest: dict[tuple[int, bool], bytes] = {}

    def take(self, piece: LogLine) -> None:
        """Take a piece of output; prints the lines that are whole."""
        tell_gap(piece)
        if self._only and piece.rank not in self._only:
            return
        if self._files is not None:
            self._files.write(piece.rank, piece.stderr, piece.data)
            if not self._files.shown(piece.rank, piece.stderr):
                return
        if self._only_local and piece.rank % self._per_pod not in self._only_local:
            return
        key = (piece.rank, piece.stderr)
        data = self._rest.pop(key, b"") + piece.data
        whole, newline, rest = data.rpartition(b"\n")
        if rest:
            self._rest[key] = rest
        if newline:
            self._print(piece.rank, piece.stderr, whole + newline)

    def _before(self, rank: int) -> str:
        if self._prefix:
            fields = {"role_name": self._role, "rank": rank, "local_rank": rank % self._per_pod}
            return string.Template(self._prefix).safe_substitute(fields)
        return f"[rank {rank}] " if self._many else ""

    def _print(self, rank: int, stderr: bool, data: bytes) -> None:
        stream = sys.stderr if stderr else sys.stdout
        if prefix := self._before(rank).encode():
            data = b"".join(prefix + line for line in data.splitlines(keepends=True))
        stream.buffer.write(data)
        stream.flush()

    def finish(self) -> None:
        """Print what stands without a line's end, and close the files."""
        for (rank, stderr), data in self._rest.items():
            self._print(rank, stderr, data + b"\n")
        self._rest.clear()
        if self._files is not None:
            self._files.close()


class _Signalled(BaseException):
    """A signal that ends the job came in."""

    def __init__(self, number: int) -> None:
        self.number = number


@contextlib.contextmanager
def _handling(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Let these signals raise `_Signalled`. Ctrl-C stays what it is, if a person may be there to answer."""

    def arrive(number: int, frame: object) -> None:
        raise _Signalled(number)

    mine = [one for one in signals if not (one == signal.SIGINT and sys.stdin.isatty())]
    before = {one: signal.signal(one, arrive) for one in mine}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _confirm(job: Job) -> bool:
    """Whether the person wants the job stopped. Without a terminal the interrupt itself is the answer."""
    if not sys.stdin.isatty():
        return True
    sys.stderr.write(f"\nStop job {job.id}? It can also run on without you. [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def follow(job: Job, printer: Printer, *, signals: Iterable[signal.Signals] = (), grace: float = 10.0) -> int:
    """Print the job's output until it is over; returns its exit code.

    Ctrl-C asks, then stops the job (a second one stops it at once) and returns 130; answering no leaves the job
    running and returns 0. One of ``signals`` stops it without a question, with ``grace`` seconds between SIGTERM and
    SIGKILL; 128 + its number is returned. Raises `JobFailed` if the job ended without an exit code of its own.
    """
    try:
        try:
            with _handling(signals):
                for piece in job.logs(follow=True):
                    printer.take(piece)
                return exit_code(job.wait())
        except _Signalled as arrived:
            remark(f"{signal.Signals(arrived.number).name}: stopping job {job.id}")
            job.stop(grace=grace)
            return 128 + arrived.number
        except KeyboardInterrupt:
            if not _confirm(job):
                remark(f"job {job.id} runs on: `moorage logs -f {job.id}` shows its output again")
                return 0
            remark(f"stopping job {job.id}")
            job.stop(grace=grace)
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
