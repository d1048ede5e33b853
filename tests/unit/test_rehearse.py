"""What is declared for a rehearsal, the instants that a seed gives, and where two runs first differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from moorage.errors import UsageError
from moorage.rehearse import compare, plot, report, schedule
from moorage.rehearse.report import Done
from moorage.rehearse.spec import Output, Rehearsal, read

Files = Mapping[str, bytes]


def judged(output: Output, wanted: Files, got: Files, ranks: int = 1) -> list[compare.Compared]:
    def reader(files: Files) -> compare.Read:
        return lambda path, rank: files.get(path.replace("{rank}", str(rank)))

    return compare.compare([output], ranks, reader(wanted), reader(got))


LINES = Output(path="s{rank}")


def test_equal_is_equal() -> None:
    files = {"s0": b"0 1.5\n1 2.5\n", "s1": b"0 1\n"}
    found = judged(LINES, files, files, ranks=2)
    assert [(one.output, one.rank, one.equal, one.size) for one in found] == [("s0", 0, True, 2), ("s1", 1, True, 1)]
    assert compare.first(found) is None


def test_the_first_difference_is_the_one_with_the_lowest_step_of_all_ranks() -> None:
    wanted = {"s0": b"0 1\n1 1\n2 1\n", "s1": b"0 1\n1 1\n2 1\n"}
    got = {"s0": b"0 1\n1 1\n2 7\n", "s1": b"0 1\n1 8\n2 8\n"}
    first = compare.first(judged(LINES, wanted, got, ranks=2))
    assert first is not None
    assert (first.rank, first.step, first.where, first.expected, first.found) == (1, 1, "line 2, column 2", "1", "8")
    assert str(first) == "rank 1, step 1, line 2, column 2: expected 1, found 8"


@pytest.mark.parametrize(
    ("got", "equal"),
    [
        (b"0 1.0009\n", True),
        (b"0 1.1\n", False),
        (b"0 0x1.0p+0\n", True),  # 1.0 as float.hex writes it
        (b"0 nan\n", False),
        (b"0  1.0\n", True),  # only a blank more
        (b"0 word\n", False),
        (b"0 1.0 2\n", False),
    ],
)
def test_within_a_tolerance(got: bytes, equal: bool) -> None:
    [found] = judged(Output(path="s", tolerance=1e-3), {"s": b"0 1.0\n"}, {"s": got})
    assert found.equal == equal


def test_bit_for_bit_means_the_text() -> None:
    [found] = judged(Output(path="s"), {"s": b"0 1.0\n"}, {"s": b"0 1.00\n"})
    assert not found.equal
    [found] = judged(Output(path="s", relative=0.1), {"s": b"0 100\n"}, {"s": b"0 109\n"})
    assert found.equal and found.worst == 9


def test_a_shorter_run_and_an_absent_file_differ() -> None:
    [found] = judged(LINES, {"s0": b"5 1\n6 1\n"}, {"s0": b"5 1\n"})
    assert found.first is not None
    assert (found.first.step, found.first.expected, found.first.found) == (6, "2 lines", "1 lines")
    [found] = judged(LINES, {"s0": b"x"}, {})
    assert found.first is not None and (found.first.where, found.first.found) == ("the file", "absent")
    [found] = judged(LINES, {}, {})
    assert found.equal


def test_bytes_and_json() -> None:
    [found] = judged(Output(path="b", kind="bytes"), {"b": b"abcd"}, {"b": b"abXd"})
    assert found.first is not None and found.first.where == "byte 2"
    output = Output(path="j", kind="json", ignore=("pid",), tolerance=0.5)
    wanted: dict[str, Any] = {"a": {"b": [1.0, 2]}, "pid": 7, "ok": True}
    same = {"a": {"b": [1.4, 2]}, "pid": 8, "ok": True}
    [found] = judged(output, {"j": json.dumps(wanted).encode()}, {"j": json.dumps(same).encode()})
    assert found.equal and found.size == 3
    other = {"a": {"b": [1.0, 3]}, "ok": 1}
    [found] = judged(output, {"j": json.dumps(wanted).encode()}, {"j": json.dumps(other).encode()})
    assert found.first is not None
    assert (found.first.where, found.first.expected, found.first.found) == ("a.b[1]", "2", "3")


def test_across_the_ranks() -> None:
    alike = Output(path="w{rank}", kind="bytes", across="equal")
    files = {"w0": b"same", "w1": b"same"}
    assert [one.equal for one in judged(alike, files, files, ranks=2)] == [True, True, True]
    # Both runs gave it, and yet the ranks do not agree.
    odd = {"w0": b"same", "w1": b"sane"}
    found = judged(alike, odd, odd, ranks=2)
    assert [one.equal for one in found] == [True, True, False]
    assert found[-1].first is not None and found[-1].first.rank == 1

    joined = Output(path="p{rank}", kind="bytes", across="joined")
    [one] = judged(joined, {"p0": b"abc", "p1": b"def"}, {"p0": b"ab", "p1": b"cdef"}, ranks=2)
    assert one.equal and one.rank == -1
    [one] = judged(joined, {"p0": b"abc", "p1": b"def"}, {"p0": b"abc", "p1": b"dXf"}, ranks=2)
    assert one.first is not None and (one.first.rank, one.first.where) == (1, "byte 1 of its part")
    parts = Output(path="l{rank}", across="joined")
    [one] = judged(parts, {"l0": b"0 a\n", "l1": b"1 b\n"}, {"l0": b"0 a\n1 b\n", "l1": b""}, ranks=2)
    assert one.equal
    [one] = judged(parts, {"l0": b"0 a\n", "l1": b"1 b\n"}, {"l0": b"0 a\n1 c\n", "l1": b""}, ranks=2)
    assert one.first is not None and (one.first.rank, one.first.step, one.first.where) == (1, 1, "line 1 of its part")


def test_a_seed_gives_the_same_instants_and_another_seed_others() -> None:
    plan = Rehearsal(outputs=(LINES,), seed=3, checkpoints=3, restores=4)
    found = schedule.disturbances(plan)
    assert found == schedule.disturbances(plan)
    assert found != schedule.disturbances(msgspec.structs.replace(plan, seed=4))
    assert [one.at for one in found] == sorted(one.at for one in found)
    assert all(plan.begin <= one.at <= plan.end for one in found)
    assert sum(one.action == "checkpoint" for one in found) == 3 and len(found) == 7


def test_nothing_goes_back_before_there_is_a_checkpoint() -> None:
    for seed in range(200):
        plan = Rehearsal(outputs=(LINES,), seed=seed, checkpoints=seed % 3, restores=1 + seed % 4)
        assert schedule.disturbances(plan)[0].action != "back"


@pytest.mark.parametrize(
    ("section", "told"),
    [
        (None, "no section"),
        ({}, "outputs"),
        ({"outputs": []}, "no outputs"),
        ({"outputs": [{"path": "a", "kind": "xml"}]}, "kind"),
        ({"outputs": [{"path": "a", "colour": 1}]}, "colour"),
        ({"outputs": [{"path": "a"}], "restores": 0}, "restores"),
        ({"outputs": [{"path": "a"}], "begin": 0.9, "end": 0.5}, "cannot be"),
    ],
)
def test_what_cannot_be_is_refused(section: Any, told: str) -> None:
    content: dict[str, Any] = {"command": ["x"]} | ({} if section is None else {"rehearse": section})
    with pytest.raises(UsageError, match=told):
        read(Path("j.yaml"), content)


def test_paths_of_the_file_are_filled_in(tmp_path: Path) -> None:
    content = {
        "command": ["${python}", "${here}/x.py"],
        "env": {"A": "${here}"},
        "rehearse": {"outputs": [{"path": "a"}]},
    }
    job, plan = read(tmp_path / "j.yaml", content)
    assert job["command"][1] == f"{tmp_path.resolve()}/x.py" and "$" not in job["command"][0]
    assert job["env"] == {"A": str(tmp_path.resolve())} and "rehearse" not in job
    assert plan.outputs == (Output(path="a"),)


DONE = [
    Done(action="checkpoint", at=1.0, checkpoint="j-0001", reached=(10, 11)),
    Done(action="back", at=2.0, checkpoint="j-0001", reached=(20, 21), resumed=(10, 11), nodes=("a",)),
    Done(action="move", at=3.0, note="the job had ended"),
]


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (3, "before anything was done to the job"),
        (15, "5 steps after going back to j-0001, at 2.0 s"),
        (-1, "no steps"),
    ],
)
def test_the_difference_is_placed_in_the_story(step: int, told: str) -> None:
    first = compare.Difference(output="s", rank=0, step=step, where="x", expected="1", found="2")
    assert told in report.when(first, DONE)


def test_a_difference_after_a_move_before_the_first_step_is_not_said_to_be_before_it() -> None:
    first = compare.Difference(output="s", rank=1, step=3, where="x", expected="1", found="2")
    early = Done(action="move", at=0.5, checkpoint="j-0001", reached=(4, -1), nodes=("a",))
    assert report.when(first, [early]) == "after the move by j-0001, at 0.5 s, when no step of rank 1 was seen"


def test_the_report_can_be_read_and_plotted() -> None:
    files = [{"s0": b"0 1.0\n1 2.0\n2 3.0\n"}, {"s0": b"0 1.0\n1 2.0\n2 9.0\n"}]

    def from_side(side: int, path: str, rank: int) -> bytes | None:
        return files[side].get(path.replace("{rank}", str(rank)))

    found = judged(LINES, files[0], files[1])
    whole = report.Report(
        job="j",
        equal=False,
        proved=True,
        seed=1,
        ranks=1,
        reference_seconds=5,
        rehearsed_seconds=7,
        disturbances=tuple(DONE),
        outputs=tuple(found),
        first=compare.first(found),
        when="now",
    )
    text = report.table(whole)
    assert text.endswith("equal: no")
    assert "DIFFERS: rank 0, step 2, line 3, column 2: expected 3.0, found 9.0" in text
    assert "back to j-0001 at step 20, 21" in text and "the job had ended" in text
    assert report.table(msgspec.structs.replace(whole, equal=True, first=None)).endswith("equal: yes")
    panels = report.series([LINES], found, 1, from_side)
    assert panels[0].expected == (1.0, 2.0, 3.0) and panels[0].differs == 2
    drawn = plot.svg("<a & b>", panels, report.marks(DONE))
    root = ElementTree.fromstring(drawn)
    assert len(root.findall(".//{*}polyline")) == 2 and len(root.findall(".//{*}circle")) == 1
    ElementTree.fromstring(plot.svg("empty", report.series([LINES], [], 1, lambda *_: None), []))
