"""The supervisor of an embedded cluster: runs etcd, the coordinator and the workers, and starts again what dies.

It takes orders over a unix socket (0600), one JSON object a line, one answer a line (`moorage.dev.control` is the
other end)::

    {"do": "status"}                               → {"roles": {NAME: {pid, started, wanted, starts, paused}}}
    {"do": "start", "role": NAME}                  start it (again), and keep it running
    {"do": "stop", "role": NAME, "signal": "…"}    end it and leave it so
    {"do": "signal", "role": NAME, "signal": "…"}  just send the signal: what dies of it is started again
    {"do": "down"}                                 end everything, in order, and the supervisor itself

Started with ``python -P -m moorage.dev.supervisor FOLDER DESCRIPTOR`` in a session of its own; goes to the background.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import structlog

from moorage.dev import layout, roles
from moorage.dev.processes import Identity
from moorage.errors import MoorageError, UsageError

log = structlog.get_logger(__name__)

FIRST_BACKOFF = 0.2
LONGEST_BACKOFF = 5.0
#: A process that ran for so long starts again at once when it dies.
SETTLED_AFTER = 2.0
STOP_GRACE = 10.0


class Running(msgspec.Struct, frozen=True):
    """What the supervisor knows of one process; ``pid`` 0: none runs."""

    pid: int
    started: int
    wanted: bool
    starts: int


class Supervised:
    """One process that is kept running."""

    def __init__(self, supervisor: Supervisor, name: str) -> None:
        self.name = name
        self.wanted = True
        self.starts = 0
        self.identity: Identity | None = None
        self._supervisor = supervisor
        self._spawned = asyncio.Event()
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=name)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        backoff = FIRST_BACKOFF
        while self.wanted:
            begun = loop.time()
            code: int | str
            try:
                process = await self._spawn()
                code = await process.wait()
            except (OSError, MoorageError) as error:
                if not self.starts:
                    raise
                code = str(error)  # a program that is being replaced, a full disk: try again
            self.identity = None
            self._supervisor.record()
            if not self.wanted:
                return
            backoff = FIRST_BACKOFF if loop.time() - begun > SETTLED_AFTER else min(backoff * 2, LONGEST_BACKOFF)
            log.warning("process ended; it is started again", role=self.name, code=code, after_seconds=backoff)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), backoff)

    async def _spawn(self) -> asyncio.subprocess.Process:
        role = roles.role(self._supervisor.cluster, self.name)
        descriptor = os.open(
            self._supervisor.folder / "log" / f"{self.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )
        try:
            process = await asyncio.create_subprocess_exec(
                *role.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                env=os.environ | role.environment,
                cwd="/",
                start_new_session=True,
            )
        finally:
            os.close(descriptor)
        self.starts += 1
        self.identity = Identity.of(process.pid)
        self._supervisor.record()
        self._spawned.set()
        log.info("process started", role=self.name, pid=process.pid)
        return process

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process, if one runs."""
        if self.identity:
            self.identity.send(number)

    async def spawned(self) -> None:
        """Wait until the process was started for the first time. Raises what starting it raised."""
        waiter = asyncio.create_task(self._spawned.wait())
        await asyncio.wait({waiter, self._task}, return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()
        if self._task.done():
            self._task.result()

    async def stop(self, number: signal.Signals) -> None:
        """End the process for good: with the signal, after a grace with SIGKILL."""
        self.wanted = False
        self._stop.set()
        self.send(number)
        self.send(signal.SIGCONT)
        done, _ = await asyncio.wait({self._task}, timeout=STOP_GRACE)
        if not done:
            self.send(signal.SIGKILL)
        await asyncio.wait({self._task})


class Supervisor:
    """All processes of the cluster in ``folder``, and the socket for orders."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cluster = layout.read(folder)
        self.processes: dict[str, Supervised] = {}
        self.over = asyncio.Event()
        self._orders = asyncio.Lock()

    def record(self) -> None:
        """Write down what runs, for a `down` that finds no supervisor."""
        running = {name: one.identity for name, one in self.processes.items() if one.identity}
        if own := Identity.of(os.getpid()):
            running["supervisor"] = own
        layout.write_atomically(self.folder / "processes.json", msgspec.json.encode(running))

    async def start(self, name: str) -> None:
        """Start the process ``name`` if it does not run; the state file is read again, for nodes are added to it."""
        self.cluster = layout.read(self.folder)
        roles.role(self.cluster, name)
        current = self.processes.get(name)
        if current is None or not current.wanted:
            self.processes[name] = Supervised(self, name)
            await self.processes[name].spawned()

    def _known(self, name: str) -> Supervised:
        if name not in self.processes:
            raise UsageError(f"no process is called {name}", f"there are: {', '.join(self.processes)}")
        return self.processes[name]

    def status(self) -> dict[str, Running]:
        return {
            name: Running(
                one.identity.pid if one.identity else 0,
                one.identity.started if one.identity else 0,
                one.wanted,
                one.starts,
            )
            for name, one in self.processes.items()
        }

    async def down(self) -> None:
        """End the coordinator, then the workers, then etcd: nobody shall mourn the workers, and all may tell etcd."""
        coordinators, members = roles.coordinator_names(self.cluster), roles.etcd_names(self.cluster)
        workers = [name for name in self.processes if name not in (*coordinators, *members)]
        for names in (coordinators, workers, members):
            known = [self.processes[name] for name in names if name in self.processes]
            await asyncio.gather(*(one.stop(signal.SIGTERM) for one in known))
        self.over.set()

    async def order(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out one order. Raises `MoorageError`."""
        async with self._orders:
            role = str(request.get("role", ""))
            match request.get("do"):
                case "status":
                    return {"roles": msgspec.to_builtins(self.status())}
                case "start":
                    await self.start(role)
                case "stop":
                    await self._known(role).stop(signal.Signals[request.get("signal", "SIGTERM")])
                case "signal":
                    self._known(role).send(signal.Signals[request["signal"]])
                case "down":
                    await self.down()
                case other:
                    raise UsageError(f"unknown order {other!r}")
        return {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the orders of one connection."""
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                try:
                    answer = await self.order(msgspec.json.decode(line, type=dict[str, Any]))
                except MoorageError as error:
                    answer = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
                except (msgspec.DecodeError, KeyError) as error:
                    answer = {"error": "UsageError", "message": f"order not understood: {error}", "hint": ""}
                writer.write(msgspec.json.encode(answer) + b"\n")
                await writer.drain()
        writer.close()

    async def run(self, tell: int) -> None:
        """Start everything, write ``ready`` to the descriptor ``tell``, then take orders until it is over."""
        loop = asyncio.get_running_loop()
        stopping: set[asyncio.Task[Any]] = set()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lambda: stopping.add(asyncio.create_task(self.order({"do": "down"}))))
        self.cluster.control.unlink(missing_ok=True)
        before = os.umask(0o177)
        server = await asyncio.start_unix_server(self.serve, self.cluster.control)
        os.umask(before)
        try:
            for name in roles.role_names(self.cluster):
                await self.start(name)
            os.write(tell, b"ready")
            os.close(tell)
            await self.over.wait()
        finally:
            server.close()
            self.cluster.control.unlink(missing_ok=True)


def main() -> None:
    folder, descriptor = Path(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(descriptor, False)
    if os.fork():
        os._exit(0)
    asyncio.run(Supervisor(folder).run(descriptor))


if __name__ == "__main__":
    main()
