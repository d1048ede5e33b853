"""inotify: watches of a folder, of a file and of one that was renamed, with their numbers and masks."""

import os
import struct
from collections.abc import Iterator

from kit import call, equal, run

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
    for name in ("file", "renamed"):
        open(name, "w").close()
    fd = call("inotify_init1", os.O_NONBLOCK | os.O_CLOEXEC)
    folder = call("inotify_add_watch", fd, b"folder", CREATE | DELETE)
    file = call("inotify_add_watch", fd, b"file", MODIFY)
    renamed = call("inotify_add_watch", fd, b"renamed", MODIFY)
    os.rename("renamed", "of another name")
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
        yield


run(program)
