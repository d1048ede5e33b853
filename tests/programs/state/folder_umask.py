"""The working folder (a child's was removed), the umask, the root folder of a child that changed it."""

import os
import time
from collections.abc import Iterator

from kit import check, equal, fork, run


def program(nonce: bytes) -> Iterator[None]:
    home = os.getcwd()
    inside = f"{home}/in {nonce.hex()}"
    os.mkdir(inside)
    os.mkdir(f"{home}/gone")
    os.mkdir(f"{home}/root")

    def removed() -> None:
        os.chdir(f"{home}/gone")
        os.rmdir(f"{home}/gone")
        while True:
            check(not os.listdir("."), "a removed folder has entries")
            check(os.readlink("/proc/self/cwd").endswith("gone (deleted)"), os.readlink("/proc/self/cwd"))
            time.sleep(0.02)

    def rooted() -> None:
        os.chroot(f"{home}/root")
        os.chdir("/")
        os.umask(0o123)
        while True:
            check(not os.path.exists("/etc"), "the root folder is another one")
            equal(os.umask(0o123), 0o123, "the child's umask")
            time.sleep(0.02)

    children = [fork(removed), fork(rooted)]
    os.chdir(inside)
    os.umask(0o027)
    yield
    while True:
        equal(os.getcwd(), inside, "the working folder")
        os.close(os.open("made", os.O_CREAT | os.O_WRONLY, 0o777))
        equal(os.stat("made").st_mode & 0o777, 0o750, "the mode of a new file")
        os.unlink("made")
        for child in children:
            equal(os.waitpid(child, os.WNOHANG), (0, 0), "children that ended")
        yield


run(program)
