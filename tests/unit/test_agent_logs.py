from __future__ import annotations

from pathlib import Path

from moorage.coordinator import journal_export
from moorage.worker.journal import Batch, Entry, Journal, JournalReader, export
from moorage.worker.journal_frames import Frame, Kind, encode
from moorage.worker.logs import chunks


def _batch(*frames: tuple[int, int, bytes], truncated: bool = False) -> Batch:
    entries = [
        Entry(Frame(kind, rank, number, number * 10**9, payload), number * 100, number * 100 + 100)
        for number, (kind, rank, payload) in enumerate(frames)
    ]
    return Batch(entries, len(entries) * 100, truncated)


def test_neighbours_of_one_stream_are_joined_and_others_kept_apart() -> None:
    batch = _batch(
        (Kind.STDOUT, 0, b"a"),
        (Kind.STDOUT, 0, b"b"),
        (Kind.STDERR, 0, b"c"),
        (Kind.STDOUT, 1, b"d"),
        (Kind.STDOUT, 0, b"e"),
    )
    found = [(c.rank, c.is_stderr, c.data, c.offset, c.time) for c in chunks(batch, 3)]
    assert found == [
        (0, False, b"ab", 200, 0.0),
        (0, True, b"c", 300, 2.0),
        (1, False, b"d", 400, 3.0),
        (0, False, b"e", 500, 4.0),
    ]


def test_frames_that_are_no_output_are_passed_over() -> None:
    batch = _batch((Kind.STARTED, 0, b"1234"), (Kind.STDOUT, 0, b"a"), (Kind.EXITED, 0, b"1234"))
    assert [c.data for c in chunks(batch, 0)] == [b"a"]


def test_a_gap_is_told_before_what_follows_it() -> None:
    lost = list(chunks(_batch((Kind.STDOUT, 0, b"a"), (Kind.LOST, 0, b"x" * 8), (Kind.STDOUT, 0, b"b")), 0))
    assert [(c.data, c.truncated) for c in lost] == [(b"a", False), (b"", True), (b"b", False)]
    headless = list(chunks(_batch((Kind.STDOUT, 0, b"a"), truncated=True), 0))
    assert [(c.data, c.truncated) for c in headless] == [(b"", True), (b"a", False)]


def test_following_from_each_chunks_offset_gives_the_rest() -> None:
    batch = _batch(*[(Kind.STDOUT, rank % 2, bytes([65 + rank])) for rank in range(6)])
    for chunk in chunks(batch, 0):
        rest = [entry for entry in batch.entries if entry.offset >= chunk.offset]
        assert b"".join(entry.frame.payload for entry in rest) == b"ABCDEF"[chunk.offset // 100 :]


def test_the_coordinator_reads_in_the_store_what_the_worker_shows_live(tmp_path: Path) -> None:
    written = Journal(tmp_path / "journal")
    for number in range(1, 50):
        kind = Kind.STDERR if number % 7 == 0 else Kind.STDOUT
        written.append(encode(Frame(kind, number % 2, number, number * 10**9, b"%d\n" % number)))
    written.close()
    export(tmp_path / "journal", tmp_path / "export")
    with JournalReader(tmp_path / "journal") as reader:
        live = list(chunks(reader.read(), 3))
    stored = journal_export.chunks((tmp_path / "export").read_bytes(), pod=3, rank=-1, offset=0)
    assert list(stored) == live
