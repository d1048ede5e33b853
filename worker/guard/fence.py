"""When a pod must stand still, may run on, or must die. Pure.

The worker promises the guard a deadline with each renewal of its lease. Once it has passed, the rest of the cluster may
take the node for dead and start the pod elsewhere. From then on the pod is *fenced*: frozen and cut off the network. It
is freed only when both hold:

* a worker has given a new deadline that has not passed;
* etcd, asked after that deadline was given, names the guard's own incarnation as the job's.

The order matters: an answer from before the new deadline says nothing about what was decided between the two. If etcd
names a higher incarnation, or does not know the job any more, the pod is dead already as far as everybody else is
concerned, and the guard kills it, whether or not a worker is there.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class State(enum.Enum):
    """OPEN: the deadline lies ahead. FENCED: it has passed. GONE: the pod has no process, and will not have one."""

    OPEN = "open"
    FENCED = "fenced"
    GONE = "gone"


class Action(enum.Enum):
    """What the guard has to do."""

    FENCE = "fence"  # freeze the pod and cut its network; the state becomes FENCED
    READ = "read"  # ask etcd for the job's incarnation, unless a question is under way
    LIFT = "lift"  # restore the network, thaw unless ordered to be frozen; the state becomes OPEN
    KILL = "kill"  # end every process of the pod; the state becomes GONE


class Deadline(NamedTuple):
    """``until``: when the promise ends. ``since``: when the guard first had a promise that has been unbroken since.
    ``lapsed``: there was a time without one, and the pod was not freed since."""

    until: float
    since: float
    lapsed: bool = False


class Read(NamedTuple):
    """An answer of etcd: the job's incarnation (0: the job is not there, or no pod of it may run), and when the
    question was sent."""

    incarnation: int
    asked: float


def renew(deadline: Deadline, until: float, now: float) -> Deadline:
    """The promise after a message of the worker that it holds ``until``. It never becomes shorter."""
    if until <= deadline.until:
        return deadline
    if now < deadline.until:
        return deadline._replace(until=until)
    # Even if this guard has not noticed yet (its machine slept): the pod has to be fenced and confirmed first.
    return Deadline(until, since=now, lapsed=True)


def freed(deadline: Deadline) -> Deadline:
    """The promise after the pod was freed under it."""
    return deadline._replace(lapsed=False)


def decide(state: State, now: float, deadline: Deadline, read: Read | None, own: int) -> tuple[Action, ...]:
    """What to do. ``own`` is the pod's incarnation, ``read`` the newest answer since the pod was fenced."""
    if state is State.GONE:
        return ()
    if state is State.OPEN:
        return (Action.FENCE, Action.READ) if now >= deadline.until or deadline.lapsed else ()
    if read is None:
        return (Action.READ,)
    if read.incarnation > own or read.incarnation == 0:
        return (Action.KILL,)
    if read.incarnation == own and now < deadline.until and read.asked > deadline.since:
        return (Action.LIFT,)
    # Its own, but nobody promises anything; or an answer older than the promise; or a number that is lower than one
    # that was valid, which only an etcd restored from a backup gives: wait for another answer, standing still.
    return (Action.READ,)
