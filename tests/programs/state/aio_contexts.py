"""Asynchronous I/O (io_setup): contexts that are idle, that were used, and with events that nobody has read yet."""

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterator

from kit import Lacks, call, equal, pattern, run

SETUP, DESTROY, GETEVENTS, SUBMIT = 206, 207, 208, 209
READ, WRITE = 0, 1


class Context:
    def __init__(self, events: int) -> None:
        self.id = ctypes.c_ulong()
        call("syscall", SETUP, events, ctypes.byref(self.id))
        self.kept: list[object] = []

    def submit(self, operation: int, fd: int, buffer: ctypes.Array[ctypes.c_char], data: int, offset: int = 0) -> None:
        address, size = ctypes.addressof(buffer), ctypes.sizeof(buffer)
        one = struct.pack("<QIIHhIQQqQII", data, 0, 0, operation, 0, fd, address, size, offset, 0, 0, 0)
        request = ctypes.create_string_buffer(one, len(one))
        requests = (ctypes.c_void_p * 1)(ctypes.addressof(request))
        self.kept += [request, buffer]
        equal(call("syscall", SUBMIT, self.id, 1, requests), 1, "io_submit")

    def events(self, number: int) -> list[tuple[int, int]]:
        room = ctypes.create_string_buffer(32 * number)
        got = call("syscall", GETEVENTS, self.id, number, number, room, None)
        return [(data, result) for data, _, result, _ in struct.iter_unpack("<QQqq", room.raw[: 32 * got])]


def program(nonce: bytes) -> Iterator[None]:
    if platform.machine() != "x86_64":
        raise Lacks("its contexts are refused on this kind of machine")
    try:
        idle, used, waiting = Context(16), Context(200), Context(64)
    except OSError as error:
        if error.errno == errno.ENOSYS:
            raise Lacks("this kernel has no io_setup") from None
        raise
    file = os.open("file", os.O_RDWR | os.O_CREAT)
    os.pwrite(file, pattern(nonce, 4096), 0)
    results = [ctypes.create_string_buffer(100) for _ in range(7)]
    for number, buffer in enumerate(results):
        waiting.submit(READ, file, buffer, 1000 + number, 10 * number)
    step = 0
    yield
    while True:
        step += 1
        text = ctypes.create_string_buffer(pattern(nonce, 50, step), 50)
        used.submit(WRITE, file, text, step, 5000)
        equal(used.events(1), [(step, 50)], "the event of a write")
        back = ctypes.create_string_buffer(50)
        used.submit(READ, file, back, step, 5000)
        equal((used.events(1), back.raw), ([(step, 50)], text.raw), "the event of a read")
        used.kept.clear()
        if os.path.exists(os.environ.get("STATE_STOP", "stop")):
            equal(waiting.events(7), [(1000 + number, 100) for number in range(7)], "events that waited")
            whole = pattern(nonce, 4096)
            equal([one.raw for one in results], [whole[10 * n : 10 * n + 100] for n in range(7)], "what was read")
            one = ctypes.create_string_buffer(100)
            for number in range(40):
                idle.submit(READ, file, one, number)
                equal(idle.events(1), [(number, 100)], "a context that was idle")
            for context in (idle, used, waiting):
                call("syscall", DESTROY, context.id)
            yield
        yield


run(program)
