"""What etcd holds of a drain: the order, and a key for each job that it moves. Unknown fields are ignored."""

from __future__ import annotations

import msgspec

from moorage.coordinator.drain.model import OVER, SETTLED, DrainPhase, Homeless, MoveState


class DrainOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One drain. ``deadline``: seconds since the epoch, 0: none. ``wave`` counts from 1; 0: not begun."""

    id: str
    owner: str
    trace: str = ""
    nodes: tuple[str, ...]
    parallel: int = 1
    homeless: Homeless = "refuse"
    deadline: float = 0.0
    created: float
    ended: float = 0.0
    phase: DrainPhase = "running"
    wave: int = 0
    reason: str = ""

    @property
    def waves(self) -> tuple[tuple[str, ...], ...]:
        return tuple(self.nodes[at : at + self.parallel] for at in range(0, len(self.nodes), self.parallel))

    @property
    def over(self) -> bool:
        return self.phase in OVER


class MoveRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One job of a drain. ``target`` empty: it has no other place, or ends by itself (``ending``)."""

    job: str
    name: str
    wave: int
    source: tuple[str, ...]
    target: tuple[str, ...] = ()
    ending: bool = False
    state: MoveState = "waiting"
    reason: str = ""
    choices: tuple[str, ...] = ()
    unplaced: bool = False  # it was to move and found no place: it is parked
    tries: int = 0
    began: float = 0.0
    seconds: float = 0.0

    @property
    def settled(self) -> bool:
        return self.state in SETTLED
