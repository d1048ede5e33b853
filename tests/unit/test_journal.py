"""The journal and its frames: nothing lost, nothing doubled, nothing taken for what it is not."""

from __future__ import annotations

import asyncio
import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moorage.errors import CorruptData
from moorage.worker import journal
from moorage.worker.journal import Journal, JournalReader
from moorage.worker.journal_frames import FLAG_GUARD, FRAME_MAX, PAYLOAD_MAX, Frame, Kind, encode, scan


def stdout(sequence: int, text: bytes = b"line\n", rank: int = 0) -> Frame:
    return Frame(Kind.STDOUT, rank, sequence, 1_000 + sequence, text)


def number(kind: Kind, sequence: int, value: int, rank: int = 0) -> Frame:
    return Frame(kind, rank, sequence, 1, struct.pack("<i", value))


def frames_of(path: Path) -> list[Frame]:
    with JournalReader(path) as reader:
        return [entry.frame for entry in reader.read(limit=1 << 30).entries]


frames = st.builds(
    Frame,
    kind=st.sampled_from([int(kind) for kind in Kind]),
    rank=st.integers(0, 2**32 - 1),
    sequence=st.integers(0, 2**64 - 1),
    time_ns=st.integers(0, 2**64 - 1),
    payload=st.binary(max_size=300) | st.just(b"x" * PAYLOAD_MAX),
    flags=st.sampled_from([0, FLAG_GUARD]),
)


@given(st.lists(frames, max_size=8))
def test_what_is_encoded_is_read_back(written: list[Frame]) -> None:
    data = b"".join(encode(frame) for frame in written)
    assert [found.frame for found in scan(data)] == written
    assert all(len(encode(frame)) <= FRAME_MAX for frame in written)


@given(st.lists(frames, min_size=1, max_size=5), st.data())
def test_a_reader_that_starts_in_the_middle_of_a_frame_finds_the_next(
    written: list[Frame], data: st.DataObject
) -> None:
    encoded = [encode(frame) for frame in written]
    cut = data.draw(st.integers(1, len(encoded[0])))
    assert [found.frame for found in scan(b"".join(encoded)[cut:])] == written[1:]


@given(st.lists(frames, min_size=1, max_size=5), st.data())
def test_a_frame_that_is_cut_off_is_not_returned(written: list[Frame], data: st.DataObject) -> None:
    encoded = b"".join(encode(frame) for frame in written)
    cut = data.draw(st.integers(1, len(encode(written[-1]))))
    assert [found.frame for found in scan(encoded[:-cut])] == written[:-1]


@given(st.lists(frames, min_size=1, max_size=4), st.data())
def test_an_altered_frame_is_passed_over(written: list[Frame], data: st.DataObject) -> None:
    encoded = bytearray(b"".join(encode(frame) for frame in written))
    at = data.draw(st.integers(0, len(encode(written[0])) - 1))
    encoded[at] ^= 1 << data.draw(st.integers(0, 7))
    assert written[0] not in [found.frame for found in scan(encoded)] or written[0] in written[1:]


def test_output_that_looks_like_frames_is_still_output() -> None:
    inner = encode(stdout(99)) * 3
    found = [each.frame for each in scan(encode(stdout(1, inner)) + encode(stdout(2)))]
    assert found == [stdout(1, inner), stdout(2)]
    assert not list(scan(encode(stdout(1, inner))[:-1]))


def test_frames_that_are_there_already_are_passed_over(tmp_path: Path) -> None:
    log = Journal(tmp_path / "journal")
    first = encode(stdout(1)) + encode(stdout(2))
    assert log.append(first) == [stdout(1), stdout(2)]
    assert log.append(first + encode(stdout(3))) == [stdout(3)]
    log.close()
    assert frames_of(tmp_path / "journal") == [stdout(1), stdout(2), stdout(3)]


def test_a_gap_in_the_numbers_is_written_down(tmp_path: Path) -> None:
    log = Journal(tmp_path / "journal")
    log.append(encode(stdout(1)) + encode(stdout(5)))
    assert (log.lost, log.sequence) == (3, 5)
    log.close()
    kinds = [frame.kind for frame in frames_of(tmp_path / "journal")]
    assert kinds == [Kind.STDOUT, Kind.LOST, Kind.STDOUT]
    assert Journal(tmp_path / "journal").lost == 3


