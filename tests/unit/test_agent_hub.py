from __future__ import annotations

import asyncio

from moorage.v1.types_pb2 import PodStatus
from moorage.worker.agent_hub import Hub


def _status(pod: int, phase: str) -> PodStatus:
    return PodStatus(job="j", incarnation=1, pod=pod, phase=phase)


def test_a_watcher_sees_the_list_its_end_and_then_changes() -> None:
    async def main() -> None:
        hub = Hub()
        watch = hub.watch(lambda: [_status(0, "running"), _status(1, "running")])
        first = [await anext(watch) for _ in range(3)]
        assert [status.job for status in first] == ["j", "j", ""]
        hub.publish(_status(1, "exited"))
        assert (await anext(watch)).phase == "exited"

    asyncio.run(main())


def test_a_slow_watcher_gets_the_newest_status_of_each_pod_in_the_order_of_the_changes() -> None:
    async def main() -> None:
        hub = Hub()
        watch = hub.watch(lambda: [])
        assert (await anext(watch)).job == ""
        for pod, phase in ((0, "starting"), (1, "starting"), (0, "running"), (1, "failed"), (0, "exited")):
            hub.publish(_status(pod, phase))
        assert [(s.pod, s.phase) for s in (await anext(watch), await anext(watch))] == [(1, "failed"), (0, "exited")]

    asyncio.run(main())


def test_a_change_during_the_list_is_not_lost() -> None:
    async def main() -> None:
        hub = Hub()
        watch = hub.watch(lambda: [_status(0, "running")])
        await anext(watch)
        hub.publish(_status(0, "exited"))
        assert (await anext(watch)).job == ""
        assert (await anext(watch)).phase == "exited"

    asyncio.run(main())
