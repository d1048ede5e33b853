"""Run a command inside a pod, beside its ranks, with pipes to the caller. Killed when the caller goes away."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from moorage.errors import Conflict, MoorageError, UsageError
from moorage.v1.worker_pb2 import ExecInput, ExecOutput
from moorage.worker import pod_start, pod_user
from moorage.worker.pod import Pod
from moorage.worker.sandbox import oci, podinit
from moorage.worker.sandbox.runc import Runc, last_words

_READ_BYTES = 64 << 10
#: runc's exit code when it could not start the command. A command may end with it too; then runc logs no error.
_RUNC_FAILED = 255
_numbers = itertools.count(1)


def exec_process(pod: Pod, first: ExecInput) -> dict[str, Any]:
    """The process of a request, as the pod's ranks have it.

    Raises `UsageError` for an empty command or a rank that is not in the pod.
    """
    if not first.command:
        raise UsageError("no command to run in the pod", "name one behind --")
    user = pod_user.resolve(pod.spec)
    config = pod_start.init_config(pod, user)
    ranks = {rank.rank: rank for rank in config.ranks}
    if first.rank not in ranks:
        raise UsageError(f"rank {first.rank} is not in {pod.label}", f"it holds ranks {min(ranks)} to {max(ranks)}")
    return oci.build_exec(
        podinit.entering(first.working_directory or config.cwd, first.command),
        env={**config.env, **ranks[first.rank].env, **first.env},
        cwd="/",
        uid=user.uid,
        gid=user.gid,
        groups=user.groups,
    )


def not_started(words: str) -> int:
    """The exit code that a shell would give for a command that runc, in these words, could not start: 127 for one that
    is not there, 126 for one that cannot be executed; 0 if the words are about something else. Pure."""
    if "executable file not found" in words or "no such file or directory" in words:
        return 127
    cannot = ("permission denied", "is a directory", "exec format error", "text file busy", "not a directory")
    return 126 if any(reason in words for reason in cannot) else 0


async def run(
    pod: Pod, first: ExecInput, inputs: AsyncIterator[ExecInput], *, started: Callable[[], Awaitable[None]]
) -> AsyncIterator[ExecOutput]:
    """Run it: what it writes, then one message with its exit code. ``started`` is called when it was let in.

    Raises `Conflict` unless the pod runs: one that is being saved must not get processes whose pipes lead out of it.
    """
    if pod.record.phase != "running":
        raise Conflict(f"{pod.label} is {pod.record.phase}", "try again when it runs")
    number = next(_numbers)
    said = pod.folder / f"exec-{number}.log"
    runc = Runc(root=pod.node.runc_root, runc=pod.node.runc, criu=pod.node.criu, log=said)
    pod.sessions[number] = " ".join(first.command)[:80]
    spec = pod.folder / f"exec-{number}.json"
    process: asyncio.subprocess.Process | None = None
    try:
        oci.write_exec(spec, exec_process(pod, first))
        process = await asyncio.create_subprocess_exec(
            *runc.exec_command(pod.container, spec),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=runc.environment(),
        )
        pod.log.info("exec session", command=pod.sessions[number])
        await started()
        feeding = asyncio.create_task(_feed(process, first, inputs))
        try:
            async for output in _outputs(process):
                yield output
            code = _exit_code(await process.wait())
            if code == _RUNC_FAILED and (words := last_words(await asyncio.to_thread(_read, said))):
                code = not_started(words)
                if not code:
                    raise MoorageError(f"{first.command[0]} was not started: {words}")
            yield ExecOutput(exited=True, exit_code=code)
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
    finally:
        if process is not None and process.returncode is None:
            await _kill(process)
        for path in (spec, said):
            path.unlink(missing_ok=True)
        del pod.sessions[number]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""


def _exit_code(code: int) -> int:
    return 128 - code if code < 0 else code


async def _feed(process: asyncio.subprocess.Process, first: ExecInput, inputs: AsyncIterator[ExecInput]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):
        message = first
        while True:
            if message.stdin:
                process.stdin.write(message.stdin)
                await process.stdin.drain()
            if message.stdin_eof:
                break
            try:
                message = await anext(inputs)
            except StopAsyncIteration:
                break
        process.stdin.close()


async def _outputs(process: asyncio.subprocess.Process) -> AsyncIterator[ExecOutput]:
    assert process.stdout is not None
    assert process.stderr is not None
    queue: asyncio.Queue[ExecOutput | None] = asyncio.Queue(4)

    async def pump(stream: asyncio.StreamReader, *, error: bool) -> None:
        while data := await stream.read(_READ_BYTES):
            await queue.put(ExecOutput(stderr=data) if error else ExecOutput(stdout=data))
        await queue.put(None)

    pumps = [
        asyncio.create_task(pump(process.stdout, error=False)),
        asyncio.create_task(pump(process.stderr, error=True)),
    ]
    try:
        ended = 0
        while ended < len(pumps):
            output = await queue.get()
            if output is None:
                ended += 1
            else:
                yield output
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill the command and what it started: runc is its parent, and takes nothing along when it is killed itself."""
    for pid in _descendants(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    try:
        await asyncio.wait_for(process.wait(), 5.0)
    except TimeoutError:
        process.kill()
        await process.wait()


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *_descendants(child)]
    return found