def test_a_writer_takes_over_where_a_dead_one_stopped(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    log = Journal(path)
    log.append(
        encode(number(Kind.STARTED, 1, 7, rank=3)) + encode(stdout(2)) + encode(number(Kind.EXITED, 3, 9, rank=3))
    )
    end = log.end
    log.close()
    with path.open("ab") as file:
        file.write(encode(stdout(4))[:-3])  # torn: the writer died
    log = Journal(path)
    assert (log.end, log.sequence, path.stat().st_size) == (end, 3, end)
    assert (log.ranks.pids, log.ranks.exits, log.output_bytes) == ({3: 7}, {3: 9}, 5)
    assert log.append(encode(stdout(4))) == [stdout(4)]
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_head_is_given_back_and_offsets_stay(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    log = Journal(path, cap=2 << 20)
    log.append(encode(number(Kind.STARTED, 1, 42)))
    for at in range(2, 2000):
        log.append(encode(stdout(at, bytes([at % 251]) * PAYLOAD_MAX)))
    assert log.start > 0
    assert log.end - log.start <= 2.3 * (1 << 20)
    assert path.stat().st_size == log.end
    assert path.stat().st_blocks * 512 < 3 << 20
    with JournalReader(path) as reader:
        assert (reader.start, reader.end) == (log.start, log.end)
        batch = reader.read(0, limit=1 << 30)
        assert batch.truncated
        assert batch.entries[0].offset == log.start
        assert batch.entries[-1].frame.sequence == 1999
        middle = batch.entries[len(batch.entries) // 2]
        assert reader.read(middle.offset, limit=1).entries[0] == middle
    log.close()
    # The start of a rank whose frame is no longer kept is still known.
    again = Journal(path, cap=2 << 20)
    assert (again.ranks.pids, again.start, again.end, again.sequence) == ({0: 42}, log.start, log.end, 1999)


def test_a_reader_gets_one_ranks_frames_and_those_of_the_pod(tmp_path: Path) -> None:
    log = Journal(tmp_path / "journal")
    log.append(b"".join(encode(stdout(at, rank=at % 3)) for at in range(1, 10)) + encode(number(Kind.ENDED, 10, 0)))
    with JournalReader(tmp_path / "journal") as reader:
        batch = reader.read(rank=1)
        assert [entry.frame.sequence for entry in batch.entries] == [1, 4, 7, 10]
        assert batch.next_offset == log.end
        assert reader.read(batch.next_offset).entries == []
        assert reader.read(end=reader.read(limit=1).entries[-1].offset).entries


def test_reading_in_small_steps_sees_everything_once(tmp_path: Path) -> None:
    log = Journal(tmp_path / "journal")
    log.append(b"".join(encode(stdout(at, b"x" * (at * 37 % PAYLOAD_MAX))) for at in range(1, 300)))
    seen = []
    offset = 0
    with JournalReader(tmp_path / "journal") as reader:
        while (batch := reader.read(offset, limit=5000)).entries:
            seen += [entry.frame.sequence for entry in batch.entries]
            offset = batch.next_offset
    assert seen == list(range(1, 300))


def test_a_follower_hears_of_what_is_written_later(tmp_path: Path) -> None:
    async def test() -> list[int]:
        log = Journal(tmp_path / "journal")
        log.append(encode(stdout(1)))
        seen: list[int] = []
        with JournalReader(tmp_path / "journal") as reader:
            async with asyncio.timeout(20):
                async for batch in reader.follow():
                    seen += [entry.frame.sequence for entry in batch.entries]
                    if seen[-1] == 3:
                        return seen
                    asyncio.get_running_loop().call_soon(log.append, encode(stdout(seen[-1] + 1)))
        return seen

    assert asyncio.run(test()) == [1, 2, 3]


@pytest.mark.parametrize("truncated", [False, True])
def test_an_exported_journal_is_laid_elsewhere_with_its_offsets(tmp_path: Path, truncated: bool) -> None:
    path = tmp_path / "journal"
    log = Journal(path, cap=1 << 20 if truncated else 1 << 30)
    for at in range(1, 1000):
        log.append(encode(stdout(at, b"y" * PAYLOAD_MAX)))
    end = log.end
    log.append(encode(stdout(1000)))  # behind the checkpoint
    size = journal.export(path, tmp_path / "exported", end=end)
    assert size == (tmp_path / "exported").stat().st_size
    assert (tmp_path / "exported").stat().st_mode & 0o777 == 0o600
    journal.restore(tmp_path / "exported", tmp_path / "again")
    copy = Journal(tmp_path / "again", cap=1 << 20)
    assert (copy.start, copy.end, copy.sequence) == (log.start, end, 999)
    assert copy.append(encode(stdout(1000, b"other"))) == [stdout(1000, b"other")]


def test_a_journal_that_is_cut_short_or_something_else_is_refused(tmp_path: Path) -> None:
    log = Journal(tmp_path / "journal")
    log.append(encode(stdout(1)))
    journal.export(tmp_path / "journal", tmp_path / "exported")
    data = (tmp_path / "exported").read_bytes()
    (tmp_path / "exported").write_bytes(data[:-1])
    with pytest.raises(CorruptData, match="ends at offset"):
        journal.restore(tmp_path / "exported", tmp_path / "again")
    (tmp_path / "exported").write_bytes(os.urandom(64))
    with pytest.raises(CorruptData, match="not a pod's journal"):
        journal.restore(tmp_path / "exported", tmp_path / "again")


def test_an_empty_journal_is_exported_and_laid_too(tmp_path: Path) -> None:
    Journal(tmp_path / "journal").close()
    journal.export(tmp_path / "journal", tmp_path / "exported")
    journal.restore(tmp_path / "exported", tmp_path / "again")
    again = Journal(tmp_path / "again")
    assert (again.start, again.end, again.sequence) == (0, 0, 0)


def test_a_new_writer_reads_no_more_than_what_follows_the_last_mark(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    log = Journal(path)
    log.append(encode(number(Kind.STARTED, 1, 42)) + encode(number(Kind.EXITED, 2, 143, rank=700)))  # 700: not started
    for at in range(3, 300):
        log.append(encode(stdout(at, b"z" * PAYLOAD_MAX)))
    state = (log.sequence, log.lost, log.output_bytes, log.ranks.pids, log.ranks.exits, log.end)
    log.close()
    with path.open("r+b") as file:  # frames before the last mark are not looked at
        file.write(b"\xff" * 4096)
    again = Journal(path)
    assert (again.sequence, again.lost, again.output_bytes, again.ranks.pids, again.ranks.exits, again.end) == state


@pytest.mark.parametrize("damage", [b"", b"not json\n", b'[5,1,0,0,[]]\n[1,"x"]\n{}'])
def test_a_damaged_index_costs_time_and_nothing_else(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "journal"
    log = Journal(path)
    log.append(b"".join(encode(stdout(at)) for at in range(1, 50)))
    (tmp_path / "journal.index").write_bytes(damage.replace(b"5", str(log.end + 1).encode()))
    again = Journal(path)
    assert (again.sequence, again.end, again.output_bytes) == (49, log.end, 49 * 5)
