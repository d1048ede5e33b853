"""The worker's end of the conversation with the NCCL proxy, as small as can be: cut, teardown, rebuild of a job."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from pathlib import Path

from moorage.errors import Unavailable
from moorage.nccl_quiesce import driver, wire
from moorage.nccl_quiesce.cut import Cut, Settings
from moorage.nccl_quiesce.model import Abort, Accept, Order, Plan, Snapshot
from moorage.nccl_quiesce.rounds import Rounds

PATIENCE = 30.0
Commander = Callable[[int], wire.ToProcess]  #: from a request's number to the command


class Connection:
    """One process that has said hello."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hello: wire.Hello) -> None:
        self._reader, self._writer, self.hello = reader, writer, hello
        self._requests = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[wire.FromProcess]] = {}

    def next_request(self) -> int:
        """A number for a command."""
        return next(self._requests)

    async def ask(self, message: wire.ToProcess) -> wire.FromProcess:
        """Send a command and wait for its answer."""
        request = getattr(message, "request")  # noqa: B009 - not every message has one
        future = self._waiting[request] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(wire.pack(message))
            return await asyncio.wait_for(future, PATIENCE)
        except ConnectionError:
            raise Unavailable("the process has gone") from None
        finally:
            self._waiting.pop(request, None)

    async def serve(self) -> None:
        """Hand answers to whoever waits for them, until the process closes."""
        try:
            while True:
                message = await read(self._reader)
                future = self._waiting.get(getattr(message, "request", -1))
                if future is not None and not future.done():
                    future.set_result(message)
        except (asyncio.IncompleteReadError, ConnectionError):
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(Unavailable("the process has gone"))
        finally:
            self._writer.close()


async def read(reader: asyncio.StreamReader) -> wire.FromProcess:
    """One message."""
    size = wire.length(await reader.readexactly(wire.HEADER_SIZE))
    return wire.from_process(await reader.readexactly(size))


class Host:
    """Talks to all processes of a job; ``pids`` in the order of their ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pids: list[int] = []
        self.incarnation = 1
        self._attempts = itertools.count(1)
        self._connections: dict[int, Connection] = {}
        self._changed = asyncio.Condition()
        self._server: asyncio.Server | None = None
        self.rounds: Rounds | None = None
        #: How many cuts began with unequal counters.
        self.unequal = 0

    async def listen(self) -> None:
        """Bind the socket (anew)."""
        if self._server is not None:
            self._server.close()
        self.path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._connected, self.path)

    async def close(self) -> None:
        """Stop listening."""
        assert self._server is not None
        self._server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = await read(reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()
            return
        assert isinstance(hello, wire.Hello)
        connection = Connection(reader, writer, hello)
        rank = self.pids.index(hello.pid)
        writer.write(wire.pack(wire.Welcome(self.incarnation, rank)))
        async with self._changed:
            self._connections[rank] = connection
            self._changed.notify_all()
        await connection.serve()
        async with self._changed:
            if self._connections.get(rank) is connection:
                del self._connections[rank]
            self._changed.notify_all()

    async def present(self) -> None:
        """Until every process is connected."""
        async with self._changed, asyncio.timeout(PATIENCE):
            await self._changed.wait_for(lambda: len(self._connections) == len(self.pids))

    async def exchange(self, rank: int, order: Order) -> Snapshot | None:
        """`driver.Transport`."""
        connection = self._connections.get(rank)
        if connection is None:
            raise Unavailable("not connected")
        report = await connection.ask(wire.Obey.of(connection.next_request(), order))
        assert isinstance(report, wire.Report), report
        snapshot = report.snapshot(rank)
        if snapshot is not None and order.round == 1:
            self._first[rank] = snapshot
        return snapshot

    async def refusals(self) -> list[wire.Refusal]:
        """What all processes say to `Prepare`."""
        found: list[wire.Refusal] = []
        for connection in self._connections.values():
            answer = await connection.ask(wire.Prepare(connection.next_request()))
            assert isinstance(answer, wire.Prepared)
            found += answer.refusals
        return found

    async def cut(self, deadline: float = 20.0) -> Accept | Abort:
        """Close the gates and find the cut."""
        self._first: dict[int, Snapshot] = {}
        settings = Settings(deadline=deadline, dry=0.05)
        ranks = range(len(self.pids))
        self.rounds = Rounds(ranks, attempt=next(self._attempts), cut=Cut(settings, seed=time.monotonic_ns()))
        result = await driver.run(self.rounds, self)
        picture = self.rounds.cut.picture(self._first)
        self.unequal += bool(picture.behind)
        return result

    async def tear_down(self, plan: Plan, seconds: float = 20.0) -> None:
        """Destroy all communicators."""
        assert self.rounds is not None
        attempt = self.rounds.attempt
        await self._all(lambda n: wire.Teardown(n, attempt, list(plan.again), list(plan.widowed), seconds))

    async def part(self) -> None:
        """Let all processes go, and have them back at a socket that was bound anew."""
        await self._all(wire.Part)
        async with self._changed, asyncio.timeout(PATIENCE):
            await self._changed.wait_for(lambda: not self._connections)
        await self.listen()
        await self.present()

    async def rebuild(self, plan: Plan, seconds: float = 20.0) -> None:
        """Make all communicators anew."""
        assert self.rounds is not None
        attempt, picture = self.rounds.attempt, self.rounds.cut.picture(self.rounds._last)
        fresh: dict[str, bytes] = {}
        for name in (*plan.rebuild, *(name for name in plan.again if "/" not in name)):
            connection = self._connections[picture.ranks[name][min(picture.ranks[name])]]
            ids = await connection.ask(wire.MakeIds(connection.next_request(), [name]))
            assert isinstance(ids, wire.Ids), ids
            fresh[name] = ids.ids[0]
        anew = [(name, fresh[name]) for name in plan.rebuild]
        again = [(name, fresh[name]) for name in plan.again if name in fresh]
        await self._all(lambda n: wire.Rebuild(n, attempt, anew, again, seconds))

    async def open(self) -> None:
        """Let the job go on."""
        assert self.rounds is not None
        await asyncio.wait_for(driver.release(self.rounds, self), PATIENCE)

    async def checkpoint(self, deadline: float = 20.0) -> Plan:
        """The whole way: cut, teardown, parting, rebuild, open."""
        result = await self.cut(deadline)
        assert isinstance(result, Accept), result
        await self.tear_down(result.plan)
        await self.part()
        await self.rebuild(result.plan)
        await self.open()
        return result.plan

    async def _all(self, message: Commander) -> None:
        everybody = list(self._connections.values())
        answers = await asyncio.gather(*(one.ask(message(one.next_request())) for one in everybody))
        assert all(isinstance(answer, wire.Done) for answer in answers), answers
