"""A drain as a message of the API. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from moorage.coordinator.drain.record import DrainOrder, MoveRecord
from moorage.v1 import coordinator_pb2 as pb

if TYPE_CHECKING:
    from moorage.coordinator.leader import Leader


def drain_message(leader: Leader, order: DrainOrder, moves: Iterable[MoveRecord]) -> pb.DrainInfo:
    """The drain and its jobs; those that have no other place, unless they are to be parked, stand apart."""
    waves = [pb.DrainWave(nodes=nodes) for nodes in order.waves]
    homeless: list[pb.DrainMove] = []
    for move in sorted(moves, key=lambda move: (move.wave, move.name, move.job)):
        job = leader.jobs.get(move.job)
        message = pb.DrainMove(
            job=move.job,
            name=move.name,
            wave=move.wave,
            source=move.source,
            target=move.target,
            placed=[seat.node for seat in job.state.seats] if job else [],
            state=move.state,
            reason=move.reason or ("it is about to end by itself" if move.ending and not move.settled else ""),
            choices=move.choices,
            seconds=move.seconds,
        )
        if move.state == "left":
            homeless.append(message)
        else:
            waves[move.wave - 1].moves.append(message)
    return pb.DrainInfo(
        id=order.id,
        phase=order.phase,
        nodes=order.nodes,
        waves=waves,
        homeless=homeless,
        wave=order.wave,
        created=order.created,
        ended=order.ended,
        owner=order.owner,
        reason=order.reason,
        over=order.over,
    )
