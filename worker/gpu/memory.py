"""`PodMemory`: all device memory of one pod, and its way through a checkpoint.

Invariants:

* every block that a process was told to have has a descriptor here, so its memory outlives the process;
* between `evict` and `bring_back` no process is connected: the socket's path does not exist;
* whatever fails before the processes were evicted ends in `release`: the job runs on with its memory where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket as sockets
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from moorage.barrier import clock
from moorage.errors import DeviceFailed, MoorageError, Unavailable
from moorage.worker.gpu import channel, wire
from moorage.worker.gpu.blocks import Block, KnownProcess, SavedProcess
from moorage.worker.gpu.channel import Channel
from moorage.worker.gpu.driver import DriverProcess
from moorage.worker.gpu.kept import Everything, Kept, PodNote, alive
from moorage.worker.gpu.messages import Objection
from moorage.worker.gpu.process import Asked, CudaProcess, same_file
from moorage.worker.gpu.wire import BlockName, Memory, Type
from moorage.worker.preflight_gpu import LOST

log = structlog.get_logger(__name__)
T = TypeVar("T")
R = TypeVar("R")

_POLL_SECONDS = 0.05
_COME_SECONDS = 10.0  # for processes that an earlier broker knew to find this one


class PodMemory:
    """``socket``: where the pod's processes find the broker. ``drive``: makes the driver's part of a process.

    ``kept``: who holds everything a second time, so that it outlives this broker; None: nobody.
    """

    def __init__(
        self,
        label: str,
        socket: Path,
        incarnation: int,
        drive: Callable[[int], DriverProcess] = DriverProcess,
        kept: Kept | None = None,
    ) -> None:
        self.label = label
        self.socket = socket
        self.incarnation = incarnation
        self.processes: dict[int, CudaProcess] = {}
        self.blocks: dict[BlockName, Block] = {}
        self.expected: dict[int, SavedProcess] = {}  # restored or an earlier broker's, and not seen yet
        self.driver_bytes = 0  # what the driver put into the processes' own memory when it saved them last
        self._kept = kept
        self._host_pids: dict[int, int] = {}  # of those expected that an earlier broker knew
        self._drive = drive
        self._changed = asyncio.Event()
        self._accepting: asyncio.Task[None] | None = None
        self._serving: set[asyncio.Task[None]] = set()

    # -- connections

    def listen(self) -> None:
        """Bind the socket anew: processes that left come back."""
        if self._accepting is None or self._accepting.done():
            listening = channel.listen(self.socket)
            self._accepting = asyncio.create_task(self._accept(listening), name=f"GPU connections of {self.label}")

    async def _accept(self, listening: sockets.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                connection, _ = await loop.sock_accept(listening)
                task = asyncio.create_task(self._serve(connection))
                self._serving.add(task)
                task.add_done_callback(self._serving.discard)
        finally:
            listening.close()

    async def _deaf(self) -> None:
        """Nobody can connect any more."""
        with contextlib.suppress(FileNotFoundError):
            self.socket.unlink()
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
            self._accepting = None

    async def _serve(self, connection: sockets.socket) -> None:
        process: CudaProcess | None = None

        async def on_packet(packet: wire.Packet, descriptor: int) -> None:
            nonlocal process
            if packet.type == Type.HELLO:
                process = await self._hello(link, wire.hello(packet.body))
            elif process is None:
                raise Unavailable("a process did not say hello")
            else:
                await self._packet(process, packet, descriptor)

        link = Channel(connection, on_packet)
        await link.run()
        if process is not None and process.channel is link:
            self._left(process)

    async def _hello(self, link: Channel, hello: wire.Hello) -> CudaProcess:
        process = self.processes.get(hello.process)
        if process is None:
            process = self.processes[hello.process] = CudaProcess(link, hello)
            self.expected.pop(hello.process, None)
        else:
            process.connect(link, hello)
        self._note()
        await link.send(Type.WELCOME, 0, wire.pack_number(self.incarnation))
        self._all_told(process)
        self._changed.set()
        return process

    def _left(self, process: CudaProcess) -> None:
        self._changed.set()
        if not process.evicted and not process.alive():
            self._forget_process(process.number)

    def _forget_process(self, number: int) -> None:
        self.processes.pop(number, None)
        for name in [name for name in self.blocks if name.process == number]:
            self._drop(name)
        self._note()

    # -- what is held a second time

    def everything(self) -> Everything:
        """For a keeper that knows nothing."""
        return Everything(self.label, PodNote(self.known()), self.blocks)

    def known(self) -> list[KnownProcess]:
        """All processes that are here, or have to come."""
        return [KnownProcess(p.number, p.pod_pid, p.pid, p.name) for p in self.processes.values()] + [
            KnownProcess(saved.process, saved.pid, self._host_pids.get(saved.process, 0), saved.name)
            for saved in self.expected.values()
        ]

    def expect(self, processes: Iterable[KnownProcess]) -> None:
        """These have to come, as far as they live, though nobody told of them before."""
        for known in processes:
            if known.process not in self.processes and known.process not in self.expected and alive(known):
                self.expected[known.process] = SavedProcess(known.process, known.pid, known.name)
                if known.host_pid:
                    self._host_pids[known.process] = known.host_pid

    def take_over(self) -> None:
        """Begin with what an earlier broker had of this pod: its memory, and the processes that will come."""
        if self._kept is None:
            return
        blocks, note = self._kept.take(self.label)
        here = {process.process: process for process in note.processes if alive(process)}
        for name, block in blocks.items():
            self.blocks[name] = block
            if name.process not in here:
                self._drop(name)
        self.expected = {p.process: SavedProcess(p.process, p.pid, p.name) for p in here.values()}
        self._host_pids = {p.process: p.host_pid for p in here.values()}
        if blocks or here:
            log.info("an earlier broker's memory", pod=self.label, blocks=len(self.blocks), processes=len(here))

    def _note(self) -> None:
        if self._kept is not None:
            self._kept.note(self.label, self.everything().note)

    def _keep(self, name: BlockName, descriptor: int) -> None:
        if self._kept is not None:
            self._kept.put(self.label, name, self.blocks[name].about, descriptor)

    def _drop(self, name: BlockName) -> None:
        block = self.blocks.pop(name, None)
        if block is not None:
            block.close()
            if self._kept is not None:
                self._kept.drop(self.label, name)

    # -- what processes tell

    async def _packet(self, process: CudaProcess, packet: wire.Packet, descriptor: int) -> None:
        match packet.type:
            case Type.MEMORY:
                self._memory(process, wire.memory(packet.body), descriptor)
            case Type.FORGET:
                self._drop(wire.block(packet.body))
            case Type.IDENTIFY | Type.FETCH | Type.EXPORTED:
                await self._asked(process, Asked(packet.type, packet.request, wire.block(packet.body), descriptor))
            case _:
                if descriptor >= 0:
                    os.close(descriptor)

    def _memory(self, process: CudaProcess, about: Memory, descriptor: int) -> None:
        name = BlockName(process.number, about.id)
        block = self.blocks.setdefault(name, Block(about))
        block.retold(about)
        if descriptor >= 0 and block.descriptors:
            os.close(descriptor)  # told again: the first one stands for the same memory
        elif descriptor >= 0:
            block.descriptors.append(descriptor)
            self._keep(name, descriptor)
        process.told.add(about.id)
        self._all_told(process)

    def _all_told(self, process: CudaProcess) -> None:
        """Once everything was told on a new connection, what was not told is gone."""
        if len(process.told) >= process.expected:
            gone = [n for n in self.blocks if n.process == process.number and n.id not in process.told]
            for name in gone:
                self._drop(name)

    async def _asked(self, process: CudaProcess, asked: Asked) -> None:
        kept = asked.descriptor
        found: BlockName | None = None
        hand_out = -1
        if asked.type == Type.IDENTIFY:
            found = next((name for name, block in self.blocks.items() if _has(block, asked.descriptor)), None)
        elif asked.block in self.blocks:
            found = asked.block
            block = self.blocks[found]
            if asked.type == Type.EXPORTED and kept >= 0:
                block.descriptors.append(kept)
                self._keep(found, kept)
                kept = -1
            elif asked.type == Type.FETCH and block.descriptors:
                hand_out = block.descriptors[0]
        if kept >= 0:
            os.close(kept)
        if found is None:
            body = wire.pack_found(1, BlockName(0, 0), 0, 0)
        else:
            about = self.blocks[found].about
            body = wire.pack_found(0, found, about.device, about.size)
        await process.channel.send(Type.ANSWER, asked.request, body, descriptor=hand_out)

    # -- a checkpoint

    async def refusals(self) -> list[Objection]:
        """What cannot be saved, by process and API. Raises `Unavailable` when a process does not answer."""
        found: list[Objection] = []
        if self._host_pids:  # they look for the socket all the time
            await self._wait(clock.now() + _COME_SECONDS)
        for process in list(self.processes.values()):
            status = msgspec.json.decode(await process.status())
            for entry in status.get("refusals", []):
                found.append(Objection(str(process), str(entry["api"]), int(entry["size"])))
        for name, block in self.blocks.items():
            owner = self.blocks.get(BlockName(block.about.owner, block.about.owner_id))
            if owner is None or not owner.descriptors:
                maker = self.processes.get(name.process)
                label = str(maker) if maker else f"process {name.process:016x}"
                found.append(Objection(label, LOST, block.about.size))
        return found

    def take(self, processes: list[SavedProcess], blocks: dict[BlockName, Block]) -> None:
        """The memory of processes that CRIU brings back; `bring_back` waits for them."""
        self.expected = {p.process: p for p in processes if p.process not in self.processes}
        self._host_pids.clear()
        self.blocks.update(blocks)
        self._note()
        for name, block in blocks.items():
            for descriptor in block.descriptors:
                self._keep(name, descriptor)

    async def quiesce(self, seconds: float) -> None:
        """Until no process submits work. On failure all run on."""
        missing = self._missing()
        if self.expected:
            raise Unavailable(f"{self.label}: {', '.join(missing)} is not connected to the GPU broker")
        try:
            await _each(self.processes.values(), lambda process: process.quiesce(seconds))
        except BaseException:
            await self.release()
            raise

    async def evict(self, seconds: float) -> int:
        """Take bulk memory from all quiesced processes, and have the driver put the rest into their own memory.

        Returns the bytes of bulk memory. On failure everything is brought back, then the error is raised.
        """
        total = 0
        try:
            for size in await _each(self.processes.values(), lambda process: process.evict()):
                total += size
            await self._deaf()
            drivers = [self._drive(process.pid) for process in self.processes.values()]
            await _each(drivers, lambda driver: asyncio.to_thread(driver.lock, seconds))
            before = sum(process.resident() for process in self.processes.values())
            await _each(drivers, lambda driver: asyncio.to_thread(driver.checkpoint))
            after = sum(process.resident() for process in self.processes.values())
            self.driver_bytes = max(0, after - before)
        except BaseException:
            await self.bring_back(seconds)
            raise
        return total

    async def bring_back(
        self,
        seconds: float,
        mapping: dict[str, str] | None = None,
        before_restore: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """The reverse of `evict` and `quiesce`, in processes that run again (the same ones, or restored ones).

        ``before_restore`` is called when all have come, at the last moment before the driver needs its memory.

        Raises `Unavailable` when one does not come back in ``seconds``, `DeviceFailed` what the driver says.
        """
        end = clock.now() + seconds
        self.listen()
        await self._wait(end)
        everybody = list(self.processes.values())
        drivers = [self._drive(process.pid) for process in everybody]
        if before_restore is not None:
            await before_restore()
        await _each(drivers, lambda driver: asyncio.to_thread(driver.restore, mapping))
        await _each(drivers, lambda driver: asyncio.to_thread(driver.unlock))
        await _each([p for p in everybody if p.evicted], self._map)
        await self.release()

    async def _map(self, process: CudaProcess) -> None:
        mine = {name: block for name, block in self.blocks.items() if name.process == process.number}
        for name, block in mine.items():
            owner = self.blocks.get(BlockName(block.about.owner, block.about.owner_id))
            if owner is None or not owner.descriptors:
                raise DeviceFailed(f"{process}: the memory of block {name.id} is not here")
            await process.adopt(name.id, owner.descriptors[0])
        await process.map()

    async def release(self) -> None:
        """Open the gates of all processes that have their memory."""
        sealed = [p for p in self.processes.values() if p.connected and not p.evicted]
        await _each(sealed, lambda process: process.resume())

    async def _wait(self, end: float) -> None:
        """Until all processes that had memory are connected. One that died meanwhile is not waited for."""
        while missing := self._missing():
            if clock.now() > end:
                raise Unavailable(f"{self.label}: {', '.join(missing)} did not connect again in time")
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _POLL_SECONDS)

    def _missing(self) -> list[str]:
        for process in list(self.processes.values()):
            if not process.connected and not process.alive():
                self._forget_process(process.number)
        for number, pid in list(self._host_pids.items()):
            if number in self.expected and not alive(KnownProcess(number, 0, pid, "")):
                del self.expected[number]
                self._forget_process(number)
        lost = [str(process) for process in self.processes.values() if not process.connected]
        return lost + [f"process {saved.pid} ({saved.name})" for saved in self.expected.values()]

    async def close(self) -> None:
        """The pod is gone: give all memory back."""
        await self._deaf()
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        for number in list(self.processes):
            self._forget_process(number)
        for block in self.blocks.values():
            block.close()
        self.blocks.clear()
        if self._kept is not None:
            self._kept.drop_pod(self.label)


def _has(block: Block, descriptor: int) -> bool:
    return descriptor >= 0 and any(same_file(descriptor, own) for own in block.descriptors)


async def _each(items: Iterable[T], do: Callable[[T], Awaitable[R]]) -> list[R]:
    """Do it for all at once; the first error is raised after all have ended."""
    done: list[R] = []
    for result in await asyncio.gather(*(do(item) for item in items), return_exceptions=True):
        if isinstance(result, MoorageError):
            raise result
        if isinstance(result, BaseException):
            raise Unavailable(f"a process of the pod went away: {result}") from result
        done.append(result)
    return done
