from __future__ import annotations

import errno
import os
import socket
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from moorage.worker import preflight_outside
from moorage.worker.preflight import OpenFile, Process, examine, exec_sessions, space
from moorage.worker.preflight_proc import mapped_writable, mappings, read_processes


def process(*files: OpenFile, **values: object) -> Process:
    return Process(pid=7, host_pid=4711, name="python3", files=files, mounts=frozenset({100, 101}), **values)  # type: ignore[arg-type]


def test_what_training_usually_holds_open_is_saved() -> None:
    usual = [
        OpenFile(0, "/dev/null", stat.S_IFCHR, (1, 3), 100),
        OpenFile(1, "pipe:[1234]", stat.S_IFIFO),
        OpenFile(3, "/data/set.bin", stat.S_IFREG, mount=101),
        OpenFile(4, "anon_inode:[eventpoll]", 0),
        OpenFile(5, "socket:[99]", stat.S_IFSOCK, protocol="TCP"),
        OpenFile(6, "socket:[98]", stat.S_IFSOCK, protocol="UNIX-STREAM"),
        OpenFile(7, "/memfd:x (deleted)", stat.S_IFREG, mount=3),
        OpenFile(8, "/dev/urandom", stat.S_IFCHR, (1, 9), 100),
        OpenFile(9, "/dev/pts/0", stat.S_IFCHR, (136, 0), 100),
    ]
    assert examine([process(*usual)]) == []


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (OpenFile(5, "anon_inode:[io_uring]", 0), "cannot be read out"),
        (OpenFile(5, "anon_inode:[userfaultfd]", 0), "cannot be read out"),
        (OpenFile(5, "socket:[1]", stat.S_IFSOCK, protocol="PACKET"), "protocol PACKET"),
        (OpenFile(5, "socket:[1]", stat.S_IFSOCK, protocol="AF_VSOCK"), "protocol AF_VSOCK"),
        (OpenFile(5, "/dev/sda", stat.S_IFBLK, (8, 0), 100), "block device"),
        (OpenFile(5, "/dev/nvidia0", stat.S_IFCHR, (195, 0), 100), "GPU"),
        (OpenFile(5, "/dev/kvm", stat.S_IFCHR, (10, 232), 100), "device 10:232"),
        (OpenFile(5, "/etc/passwd", stat.S_IFREG, mount=22), "outside the pod"),
    ],
)
def test_an_objection_names_process_descriptor_reason_and_cure(file: OpenFile, why: str) -> None:
    (objection,) = examine([process(file)])
    assert objection.what == f"process 7 (python3), descriptor 5 ({file.target})"
    assert why in objection.why
    assert objection.cure


def test_a_traced_process_is_named() -> None:
    (objection,) = examine([process(tracer=99)])
    assert "traced by process 99" in objection.why


def test_a_mapped_ring_is_found_though_its_descriptor_is_closed() -> None:
    (objection,) = examine([process(maps=frozenset({"anon_inode:[io_uring]"}))])
    assert objection.what.endswith("mapping anon_inode:[io_uring]")


def test_space_that_does_not_suffice_is_told_in_numbers() -> None:
    assert space(10 << 20, 10 << 20, "/staging") == []
    (objection,) = space(30 << 20, 10 << 20, "/staging")
    assert objection.what == "/staging"
    assert "30 MiB" in objection.why
    assert "10 MiB" in objection.why
    assert objection.kind == "NoCapacity"


def test_each_exec_session_is_named() -> None:
    assert [o.what for o in exec_sessions(["bash", "top"])] == ["exec session `bash`", "exec session `top`"]


def test_mappings_keep_names_with_spaces() -> None:
    text = (
        "7f00-7f10 rw-s 00000000 00:1f 12  /shared file\n"
        "7f10-7f20 r--p 00000000 00:1f 13  /lib/x.so\n"
        "7f20-7f30 rw-p 00000000 00:00 0 \n"
    )
    assert mappings(text) == [("rw-s", "/shared file"), ("r--p", "/lib/x.so")]


def test_this_process_is_read_with_its_descriptors(tmp_path: Path) -> None:
    import mmap

    path = tmp_path / "mapped"
    path.write_bytes(b"x" * 4096)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096), socket.socket() as tcp:
        (me,) = read_processes([os.getpid()])
        files = {f.fd: f for f in me.files}
        assert files[tcp.fileno()].protocol == "TCP"
        assert files[file.fileno()].target == str(path)
        assert files[file.fileno()].mount in me.mounts
        assert str(path) in mapped_writable([os.getpid()])
    assert me.tracer == 0


def test_a_process_that_is_gone_is_left_out() -> None:
    assert read_processes([2**22 + 1]) == []
    assert mapped_writable([2**22 + 1]) == set()


def test_a_process_that_ends_while_it_is_read_is_left_out_and_what_cannot_be_read_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pid, state, flags in ((7, "R", 0x4), (8, "Z", 0), (9, "R", 0)):
        folder = tmp_path / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "status").write_text(f"Name:\tx\nNSpid:\t{pid}\n")
        (folder / "maps").touch()
        (folder / "stat").write_text(f"{pid} (a b) {state} 1 1 1 0 -1 {flags} 0 0 0")
    real = Path.read_text

    def read_text(path: Path, *arguments: Any, **options: Any) -> str:
        if path.name == "mountinfo":  # as the kernel does for a process that has left its namespaces
            raise OSError(errno.EINVAL, "Invalid argument", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", read_text)
    assert read_processes([7, 8], proc=tmp_path) == []
    with pytest.raises(OSError, match="Invalid argument"):
        read_processes([9], proc=tmp_path)


def test_a_zombie_is_left_out() -> None:
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    try:
        assert read_processes([child]) == [] and mapped_writable([child]) == set()
    finally:
        os.waitpid(child, 0)


def test_a_process_that_has_just_ended_is_no_nested_container() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    gone = Process(pid=165, host_pid=ended.pid, name="sleep")
    assert not list(preflight_outside._of_process(gone, os.getpid(), frozen_stays=False))
