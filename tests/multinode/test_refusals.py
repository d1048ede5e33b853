"""What cannot be saved is refused by name before anything is touched, and the job runs on."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage.coordinator.client import Job
from moorage.errors import Refused
from moorage.worker.sandbox.cgroup import PodCgroup
from tests.support import state_programs
from tests.support.cluster import DevCluster

pytestmark = pytest.mark.root

_PROGRAM = Path(__file__).resolve().parent.parent / "programs" / "offender.py"
#: Not every machine has such a device for the test to open.
_MAY_LACK = {"device from outside", "disk from outside"}
_messages: dict[str, dict[str, str]] = {}


def _without_numbers(message: str) -> str:
    """What is the same in every run of it."""
    message = message.partition(": ")[2]  # the pod and its node
    message = re.sub(r"\((?:/[^/ ]+)+/([^/ ]+)\)(?=:)", r"(…/\1)", message.replace("(/dev/", "(DEVICES"))
    message = re.sub(r"(?<=watches )(?:/[^/ ]+)+/", "…/", message)
    message = re.sub(r"(process|descriptor|pid|device) [\d:]+", r"\1 N", message.replace("(DEVICES", "(/dev/"))
    return re.sub(r":\[\d+\]", ":[N]", message).replace("|", "/")


class Offender:
    """The job, and the outside that it has to do with: a giver of descriptors, a listener, a FIFO, a lock."""

    def __init__(self, cluster: DevCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.gifts: dict[str, int] = {}
        self._giver = self._listen("giver")
        self._listener = self._listen("listener")
        os.mkfifo(folder / "fifo")
        (folder / "locked").write_bytes(bytes(100))
        threading.Thread(target=self._give, daemon=True).start()
        self.job: Job = cluster.client().run(
            [sys.executable, "-u", str(_PROGRAM), str(folder)],
            working_directory=str(folder.parent),
            mounts=[f"{folder}:{folder}"],
        )
        self.until((folder / "count").exists)

    def _listen(self, name: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.folder / name))
        listener.listen()
        return listener

    def _give(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._giver.accept()
                with connection:
                    socket.send_fds(connection, [b"x"], [self.gifts[connection.recv(100).decode()]])

    def accept(self) -> socket.socket:
        return self._listener.accept()[0]

    def close(self) -> None:
        for sock in (self._giver, self._listener):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    @staticmethod
    def until(done: object, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not done():  # type: ignore[operator]
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def count(self) -> int:
        return int((self.folder / "count").read_text() or 0)

    @contextlib.contextmanager
    def doing(self, name: str) -> Iterator[str]:
        """While the job does ``name``; gives what it said of it."""
        order, done = self.folder / f"do-{name}", self.folder / f"done-{name}"
        order.touch()
        try:
            self.until(done.exists)
            yield done.read_text()
        finally:
            order.unlink()
            self.until(lambda: not done.exists())

    def refusal(self, row: str) -> str:
        """What a checkpoint is refused with; the job runs on. ``row``: where the table of the documentation has it."""
        with pytest.raises(Refused) as refused:
            self.job.checkpoint()
        before = self.count()
        self.until(lambda: self.count() > before + 2)
        assert self.job.status().phase == "running"
        message = str(refused.value).partition("was not made: ")[2]
        _messages[row] = {"message": _without_numbers(message)}
        return message


@pytest.fixture(scope="module")
def offender() -> Iterator[Offender]:
    with DevCluster(nodes=1, lease_seconds=10) as cluster:
        folder = Path(tempfile.mkdtemp(prefix="offender-", dir=cluster.folder), "live")
        folder.mkdir()
        made = Offender(cluster, folder)
        try:
            yield made
            (folder / "stop").touch()
            made.job.wait(timeout=60)
            if set(_messages) >= set(state_programs.REFUSED) - _MAY_LACK:  # all tests of this file have run
                state_programs.record("refusals", _messages)
        finally:
            made.close()


_PROCESS = r"process \d+ \(\S+\)"
_DESCRIPTOR = _PROCESS + r", descriptor \d+ \(\S+( \(deleted\))?\)"

#: Offence → what the message must say: who, why, and the way out.
_OWN = {
    "traced": (_PROCESS + ": it is traced by process .*", "end the debugger or strace first"),
    "raw_socket": (_DESCRIPTOR + ": sockets of the protocol (RAW|ICMP) cannot be saved", "use TCP or UDP"),
    "packet_socket": (_DESCRIPTOR + ": sockets of the protocol PACKET cannot be saved", "close the capture of packets"),
    "aio": (_PROCESS + r": asynchronous I/O is in flight \(requests of io_submit: 1\)", "let them end"),
    "user_timeout": (_DESCRIPTOR + ": TCP_USER_TIMEOUT of 1500 ms is shorter", "set TCP_USER_TIMEOUT to 0"),
    "shared_client": (
        _PROCESS
        + r", descriptor \d+ \(unix socket\): it holds a connection that was not accepted yet, and whose other "
        "end several processes have open",
        "let the program accept its connections",
    ),
    "unlinked_listener": (
        _PROCESS
        + r", descriptor \d+ \(unix socket\): it holds a connection that was not accepted yet, and its name was "
        "removed",
        "let the program accept its connections",
    ),
    "nested": (_PROCESS + ": it is in a (user|pid) namespace of its own", "end the nested container"),
}


def _says(message: str, why: str, cure: str) -> None:
    assert re.search(why, message), message
    assert cure in message, message


@pytest.mark.parametrize("offence", _OWN)
def test_what_a_process_does_is_refused_by_name(offender: Offender, offence: str) -> None:
    with offender.doing(offence) as words:
        assert not words.startswith("failed"), words
        _says(offender.refusal(offence), *_OWN[offence])


def test_io_uring_is_answered_as_if_the_kernel_had_none(offender: Offender) -> None:
    with offender.doing("io_uring") as words:
        assert words == "ENOSYS"
        offender.job.checkpoint()
    _messages["io_uring"] = {"message": "not refused: `io_uring_setup` answers ENOSYS in a pod, and programs use epoll"}


def test_shared_memory_of_system_v_from_outside_is_not_there(offender: Offender) -> None:
    libc, key = ctypes.CDLL(None, use_errno=True), 0x6D000000 | os.getpid() & 0xFFFFFF
    segment = libc.shmget(key, 4096, 0o1600)  # IPC_CREAT
    assert segment >= 0
    try:
        (offender.folder / "key").write_text(str(key))
        with offender.doing("sysv_outside") as words:
            assert words == "ENOENT"
            offender.job.checkpoint()
    finally:
        libc.shmctl(segment, 0, None)
    words = "not refused: a pod has System V objects of its own; `shmget` with a key of the outside answers ENOENT"
    _messages["sysv_outside"] = {"message": words}


def test_a_stopped_process_is_saved_or_refused_as_the_cgroups_allow(offender: Offender) -> None:
    with offender.doing("stopped"):
        if PodCgroup("/any").unified:
            offender.job.checkpoint()
            _messages["stopped"] = {"message": "not refused: it is saved where cgroups are of version 2, as here"}
        else:
            _says(offender.refusal("stopped"), _PROCESS + r": it is stopped \(SIGSTOP or SIGTSTP\)", "SIGCONT")


def test_descriptors_that_came_from_outside_are_refused(offender: Offender, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("of the host")
    pipe = os.pipe()
    with socket.socket() as network, (tmp_path / "file").open() as file, _device("c") as device, _device("b") as disk:
        gifts = {
            "file": (file.fileno(), "it was opened outside the pod and leads to a file", "open the file inside"),
            "pipe": (
                pipe[1],
                f"the process {os.getpid()} .* outside the pod has its other end",
                "let both ends be inside",
            ),
            "network": (
                network.fileno(),
                "it was opened outside the pod, in another network",
                "open the socket inside",
            ),
            "device": (device, r"it is device \d+:\d+ of this host", "close it before the checkpoint"),
            "disk": (disk, "it is a block device of this host", "use a file"),
        }
        for name, (fd, why, cure) in gifts.items():
            if fd < 0:
                continue  # this machine has no such device; the unit tests have the rule
            offender.gifts[name] = fd
            with offender.doing(f"given-{name}"):
                _says(offender.refusal(f"{name} from outside"), _DESCRIPTOR + ": " + why, cure)
    for fd in pipe:
        os.close(fd)


@contextlib.contextmanager
def _device(kind: str) -> Iterator[int]:
    """A descriptor of some device of this host that is neither a GPU nor a standard one; -1 where there is none."""
    names = ("loop-control", "fuse", "kmsg") if kind == "c" else ("loop0", "vda", "sda", "nvme0n1")
    fd = -1
    for name in names:
        with contextlib.suppress(OSError):
            fd = os.open(f"/dev/{name}", os.O_RDONLY)
            break
    try:
        yield fd
    finally:
        if fd >= 0:
            os.close(fd)


def test_what_a_process_outside_takes_part_in_is_refused(offender: Offender) -> None:
    reader = os.open(offender.folder / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    with offender.doing("fifo"):
        why = _DESCRIPTOR + f": the process {os.getpid()} .* outside the pod has its other end"
        _says(offender.refusal("FIFO with a process outside"), why, "let both ends be inside")
    os.close(reader)
    with (offender.folder / "locked").open("r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX, 5, 0)
        with offender.doing("lock"):
            why = _DESCRIPTOR + f": the process {os.getpid()} .* outside the pod holds or waits for a lock"
            _says(offender.refusal("lock with a process outside"), why, "release the lock")
    with offender.doing("unix_peer"), offender.accept():
        why = _DESCRIPTOR + ": the other end of this unix socket is outside the pod"
        _says(offender.refusal("unix socket to the outside"), why, "close the connection to the program outside")


def test_a_process_that_moorage_did_not_start_is_refused(offender: Offender) -> None:
    (path,) = offender.cluster.folder.glob("state/nodes/*/pods/*/*/*/init.pid")
    nsenter = shutil.which("nsenter")
    assert nsenter, "nsenter (util-linux) is needed"
    command = [nsenter, "--target", path.read_text().strip(), "--pid", "--mount", "sleep", "1000"]
    with subprocess.Popen(command, start_new_session=True) as stranger:
        try:
            children = Path(f"/proc/{stranger.pid}/task/{stranger.pid}/children")
            offender.until(lambda: children.read_text().strip())
            message = offender.refusal("process that moorage did not start")
            _says(message, _PROCESS + r": moorage did not start it: host pid \d+ is in its process", "end it, or start")
        finally:
            os.killpg(stranger.pid, signal.SIGKILL)


def test_without_any_of_it_the_same_job_is_saved(offender: Offender) -> None:
    assert offender.job.checkpoint().latest
