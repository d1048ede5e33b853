from __future__ import annotations

import struct
from pathlib import Path

import pytest

from moorage.errors import CorruptData, EnvironmentLacking
from moorage.worker import extra_state
from moorage.worker.extra_record import Extras, PosixLock, SocketOptions, Thread
from moorage.worker.sandbox import criu, images, mend, native


def _file(kind: int, number: int, **parts: object) -> object:
    return images.message("file")(type=kind, id=number, **parts)


def _write(path: Path, *entries: object) -> None:
    bodies = [entry.SerializeToString() for entry in entries]  # type: ignore[attr-defined]
    path.write_bytes(struct.pack("<II", 0x54564319, 77) + b"".join(struct.pack("<I", len(b)) + b for b in bodies))


def test_fields_that_are_not_known_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "files.img"
    entry = _file(1, 9, regular={"id": 9, "name": b"/a"})
    body = entry.SerializeToString() + b"\xa2\x01\x03abc"  # type: ignore[attr-defined]  # field 20, a string
    path.write_bytes(struct.pack("<III", 0x54564319, 77, len(body)) + body)
    images.edit(path, "file", lambda entries: entries)
    assert path.read_bytes().endswith(b"\xa2\x01\x03abc")
    assert images.read(path, "file")[0] == 77


@pytest.mark.parametrize("damage", [b"", b"12345678", struct.pack("<III", 0x54564319, 77, 5) + b"ab"])
def test_a_damaged_image_is_told(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "files.img").write_bytes(damage)
    with pytest.raises(CorruptData):
        images.read(tmp_path / "files.img", "file")


@pytest.mark.parametrize(("mark", "said"), [(b"", "a version before 2"), (b"moorage-criu-library 1;", "version 1")])
def test_a_library_of_another_version_is_not_preloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mark: bytes, said: str
) -> None:
    assert criu.library().name == criu.LIMITS_LIBRARY  # that of this tree is the right one
    old = tmp_path / criu.LIMITS_LIBRARY
    old.write_bytes(b"\x7fELF before" + mark + b"behind")
    monkeypatch.setattr(native, "find", lambda *_, **__: old)
    (tmp_path / criu.MENDS_FILE).write_text("z 7 200;")
    with pytest.raises(EnvironmentLacking, match=f"of another version of moorage .{said}") as lacks:
        criu.environment(tmp_path)
    assert "make setup" in lacks.value.hint


def test_locks_that_criu_left_out_are_added() -> None:
    one = PosixLock(5, 3, True, 10, 5)
    there = images.message("lock")(flag=1, type=1, pid=5, fd=3, start=10, length=5)
    flock = images.message("lock")(flag=2, type=1, pid=6, fd=3, start=10, length=5)  # no POSIX lock
    assert mend.add_locks([there], [one]) is None
    added = mend.add_locks([there, flock], [one, PosixLock(6, 3, False, 10, 5)])
    assert added is not None
    assert [(each.flag, each.type, each.pid) for each in added] == [(1, 1, 5), (2, 1, 6), (1, 0, 6)]


def test_what_waits_before_a_message_with_descriptors_is_cut_off_it(tmp_path: Path) -> None:
    packet = images.message("packet")
    path = tmp_path / "sk-queues.img"
    held = [(packet(id_for=7, length=5, scm=[b"rights"]), b"abcde"), (packet(id_for=8, length=3, scm=[b"x"]), b"fgh")]
    held += [(packet(id_for=7, length=4, scm=[b"more"]), b"ijkl"), (packet(id_for=7, length=2), b"mn")]
    text = struct.pack("<II", 0x54564319, 9)
    for entry, data in held:
        body = entry.SerializeToString()
        text += struct.pack("<I", len(body)) + body + data
    path.write_bytes(text)
    images.edit_packets(path, lambda found: None)
    assert path.read_bytes() == text
    images.edit_packets(path, lambda found: mend.split(found, {7: [4, 7], 9: [1]}))
    found: list[tuple[object, bytes]] = []
    images.edit_packets(path, found.extend)
    wanted = [(7, [], b"abcd"), (7, [b"rights"], b"e"), (8, [b"x"], b"fgh"), (7, [], b"ij"), (7, [b"more"], b"kl")]
    assert [(e.id_for, list(e.scm), data) for e, data in found] == [*wanted, (7, [], b"mn")]  # type: ignore[attr-defined]
    assert all(e.length == len(data) for e, data in found)  # type: ignore[attr-defined]
    path.write_bytes(text[:-1])
    with pytest.raises(CorruptData):
        images.edit_packets(path, lambda found: None)


def test_an_image_that_criu_left_out_for_want_of_locks_is_made(tmp_path: Path) -> None:
    mend.mend(tmp_path, Extras(locks=[PosixLock(6, 3, True, 10, 0)]))
    magic, [lock] = images.read(tmp_path / "filelocks.img", "lock")
    assert (magic, lock.pid, lock.start, lock.length) == (images.LOCKS_MAGIC, 6, 10, 0)


