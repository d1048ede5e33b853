"""Calls that wait: sleep, poll, select, epoll, futex with a time limit go on and end no earlier than they should."""

import select
import signal
import socket
import threading
import time
from collections.abc import Iterator

from kit import check, libc, run


def program(nonce: bytes) -> Iterator[None]:
    left, right = socket.socketpair()
    poll, epoll = select.poll(), select.epoll()
    poll.register(left, select.POLLIN)
    epoll.register(right, select.EPOLLIN)
    event = threading.Event()
    rounds = [0] * 6
    faults: list[str] = []

    def waits(number: int) -> None:
        length = 0.2 + 0.11 * number
        while True:
            began = time.monotonic()
            if number == 0:
                time.sleep(length)
            elif number == 1:
                poll.poll(length * 1000)
            elif number == 2:
                select.select([left], [], [], length)
            elif number == 3:
                epoll.poll(length)
            elif number == 4:
                event.wait(length)
            else:
                signal.sigtimedwait([signal.SIGUSR2], length)
            passed = time.monotonic() - began
            if passed < length - 0.005:
                faults.append(f"wait {number} took {passed} instead of {length}")
            rounds[number] += 1

    for number in range(len(rounds)):
        threading.Thread(target=waits, args=(number,), daemon=True).start()
    blocked = threading.Thread(target=left.recv, args=(1,), daemon=True)
    blocked.start()
    seen, since = list(rounds), time.monotonic()
    libc.prctl(29, 1)
    yield
    while True:
        if all(now > before for now, before in zip(rounds, seen, strict=False)):
            seen, since = list(rounds), time.monotonic()
        check(time.monotonic() < since + 200, f"a call waits for ever: {seen} {rounds}")
        check(not faults, "; ".join(faults))
        check(blocked.is_alive(), "a call that waits for data came back without")
        yield


run(program)
