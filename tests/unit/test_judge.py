"""The witness judge tells what one incarnation at a time can have written from what it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.judge import incarnations_overlap, judge, parse, read


def _lines(*steps: str, rank: int = 0) -> list[str]:
    """``A5``: body A wrote step 5."""
    return [f"{10**9 * number} {rank} nonce {step[0]} {step[1:]}" for number, step in enumerate(steps)]


def _judge(*steps: str, committed: int = 0) -> list[str]:
    return judge(parse(_lines(*steps)), committed={0: committed} if committed else None).faults


def test_one_process_that_counts_is_sound() -> None:
    verdict = judge(parse(_lines("A1", "A2", "A3")))
    assert verdict.sound
    assert verdict.restores == []
    assert (verdict.nonces, verdict.reached) == ({0: ["nonce"]}, {0: 3})


def test_a_restore_repeats_steps_and_is_sound() -> None:
    verdict = judge(parse(_lines("A1", "A2", "A3", "B2", "B3", "B4")))
    assert verdict.sound
    (restore,) = verdict.restores
    assert (restore.reached, restore.resumed_at, restore.repeated, restore.pause_seconds) == (3, 2, 2, 1.0)


def test_a_move_without_a_lost_step_repeats_none() -> None:
    (restore,) = judge(parse(_lines("A1", "A2", "B3"))).restores
    assert restore.repeated == 0


@pytest.mark.parametrize(
    "steps",
    [
        ("A1", "A2", "A3", "B2", "A4", "B3"),
        ("A1", "A2", "A3", "B2", "B3", "A4"),
        ("A1", "B1", "A2", "B2"),  # in step with each other
        ("A1", "A2", "B2", "C2", "B3"),
        ("A1", "A2", "B3", "A3"),
    ],
)
def test_two_processes_of_a_rank_at_once_are_found(steps: tuple[str, ...]) -> None:
    assert any("two processes at once" in fault for fault in _judge(*steps))


def test_a_gap_a_repetition_and_a_late_beginning_are_found() -> None:
    assert _judge("A1", "A3") == ["rank 0: step 3 follows 1 in one process"]
    assert _judge("A1", "A1") == ["rank 0: step 1 follows 1 in one process"]
    assert _judge("A2") == ["rank 0: the first step seen is 2"]
    assert "unseen" in _judge("A1", "A2", "B5")[0]


def test_a_restore_from_before_a_committed_checkpoint_is_found() -> None:
    assert _judge("A1", "A2", "A3", "B3", committed=2) == []
    assert "behind the committed 2" in _judge("A1", "A2", "A3", "B2", committed=2)[0]


def test_a_line_in_the_old_name_right_after_a_restore_is_the_new_process() -> None:
    """It read who it is before it was saved, and wrote after it was restored."""
    verdict = judge(parse(_lines("A1", "A2", "A3", "A2", "B3", "B4")))
    assert verdict.sound
    assert verdict.restores[0].resumed_at == 2
    assert not judge(parse(_lines("A1", "A2", "A3", "A2", "B4"))).sound


def test_each_rank_is_judged_by_itself() -> None:
    lines = [*_lines("A1", "A2", "B2"), *_lines("C1", "D1", "C2", rank=1)]
    verdict = judge(parse(lines))
    assert len(verdict.restores) == 3
    assert [fault[:6] for fault in verdict.faults] == ["rank 1"]


def test_ranks_of_different_incarnations_at_once_are_found() -> None:
    def line(rank: int, body: str, seq: int) -> str:
        return f"0 {rank} n {body} {seq}"

    fine = [line(0, "A", 1), line(1, "C", 1), line(0, "B", 1), line(1, "D", 1)]
    assert incarnations_overlap(parse(fine)) == []
    late = [line(0, "A", 1), line(1, "C", 1), line(0, "B", 1), line(1, "C", 2), line(1, "D", 1)]
    assert judge(parse(late)).sound
    assert len(incarnations_overlap(parse(late))) == 1
    assert incarnations_overlap(parse(late[:-1])) == []  # rank 1 was restored only once: nothing can be said


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "witness"
    assert read(path) == []
    path.write_text("1 0 n A 1\n2 0 n A 2\n3 0 n")
    assert [line.seq for line in read(path)] == [1, 2]
    with pytest.raises(ValueError):
        parse(["3 0 n"])
