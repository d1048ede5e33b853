from __future__ import annotations

from pathlib import Path

import pytest

from moorage.errors import CorruptData
from moorage.worker import pod_record
from moorage.worker.agent_adopt import found_phase
from moorage.worker.guard.messages import Desired, GuardStatus, PodPhase, RankState
from moorage.worker.pod_phase import LIVING_PHASES, Phase
from moorage.worker.pod_record import PodRecord, StagedCapture


def _guard(phase: PodPhase, desired: Desired = "run") -> GuardStatus:
    return GuardStatus(job="j", pod=0, incarnation=1, guard_pid=1, phase=phase, desired=desired)


@pytest.mark.parametrize(
    ("recorded", "guard", "restoring", "found"),
    [
        ("starting", _guard("empty"), False, None),
        ("starting", _guard("running"), False, "running"),
        ("starting", _guard("frozen"), False, "running"),  # fenced
        ("starting", _guard("frozen", "freeze"), True, "restored"),
        ("restored", _guard("frozen", "freeze"), True, "restored"),
        ("restored", _guard("running"), True, "running"),  # thawed, and not written down any more
        ("running", _guard("frozen"), False, "running"),  # fenced
        ("preparing", _guard("running"), False, "preparing"),
        ("preparing", _guard("frozen", "freeze"), False, "frozen"),
        ("frozen", _guard("frozen", "freeze"), False, "frozen"),
        ("sealed", _guard("frozen", "freeze"), False, "sealed"),
        ("captured", _guard("frozen", "freeze"), False, "captured"),
        ("captured", _guard("running"), False, "running"),  # thawed by its outcome
        ("captured", _guard("frozen"), False, "running"),  # thawed by its outcome, then fenced
    ],
)
def test_the_phase_follows_from_the_record_and_the_guard(
    recorded: Phase, guard: GuardStatus, restoring: bool, found: Phase | None
) -> None:
    assert found_phase(recorded, guard, restoring=restoring) == found


def test_no_pod_that_is_ordered_to_stand_is_taken_for_a_running_one() -> None:
    for recorded in LIVING_PHASES:
        found = found_phase(recorded, _guard("frozen", "freeze"), restoring=True)
        assert recorded == "running" or found not in ("running", "preparing")


def _record(**values: object) -> PodRecord:
    return PodRecord(boot="b", job="j", pod=1, incarnation=3, spec=b"", membership=b"", **values)  # type: ignore[arg-type]


def test_a_record_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    folder = pod_record.pod_folder(tmp_path, "j", 3, 1)
    staged = StagedCapture(attempt=2, incarnation=3, staging="/s", generation=5, ranks=[RankState(rank=2, pid=7)])
    record = _record(phase="captured", staged=staged, ranks=[RankState(rank=2, pid=7)])
    pod_record.save(folder, record)
    assert pod_record.load(folder) == record
    assert list(pod_record.folders(tmp_path)) == [folder]
    assert (folder / pod_record.RECORD_FILE).stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_record_that_is_damaged_is_named(tmp_path: Path) -> None:
    assert pod_record.load(tmp_path) is None
    (tmp_path / pod_record.RECORD_FILE).write_text("{")
    with pytest.raises(CorruptData, match=r"pod\.json"):
        pod_record.load(tmp_path)


def test_removing_a_pods_folder_takes_empty_parents_along(tmp_path: Path) -> None:
    one, other = (pod_record.pod_folder(tmp_path, "j", 3, pod) for pod in (0, 1))
    for folder in (one, other):
        pod_record.save(folder, _record())
    pod_record.remove_folder(one)
    assert other.exists()
    pod_record.remove_folder(other)
    assert not (tmp_path / "pods" / "j").exists()
    pod_record.remove_folder(other)
