"""What CRIU refuses, or would change: connections that wait to be accepted, pipes of packets, text in terminals.

While CRIU looks, the connections are out of their queues (those over unix sockets stay, without their data), the pipes
are plain ones and the terminals leave output as it is; all is back before the capture is over. What was changed is in a
file of the pod's folder meanwhile: a worker that follows puts it back before the pod runs on.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from moorage.errors import MoorageError, NotFound, Refused
from moorage.worker import aio, connecting, extra_files, extra_watches, unaccepted, under_way, unix_diag
from moorage.worker.borrow import Place, borrowed_socket, holders_of
from moorage.worker.extra_record import Early, Extras, PacketPipe, Terminal, Watch
from moorage.worker.extra_state import tasks_of
from moorage.worker.guard.files import write_private
from moorage.worker.network import corked, namespace, waiting
from moorage.worker.network.corked import Corked
from moorage.worker.network.waiting import Waiting
from moorage.worker.pod import Pod
from moorage.worker.sandbox import inject
from moorage.worker.sandbox.cgroup import PodCgroup
from moorage.worker.sandbox.process import inner_pid
from moorage.worker.transient import waiting_ports

FILE = "aside.json"
#: What a new connection takes in before its receiver has read any of it.
_SMALL_BYTES = 30_000
#: What a disk takes at most for a request; what is longer under way waits for something else.
_REQUEST_SECONDS, _REQUEST_PAUSE = 2.0, 0.02


class Aside(msgspec.Struct):
    """What `put_back` has to put back."""

    waiting: list[Waiting] = []
    packets: list[PacketPipe] = []
    terminals: list[Terminal] = []
    watches: list[Watch] = []
    early: list[Early] = []
    corked: list[Corked] = []
    #: The clients of `early` are connected again, and only lack what they had sent.
    connected: bool = False


def take(pod: Pod, pids: list[int], extras: Extras) -> None:
    """Take the connections that wait out of their queues, make the pipes of packets plain, and let the terminals'
    output be. The connections are noted in ``extras``.

    Raises `Refused`, `OSError`, `EnvironmentLacking`.
    """
    _look_for_requests(pod, pids)
    found, row = unaccepted.look(_hands(pod, pids)) if pids else ([], [])  # it may refuse: before anything is taken
    packets, terminals = extras.packets, extras.terminals
    plain = [PacketPipe(pipe.pid, pipe.fd, []) for pipe in packets]
    aside = Aside(packets=plain, terminals=terminals, watches=extras.watches)
    if pids and (ports := waiting_ports(pids[0])):
        aside.waiting = _take(pod, pids, ports, aside)
    elif packets or terminals or extras.watches:
        _note(pod, aside)
    if packets or terminals or extras.watches:
        tasks = dict(tasks_of(pids))
        extra_watches.take(extras.watches, tasks)
        extra_files.set_packets(packets, tasks, on=False)
        extra_files.set_terminals(terminals, tasks, on=False)
    extras.backlog = aside.waiting
    if extras.corked:
        extras.corked = _take_corked(pod, dict(tasks_of(pids)), extras.corked, aside)
    extras.early = _take_early(pod, pids, found, aside) + row if found else row


def _look_for_requests(pod: Pod, pids: list[int]) -> None:
    """Refuse what has asynchronous I/O in flight that does not end."""
    users = [pid for pid in pids if aio.addresses(_maps(pid))] if inject.possible() and aio.in_use() else []
    end = time.monotonic() + _REQUEST_SECONDS
    while users:
        with inject.held(PodCgroup(pod.cgroup), pids):
            found = {pid: aio.in_flight(pid) for pid in users}
        users = [pid for pid in users if found[pid]]
        if users and time.monotonic() > end:
            folder = Path("/proc", str(users[0]))
            raise Refused(
                f"process {inner_pid(folder)} ({(folder / 'comm').read_text().strip()}): asynchronous I/O is in flight "
                f"(requests of io_submit: {found[users[0]]})",
                "let them end before the checkpoint (io_getevents), or cancel those that wait (io_cancel)",
            )
        if users:
            time.sleep(_REQUEST_PAUSE)


def _maps(pid: int) -> str:
    try:
        return Path("/proc", str(pid), "maps").read_text(errors="replace")
    except OSError:
        return ""  # it has ended


def _take_early(pod: Pod, pids: list[int], found: list[Early], aside: Aside) -> list[Early]:
    with connecting.ready(hands := _hands(pod, pids), found) as ready:
        if ready.missing:
            one, _ = ready.missing[0]
            raise Refused(
                f"process {one.listener[0]}, descriptor {one.listener[1]} (unix socket): "
                f"{_words(ready.missing[:1])}, which was not accepted yet, cannot be made once more",
                "let the program accept its connections before the checkpoint",
            )
        with unaccepted.emptied(hands, found) as taken:
            aside.early = taken.notes
            _note(pod, aside)
            rights = dict(taken.rights)
            if lost := ready.connect(aside.early, with_data=bool(rights), rights=rights):
                raise MoorageError(f"{_words(lost)} could not be connected once more")
            if rights:
                aside.early = []
                _note(pod, aside)
                pid, fd = found[min(rights)[0]].listener
                raise Refused(
                    f"process {pid}, descriptor {fd} (unix socket): descriptors are under way in a connection that was "
                    "not accepted yet",
                    "let the program accept its connections before the checkpoint",
                )
    aside.connected = True
    _note(pod, aside)
    pod.log.info("connections over unix sockets wait to be accepted", count=len(found))
    return aside.early


def _take_corked(pod: Pod, tasks: dict[int, int], found: list[Corked], aside: Aside) -> list[Corked]:
    for one in found:
        with borrowed_socket(tasks[one.pid], one.fd) as sock:
            taken = namespace.run_in(pod.network.netns_path, functools.partial(corked.take, sock, one))
        aside.corked.append(taken)
        _note(pod, aside)
    return aside.corked


def give_corked(pod: Pod, found: list[Corked]) -> None:
    """Let UDP sockets hold back what they did. Raises nothing but for a process that is gone: it is only a datagram."""
    tasks = dict(tasks_of(pod.processes()))
    for one in found:
        try:
            with borrowed_socket(tasks[one.pid], one.fd) as sock:
                corked.give(sock, one)
        except (KeyError, OSError) as error:
            pod.log.warning("a datagram that was held back is lost", process=one.pid, why=str(error))


def early(pod: Pod) -> list[str]:
    """Words for connections over unix sockets that wait to be accepted in the frozen pod, with data in them."""
    table = namespace.run_in(pod.network.netns_path, unix_diag.read)
    return ["a connection over a unix socket waits to be accepted"] if unaccepted.awaited(table) else []


def _hands(pod: Pod, pids: list[int]) -> unaccepted.Hands:
    return unaccepted.Hands(PodCgroup(pod.cgroup), pids, lambda work: namespace.run_in(pod.network.netns_path, work))


def _note(pod: Pod, aside: Aside) -> None:
    write_private(pod.folder / FILE, msgspec.json.encode(aside))


def _take(pod: Pod, pids: list[int], ports: list[int], aside: Aside) -> list[Waiting]:
    pod.network.shield(ports=ports)
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(borrowed_socket(*place)) for place in _listeners(pids, set(ports))]
        if not set(ports) <= {listener.getsockname()[1] for listener in listeners}:
            listeners += _under_way(pids, set(ports), stack)
        taken, accepted = waiting.take(listeners)
        aside.waiting = taken
        _note(pod, aside)
        waiting.vanish(accepted)
    pod.network.shield(waiting=taken)
    pod.log.info("connections wait to be accepted", count=len(taken), bytes=sum(len(one.data) for one in taken))
    return taken


def _listeners(pids: list[int], ports: set[int]) -> Iterator[Place]:
    """Process and descriptor of each socket that listens at one of the ports, each socket once."""
    for places in holders_of(pids).values():
        for place in places:
            with contextlib.suppress(OSError):
                if _listens(*place, ports):
                    yield place
                    break


def _listens(pid: int, fd: int, ports: set[int]) -> bool:
    with borrowed_socket(pid, fd) as sock:
        return _is_at(sock, ports)


def _is_at(sock: socket.socket, ports: set[int]) -> bool:
    return (
        sock.family in (socket.AF_INET, socket.AF_INET6)
        and sock.type == socket.SOCK_STREAM
        and bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        and sock.getsockname()[1] in ports
    )


def _under_way(pids: list[int], ports: set[int], stack: contextlib.ExitStack) -> list[socket.socket]:
    """Those that listen at one of the ports and are on their way from one process to another."""
    return [stack.enter_context(sock.dup()) for sock in under_way.sockets(pids) if _is_at(sock, ports)]


def put_back(pod: Pod) -> None:
    """Put back what `take` has taken, if it was not yet. What cannot be does not keep the rest from it. Raises
    `OSError`, `MoorageError`: the first that went wrong."""
    file = pod.folder / FILE
    if not file.exists():
        return
    aside = msgspec.json.decode(file.read_bytes(), type=Aside)
    tasks = dict(tasks_of(pod.processes()))
    failed: list[OSError | MoorageError] = []

    def done(work: Callable[[], None], name: str) -> None:
        """Once: data that is sent again by a worker that follows would be there twice."""
        if not getattr(aside, name):
            return
        try:
            work()
        except (OSError, MoorageError) as error:
            failed.append(error)
        else:
            setattr(aside, name, [])
            _note(pod, aside)

    done(lambda: extra_files.set_packets(aside.packets, tasks, on=True), "packets")
    done(lambda: extra_files.set_terminals(aside.terminals, tasks, on=True), "terminals")
    done(lambda: extra_watches.give(aside.watches, tasks), "watches")
    done(lambda: give_corked(pod, aside.corked), "corked")
    done(lambda: give_early(pod, aside.early, connected=aside.connected), "early")
    done(lambda: give(pod, aside.waiting), "waiting")
    if failed:
        raise failed[0]
    file.unlink()


def give_early(pod: Pod, early: list[Early], *, connected: bool) -> None:
    """Send what was sent over these connections. ``connected``: all are there, and in their order; else they are made
    anew. Raises `OSError`, `MoorageError`."""
    hands = _hands(pod, pod.processes())
    if connected and all(one.client is not None for one in early):
        connecting.send(hands, early)
    else:
        if lost := connecting.connect(hands, early, with_data=True):
            pod.log.error("connections are lost", why=_words(lost))


def _words(lost: list[tuple[Early, str]]) -> str:
    return ", ".join(f"the connection of {one.client or 'a client that ended'} ({why})" for one, why in lost)


def give(pod: Pod, taken: list[Waiting]) -> None:
    """Put connections into the queues of the pod's listening sockets, and take the shield away. Raises `OSError`."""
    size = max((len(one.data) for one in taken), default=0)
    ports = {one.local[1] for one in taken if len(one.data) > _SMALL_BYTES}
    with contextlib.suppress(NotFound), contextlib.ExitStack() as stack:
        if ports:
            listeners = [stack.enter_context(borrowed_socket(*place)) for place in _listeners(pod.processes(), ports)]
            stack.enter_context(waiting.roomy(listeners, size))
        if left := pod.network.put_back(taken):
            pod.log.error("connections are lost", why=str(waiting.lost(left)))
        pod.network.unshield()


def of_job(pod: Pod, taken: list[Waiting], node: str, external_address: str) -> list[Waiting]:
    """Those that can go on here: after a move, connections from the world are over (`restore.settle`)."""
    if node == pod.node.name and external_address == pod.network.external_address:
        return taken
    return [one for one in taken if one.local[0] != external_address]
