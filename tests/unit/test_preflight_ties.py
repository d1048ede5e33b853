from __future__ import annotations

import fcntl
import os
import re
import socket
from pathlib import Path

import pytest

from moorage.worker.preflight_gpu import GpuReport, Noted, examine_gpu
from moorage.worker.preflight_outside import read_unix_peers
from moorage.worker.preflight_ties import (
    SAYINGS,
    Fact,
    Lock,
    judge,
    parse_locks,
    shared_locks,
    too_short,
    without_parent,
)

_NOTED = r'(?:note_refusal|foreign_ipc|managed_added)\("(cu\w+)"'  # in native/intercept
ROOT = Path(__file__).resolve().parents[2]
_WHO = "process 7 (python3)"


@pytest.mark.parametrize("kind", SAYINGS)
def test_each_fact_is_told_with_who_why_and_the_way_out(kind: str) -> None:
    (told,) = judge([Fact(kind, _WHO, 5, "socket:[1]", "4711")])
    assert told.what == "process 7 (python3), descriptor 5 (socket:[1])"
    assert told.why == SAYINGS[kind].why.format(detail="4711")
    assert told.cure and told.kind == "Refused"


def test_a_fact_is_told_once_and_without_a_descriptor_if_it_has_none() -> None:
    fact = Fact("aio", _WHO)
    assert [told.what for told in judge([fact, fact])] == [_WHO]


def test_a_user_timeout_counts_only_when_it_may_pass_during_a_checkpoint() -> None:
    assert [too_short(ms, 60) for ms in (0, 1, 59_999, 60_000, 3_600_000)] == [False, True, True, False, False]


def test_locks_of_a_file_that_both_sides_lock_are_found() -> None:
    text = (
        "1: POSIX  ADVISORY  WRITE 10 fd:00:99 0 EOF\n1: -> POSIX  ADVISORY  WRITE 20 fd:00:99 0 EOF\n"
        "2: FLOCK  ADVISORY  WRITE 10 fd:00:100 0 EOF\n3: OFDLCK ADVISORY  READ -1 fd:00:99 0 EOF\n"
        "4: LEASE  ACTIVE    READ 10 fd:00:99 0 EOF\n5: POSIX  ADVISORY  WRITE 20 fd:01:100 0 EOF\n"
    )
    locks = parse_locks(text)
    assert locks[1] == Lock("POSIX", 20, (0xFD, 0), 99, waits=True)
    assert [lock.kind for lock in locks] == ["POSIX", "POSIX", "FLOCK", "OFDLCK", "POSIX"]
    assert shared_locks(locks, frozenset({10})) == [(locks[0], 20)]
    assert shared_locks(locks, frozenset({10, 20})) == []


def test_the_locks_of_this_machine_can_be_parsed(tmp_path: Path) -> None:
    with (tmp_path / "locked").open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        found = parse_locks(Path("/proc/locks").read_text())
        inode = os.fstat(file.fileno()).st_ino
        assert any(lock.pid == os.getpid() and lock.inode == inode for lock in found)


def test_who_does_not_descend_from_the_init_is_a_stranger() -> None:
    assert without_parent({10: 1, 11: 10, 12: 11, 13: 5, 14: 13}, 10) == [13, 14]


def test_both_ends_of_a_unix_socket_are_known() -> None:
    left, right = socket.socketpair()
    with left, right:
        one, two = os.fstat(left.fileno()).st_ino, os.fstat(right.fileno()).st_ino
        peers = read_unix_peers()
        assert (peers[one], peers[two]) == (two, one)


def test_what_the_gpu_driver_cannot_save_is_told_by_process_and_call() -> None:
    assert examine_gpu(GpuReport()) == []
    who = "process 7 (python3)"
    noted = (
        Noted(who, "cuMemAllocManaged", 3 << 20),
        Noted(who, "cuIpcOpenMemHandle"),
        Noted(who, "cuSomethingNew", 9),
    )
    told = examine_gpu(GpuReport(noted, mig=("GPU-1",), mps=True))
    assert [each.what for each in told] == [
        "GPU GPU-1",
        "the pod's CUDA processes",
        "process 7 (python3), cuMemAllocManaged",
        "process 7 (python3), cuIpcOpenMemHandle",
        "process 7 (python3), cuSomethingNew",
    ]
    assert "3 MiB of managed memory" in told[2].why
    assert "imported from outside the pod" in told[3].why
    assert all(each.cure for each in told)


def test_every_refusal_of_the_proxy_has_words_of_its_own() -> None:
    sources = (ROOT / "native" / "intercept").glob("*.cpp")
    named = {name for path in sources for name in re.findall(_NOTED, path.read_text())}
    assert {"cuMemAllocManaged", "cuMulticastCreate", "cuMemMapArrayAsync"} <= named
    for name in named:
        (told,) = examine_gpu(GpuReport((Noted("process 7 (python3)", name, 100),)))
        assert told.why != "the driver cannot save it", name
