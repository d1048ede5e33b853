"""The job state machine, case by case. `test_job_machine_world` plays random histories."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from moorage import failpoints
from moorage.coordinator.machine import (
    TABLE,
    IllegalEvent,
    IllegalTransition,
    JobPolicy,
    JobState,
    Machine,
    Policies,
    new_job,
    resume,
    validate,
)
from moorage.coordinator.machine import events as ev
from moorage.coordinator.machine import instructions as ins
from moorage.coordinator.machine.policies import FailurePolicy, HeartbeatPolicy
from moorage.coordinator.machine.state import PHASES, Seat, decode, encode
from moorage.coordinator.machine.table import failpoint
from moorage.errors import Conflict, NewerVersion
from moorage.records import Outcome


class Player:
    """Plays events and answers to one job, as a coordinator that is never in doubt would."""

    def __init__(self, pods: int = 2, **policy: Any) -> None:
        state, found = new_job(job="j", name="train", owner="ann", pods=pods, policy=JobPolicy(**policy), now=100.0)
        self.machine = Machine(state)
        self.now = 100.0
        self.found: list[ins.Instruction] = found
        self.said: list[str] = []

    @property
    def state(self) -> JobState:
        return self.machine.state

    def do(self, event: ev.Event) -> Player:
        after, self.found = self.machine.consider(event)
        self.machine.accept(event, after, self.found)
        self.said += [r.kind for r in self.found if isinstance(r, ins.Say)]
        return self

    def order(self, kind: type[ins.Order]) -> Any:
        (found,) = [order for order in resume(self.state) if isinstance(order, kind)]
        return found

    def records(self, kind: type[ins.Record]) -> list[Any]:
        return [record for record in self.found if isinstance(record, kind)]

    def done(self, *kinds: type[ins.Order]) -> Player:
        for kind in kinds:
            self.now += 1
            self.do(ev.Done(time=self.now, of=self.order(kind)))
        return self

    def fail(self, kind: type[ins.Order], error: str = "MoorageError", pod: int = 0, node: str = "a") -> Player:
        of = self.order(kind)
        return self.do(ev.Failed(time=self.now, of=of, message="it broke", error_kind=error, pod=pod, node=node))

    def place(self, *nodes: str) -> Player:
        of = self.order(ins.Place)
        seats = tuple(Seat(node) for node in nodes)
        return self.do(ev.Placed(time=self.now, of=of, seats=seats, vni=9, slot=4))

    def run(self) -> Player:
        return self.place(*"ab"[: self.state.pods]).done(ins.Load)

    def captured(self) -> Player:
        return self.done(ins.Prepare, ins.Freeze, ins.Seal, ins.Capture)

    def stored(self) -> Player:
        of = self.order(ins.Collect)
        self.do(ev.Persisted(time=self.now, of=of, bytes_total=10, bytes_new=2, pause_seconds=0.5))
        return self.do(ev.Written(time=self.now, of=self.order(ins.WriteManifest), manifest="m", generation=3))

    def save(self) -> Player:
        return self.do(ev.CheckpointAsked(time=self.now)).captured().stored()

    def exit(self, pod: int, code: int) -> Player:
        return self.do(ev.PodExited(time=self.now, pod=pod, incarnation=self.state.incarnation, code=code))

    def lose(self, node: str) -> Player:
        return self.do(ev.NodeLost(time=self.now, node=node))

    def refused(self, event: ev.Event, words: str) -> None:
        with pytest.raises(Conflict, match=words):
            self.machine.consider(event)


def test_a_job_starts_and_finishes() -> None:
    job = Player()
    assert job.state.phase == "pending"
    job.place("a", "b")
    assert job.state.phase == "starting"
    assert job.records(ins.Raise)[0].record.placement == ["a", "b"]
    job.done(ins.Load)
    assert job.state.phase == "running"
    job.exit(0, 0)
    assert job.state.phase == "running"
    job.exit(1, 0)
    assert job.state.phase == "finishing"
    job.do(ev.Closed(time=1.0, of=job.order(ins.Finish)))
    assert (job.state.phase, job.state.exit_code) == ("finished", 0)
    assert job.records(ins.Raise)[0].record.placement == [], "no pod may run any more"
    assert resume(job.state) == []


def test_a_checkpoint_lets_the_job_run_on_before_it_is_stored() -> None:
    job = Player().run().do(ev.CheckpointAsked(time=1.0))
    assert job.state.phase == "checkpointing"
    assert job.records(ins.CreateStart)[0].start.kind == "resume"
    job.captured()
    assert job.state.phase == "running"
    assert job.records(ins.Conclude)[0].outcome.kind == "resume"
    assert job.order(ins.Collect)
    job.stored()
    (commit,) = job.records(ins.Commit)
    assert commit.checkpoint.checkpoint == "j-0001"
    assert commit.generation == 3
    assert (job.state.latest, job.state.attempt) == ("j-0001", None)
    assert job.state.past[-1].pause_seconds == 0.5


def test_a_park_is_decided_in_the_commit_itself() -> None:
    job = Player().run().do(ev.ParkAsked(time=1.0)).captured()
    assert job.state.phase == "parking"
    assert not job.records(ins.Conclude)
    job.stored()
    assert job.records(ins.Conclude)[0].outcome.kind == "stop"
    assert job.records(ins.Commit)
    assert job.order(ins.Fence).bound == 1
    job.done(ins.Fence)
    assert job.state.phase == "parked"


def test_a_move_restores_on_the_named_nodes() -> None:
    job = Player().run().do(ev.MoveAsked(time=1.0, nodes=("c",))).captured().stored()
    assert job.state.phase == "restoring"
    assert job.order(ins.Place).on == ("c",)
    job.place("c", "c")
    assert job.order(ins.Fence)
    with pytest.raises(ValueError, match="unpack"):
        job.order(ins.Load)
    job.done(ins.Fence, ins.Load, ins.Release)
    assert job.state.phase == "running"
    assert job.state.restarts == 0


@pytest.mark.parametrize("step", [ins.Prepare, ins.Freeze, ins.Seal, ins.Capture])
@pytest.mark.parametrize("asked", [ev.CheckpointAsked(time=1.0), ev.ParkAsked(time=1.0)])
def test_an_attempt_that_fails_lets_the_job_run_on(step: type[ins.Order], asked: ev.Event) -> None:
    job = Player().run().do(asked)
    for kind in (ins.Prepare, ins.Freeze, ins.Seal, ins.Capture):
        if kind is step:
            break
        job.done(kind)
    job.fail(step)
    assert job.records(ins.Conclude)[0].outcome.kind == "abort"
    assert job.state.phase == "running"
    assert job.order(ins.Settle)
    job.done(ins.Settle)
    assert job.state.attempt is None
    assert job.state.past[-1].step == "aborted"
    assert "it broke" in job.state.past[-1].reason
    assert job.state.incarnation == 1


def test_a_pod_that_does_not_come_back_after_an_abort_is_restored() -> None:
    job = Player().run().save().do(ev.CheckpointAsked(time=1.0)).fail(ins.Prepare)
    job.fail(ins.Settle)
    assert job.state.phase == "restoring"


def test_an_outcome_that_a_worker_made_is_obeyed() -> None:
    job = Player().run().do(ev.CheckpointAsked(time=1.0)).done(ins.Prepare, ins.Freeze)
    outcome = Outcome(kind="abort", incarnation=1, attempt=1, reason="late", by="b")
    job.do(ev.OutcomeStands(time=2.0, outcome=outcome))
    assert job.state.phase == "running"
    assert not job.records(ins.Conclude)
    assert "b aborted it: late" in job.state.attempt.reason  # type: ignore[union-attr]


def test_the_deadline_ends_an_attempt() -> None:
    job = Player().run().do(ev.CheckpointAsked(time=1.0))
    (alarm,) = [o for o in resume(job.state) if isinstance(o, ins.Alarm)]
    assert alarm.at == 121.0
    job.do(ev.AlarmRang(time=121.0, of=alarm))
    assert job.state.attempt is not None
    assert job.state.attempt.error_kind == "DeadlineExceeded"


def test_a_lost_node_takes_the_job_back_to_its_checkpoint_elsewhere() -> None:
    job = Player().run().save().lose("a")
    assert job.state.phase == "restoring"
    assert job.state.bringup is not None
    assert job.state.bringup.checkpoint == "j-0001"
    job.place("b", "c")
    assert [(t.pod, t.node) for t in job.order(ins.Fence).targets] == [(0, "a"), (1, "b")]
    job.done(ins.Fence, ins.Load)
    assert job.state.bringup.step == "releasing"
    job.done(ins.Release)
    assert (job.state.phase, job.state.restarts, job.state.incarnation) == ("running", 1, 2)
    assert {"node.lost", "restore.started", "restore.fenced", "restore.done"} <= set(job.said)


def test_restarts_are_counted_on_beyond_a_restore_that_was_asked_for() -> None:
    job = Player().run().save().lose("a")
    job.place("b", "c").done(ins.Fence, ins.Load, ins.Release)
    job.do(ev.RestoreAsked(time=9.0))
    assert (job.state.restarts, job.state.restarts_before) == (0, 1)


def test_a_lost_node_before_the_first_checkpoint_starts_the_job_again() -> None:
    job = Player().run().lose("b")
    assert job.state.phase == "starting"
    job.place("a", "a").done(ins.Fence, ins.Load)
    assert (job.state.phase, job.state.restarts) == ("running", 1)


def test_a_node_lost_in_the_middle_of_an_attempt_aborts_it() -> None:
    job = Player().run().save().do(ev.CheckpointAsked(time=1.0)).done(ins.Prepare, ins.Freeze).lose("a")
    assert job.records(ins.Conclude)[0].outcome.kind == "abort"
    assert job.state.phase == "restoring"
    assert job.state.past[-1].step == "aborted"


def test_what_is_being_committed_is_committed_before_the_job_goes_back_to_it() -> None:
    job = Player().run().do(ev.CheckpointAsked(time=1.0)).captured()
    of = job.order(ins.Collect)
    job.do(ev.Persisted(time=2.0, of=of, bytes_total=1, bytes_new=1, pause_seconds=0.1)).lose("a")
    assert job.state.phase == "running"
    job.do(ev.Written(time=3.0, of=job.order(ins.WriteManifest), manifest="m", generation=0))
    assert job.state.phase == "restoring"
    assert job.state.base == "j-0001"


def test_a_second_node_lost_during_the_restore_chooses_again() -> None:
    job = Player().run().save().lose("a").place("b", "c").done(ins.Fence)
    job.lose("c")
    assert job.state.bringup.step == "placing"  # type: ignore[union-attr]
    job.place("b", "d")
    assert {(t.pod, t.node) for t in job.order(ins.Fence).targets} == {(0, "b"), (1, "c")}


def test_a_restore_that_fails_on_a_node_avoids_it_and_in_the_end_parks() -> None:
    job = Player().run().save().lose("a").place("b", "c").done(ins.Fence).fail(ins.Load, node="c")
    assert job.order(ins.Place).exclude == ("c",)
    job.do(ev.Unplaceable(time=5.0, of=job.order(ins.Place), reason="no node is left"))
    assert job.state.phase == "parking"
    job.done(ins.Fence)
    assert job.state.phase == "parked"
    assert "it broke" in job.state.reason
    assert job.state.latest == "j-0001"


def test_a_damaged_checkpoint_is_not_tried_on_other_nodes() -> None:
    job = Player().run().save().lose("a").place("b", "c").done(ins.Fence).fail(ins.Load, "CorruptData", node="c")
    assert (job.state.phase, job.state.error_kind) == ("parking", "CorruptData")


def test_whoever_waits_for_a_restore_learns_the_class_of_what_stopped_it_and_the_next_one_forgets_it() -> None:
    job = Player().run().save().lose("a").place("b", "c").done(ins.Fence).fail(ins.Load, "Incompatible", node="c")
    assert job.state.error_kind == ""
    job.do(ev.Unplaceable(time=5.0, of=job.order(ins.Place), reason="no node is left"))
    assert job.state.error_kind == "Incompatible"
    job.done(ins.Fence).do(ev.RestoreAsked(time=6.0))
    assert job.state.error_kind == ""
    job.do(ev.Unplaceable(time=7.0, of=job.order(ins.Place), reason="no node is live"))
    assert job.state.error_kind == "NoCapacity"


def test_a_checkpoint_that_fits_no_node_is_given_up_only_if_its_owner_said_so() -> None:
    for cold in (False, True):
        job = Player(cold_start=cold).run().save().lose("a").place("b", "c").done(ins.Fence)
        job.fail(ins.Load, "Incompatible", node="c")
        job.do(ev.Unplaceable(time=5.0, of=job.order(ins.Place), reason="no node is left"))
        assert job.state.phase == ("starting" if cold else "parking")
        if cold:
            assert job.order(ins.Place).exclude == ()
            job.place("b", "b").done(ins.Fence, ins.Load)
            assert (job.state.phase, job.state.base, job.state.latest) == ("running", "", "j-0001")


def unfit(job: Player, time: float) -> None:
    place = job.order(ins.Place)
    reason = "the checkpoint fits no node that is left (b: the kernel is 5 there)"
    job.do(ev.Unplaceable(time=time, of=place, reason=reason, error_kind="Incompatible", hint="see compat"))


def test_an_automatic_restore_with_no_fitting_node_waits_for_one_then_parks_or_begins_anew_as_its_owner_said() -> None:
    for cold in (False, True):
        job = Player(cold_start=cold).run().save().lose("a")
        unfit(job, 200.0)
        assert job.state.phase == "restoring" and "the kernel is 5 there" in job.state.reason
        (alarm,) = [o for o in resume(job.state) if isinstance(o, ins.Alarm)]
        job.do(ev.AlarmRang(time=260.0, of=alarm))
        assert job.state.phase == ("starting" if cold else "parking")
        if not cold:
            job.done(ins.Fence)
            assert (job.state.phase, job.state.error_kind, job.state.hint) == ("parked", "Incompatible", "see compat")
            assert "the kernel is 5 there" in job.state.reason and job.state.latest == "j-0001"


def test_no_room_at_the_end_is_no_misfit() -> None:
    job = Player(cold_start=True).run().save().lose("a")
    unfit(job, 200.0)
    job.do(ev.Unplaceable(time=210.0, of=job.order(ins.Place), reason="no node is live"))
    (alarm,) = [o for o in resume(job.state) if isinstance(o, ins.Alarm)]
    job.do(ev.AlarmRang(time=260.0, of=alarm))
    assert (job.state.phase, job.state.error_kind) == ("parking", "NoCapacity")


def test_whoever_asks_for_a_restore_may_say_otherwise_than_the_owner_did() -> None:
    for owner, asked, phase in ((False, True, "starting"), (True, False, "parked"), (True, None, "starting")):
        job = Player(cold_start=owner).run().do(ev.ParkAsked(time=1.0)).captured().stored().done(ins.Fence)
        job.do(ev.RestoreAsked(time=2.0, cold_start=asked))
        unfit(job, 3.0)
        assert job.state.phase == phase


def test_a_failed_job_waits_for_a_node_and_is_parked_when_none_comes() -> None:
    job = Player().run().save().lose("a")
    job.do(ev.Unplaceable(time=200.0, of=job.order(ins.Place), reason="no node is live"))
    assert job.state.phase == "restoring"
    (alarm,) = [o for o in resume(job.state) if isinstance(o, ins.Alarm)]
    assert alarm.at == 260.0
    job.do(ev.AlarmRang(time=260.0, of=alarm))
    assert job.state.phase == "parking"


def test_somebody_who_asks_for_a_restore_is_told_at_once_that_there_is_no_node() -> None:
    job = Player().run().do(ev.ParkAsked(time=1.0)).captured().stored().done(ins.Fence)
    job.do(ev.RestoreAsked(time=2.0, nodes=("z",)))
    before = job.state.incarnation
    job.do(ev.Unplaceable(time=3.0, of=job.order(ins.Place), reason="z is full"))
    assert job.state.phase == "parked"
    assert "z is full" in job.state.reason
    assert job.state.incarnation > before


def test_a_pending_job_waits_for_nodes_for_ever() -> None:
    job = Player()
    job.do(ev.Unplaceable(time=1.0, of=job.order(ins.Place), reason="no node is live"))
    assert job.state.phase == "pending"
    assert "no node is live" in job.state.reason
    assert [type(order) for order in resume(job.state)] == [ins.Place]


def test_a_rank_that_fails_before_any_checkpoint_fails_the_job() -> None:
    job = Player().run().exit(1, 5)
    assert job.state.phase == "finishing"
    job.do(ev.Closed(time=2.0, of=job.order(ins.Kill))).do(ev.Closed(time=2.0, of=job.order(ins.Finish)))
    assert (job.state.phase, job.state.exit_code) == ("failed", 5)
    assert "no checkpoint" in job.state.reason


def test_a_rank_that_fails_while_others_still_start_is_judged_when_all_run() -> None:
    job = Player().place("a", "b").exit(0, 7)
    assert job.state.phase == "starting"
    job.done(ins.Load)
    assert job.state.phase == "finishing"
    assert job.state.ending is not None
    assert job.state.ending.exit_code == 7


def test_pods_that_cannot_be_reached_at_the_end_are_fenced_first() -> None:
    job = Player(on_failure="fail").run().lose("a")
    job.do(ev.Closed(time=2.0, of=job.order(ins.Kill), unreached=(0,)))
    job.do(ev.Closed(time=2.0, of=job.order(ins.Finish), unreached=(0,)))
    assert job.state.phase == "finishing"
    assert [(t.pod, t.node) for t in job.order(ins.Fence).targets] == [(0, "a")]
    job.done(ins.Fence)
    assert job.state.phase == "failed"
    assert "logs and results on a could not be collected" in job.state.reason


def test_a_hang_counts_as_a_failure_unless_the_pods_are_meant_to_stand_still() -> None:
    job = Player().run().save()
    job.do(ev.CheckpointAsked(time=1.0)).do(ev.Hung(time=2.0, incarnation=1, reason="nothing moves"))
    assert job.state.phase == "checkpointing"
    job.captured().stored().do(ev.Hung(time=2.0, incarnation=1, reason="nothing moves"))
    assert job.state.phase == "restoring"
    assert job.state.base == "j-0002"


def test_news_of_an_older_incarnation_change_nothing() -> None:
    job = Player().run().save().lose("a").place("b", "c").done(ins.Fence, ins.Load, ins.Release)
    before = job.state
    for event in (
        ev.PodExited(time=9.0, pod=0, incarnation=1, code=1),
        ev.PodFailed(time=9.0, pod=0, incarnation=1, reason="gone"),
        ev.Hung(time=9.0, incarnation=1, reason="still"),
        ev.Done(time=9.0, of=ins.Load(incarnation=1)),
        ev.NodeLost(time=9.0, node="a"),
    ):
        assert job.do(event).state is before


def test_a_restore_of_an_older_checkpoint_begins_a_line_of_its_own() -> None:
    job = Player().run().save().save()
    job.do(ev.RestoreAsked(time=1.0, checkpoint="j-0001")).place("a", "b").done(ins.Fence, ins.Load, ins.Release)
    assert (job.state.latest, job.state.base) == ("j-0002", "j-0001")
    job.lose("a")
    assert job.state.bringup is not None
    assert job.state.bringup.checkpoint == "j-0001", "the newer one is of the line that was left"


def test_what_cannot_be_done_now_is_refused_with_the_reason() -> None:
    job = Player()
    job.refused(ev.CheckpointAsked(time=1.0), "job train is pending: cannot checkpoint")
    job.run()
    job.refused(ev.RestoreAsked(time=1.0), "has no checkpoint")
    job.do(ev.ParkAsked(time=1.0))
    job.do(ev.CheckpointAsked(time=1.0))
    job.do(ev.MoveAsked(time=1.0, nodes=("c",)))
    job.refused(ev.ParkAsked(time=1.0), "is to move")


def test_the_same_request_changes_nothing() -> None:
    job = Player().run().do(ev.CheckpointAsked(time=1.0, request="r"))
    before = job.state
    assert job.do(ev.CheckpointAsked(time=2.0, request="r")).state is before
    assert before.requests[-1].attempt == 1


def test_a_stop_ends_what_runs_and_a_second_one_hurries() -> None:
    job = Player().run().do(ev.StopAsked(time=1.0, grace_seconds=60.0))
    assert job.order(ins.Kill).grace_seconds == 60.0
    job.do(ev.StopAsked(time=2.0))
    assert job.order(ins.Kill).grace_seconds == 0.0
    job.do(ev.Closed(time=3.0, of=job.order(ins.Kill))).do(ev.Closed(time=3.0, of=job.order(ins.Finish)))
    assert job.state.phase == "stopped"


def test_a_stop_with_a_checkpoint_ends_only_after_the_commit() -> None:
    job = Player().run().do(ev.StopAsked(time=1.0, checkpoint=True)).captured().stored()
    assert job.state.phase == "stopping"
    job.done(ins.Fence)
    assert (job.state.phase, job.state.latest) == ("stopped", "j-0001")
    job.do(ev.RestoreAsked(time=2.0))
    assert job.state.phase == "restoring"


def test_an_attempt_that_waits_for_another_begins_when_that_has_ended() -> None:
    job = Player().run().do(ev.CheckpointAsked(time=1.0)).do(ev.ParkAsked(time=1.0, request="p"))
    assert job.state.requests[-1].attempt == 2
    job.captured().stored()
    assert (job.state.phase, job.state.attempts) == ("parking", 2)
    assert job.records(ins.Commit)
    assert job.records(ins.CreateStart)


def test_whoever_waits_for_a_queued_attempt_is_told_when_it_never_comes() -> None:
    job = Player().run().do(ev.CheckpointAsked(time=1.0)).do(ev.CheckpointAsked(time=1.0)).exit(0, 1)
    assert job.state.phase == "finishing"
    assert [(a.number, a.step) for a in job.state.past] == [(1, "aborted"), (2, "aborted")]


def test_the_heartbeat_counts_from_the_end_of_the_last_and_backs_off() -> None:
    job = Player(checkpoint_every_seconds=10.0).run()
    alarm = job.order(ins.Alarm)
    assert (alarm.what, alarm.at) == ("heartbeat", job.now + 10)
    job.do(ev.AlarmRang(time=alarm.at, of=alarm))
    assert job.state.phase == "checkpointing"
    job.now = alarm.at
    job.fail(ins.Prepare).done(ins.Settle)
    assert job.order(ins.Alarm).at == job.now + 20
    policy = HeartbeatPolicy()
    due = [policy.next_due(JobPolicy(checkpoint_every_seconds=10), end=0, failed_attempts=n) for n in range(6)]
    assert due == [10, 20, 40, 80, 80, 80]
    assert policy.next_due(JobPolicy(), end=5, failed_attempts=0) == 0


@pytest.mark.parametrize(
    ("policy", "given", "action"),
    [
        (JobPolicy(), {"kind": "rank", "has_checkpoint": True}, "restore"),
        (JobPolicy(), {"kind": "rank", "has_checkpoint": False}, "fail"),
        (JobPolicy(), {"kind": "node", "has_checkpoint": False}, "again"),
        (JobPolicy(), {"kind": "node", "has_checkpoint": True, "in_row": 99}, "restore"),
        (JobPolicy(), {"kind": "rank", "has_checkpoint": True, "in_row": 3}, "fail"),
        (JobPolicy(max_restarts=2), {"kind": "node", "has_checkpoint": True, "restarts": 1}, "restore"),
        (JobPolicy(max_restarts=2), {"kind": "node", "has_checkpoint": True, "restarts": 2}, "fail"),
        (JobPolicy(on_failure="fail"), {"kind": "node", "has_checkpoint": True}, "fail"),
    ],
)
def test_the_failure_policy(policy: JobPolicy, given: dict[str, Any], action: str) -> None:
    verdict = FailurePolicy().decide(policy, **{"restarts": 0, "in_row": 0, **given})
    assert verdict.action == action
    assert bool(verdict.why) == (action == "fail")


def test_a_job_that_somebody_else_brings_back_says_so() -> None:
    policy = JobPolicy(on_failure="fail", keeper="its Ray driver")
    verdict = FailurePolicy().decide(policy, kind="node", restarts=0, in_row=0, has_checkpoint=True)
    assert (verdict.action, verdict.why) == ("fail", "bringing it back is left to its Ray driver")


# -- the machine as a whole


def test_every_transition_has_failpoints_a_kind_and_a_sentence() -> None:
    declared = failpoints.declared()
    for (start, finish), rule in TABLE.items():
        for side in ("before", "after"):
            assert f"{failpoint(start, finish)}.{side}" in declared
        assert re.fullmatch(r"[a-z]+\.[a-z]+", rule.kind)
        assert len(rule.sentence) > 3
    assert "job.running-checkpointing.before" in declared
    assert "job.attempt.freezing-sealing.after" in declared
    assert len({failpoint(*key) for key in TABLE}) == len(TABLE), "two transitions share a failpoint"


def test_every_phase_can_be_reached_and_left() -> None:
    phases = {key for key in TABLE if "." not in key[1]}
    assert {finish for _, finish in phases} == set(PHASES)
    assert {start for start, _ in phases} >= set(PHASES)


def test_an_impossible_event_prints_the_whole_story() -> None:
    job = Player().run().do(ev.CheckpointAsked(time=1.0))
    of = ins.Freeze(incarnation=1, attempt=7)
    with pytest.raises(IllegalEvent) as caught:
        job.machine.consider(ev.Done(time=2.0, of=of))
    story = str(caught.value)
    for words in ("nothing like it was ever ordered", "stimulus Placed", "pending → starting", "CheckpointAsked"):
        assert words in story


def test_a_state_that_breaks_an_invariant_is_named() -> None:
    state = Player().run().state
    with pytest.raises(IllegalTransition, match="checkpointing with no attempt"):
        validate(msgspec.structs.replace(state, phase="checkpointing"))


def test_a_state_survives_etcd_and_gives_the_same_orders() -> None:
    job = Player().run().do(ev.MoveAsked(time=1.0, nodes=("c",))).done(ins.Prepare)
    read = decode(encode(job.state))
    assert read == job.state
    assert resume(read) == resume(job.state)


def test_a_state_of_a_newer_version_is_refused() -> None:
    data = encode(Player().state).replace(b'"version":1', b'"version":99')
    with pytest.raises(NewerVersion, match="version 99"):
        decode(data)


def test_policies_can_be_replaced() -> None:
    patient = Policies(failure=FailurePolicy(max_in_row=0))
    state, _ = new_job(job="j", name="n", owner="", pods=1, policy=JobPolicy(), now=0.0, policies=patient)
    assert Machine(state, patient).policies.failure.max_in_row == 0