def test_the_locks_of_a_process_are_read_from_what_its_descriptor_shows() -> None:
    text = (
        "pos:\t0\nflags:\t0100002\nmnt_id:\t30\nino:\t7\n"
        "lock:\t1: POSIX  ADVISORY  WRITE 4711 08:02:7 10 14\n"
        "lock:\t2: POSIX  ADVISORY  READ 4711 08:02:7 9000 EOF\n"
        "lock:\t3: POSIX  ADVISORY  READ 4712 08:02:7 1 1\n"
        "lock:\t4: FLOCK  ADVISORY  WRITE 4711 08:02:7 0 EOF\n"
        "lock:\t5: OFDLCK ADVISORY  WRITE -1 08:02:7 0 EOF\n"
    )
    found = extra_state.posix_locks(text, 4711, 5, 3)
    assert found == [PosixLock(5, 3, True, 10, 5), PosixLock(5, 3, False, 9000, 0)]


def test_only_a_periodic_timer_without_a_time_gets_one(tmp_path: Path) -> None:
    timers = [
        {"interval_seconds": 1}, {"interval_nanoseconds": 5}, {"interval_seconds": 1, "value_seconds": 3}, {"ticks": 1},
    ]  # fmt: skip
    _write(tmp_path / "files.img", *(_file(17, n, timerfd={"id": n, **timer}) for n, timer in enumerate(timers)))
    mend.mend(tmp_path, Extras())
    _, files = images.read(tmp_path / "files.img", "file")
    assert [file.timerfd.value_nanoseconds for file in files] == [1, 1, 0, 0]


def test_a_file_that_lost_its_name_is_opened_by_the_one_that_is_left(tmp_path: Path) -> None:
    regular = [_file(1, n, regular={"id": n, "name": name}) for n, name in ((1, b"/w/a"), (2, b"/w/c"), (3, b"/w/a"))]
    _write(tmp_path / "files.img", *regular)
    remap = images.message("remap")
    _write(
        tmp_path / "remap-fpath.img",
        remap(orig_id=1, remap_id=9, remap_type=0),
        remap(orig_id=2, remap_id=8, remap_type=1),
    )
    mend.mend(tmp_path, Extras(links={"/w/a": "/w/b"}))
    _, files = images.read(tmp_path / "files.img", "file")
    # The third has the name now: another file was made under it.
    assert [file.regular.name for file in files] == [b"/w/b", b"/w/c", b"/w/a"]
    assert [entry.orig_id for entry in images.read(tmp_path / "remap-fpath.img", "remap")[1]] == [2]


def test_a_timer_signals_the_thread_that_it_did(tmp_path: Path) -> None:
    core = images.message("core")(
        mtype=1, task={"timers": {"posix": [{"it_id": 0}, {"it_id": 3, "notify_thread_id": -5}]}}
    )
    _write(tmp_path / "core-8.img", core)
    _write(tmp_path / "files.img")
    mend.mend(tmp_path, Extras(timers={"8": {3: 12}, "9": {0: 1}}))
    (found,) = images.read(tmp_path / "core-8.img", "core")[1]
    assert [timer.notify_thread_id for timer in found.task.timers.posix] == [0, 12]


def test_extras_are_what_they_were() -> None:
    extras = Extras({"/a": "/b"}, {"8": {3: 12}}, [SocketOptions(8, 3, [(6, 18, b"\x01\0\0\0")])], [Thread(9, [0], 5)])
    assert Extras.decode(extras.encode()) == extras
    with pytest.raises(CorruptData):
        Extras.decode(b"{")


def test_an_eventfd_that_criu_makes_otherwise_gets_a_counter_of_its_own(tmp_path: Path) -> None:
    first = 0xE0000000
    counters = {1: 5, 2: first, 3: (1 << 40) + 7}
    _write(
        tmp_path / "files.img",
        *(_file(6, number, eventfd={"id": number, "counter": counter}) for number, counter in counters.items()),
    )
    _write(tmp_path / "ids-7.img", images.message("ids")(files_id=4))
    descriptors = ({"id": 1, "fd": 10}, {"id": 2, "fd": 11}, {"id": 3, "fd": 12})
    _write(tmp_path / "fdinfo-4.img", *(images.message("descriptor")(**one) for one in descriptors))
    said = mend.mend(tmp_path, Extras(eventfds={"7": {10: 1, 12: 0}}, zombies={"9": 200}))
    _, files = images.read(tmp_path / "files.img", "file")
    assert [file.eventfd.counter for file in files] == [first + 1, first, first + 2]
    assert said == f"z 9 200;e {first + 1} 5 1;e {first + 2} {(1 << 40) + 7} 0;"
    assert mend.mend(tmp_path, Extras()) == ""
