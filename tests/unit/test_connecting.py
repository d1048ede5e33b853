"""Connections over unix sockets that wait to be accepted: nothing is lost of those that cannot be made once more."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from moorage.errors import Refused
from moorage.worker import connecting, unaccepted
from moorage.worker.borrow import borrowed_socket
from moorage.worker.sandbox.cgroup import PodCgroup
from moorage.worker.unaccepted import Hands

pytestmark = pytest.mark.root

_PROGRAM = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen(8)
for number in range(3):
    ready, done = os.pipe()
    if os.fork() == 0:
        listener.close()
        client = socket.socket(socket.AF_UNIX)
        client.connect(sys.argv[1])
        client.send(b"from %d" % number)
        os.write(done, b"x")
        os._exit(client.recv(100) != b"to %d" % number)
    os.read(ready, 1)
    print("waits", flush=True)
sys.stdin.readline()
for number in range(3):
    server = listener.accept()[0]
    assert server.recv(100) == b"from %d" % number
    server.send(b"to %d" % number)
sys.exit(any(os.wait()[1] for number in range(3)))
"""


class _Cgroup:
    """Of processes that stand still by themselves."""

    def order(self, *, frozen: bool) -> None:
        pass

    def state(self) -> str:
        return "frozen"


@contextlib.contextmanager
def _program(name: Path) -> Iterator[tuple[subprocess.Popen[str], Hands]]:
    command = [sys.executable, "-c", _PROGRAM, str(name)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout
        try:
            for _ in range(3):
                program.stdout.readline()
            children = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
            pids = [program.pid, *map(int, children)]
            yield program, Hands(cast(PodCgroup, _Cgroup()), pids, lambda work: work())
        except BaseException:
            program.kill()
            raise


def _whole(program: subprocess.Popen[str]) -> None:
    program.communicate("go\n", timeout=30)
    assert program.returncode == 0


def test_they_are_made_once_more(tmp_path: Path) -> None:
    with _program(tmp_path / "name") as (program, hands):
        found, _ = unaccepted.look(hands)
        assert len(found) == 3
        with connecting.ready(hands, found) as ready, unaccepted.emptied(hands, found) as taken:
            assert ready.missing == []
            assert ready.connect(taken.notes, with_data=False) == []
        connecting.send(hands, taken.notes)
        assert connecting.connect(hands, taken.notes, with_data=True) == [], "as a worker that follows does"
        _whole(program)


@pytest.mark.parametrize("how", ["removed", "replaced", "renamed"])
def test_a_name_that_is_gone_is_refused_before_anything_is_taken(tmp_path: Path, how: str) -> None:
    name = tmp_path / "name"
    with _program(name) as (program, hands), socket.socket(socket.AF_UNIX) as other:
        found, _ = unaccepted.look(hands)
        name.rename(tmp_path / "other") if how == "renamed" else name.unlink()
        if how == "replaced":
            other.bind(str(name))
        with pytest.raises(Refused, match="its name was removed"):
            unaccepted.look(hands)
        if how != "renamed":  # the kernel knows the name that the file has now
            with connecting.ready(hands, found) as ready:
                assert [one for one, _ in ready.missing] == found
        _whole(program)


def test_a_queue_that_has_grown_small_is_refused(tmp_path: Path) -> None:
    with _program(tmp_path / "name") as (program, hands):
        found, _ = unaccepted.look(hands)
        with borrowed_socket(program.pid, found[0].listener[1]) as listener:
            listener.listen(1)
        with pytest.raises(Refused, match="than it would take now"):
            unaccepted.look(hands)
        _whole(program)
