"""The life of a pod on its node, as a table. Pure: nothing here reads a clock, a process or a file.

::

    starting ──STARTED──▶ running ──PREPARED──▶ preparing ──FROZEN──▶ frozen ──SEALED──▶ sealed ──CAPTURED──▶ captured
        │                  ▲   ▲                    │                   │                  │                    │
     RESTORED              │   └───────────────────THAWED (outcome resume or abort, or ResumePod)───────────────┘
        ▼                  │
    restored ──RELEASED────┘

From every living phase ENDED leads to ``exited`` (the pod's init has exited), BROKE to ``failed`` and KILLED to
``killed``. ``exited``, ``failed`` and ``killed`` have no process of the pod left; they are left only by removing it.

Invariants:

* a pod has a process that is not frozen only in ``starting``, ``running`` and ``preparing``; a guard whose node lost
  its lease may freeze it there, never thaw it elsewhere;
* the phases from ``preparing`` to ``captured`` belong to exactly one attempt.
"""

from __future__ import annotations

import enum
from typing import Final, Literal

from moorage.errors import Conflict

Phase = Literal[
    "starting",
    "running",
    "preparing",
    "frozen",
    "sealed",
    "captured",
    "restored",
    "exited",
    "killed",
    "failed",
]


class Change(enum.Enum):
    """What happened to the pod."""

    STARTED = "started"
    RESTORED = "restored"
    RELEASED = "released"
    PREPARED = "prepared"
    FROZEN = "frozen"
    SEALED = "sealed"
    CAPTURED = "captured"
    THAWED = "thawed"
    ENDED = "ended"
    BROKE = "broke"
    KILLED = "killed"


ATTEMPT_PHASES: Final[tuple[Phase, ...]] = ("preparing", "frozen", "sealed", "captured")
LIVING_PHASES: Final[tuple[Phase, ...]] = ("starting", "running", *ATTEMPT_PHASES, "restored")
GONE_PHASES: Final[tuple[Phase, ...]] = ("exited", "killed", "failed")

TRANSITIONS: Final[dict[tuple[Phase, Change], Phase]] = {
    ("starting", Change.STARTED): "running",
    ("starting", Change.RESTORED): "restored",
    ("restored", Change.RELEASED): "running",
    ("running", Change.PREPARED): "preparing",
    ("preparing", Change.FROZEN): "frozen",
    ("frozen", Change.SEALED): "sealed",
    ("sealed", Change.CAPTURED): "captured",
    **{(phase, Change.THAWED): "running" for phase in ATTEMPT_PHASES},
    **{(phase, Change.ENDED): "exited" for phase in LIVING_PHASES},
    **{(phase, Change.BROKE): "failed" for phase in LIVING_PHASES},
    **{(phase, Change.KILLED): "killed" for phase in (*LIVING_PHASES, *GONE_PHASES)},
}


def follow(phase: Phase, change: Change) -> Phase:
    """The phase after ``change``. Raises `Conflict` where the table has no entry."""
    try:
        return TRANSITIONS[phase, change]
    except KeyError:
        raise Conflict(f"a pod that is {phase} cannot become {change.value}") from None


#: The orders of an attempt: the phase each one starts from, and the phase in which it is done.
STEPS: Final[dict[str, tuple[Phase, Phase]]] = {
    "prepare": ("running", "preparing"),
    "freeze": ("preparing", "frozen"),
    "seal": ("frozen", "sealed"),
    "capture": ("sealed", "captured"),
}


def step_done(step: str, phase: Phase, *, order_attempt: int, pod_attempt: int, last_attempt: int) -> bool:
    """Whether the order ``step`` of ``order_attempt`` was already carried out, so that it only needs its answer again.

    ``pod_attempt`` is the attempt under way in the pod (0: none), ``last_attempt`` the newest one it took part in.
    Returns False when the step is to be done now. Raises `Conflict`, naming the cause, when it can be neither.
    """
    before, after = STEPS[step]
    if phase in GONE_PHASES:
        return True  # a pod without processes has nothing to freeze; what it votes is decided at capture
    if step == "prepare" and phase == "running":
        if order_attempt > last_attempt:
            return False
        raise Conflict(f"attempt {order_attempt} is over on this pod", f"its newest attempt was {last_attempt}")
    if pod_attempt != order_attempt:
        under_way = f"attempt {pod_attempt} is under way" if pod_attempt else f"the pod is {phase}, in no attempt"
        raise Conflict(f"the order to {step} belongs to attempt {order_attempt}, but {under_way}")
    if phase == before:
        return False
    if ATTEMPT_PHASES.index(phase) >= ATTEMPT_PHASES.index(after):
        return True
    raise Conflict(f"a pod that is {phase} cannot {step}", f"it must be {before} first")
