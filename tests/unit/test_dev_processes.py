"""Processes named for certain and ended for certain."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from moorage.dev import processes
from moorage.dev.processes import Identity, descendants, end, end_all, identities, unescape, wait_gone
from moorage.errors import MoorageError


@contextlib.contextmanager
def child(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command or ("sleep", "600"), stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def identity(process: subprocess.Popen[bytes]) -> Identity:
    found = Identity.of(process.pid)
    assert found is not None
    return found


def test_a_pid_that_was_given_to_another_process_is_not_signalled() -> None:
    with child() as process:
        other = Identity(process.pid, identity(process).started - 1)
        assert not other.alive()
        assert not other.send(signal.SIGKILL)
        assert process.poll() is None


def test_a_process_that_ended_is_not_alive_even_before_it_was_reaped() -> None:
    with child("true") as process:
        own = Identity.of(process.pid)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert own is None or not own.alive()
        assert identities([process.pid]) == set()


def test_ending_asks_first_and_kills_what_does_not_listen() -> None:
    ignore = "import signal, sys; signal.signal(15, signal.SIG_IGN); print(1, flush=True); signal.pause()"
    with child() as polite, child(sys.executable, "-c", ignore) as deaf:
        assert deaf.stdout is not None
        deaf.stdout.readline()
        end([identity(polite), identity(deaf)], grace=0.5)
        assert polite.wait() == -signal.SIGTERM
        assert deaf.wait() == -signal.SIGKILL


def test_a_stopped_process_is_ended_too() -> None:
    with child() as process:
        process.send_signal(signal.SIGSTOP)
        end([identity(process)])
        assert process.wait() == -signal.SIGKILL


def test_waiting_returns_those_that_are_left() -> None:
    with child() as long, child("true") as short:
        both = [identity(long), Identity(short.pid, 0)]
        assert wait_gone(both, 0.05) == {both[0]}


def test_everything_below_a_process_is_found_and_ended() -> None:
    with child("sh", "-c", "sleep 600 & echo; wait") as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        tree = descendants([parent.pid])
        assert len(tree) == 2
        end_all(lambda: descendants([parent.pid]) if Identity.of(parent.pid) else set())
        deadline = time.monotonic() + 10
        while identities(tree) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert identities(tree) == set()


def test_the_caller_is_never_among_those_that_are_ended() -> None:
    end_all(lambda: {os.getpid(), os.getppid()})


def test_processes_that_come_back_for_ever_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "end", lambda found: None)
    with child() as process, pytest.raises(MoorageError, match="come back"):
        end_all(lambda: {process.pid})


def test_mount_points_with_blanks_are_read_right() -> None:
    assert unescape(r"/a\040b\134c") == "/a b\\c"
