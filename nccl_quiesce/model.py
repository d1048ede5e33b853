"""The data of the cut: what each process counts and reports, and what it is told. Plain data in every language.

A *rank* is one process of the job. A *member* is a place in a communicator, 0 to size - 1; a process may hold several
members of one communicator. The name of a communicator is the same at all its members and never used again in the job.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import msgspec

Kind: TypeAlias = Literal["collective", "send", "receive"]
Phase: TypeAlias = Literal["cut", "drain", "open"]


class Lane(NamedTuple):
    """What is counted: one member's collectives, or its sends to, or receives from, one ``peer`` (a member)."""

    communicator: str
    member: int
    kind: Kind
    peer: int = -1

    @property
    def partner(self) -> Lane:
        """The lane at the other end of a send or receive."""
        return Lane(self.communicator, self.peer, "receive" if self.kind == "send" else "send", self.member)


class Creation(msgspec.Struct, frozen=True):
    """One member's part in making a communicator (init, split, shrink, grow).

    ``size``: how many members must take part. For a shrink these are the survivors only.
    """

    communicator: str
    member: int
    size: int


class Call(msgspec.Struct, frozen=True):
    """One call that the gate treats as a whole: an operation, an outermost group, the launch of a graph, a creation.

    ``ticket``: unique in its process, ascending in the order of entry, so also in the order of counting. ``thread``:
    the calling thread. ``lanes``: what the call adds to each count. ``destroys``: the call ends a communicator; such a
    call passes every gate. ``submits``: no NCCL call, but a thread with work for a stream that a drain order holds.
    """

    ticket: int
    thread: int
    lanes: dict[Lane, int] = {}
    creates: tuple[Creation, ...] = ()
    destroys: bool = False
    submits: bool = False


class Handle(msgspec.Struct, frozen=True):
    """A member that lives in this process. ``creating``: its creation was admitted, and the job has no result yet."""

    communicator: str
    member: int
    size: int
    state: Literal["creating", "ready", "gone"] = "ready"


class Snapshot(msgspec.Struct, frozen=True):
    """What one process reports in a round, taken at one instant after it obeyed the order of that round.

    ``admitted``: for each lane what was let in. ``held``: calls that wait at the gate. ``inside``: calls that were let
    in and have not returned. ``entering``: how many threads have come and not settled whether they are held, or may
    submit work to streams in spite of a drain order. ``handles``: all members of this process, with those that are gone
    (their counts stay). ``users``: for each communicator the thread that used it last. ``waits_for``: ranks that a
    blocked descriptor of a thread outside points to. ``moves``: a number that changes whenever anything of this report
    changes. ``undrained``: names of streams that still have work; filled only in answer to a drain order. ``exited``:
    the process ended well, and its counts are final.
    """

    attempt: int
    round: int
    rank: int
    admitted: dict[Lane, int] = {}
    held: tuple[Call, ...] = ()
    inside: tuple[Call, ...] = ()
    entering: int = 0
    handles: tuple[Handle, ...] = ()
    users: dict[str, int] = {}
    waits_for: tuple[int, ...] = ()
    moves: int = 0
    undrained: tuple[str, ...] = ()
    exited: bool = False


class Order(msgspec.Struct, frozen=True):
    """What the coordinator tells one process in one round.

    ``cut``: gates are closed. ``drain``: the same, and besides creations stand still, and no thread submits work to any
    stream (such a thread is held, as if it called), so that a dry stream stays dry; the answer names streams that are
    not. ``open``: the attempt is over, gates are open.

    ``admit``: tickets that go on: held calls; creations that stand still; a thread that is held with work for a stream
    may submit any until the next order, and is reported as entering until then.

    ``needs``: lanes on which the process was behind when this was decided, with what they need. Until the next order,
    as long as a count is below, calls on such a lane go on without being named, and, with ``push``, any other calls of
    the threads that used these communicators last.
    """

    attempt: int
    round: int
    phase: Phase
    admit: tuple[int, ...] = ()
    needs: dict[Lane, int] = {}
    push: bool = False


class Short(msgspec.Struct, frozen=True):
    """A rank that is behind: it was admitted to ``count`` operations of the lane, and ``need`` have been issued."""

    rank: int
    lane: Lane
    count: int
    need: int

    def __str__(self) -> str:
        lane = self.lane
        what = {"collective": "collectives", "send": f"sends to {lane.peer}", "receive": f"receives from {lane.peer}"}
        return (
            f"rank {self.rank} is behind on communicator {lane.communicator} as member {lane.member}: "
            f"{self.count} of {self.need} {what[lane.kind]}"
        )


class Plan(msgspec.Struct, frozen=True):
    """What follows an accepted cut. All names sorted, so every process works in the same order.

    ``rebuild``: communicators that all members have, destroyed at once and made anew in this order. ``again``:
    creations that no member has finished; they are taken back and issued again under fresh ids when the gates open.
    ``widowed``: communicators that some members have destroyed and others not; they are not rebuilt, and their handles
    answer queries, destroy and abort only.
    """

    rebuild: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    widowed: tuple[str, ...] = ()


class Wait(msgspec.Struct, frozen=True):
    """Ask again, in the same phase. ``needs``: for each rank that is behind the lanes and what they need.

    ``push``: whether a rank that is behind may go on with what else it holds.
    """

    needs: dict[int, dict[Lane, int]] = {}
    push: bool = False


class Admit(msgspec.Struct, frozen=True):
    """The same, and let these held calls go on: for each rank its tickets. ``slide``: one that nobody owes."""

    orders: dict[int, tuple[int, ...]]
    slide: bool = False
    needs: dict[int, dict[Lane, int]] = {}
    push: bool = False


class Drain(msgspec.Struct, frozen=True):
    """Nobody is behind and nobody inside: see whether the streams run dry."""


class Accept(msgspec.Struct, frozen=True):
    """The cut: every operation that was issued has all its partners and is done."""

    plan: Plan


class Abort(msgspec.Struct, frozen=True):
    """The cut cannot be had in time. ``reason``: one sentence for people; the rest is what it was made from."""

    reason: str
    behind: tuple[Short, ...] = ()
    inside: tuple[tuple[int, Call], ...] = ()
    undrained: tuple[tuple[int, str], ...] = ()


Decision: TypeAlias = Wait | Admit | Drain | Accept | Abort
