"""A family of processes that holds one of everything that the kernel keeps for a program, and looks at it in each step.

Children behind a pipe, a fifo, a unix socket, and shared memory with semaphores; timers (interval timer, timerfd);
eventfd in an epoll set; a locked file; a deleted file that is still open; a shared mapping of a file; threads that meet
at a condition; another working directory; a blocked signal that is pending; a clock that must not jump back.

Prints ``step N`` and at last ``done nonce=… pid=… steps=N digest=D``, with `expected_digest`. Exit code 70 and
``FATAL what`` as soon as anything is not as it was.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import mmap
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from multiprocessing import get_context
from typing import NoReturn, Protocol

_TFD_CLOEXEC = 0o2000000


_children: list[int] = []


def fail(what: str) -> NoReturn:
    print(f"FATAL {what}", flush=True)
    end_children()
    os._exit(70)


def fork() -> bool:
    """Whether this is the child."""
    pid = os.fork()
    if pid == 0:
        _children.clear()
    else:
        _children.append(pid)
    return pid == 0


def end_children() -> None:
    for pid in _children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def check(condition: bool, what: str) -> None:
    if not condition:
        fail(what)


def expected_digest(steps: int) -> str:
    """What is printed at the end."""
    digest = b""
    for step in range(1, steps + 1):
        digest = hashlib.sha256(digest + b"pipe%dfifo%dunix%dshm%d" % (step, step, step, step)).digest()
    return digest.hex()


def answer(word: bytes) -> bytes:
    """What every child answers."""
    return word + b"!"


def child_of_pipe(source: int, sink: int) -> None:
    while word := os.read(source, 100):
        os.write(sink, answer(word))


def child_of_fifo(there: str, back: str) -> None:
    with open(there, "rb", buffering=0) as source, open(back, "wb", buffering=0) as sink:
        while word := source.read(100):
            sink.write(answer(word))


def child_of_socket(connection: socket.socket) -> None:
    while word := connection.recv(100):
        connection.sendall(answer(word))


class Relation(Protocol):
    """A child and the way to it."""

    def ask(self, word: bytes) -> bytes: ...


class Pipe:
    def __init__(self) -> None:
        to_child, self._sink = os.pipe()
        self._source, from_child = os.pipe()
        if fork():
            os.close(self._sink)
            os.close(self._source)
            child_of_pipe(to_child, from_child)
            os._exit(0)
        os.close(to_child)
        os.close(from_child)

    def ask(self, word: bytes) -> bytes:
        os.write(self._sink, word)
        return os.read(self._source, 100)


class Fifo:
    def __init__(self, folder: str) -> None:
        there, back = f"{folder}/there", f"{folder}/back"
        os.mkfifo(there)
        os.mkfifo(back)
        if fork():
            child_of_fifo(there, back)
            os._exit(0)
        self._sink = open(there, "wb", buffering=0)  # noqa: SIM115
        self._source = open(back, "rb", buffering=0)  # noqa: SIM115

    def ask(self, word: bytes) -> bytes:
        self._sink.write(word)
        return self._source.read(100)


class Unix:
    """A listening socket with a name, and a connection to it."""

    def __init__(self, folder: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{folder}/socket")
        self._listener.listen()
        if fork():
            self._listener.close()
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(f"{folder}/socket")
            child_of_socket(connection)
            os._exit(0)
        self._connection, _ = self._listener.accept()

    def ask(self, word: bytes) -> bytes:
        self._connection.sendall(word)
        return self._connection.recv(100)


class Shared:
    """Memory in /dev/shm and two semaphores, as data loaders use them."""

    def __init__(self) -> None:
        context = get_context("fork")
        self._asked, self._answered = context.Semaphore(0), context.Semaphore(0)
        descriptor, path = tempfile.mkstemp(dir="/dev/shm")
        os.ftruncate(descriptor, 4096)
        self._memory = mmap.mmap(descriptor, 4096)
        os.close(descriptor)
        os.unlink(path)
        if fork():
            while self._asked.acquire():
                (length,) = struct.unpack_from("<I", self._memory)
                self._write(answer(self._memory[4 : 4 + length]))
                self._answered.release()
            os._exit(0)

    def _write(self, word: bytes) -> None:
        self._memory[: 4 + len(word)] = struct.pack("<I", len(word)) + word

    def ask(self, word: bytes) -> bytes:
        self._write(word)
        self._asked.release()
        self._answered.acquire()
        (length,) = struct.unpack_from("<I", self._memory)
        return self._memory[4 : 4 + length]


class Kernel:
    """What has no other process at its end."""

    def __init__(self, folder: str, *, periodic_timerfd: bool) -> None:
        self._folder = folder
        self._alarms = 0
        signal.signal(signal.SIGALRM, self._alarm)
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        os.kill(os.getpid(), signal.SIGUSR1)
        self._deleted = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._deleted.write(b"deleted " * 1000)
        self._deleted.flush()
        self._locked = open(f"{folder}/lock", "w")  # noqa: SIM115
        fcntl.flock(self._locked, fcntl.LOCK_EX)
        with open(f"{folder}/mapped", "wb") as file:
            file.truncate(8192)
        with open(f"{folder}/mapped", "r+b") as file:
            self._mapped = mmap.mmap(file.fileno(), 8192)
        self._event = _call("eventfd", 0, 0)
        self._timer = _call("timerfd_create", time.CLOCK_MONOTONIC, _TFD_CLOEXEC)
        self._period = 20_000_000 if periodic_timerfd else 0
        self._arm()
        self._poll = select.epoll()
        self._poll.register(self._event, select.EPOLLIN)
        self._poll.register(self._timer, select.EPOLLIN)
        self._clock = time.monotonic()
        self._condition = threading.Condition()
        self._thread_steps = 0
        threading.Thread(target=self._second_thread, daemon=True).start()
        os.chdir(folder)

    def _arm(self) -> None:
        # Interval, then first expiry, as seconds and nanoseconds.
        _call("timerfd_settime", self._timer, 0, struct.pack("<qqqq", 0, self._period, 0, 20_000_000), None)

    def _alarm(self, *_: object) -> None:
        self._alarms += 1

    def _second_thread(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._thread_steps % 2 == 1)
                self._thread_steps += 1
                self._condition.notify_all()

    def look(self, step: int) -> None:
        now = time.monotonic()
        check(now >= self._clock, "the monotonic clock went back")
        self._clock = now
        check(signal.SIGUSR1 in signal.sigpending(), "a pending signal is gone")
        check(signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, set()), "a blocked signal is not any more")
        self._deleted.seek(0)
        check(self._deleted.read() == b"deleted " * 1000, "a deleted file lost its content")
        with open("lock", "w") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fail("the file's lock is gone")
            except BlockingIOError:
                pass
        check(self._mapped[:8] == (step - 1).to_bytes(8, "little"), "a mapped file has not what was written")
        self._mapped[:8] = step.to_bytes(8, "little")
        with open("mapped", "rb") as file:
            check(file.read(8) == step.to_bytes(8, "little"), "mapping and file differ")
        os.write(self._event, struct.pack("<Q", step))
        ready = dict(self._poll.poll(5))
        check(bool(ready.get(self._event)), "eventfd or epoll is dead")
        check(struct.unpack("<Q", os.read(self._event, 8)) == (step,), "eventfd has another value")
        check(select.select([self._timer], [], [], 5)[0] != [], "timerfd does not tick")
        os.read(self._timer, 8)
        if not self._period:
            self._arm()
        before, deadline = self._alarms, time.monotonic() + 5
        while self._alarms == before:
            check(time.monotonic() < deadline, "the interval timer does not tick")
            signal.sigtimedwait([signal.SIGUSR2], 0.005)
        with self._condition:
            self._thread_steps += 1
            self._condition.notify_all()
            check(self._condition.wait_for(lambda: self._thread_steps % 2 == 0, 5), "the second thread is dead")
        check(os.getcwd() == self._folder, "the working directory is another one")


def _call(name: str, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result = int(getattr(libc, name)(*arguments))
    if result < 0:
        fail(f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--delay", type=float, default=0.05, help="seconds between steps")
    parser.add_argument(
        "--periodic-timerfd",
        action="store_true",
        help="a timerfd that repeats by itself: CRIU up to 4.2 restores one that has ticked unread as stopped",
    )
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="family-")
    relations: dict[bytes, Relation] = {b"pipe": Pipe(), b"fifo": Fifo(folder), b"unix": Unix(folder), b"shm": Shared()}
    kernel = Kernel(folder, periodic_timerfd=options.periodic_timerfd)
    nonce = os.urandom(8).hex()
    print(f"start nonce={nonce} pid={os.getpid()}", flush=True)
    digest = b""
    for step in range(1, options.steps + 1):
        said = b""
        for name, relation in relations.items():
            word = b"%s%d" % (name, step)
            check(relation.ask(word) == answer(word), f"the child behind {name.decode()} answers wrongly")
            said += word
        digest = hashlib.sha256(digest + said).digest()
        kernel.look(step)
        print(f"step {step}", flush=True)
        time.sleep(options.delay)
    print(f"done nonce={nonce} pid={os.getpid()} steps={options.steps} digest={digest.hex()}", flush=True)
    end_children()
    signal.setitimer(signal.ITIMER_REAL, 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
