"""The coordinator's pure parts: counters, exit codes, journals, specs, what hangs, what is told."""

from __future__ import annotations

import struct
import zlib

import pytest

from moorage.coordinator import journal_export
from moorage.coordinator.checkpoints import Part, device_parts, kind_of
from moorage.coordinator.counters import next_range
from moorage.coordinator.job import exit_of
from moorage.coordinator.machine import JobPolicy, JobState
from moorage.coordinator.machine.state import checkpoint_id, job_of
from moorage.coordinator.submit import complete, new_id, policy_of
from moorage.coordinator.telemetry import Telemetry
from moorage.errors import CorruptData, UsageError
from moorage.v1 import types_pb2
from moorage.v1.types_pb2 import JobSpec, PodStatus, RankStatus


def test_ranges_follow_each_other_and_pass_over_what_is_taken() -> None:
    assert next_range(0, 3, [], 100) == 1
    assert next_range(10, 3, [(12, 4)], 100) == 16
    assert next_range(98, 3, [(1, 5)], 100) == 6
    assert next_range(10, 1, [(11, 1), (12, 1)], 100) == 13


def _status(*codes: int, pod_code: int = 0) -> PodStatus:
    ranks = [RankStatus(rank=n, exited=True, exit_code=code) for n, code in enumerate(codes)]
    return PodStatus(pod=1, ranks=ranks, exit_code=pod_code)


def test_the_exit_code_is_that_of_the_rank_that_failed_first() -> None:
    assert exit_of(_status(0, 0)) == (0, "")
    assert exit_of(_status(137, 3, pod_code=3)) == (3, "rank 1")
    assert exit_of(_status(137, 3)) == (3, "rank 1"), "a rank that was killed followed the one that failed"
    assert exit_of(_status(139)) == (139, "rank 0")
    assert exit_of(_status(pod_code=7)) == (7, "pod 1")


def test_a_checkpoint_names_its_job() -> None:
    assert job_of(checkpoint_id("jabc", 12)) == "jabc"
    assert checkpoint_id("jabc", 12) == "jabc-0012"
    assert job_of("jabc") == ""
    assert job_of("jabc-x") == ""


def test_the_same_request_gets_the_same_id_and_others_do_not() -> None:
    assert new_id("one") == new_id("one") != new_id("two")
    assert new_id() != new_id()


