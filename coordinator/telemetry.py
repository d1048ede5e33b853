"""What is known of a job's pods from their workers. Kept in memory: it is read again after a restart."""

from __future__ import annotations

import time

from moorage.coordinator.machine.policies import HangPolicy, Sample
from moorage.coordinator.machine.state import JobPolicy, JobState
from moorage.v1.types_pb2 import PodStatus


class Telemetry:
    """The newest status of each pod, and when it last did something."""

    def __init__(self, policy: HangPolicy | None = None) -> None:
        self.pods: dict[int, PodStatus] = {}
        self._policy = policy or HangPolicy()
        self._active: dict[int, Sample] = {}
        self._newest: dict[int, Sample] = {}

    def see(self, status: PodStatus, now: float | None = None) -> None:
        """Take in a status. ``now``: seconds, of any clock that does not jump."""
        old = self.pods.get(status.pod)
        self.pods[status.pod] = status
        new = Sample(time.monotonic() if now is None else now, status.cpu_seconds, status.output_bytes)
        active = self._active.get(status.pod)
        same = old is not None and (old.incarnation, old.phase) == (status.incarnation, status.phase)
        if active is None or not same or self._policy.moved(active, new):
            self._active[status.pod] = new
        self._newest[status.pod] = new

    def restart(self) -> None:
        """The pods stood still on purpose: count from now on."""
        self._active.clear()
        self._newest.clear()

    def hangs(self, state: JobState, policy: JobPolicy) -> float:
        """How long the job has hung, in seconds; 0: it does not."""
        alive = {pod for pod in range(state.pods) if pod not in state.exits}
        active = {pod: sample for pod, sample in self._active.items() if pod in alive}
        newest = {pod: sample for pod, sample in self._newest.items() if pod in alive}
        if set(active) != alive:
            return 0.0
        return self._policy.hangs(policy, active, newest)

    def of(self, incarnation: int) -> list[PodStatus]:
        """The statuses of one incarnation, by pod."""
        return [self.pods[pod] for pod in sorted(self.pods) if self.pods[pod].incarnation == incarnation]
