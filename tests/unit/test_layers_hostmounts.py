"""Which host mounts a pod needs, read from the kernel's table."""

from __future__ import annotations

import pytest

from moorage.errors import UsageError
from moorage.worker.layers.hostmounts import (
    HostMount,
    below,
    check_working_directory,
    mount_of,
    needed,
    parse_mounts,
)
from moorage.worker.layers.mapped import shared_spans

_TABLE = r"""
25 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
26 25 0:22 / /proc rw - proc proc rw
27 25 0:24 / /home rw shared:5 master:3 - nfs4 server:/home rw,vers=4.2
28 27 0:25 / /home/ann/data\040set rw - xfs /dev/sdb rw
29 25 0:26 / /opt/py rw - squashfs /dev/loop0 ro
30 25 0:27 / /tmp rw - tmpfs tmpfs rw
31 25 0:28 / /dev/shm rw - tmpfs tmpfs rw
32 25 0:29 / /home rw - ext4 /dev/sdc rw
"""
_MOUNTS = parse_mounts(_TABLE.strip())


def test_the_table_is_read_with_its_escapes_and_optional_fields() -> None:
    assert _MOUNTS[0] == HostMount("/", "ext4")
    assert _MOUNTS[3] == HostMount("/home/ann/data set", "xfs")
    assert len(_MOUNTS) == 8


def test_a_path_lies_on_the_deepest_and_latest_mount() -> None:
    assert mount_of("/usr/bin/python", _MOUNTS).mountpoint == "/"
    assert mount_of("/home/ann", _MOUNTS) == HostMount("/home", "ext4")  # mounted over the other one
    assert mount_of("/home/ann/data set/x", _MOUNTS).kind == "xfs"
    assert mount_of("/homeless", _MOUNTS).mountpoint == "/"


def test_only_mounts_with_needed_paths_get_an_overlay_parents_first() -> None:
    paths = [
        "/home/ann/data set/run",
        "/home/ann/job",
        "/opt/py/bin/python3",
        "/usr/bin/env",
        "/proc/self",
        "/dev/shm/x",
    ]
    assert needed(paths, _MOUNTS, ()) == ["/home", "/opt/py", "/home/ann/data set"]
    assert needed(["/usr/lib"], _MOUNTS, ()) == []
    assert needed(["/tmp/job"], _MOUNTS, ()) == ["/tmp"]  # only because the job is there


def test_what_a_live_mount_covers_needs_no_overlay() -> None:
    assert needed(["/home/ann/job", "/opt/py/bin/python"], _MOUNTS, ["/home/ann/"]) == ["/opt/py"]
    assert needed(["/home/bob/job"], _MOUNTS, ["/home/ann"]) == ["/home"]


def test_below_is_by_parts() -> None:
    assert below("/a", "/a")
    assert below("/a/b", "/a")
    assert below("/a", "/")
    assert not below("/ab", "/a")


@pytest.mark.parametrize("path", ["relative", "/dev/shm", "/proc/1", "/sys", "/state/pods"])
def test_working_directories_that_a_pod_cannot_have(path: str) -> None:
    with pytest.raises(UsageError):
        check_working_directory(path, ["/state"])


def test_only_shared_mappings_of_files_are_looked_at() -> None:
    lines = b"""\
00400000-00401000 r-xp 00000000 fe:00 12 /usr/bin/x
7f0000000000-7f0000001000 rw-s 00000000 00:2a 77 /job/with spaces
7f0000002000-7f0000003000 r--s 00000000 00:2a 78 /job/read (deleted)
7f0000004000-7f0000005000 rw-s 00000000 00:01 0
0a000000-0a001000 rw-p 00000000 00:00 0 [heap]""".splitlines()
    assert shared_spans(lines) == ["7f0000000000-7f0000001000", "7f0000002000-7f0000003000"]
    assert shared_spans([b"00a00000-00a01000 rw-s 00000000 00:2a 5 /x"]) == ["a00000-a01000"]