def test_a_spec_is_completed_and_left_untouched() -> None:
    spec = JobSpec(command=["train"])
    full = complete(spec, "user:ann", "j1")
    assert (full.name, full.owner, full.pods, full.ranks_per_pod) == ("j1", "user:ann", 1, 1)
    assert spec.name == ""
    policy = policy_of(full)
    assert (policy.keep_last, policy.attempt_deadline_seconds, policy.on_failure) == (3, 120.0, "restore")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (JobSpec(), "no command"),
        (JobSpec(command=["x"], name="Bad name"), "cannot be used"),
        (JobSpec(command=["x"], pods=1 << 20), "too many"),
        (JobSpec(command=["x"], working_directory="here"), "not absolute"),
        (JobSpec(command=["x"], mounts=[types_pb2.Mount(source="a", destination="/b")]), "not absolute"),
        (JobSpec(command=["x"], publish=[types_pb2.Publish(host_port=1, pod=3)]), "pod 3 of 1"),
        (JobSpec(command=["x"], policy=types_pb2.Policy(hang_seconds=-1)), "hang_seconds is -1"),
    ],
)
def test_a_spec_that_cannot_run_is_refused_with_the_reason(spec: JobSpec, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        complete(spec, "user:ann", "j1")


@pytest.mark.parametrize(
    "place",
    ["/.moorage", "//.moorage/", "/x/../.moorage/init", "/.moorage-gpu", "/", "//", "/..", "/proc/1", "/sys", "/dev/"],
)
def test_nothing_is_mounted_over_what_makes_a_pod(place: str) -> None:
    spec = JobSpec(command=["id"], mounts=[types_pb2.Mount(source="/home/ann", destination=place)])
    with pytest.raises(UsageError, match="nothing can be mounted"):
        complete(spec, "user:ann", "j1")


def test_a_mount_may_lie_anywhere_else() -> None:
    places = {"/data/": "/data", "//x/./y": "/x/y", "/dev/infiniband": "/dev/infiniband", "/process": "/process"}
    spec = JobSpec(command=["id"], mounts=[types_pb2.Mount(source="/home/ann", destination=place) for place in places])
    assert [mount.destination for mount in complete(spec, "user:ann", "j1").mounts] == list(places.values())


# -- journals


def frame(rank: int, kind: int, payload: bytes, sequence: int = 1) -> bytes:
    """A frame as the pod's init writes it."""
    body = struct.pack("<BBHIQQ", kind, 0, len(payload), rank, sequence, 5_000_000_000) + payload
    return struct.pack("<II", 0x31474F4D, zlib.crc32(body)) + body


def export(frames: bytes, start: int = 0) -> bytes:
    """A journal as the worker exports it."""
    return struct.pack("<8sQQQ", b"MOGJRNL1", start, start + len(frames), 5) + b"index" + frames


def test_neighbours_of_one_stream_are_one_chunk() -> None:
    data = export(frame(0, 1, b"a\n") + frame(0, 1, b"b\n") + frame(1, 1, b"c\n") + frame(1, 2, b"d\n"))
    found = list(journal_export.chunks(data, pod=4, rank=-1, offset=0))
    assert [(c.rank, c.is_stderr, c.data) for c in found] == [
        (0, False, b"a\nb\n"),
        (1, False, b"c\n"),
        (1, True, b"d\n"),
    ]
    assert found[-1].offset == journal_export.bounds(data)[1]
    assert {c.pod for c in found} == {4}
    assert found[0].time == 5.0


def test_reading_goes_on_behind_a_chunk() -> None:
    data = export(frame(0, 1, b"a\n") + frame(1, 1, b"b\n"), start=1000)
    first, second = journal_export.chunks(data, pod=0, rank=-1, offset=1000)
    (again,) = journal_export.chunks(data, pod=0, rank=-1, offset=first.offset)
    assert again == second
    assert not list(journal_export.chunks(data, pod=0, rank=-1, offset=second.offset))


def test_what_is_no_longer_kept_is_told() -> None:
    data = export(frame(0, 1, b"a\n"), start=1000)
    (chunk,) = journal_export.chunks(data, pod=0, rank=-1, offset=0)
    assert chunk.truncated


def test_one_rank_is_picked_and_what_is_cut_short_is_not_shown() -> None:
    whole = frame(0, 1, b"a\n") + frame(1, 1, b"b\n") + frame(1, 1, b"cut short")
    (chunk,) = journal_export.chunks(export(whole)[:-3], pod=0, rank=1, offset=0)
    assert chunk.data == b"b\n"
    with pytest.raises(CorruptData):
        list(journal_export.chunks(b"something else, and long enough", pod=0, rank=1, offset=0))


# -- hanging


def _telemetry(*samples: tuple[float, int, float, int]) -> Telemetry:
    telemetry = Telemetry()
    for now, pod, cpu, output in samples:
        status = PodStatus(pod=pod, incarnation=1, phase="running", cpu_seconds=cpu, output_bytes=output)
        telemetry.see(status, now)
    return telemetry


def _state(pods: int = 2, exits: dict[int, int] | None = None) -> JobState:
    policy = JobPolicy(hang_seconds=10)
    return JobState(job="j", name="j", owner="", pods=pods, policy=policy, exits=exits or {})


def test_a_job_hangs_when_all_its_pods_stand_still() -> None:
    quiet = _telemetry((0, 0, 5, 10), (0, 1, 5, 10), (11, 0, 5.01, 10), (12, 1, 5, 10))
    assert quiet.hangs(_state(), _state().policy) == 11


def test_one_busy_pod_is_enough() -> None:
    busy = _telemetry((0, 0, 5, 10), (0, 1, 5, 10), (11, 0, 9, 10), (12, 1, 5, 10))
    assert busy.hangs(_state(), _state().policy) == 0


def test_output_is_a_sign_of_life() -> None:
    talks = _telemetry((0, 0, 5, 10), (11, 0, 5, 11))
    assert talks.hangs(_state(1), _state().policy) == 0


def test_without_news_nothing_is_concluded() -> None:
    silent = _telemetry((0, 0, 5, 10), (11, 0, 5, 10))
    assert silent.hangs(_state(), _state().policy) == 0, "pod 1 was never heard of"


def test_a_pod_that_has_finished_does_not_hang() -> None:
    done = _telemetry((0, 0, 5, 10), (0, 1, 5, 10), (11, 0, 5, 10))
    assert done.hangs(_state(exits={1: 0}), _state().policy) == 11


def test_kinds_are_told_in_a_users_words() -> None:
    assert kind_of("images", "pages-1.img") == "process memory"
    assert kind_of("images", "core-1.img") == "process state"
    assert kind_of("images", "tcp-stream-2f.img") == kind_of("images", "netdev-8.img") == "network"
    assert kind_of("layer", "tree") == "files"
    assert kind_of("journal", "journal") == "logs"


def test_device_memory_is_told_by_what_it_cost() -> None:
    whole = Part(0, kind_of("memory", "1/1"), 100, 44, 3)
    assert device_parts(whole, {}) == [whole], "an earlier release's"
    gpu = {"bytes_new": 30, "bytes_shared": 10, "bytes_same": 60, "driver_bytes": 7, "processes": [[1, 2, "x"]]}
    assert device_parts(whole, gpu) == [
        Part(0, "device memory, new", 30, 33, 3),
        Part(0, "device memory, as in earlier checkpoints", 10, 11, 3),
        Part(0, "device memory, zeros and repeated", 60, 0, 3),
        Part(0, "CUDA context (within process memory)", 7, 0, 1),
    ]
