"""Files that the pod wrote: made, changed, renamed, deleted, sparse, linked, with extended attributes, modes, times."""

import hashlib
import os
import shutil
from collections.abc import Iterator

from kit import equal, pattern, run


def snapshot(top: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for parent, folders, names in os.walk(top):
        for name in folders + names:
            path = os.path.join(parent, name)
            status = os.lstat(path)
            content: object = ""
            if os.path.islink(path):
                content = os.readlink(path)
            elif os.path.isfile(path) and status.st_size < 1 << 20:
                with open(path, "rb") as file:
                    content = hashlib.sha256(file.read()).hexdigest()
            xattrs = {x: os.getxattr(path, x, follow_symlinks=False) for x in os.listxattr(path, follow_symlinks=False)}
            times = status.st_mtime_ns if not os.path.isdir(path) else 0
            links = status.st_nlink if not os.path.isdir(path) else 0
            size = status.st_size if not os.path.isdir(path) else 0
            owner = (status.st_uid, status.st_gid)
            found[path] = (status.st_mode, size, times, links, content, xattrs, owner)
    return found


def program(nonce: bytes) -> Iterator[None]:
    lower = "/usr/share/doc" if os.path.isdir("/usr/share/doc") else "/usr/share"
    victim = next(
        os.path.join(parent, name)
        for parent, _, names in os.walk(lower)
        for name in sorted(names)
        if os.path.isfile(os.path.join(parent, name)) and not os.path.islink(os.path.join(parent, name))
    )
    with open(victim, "rb") as file:
        original = file.read()
    with open(victim, "ab") as file:  # a file of the host, changed
        file.write(nonce)
    os.makedirs("a/b/c")
    for number in range(20):
        with open(f"a/b/file{number}", "wb") as file:
            file.write(pattern(nonce, number * 500, number))
    os.link("a/b/file1", "a/link of file1")
    os.symlink("/nowhere", "a/dangling")
    with open("a/sparse", "wb") as file:
        file.truncate(5 << 30)
        os.pwrite(file.fileno(), nonce, 4 << 30)
    os.setxattr("a/b/file2", "user.state", nonce)
    os.chmod("a/b/file3", 0o4751)
    os.chown("a/b/file4", 1234, 4321)
    os.utime("a/b/file5", ns=(111, 222_333_444_555))
    os.mkfifo("a/fifo")
    os.rename("a/b/file6", "a/b/c/file6")
    os.unlink("a/b/file7")
    shutil.rmtree("/usr/share/man", ignore_errors=True)  # a folder of the host, deleted in the pod
    wanted = snapshot("a")
    step = 0
    yield
    while True:
        step += 1
        if step % 5 == 1:
            equal(snapshot("a"), wanted, "files")
            with open("a/sparse", "rb") as file:
                equal((os.pread(file.fileno(), 16, 4 << 30), os.pread(file.fileno(), 9, 9)), (nonce, bytes(9)), "data")
            equal(os.stat("a/sparse").st_blocks < 1000, True, "a sparse file")
            with open(victim, "rb") as file:
                equal(file.read(), original + nonce, "the changed file of the host")
            equal(os.path.exists("/usr/share/man"), False, "a deleted folder of the host")
            os.rename("a/b", "a/renamed" if os.path.exists("a/b") else "a/b")
            os.rename("a/renamed", "a/b")
            with open(f"log{step % 3}", "w") as file:
                file.write(str(step))
        yield


run(program)
