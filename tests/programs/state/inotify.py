"""inotify: watches of a folder, of a file and of one that was renamed, and events that nobody has read yet."""

import os
import struct
from collections.abc import Iterator

from kit import call, check, equal, run

MODIFY, CREATE, DELETE = 0x2, 0x100, 0x200


def events(fd: int) -> list[tuple[int, int, bytes]]:
    try:
        data = os.read(fd, 1 << 16)
    except BlockingIOError:
        return []
    found, at = [], 0
    while at < len(data):
        watch, mask, _, length = struct.unpack_from("<iIII", data, at)
        found.append((watch, mask, data[at + 16 : at + 16 + length].rstrip(b"\0")))
        at += 16 + length
    return found


def program(nonce: bytes) -> Iterator[None]:
    os.mkdir("folder")
    os.mkdir("waiting")
    for name in ("file", "renamed"):
        open(name, "w").close()
    fd = call("inotify_init1", os.O_NONBLOCK | os.O_CLOEXEC)
    folder = call("inotify_add_watch", fd, b"folder", CREATE | DELETE)
    file = call("inotify_add_watch", fd, b"file", MODIFY)
    renamed = call("inotify_add_watch", fd, b"renamed", MODIFY)
    os.rename("renamed", "of another name")
    unread = call("inotify_init1", os.O_NONBLOCK | os.O_CLOEXEC)
    waiting = call("inotify_add_watch", unread, b"waiting", CREATE)
    names = [f"{nonce.hex()}{number}" for number in range(3)]
    for name in names:
        open(f"waiting/{name}", "w").close()
    yield
    while True:
        equal(events(fd), [], "events though nothing happened")
        open("folder/made", "w").close()
        os.unlink("folder/made")
        for name in ("file", "of another name"):
            with open(name, "a") as handle:
                handle.write("x")
        wanted = [(folder, CREATE, b"made"), (folder, DELETE, b"made"), (file, MODIFY, b""), (renamed, MODIFY, b"")]
        equal(events(fd), wanted, "events")
        if os.path.exists(os.environ.get("STATE_STOP", "stop")):
            equal(events(unread), [(waiting, CREATE, name.encode()) for name in names], "events that waited")
            check(os.listdir("waiting"), "the folder")
            yield
        yield


run(program)
