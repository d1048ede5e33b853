"""Two changes of a drain's order at the same time: neither is lost."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from moorage.coordinator.drain.drains import Drain, Drains
from moorage.coordinator.drain.record import DrainOrder
from moorage.records import Keys

ORDER = DrainOrder(id="d", owner="me", nodes=("a",), created=1.0)


class SlowEtcd:
    """Every write takes some turns of the loop."""

    def __init__(self) -> None:
        self.written: list[DrainOrder] = []

    async def txn(self, compares: object, ops: list[Any]) -> Any:
        for _ in range(5):
            await asyncio.sleep(0)
        self.written += [msgspec.json.decode(one.value, type=DrainOrder) for one in ops]
        return SimpleNamespace(succeeded=True)


def drains(etcd: SlowEtcd) -> Drains:
    leadership = SimpleNamespace(compare=lambda: None)
    leader: Any = SimpleNamespace(etcd=etcd, keys=Keys("c"), leadership=leadership)
    return Drains(leader)


@pytest.mark.parametrize("late", [0, 1, 3])
def test_a_drain_that_ends_while_it_is_called_off_is_over(late: int) -> None:
    async def run() -> None:
        etcd = SlowEtcd()
        all_of_them, drain = drains(etcd), Drain(ORDER, {})
        ending = asyncio.create_task(all_of_them.change(drain, phase="done", ended=2.0))
        for _ in range(late):
            await asyncio.sleep(0)
        await all_of_them.cancel(drain)
        await ending
        assert drain.order.phase == etcd.written[-1].phase == "done"

    asyncio.run(run())


def test_the_next_wave_does_not_write_over_that_it_is_called_off() -> None:
    async def run() -> None:
        etcd = SlowEtcd()
        all_of_them, drain = drains(etcd), Drain(ORDER, {})
        await asyncio.gather(all_of_them.cancel(drain), all_of_them.change(drain, wave=2))
        assert (drain.order.phase, drain.order.wave) == (etcd.written[-1].phase, etcd.written[-1].wave)
        assert (drain.order.phase, drain.order.wave) == ("cancelling", 2)

    asyncio.run(run())
