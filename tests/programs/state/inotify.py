"""inotify: watches of a folder, a file, renamed and deleted ones, with their numbers and masks."""

import os
import struct
import tempfile
import time
from collections.abc import Iterator

from kit import call, call_until, equal, fork, run

MODIFY, ATTRIB, CREATE, DELETE, FOLDER = 0x2, 0x4, 0x100, 0x200, 0x40000000


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


def in_folder(name: str) -> None:
    os.chdir(name)
    while True:
        time.sleep(1000)


def program(nonce: bytes) -> Iterator[None]:
    os.mkdir("folder")
    for name in ("file", "renamed"):
        open(name, "w").close()
    fd = call("inotify_init1", os.O_NONBLOCK | os.O_CLOEXEC)
    folder = call("inotify_add_watch", fd, b"folder", CREATE | DELETE)
    file = call("inotify_add_watch", fd, b"file", MODIFY)
    renamed = call("inotify_add_watch", fd, b"renamed", MODIFY)
    os.rename("renamed", "of another name")
    far = tempfile.mkdtemp(dir="/var/tmp")  # in no working folder
    elsewhere = call("inotify_add_watch", fd, far.encode(), CREATE)
    # What has no name any more, but is open: a file, and a child's folder.
    deleted = open("deleted", "w+")  # noqa: SIM115
    nameless = call("inotify_add_watch", fd, b"deleted", MODIFY)
    os.mkdir("below")
    child = fork(lambda: in_folder("below"))
    call_until(lambda: equal(os.readlink(f"/proc/{child}/cwd"), os.path.abspath("below"), "the child's folder"))
    below = call("inotify_add_watch", fd, b"below", ATTRIB)
    os.unlink("deleted")
    os.rmdir("below")
    events(fd)
    step = 0
    yield
    while True:
        equal(events(fd), [], "events though nothing happened")
        open("folder/made", "w").close()
        os.unlink("folder/made")
        for name in ("file", "of another name"):
            with open(name, "a") as handle:
                handle.write("x")
        deleted.write("x")
        deleted.flush()
        open(f"{far}/{step}", "w").close()
        os.chmod(f"/proc/{child}/cwd", 0o700 + step % 2)
        made = str(step).encode()
        step += 1
        wanted = [(folder, CREATE, b"made"), (folder, DELETE, b"made"), (file, MODIFY, b""), (renamed, MODIFY, b"")]
        wanted += [(nameless, MODIFY, b""), (elsewhere, CREATE, made), (below, ATTRIB | FOLDER, b"")]
        equal(events(fd), wanted, "events")
        yield


run(program)
