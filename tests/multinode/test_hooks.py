"""Each event of a job's checkpoints and restores fires once, as signal, line and callback, whatever dies in between."""

from __future__ import annotations

import contextlib
import runpy
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from moorage.coordinator.client import Job
from moorage.errors import MoorageError
from moorage.hooks import KINDS, parse
from tests.support.cluster import DevCluster
from tests.support.worker_rig import wait_for

pytestmark = pytest.mark.root

PROGRAM = Path(__file__).resolve().parents[1] / "programs" / "hooked.py"
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "outside_effects"
SIGNALS = dict(zip(KINDS, ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGWINCH"), strict=True))
#: Where a process dies within a checkpoint, and whose.
KILLS = [
    ("worker.prepare.record.after", "node-1"),
    ("worker.prepare.hooks.before", "node-1"),
    ("worker.prepare.hooks.after", "node-1"),
    ("job.attempt.preparing-freezing.after", "coordinator"),
    ("worker.vote.captured.after", "node-1"),
    ("worker.outcome.hooks.before", "node-1"),
    ("worker.outcome.hooks.after", "node-1"),
    ("worker.outcome.thaw.after", "node-1"),
]
RESTORE_KILLS = [
    ("worker.restore.layers.after", ""),
    ("worker.release.hooks.before", ""),
    ("worker.release.hooks.after", ""),
    ("worker.release.thaw.after", ""),
    ("job.bringup.loading-releasing.after", "coordinator"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    with DevCluster(nodes=2, lease_seconds=15) as made:
        yield made


class Told:
    """The live file into which the job says what it was told."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def lines(self) -> list[str]:
        text = self._path.read_text() if self._path.exists() else ""
        return text[: text.rfind("\n") + 1].splitlines()

    def callbacks(self) -> list[tuple[str, int, int]]:
        """Kind, id and the incarnation that the process read, in order."""
        rows = [line.split() for line in self.lines if line.startswith("callback ")]
        return [(kind, int(number), int(incarnation)) for _, kind, number, incarnation in rows]

    def has(self, kind: str, number: int) -> bool:
        return (kind, number) in [(k, n) for k, n, _ in self.callbacks()]

    def until(self, kind: str, number: int) -> None:
        wait_for(lambda: self.has(kind, number), f"{kind} {number} was not told", 60)

    def all_of(self, job: Job) -> bool:
        """Whether every before has its after in the pod's own file, and the job was told just what stands there."""
        time.sleep(0.1)
        with contextlib.suppress(MoorageError):  # its worker may be away still
            written = events_of(job)
            kinds = Counter(kind for kind, _ in written)
            paired = kinds["before-checkpoint"] == kinds["after-checkpoint"]
            return paired and written == [(kind, number) for kind, number, _ in self.callbacks()]
        return False

    def settle(self) -> None:
        """As many signals as callbacks, of each kind."""

        def equal() -> bool:
            signals = Counter(line.split()[1] for line in self.lines if line.startswith("signal "))
            calls = Counter(SIGNALS[kind] for kind, _, _ in self.callbacks())
            return signals == calls

        wait_for(equal, "signals and callbacks differ", 30)


@pytest.fixture
def told() -> Iterator[Told]:
    folder = Path(tempfile.mkdtemp(prefix="moorage-test-", dir="/var/tmp"))
    yield Told(folder / "told")
    shutil.rmtree(folder)


def start(cluster: DevCluster, told: Told) -> Job:
    folder = told._path.parent
    job = cluster.client().run(
        [sys.executable, str(PROGRAM), str(told._path)],
        name=f"hooked-{folder.name.rpartition('-')[2].replace('_', '-').strip('-')}",
        working_directory="/tmp",
        mounts=[f"{folder}:{folder}"],
        env={"MOORAGE_TEST_SIGNALS": ",".join(SIGNALS.values())},
        hooks=SIGNALS,
        nodes=["node-1", "node-2"],
    )
    wait_for(lambda: told.lines or job.status().over, "the job did not start", 60)
    assert told.lines, b"".join(line.data for line in job.logs()).decode() + job.status().reason
    return job


def events_of(job: Job) -> list[tuple[str, int]]:
    """What the pod's own file says."""
    text = bytearray()
    assert job.exec(["cat", "/run/moorage/events"], output=lambda data, _: text.extend(data)) == 0
    found = [parse(line) for line in text.decode().splitlines()]
    assert all(event is not None for event in found)
    return [(event.kind, event.id) for event in found if event]


def test_every_event_fires_once_although_processes_die(cluster: DevCluster, told: Told) -> None:
    job = start(cluster, told)
    assert told.lines[0] == "start 1"
    for failpoint, role in KILLS:
        cluster.arm(failpoint, "kill", role=role)
        with contextlib.suppress(MoorageError):  # it may be aborted: its after says so
            job.checkpoint()
        wait_for(lambda: not cluster.armed(), f"{failpoint} was not reached", 60)
        wait_for(lambda: told.all_of(job), f"{failpoint}: not all was told", 60)
    # One that is refused in the middle, by an error.
    cluster.arm("worker.capture.dump.before", "error no")
    with pytest.raises(MoorageError):
        job.checkpoint()
    wait_for(lambda: told.all_of(job), "not all was told", 60)
    told.settle()
    assert job.status().incarnation == 1, "the job was restored, and nothing was shown"

    # An attempt that ended before the pod heard of it has neither; every other one has both, once, in this order.
    calls = [(kind, number) for kind, number, _ in told.callbacks()]
    attempts = list(dict.fromkeys(number for _, number in calls))
    assert calls == [(kind, n) for n in attempts for kind in ("before-checkpoint", "after-checkpoint")]
    assert len(attempts) >= len(KILLS) - 2

    # Restores: the copy hears that it is one, and which incarnation it belongs to.
    before = len(calls)
    checkpoint = job.checkpoint()
    for failpoint, role in RESTORE_KILLS:
        cluster.arm(failpoint, "kill", role=role)
        job.restore(checkpoint)
        wait_for(lambda: not cluster.armed(), f"{failpoint} was not reached", 60)
        told.until("after-restore", job.status().incarnation)
    told.settle()
    new = [call for call in told.callbacks()[before:] if call[0].endswith("restore")]
    assert max(Counter(new).values()) == 1
    assert all(number == incarnation for _, number, incarnation in new), new
    # Each copy hears both, the first one first; a copy that never came to run heard nothing.
    ids = list(dict.fromkeys(number for _, number, _ in new))
    assert [(kind, number) for kind, number, _ in new] == [
        (kind, number) for number in ids for kind in ("before-restore", "after-restore")
    ]
    assert job.status().incarnation == ids[-1]
    assert events_of(job)[-2:] == [("before-restore", ids[-1]), ("after-restore", ids[-1])]
    assert [line for line in told.lines if line.startswith("start")] == ["start 1"]
    job.stop(grace=0)


def test_calls_to_the_outside_are_made_again_and_booked_once(cluster: DevCluster, tmp_path: Path) -> None:
    ledger = runpy.run_path(str(EXAMPLE / "ledger.py"))["Ledger"]((cluster.record.gateway, 0))
    threading.Thread(target=ledger.serve_forever, daemon=True).start()
    try:
        url = f"http://{cluster.record.gateway}:{ledger.server_port}"
        steps = 200
        command = [sys.executable, "-u", str(EXAMPLE / "job.py"), url, str(steps)]
        job = cluster.client().run(command, name="books", working_directory=str(tmp_path))
        wait_for(lambda: len(ledger.booked) >= 5, "nothing is booked", 60)
        checkpoint = job.checkpoint()
        reached = len(ledger.booked)
        wait_for(lambda: len(ledger.booked) >= reached + 5, "it does not go on", 60)
        job.restore(checkpoint)
        info = job.wait(timeout=120)
        assert (info.phase, info.exit_code) == ("finished", 0)
        # Steps after the checkpoint were called for twice, and each of all is booked once.
        assert len(ledger.calls) > len(ledger.booked) == steps
        assert sum(ledger.booked.values()) == steps * (steps + 1) // 2
        said = b"".join(line.data for line in job.logs()).decode()
        assert f"incarnation 2: going on from {checkpoint.id}" in said
    finally:
        ledger.shutdown()
        ledger.server_close()
