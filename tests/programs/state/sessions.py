"""Sessions and process groups: a session of a child's own, a second group in it, one whose leader has ended."""

import os
import signal
import time
from collections.abc import Iterator

from kit import equal, fork, run


def pause() -> None:
    while True:
        time.sleep(1000)


def program(nonce: bytes) -> Iterator[None]:
    read, write = os.pipe()

    def leader() -> None:
        os.setsid()
        member = fork(pause)
        other = fork(pause)
        os.setpgid(other, other)
        os.write(write, b"%d %d\n" % (member, other))
        pause()

    def short_leader() -> None:
        os.setsid()
        left = os.fork()
        if left == 0:
            pause()
        os.write(write, b"%d\n" % left)
        os._exit(0)

    os.environ["KIT"] = "1"
    first = fork(leader)
    member, other = map(int, os.read(read, 40).split())
    second = fork(short_leader)
    left = int(os.read(read, 40))
    os.waitpid(second, 0)

    def seen() -> list[tuple[int, int]]:
        return [(os.getsid(pid), os.getpgid(pid)) for pid in (os.getpid(), first, member, other, left)]

    mine = (os.getsid(0), os.getpgid(0))
    wanted = [mine, (first, first), (first, first), (first, other), (second, second)]
    yield
    while True:
        equal(seen(), wanted, "sessions and groups")
        if os.path.exists(os.environ.get("STATE_STOP", "stop")):
            os.kill(left, signal.SIGKILL)
            os.killpg(first, signal.SIGKILL)
            yield
        yield


run(program)
