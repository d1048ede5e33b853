"""The programs that run in pods do what the tests of pods rely on, without any pod."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from moorage.dev.network import free_ports
from tests.programs import family, pingpong, writes
from tests.support.judge import judge, read

_PROGRAMS = Path(pingpong.__file__).parent


def _start(name: str, *arguments: str, cwd: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(_PROGRAMS / name), *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _ranks(cwd: Path, world: int, *arguments: str) -> list[subprocess.Popen[str]]:
    port = str(free_ports(1)[0])
    return [
        _start("pingpong.py", *arguments, cwd=cwd, RANK=str(rank), WORLD_SIZE=str(world), MASTER_PORT=port)
        for rank in range(world)
    ]


def _outputs(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    try:
        return [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the process and what it started, close the pipe."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _done(output: str) -> dict[str, str]:
    line = re.findall(r"^done (.*)$", output, re.MULTILINE)[-1]
    return dict(pair.split("=") for pair in line.split())


@pytest.mark.parametrize("world", [1, 3])
def test_ranks_end_with_the_digest_that_was_known_before(tmp_path: Path, world: int) -> None:
    witness = tmp_path / "witness"
    processes = _ranks(tmp_path, world, "--steps", "50", "--payload", "100000", "--witness", str(witness))
    outputs = _outputs(processes)
    assert [process.returncode for process in processes] == [0] * world, outputs
    for rank, output in enumerate(outputs):
        done = _done(output)
        assert done["digest"] == pingpong.expected_digest(world, 50, rank)
        assert done["started"] == done["body"]  # never restored
        lines = (tmp_path / f"rank{rank}.txt").read_text().splitlines()
        assert lines[-1].split() == ["50", done["digest"], done["nonce"], done["pid"]]
        assert "step 50" in output
    verdict = judge(read(witness))
    assert verdict.sound
    assert verdict.reached == dict.fromkeys(range(world), 50)
    assert len({nonces[0] for nonces in verdict.nonces.values()}) == world


def test_a_rank_that_dies_is_noticed_loudly(tmp_path: Path) -> None:
    first, second = _ranks(tmp_path, 2, "--steps", "100000", "--report", "1")
    try:
        assert second.stdout is not None
        while "step" not in second.stdout.readline():
            pass
        second.kill()
        (output,) = _outputs([first])
    finally:
        _end(second)
    assert first.returncode == 71
    assert "FATAL connection to rank 1" in output


def test_a_damaged_and_a_missing_message_are_noticed_loudly() -> None:
    for message, code, words in (
        (pingpong._HEADER.pack(5, 0, 2, b"d" * 32) + b"xx", 70, "damaged"),
        (pingpong._HEADER.pack(6, 0, 0, b"d" * 32), 70, "expected message 5"),
        (b"", 71, "closed"),
    ):
        program = (
            f"import socket; from tests.programs.pingpong import Peer\n"
            f"a, b = socket.socketpair(); a.sendall({message!r}); a.close()\n"
            f"p = Peer.__new__(Peer); p._socket = b; p._name = 'rank 0'; p.receive(5, 0)"
        )
        root = _PROGRAMS.parents[1]
        command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r})\n{program}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, words in done.stdout) == (code, True), done


def test_an_exit_code_comes_after_the_steps(tmp_path: Path) -> None:
    process = _start("exits.py", "--after", "2", "--code", "7", "--delay", "0", cwd=tmp_path)
    (output,) = _outputs([process])
    assert (process.returncode, output) == (7, "step 1\nstep 2\nlast words on stderr\n")
    process = _start("exits.py", "--after", "1", "--delay", "0", "--signal", "11", cwd=tmp_path)
    _outputs([process])
    assert process.returncode == -11


def test_the_stubborn_one_outlives_sigterm(tmp_path: Path) -> None:
    process = _start("stubborn.py", cwd=tmp_path)
    assert process.stdout is not None
    try:
        ready = {process.stdout.readline().split()[1] for _ in range(2)}
        assert ready == {"parent", "child"}
        os.killpg(process.pid, signal.SIGTERM)
        assert {process.stdout.readline() for _ in range(2)} == {"ignored signal 15\n"}
        assert process.poll() is None
    finally:
        _end(process)


def test_the_one_that_hangs_does_nothing_any_more(tmp_path: Path) -> None:
    process = _start("hangs.py", "--after", "2", "--delay", "0", cwd=tmp_path)
    assert process.stdout is not None
    try:
        assert [process.stdout.readline() for _ in range(2)] == ["step 1\n", "step 2\n"]
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.3)
    finally:
        _end(process)


def test_the_files_are_those_that_were_foretold(tmp_path: Path) -> None:
    _outputs([_start("writes.py", "--prepare", cwd=tmp_path)])
    process = _start("writes.py", "--steps", "3", "--delay", "0", cwd=tmp_path)
    (output,) = _outputs([process])
    assert process.returncode == 0, output
    expected = writes.expected_files(3)
    found = {
        str(path.relative_to(tmp_path)): path for path in tmp_path.rglob("*") if path.is_symlink() or path.is_file()
    }
    assert set(found) == set(expected)
    for name, content in expected.items():
        path = found[name]
        assert (str(path.readlink()) if isinstance(content, str) else path.read_bytes()) == content, name


@pytest.mark.parametrize("options", [(), ("--periodic-timerfd",)])
def test_the_family_is_whole(tmp_path: Path, options: tuple[str, ...]) -> None:
    process = _start("family.py", "--steps", "5", "--delay", "0", *options, cwd=tmp_path, TMPDIR=str(tmp_path))
    (output,) = _outputs([process])
    assert process.returncode == 0, output
    assert _done(output)["digest"] == family.expected_digest(5)


def test_a_lost_connection_to_the_outside_is_opened_again(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for replies in (3, 100):
                connection, _ = server.accept()
                with connection:
                    # Closing with linger 0 is a reset.
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    for _ in range(replies):
                        data = connection.recv(100)
                        if not data:
                            return
                        connection.sendall(data)

        thread = threading.Thread(target=serve)
        thread.start()
        port = str(server.getsockname()[1])
        process = _start("external.py", "127.0.0.1", port, "--steps", "10", "--delay", "0.01", cwd=tmp_path)
        (output,) = _outputs([process])
        thread.join()
    assert process.returncode == 0, output
    assert "lost after 3" in output
    assert _done(output) == {"steps": "10", "connections": "2"}
