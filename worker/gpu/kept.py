"""The broker's side of the keeper: every descriptor goes there too, and comes back to the next broker."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from moorage.worker.gpu import keeper
from moorage.worker.gpu.blocks import Block, KnownProcess
from moorage.worker.gpu.wire import BlockFlag, BlockName, Memory

log = structlog.get_logger(__name__)

_SECONDS = 10.0
_AGAIN_SECONDS = 10.0


class PodNote(msgspec.Struct, frozen=True):
    """What the next broker has to know of a pod beside its blocks."""

    processes: list[KnownProcess] = []


class Everything(NamedTuple):
    """All that is to be held of one pod."""

    pod: str
    note: PodNote
    blocks: dict[BlockName, Block]


class Kept:
    """``folder``: the broker's. Nothing here raises: without a keeper the broker works, and its memory dies with it.

    ``everything``: all that is to be held, asked when a keeper had to be started anew.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / keeper.FOLDER
        self._line: socket.socket | None = None
        self._again = 0.0
        self._first = True
        self.everything: Callable[[], Iterable[Everything]] = lambda: ()

    def put(self, pod: str, name: BlockName, about: Memory, descriptor: int) -> None:
        """One more descriptor of a block. It is in `everything` already."""
        self._send(_put(pod, name, about), descriptor)

    def drop(self, pod: str, name: BlockName) -> None:
        """A block is gone."""
        self._send(keeper.Drop(pod, name.process, name.id))

    def drop_pod(self, pod: str) -> None:
        """A pod is gone."""
        self._send(keeper.DropPod(pod))

    def note(self, pod: str, note: PodNote) -> None:
        """What is known of the pod now."""
        self._send(keeper.Note(pod, msgspec.msgpack.encode(note)))

    def take(self, pod: str) -> tuple[dict[BlockName, Block], PodNote]:
        """All that an earlier broker had of the pod; the descriptors are the caller's. Empty: there was none."""
        blocks: dict[BlockName, Block] = {}
        if self._line is None:
            self._open()
        line = self._line
        try:
            if line is None:
                return blocks, PodNote()
            keeper.send(line, keeper.Take(pod))
            while True:
                message, descriptor = keeper.receive(line)
                match message:
                    case keeper.Put():
                        name = BlockName(message.process, message.id)
                        block = blocks.setdefault(name, Block(_about(message.about)))
                        block.descriptors.append(descriptor)
                    case keeper.Note():
                        return blocks, msgspec.msgpack.decode(message.text, type=PodNote) if message.text else PodNote()
                    case _:
                        raise ConnectionError("the keeper closed the line")
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("the keeper of device memory does not answer", error=str(error))
            self.close()
            for block in blocks.values():
                block.close()
            return {}, PodNote()

    def close(self) -> None:
        """Let go of the keeper, which lives on as long as it holds anything."""
        if self._line is not None:
            self._line.close()
            self._line = None

    def _send(self, message: keeper.Message, descriptor: int = -1) -> None:
        for _ in range(2):
            if self._line is None and self._open():
                return  # told with everything else
            if self._line is None:
                return
            try:
                keeper.send(self._line, message, descriptor)
                return
            except OSError as error:
                log.warning("the keeper of device memory went away", error=str(error))
                self.close()

    def _open(self) -> bool:
        """Find the keeper, or start one. True: it was told everything. Afterwards there may be no line."""
        if time.monotonic() < self._again:
            return False
        found = True
        try:
            try:
                self._line = self._connect()
            except (FileNotFoundError, ConnectionRefusedError):
                self._start()
                self._line = self._connect()
                found = False
            if found and self._first:
                return False  # an earlier broker's: what it holds is for `take`
            for message, descriptor in self._all():
                keeper.send(self._line, message, descriptor)
            return True
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("there is no keeper of device memory", error=str(error))
            self.close()
            self._again = time.monotonic() + _AGAIN_SECONDS
            return False
        finally:
            self._first = False

    def _all(self) -> Iterator[tuple[keeper.Message, int]]:
        for pod in self.everything():
            yield keeper.DropPod(pod.pod), -1
            yield keeper.Note(pod.pod, msgspec.msgpack.encode(pod.note)), -1
            for name, block in pod.blocks.items():
                for descriptor in block.descriptors:
                    yield _put(pod.pod, name, block.about), descriptor

    def _connect(self) -> socket.socket:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            line.settimeout(_SECONDS)
            line.connect(str(self._folder / keeper.SOCKET_FILE))
        except OSError:
            line.close()
            raise
        return line

    def _start(self) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        subprocess.run(
            [sys.executable, "-P", "-m", "moorage.worker.gpu.keeper", "--folder", str(self._folder)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            check=True, timeout=60, cwd="/",
        )  # fmt: skip


def forget(folder: Path, pod: str) -> None:
    """For a pod that ends while there is no broker: its memory must not live on. Raises nothing."""
    if (folder / keeper.FOLDER / keeper.SOCKET_FILE).exists():
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        with line:
            try:
                line.settimeout(_SECONDS)
                line.connect(str(folder / keeper.FOLDER / keeper.SOCKET_FILE))
                keeper.send(line, keeper.DropPod(pod))
            except OSError as error:
                log.info("no keeper of device memory to tell", pod=pod, error=str(error))


def alive(process: KnownProcess) -> bool:
    """Whether it may still come: it is on this host, or on its way back."""
    if not process.host_pid:
        return True
    try:
        os.kill(process.host_pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _put(pod: str, name: BlockName, about: Memory) -> keeper.Put:
    return keeper.Put(pod, name.process, name.id, msgspec.msgpack.encode([int(number) for number in about]))


def _about(data: bytes) -> Memory:
    number, size, address, owner, owner_id, device, flags = msgspec.msgpack.decode(data, type=list[int])
    return Memory(number, size, address, owner, owner_id, device, BlockFlag(flags))
