"""epoll: level, edge, one-shot, with its own data, one in another, of a descriptor that was closed and opened anew."""

import os
import select
from collections.abc import Iterator

from kit import equal, run


def program(nonce: bytes) -> Iterator[None]:
    level, edge, once = os.pipe(), os.pipe(), os.pipe()
    outer, inner = select.epoll(), select.epoll()
    inner.register(level[0], select.EPOLLIN)
    inner.register(edge[0], select.EPOLLIN | select.EPOLLET)
    inner.register(once[0], select.EPOLLIN | select.EPOLLONESHOT)
    outer.register(inner, select.EPOLLIN)
    os.write(once[1], b"x")
    equal(inner.poll(5), [(once[0], select.EPOLLIN)], "the first event")
    yield
    while True:
        equal(outer.poll(0), [], "events though nothing happened")
        os.write(level[1], b"x")
        os.write(edge[1], b"x")
        equal(outer.poll(20), [(inner.fileno(), select.EPOLLIN)], "the outer one")
        equal(sorted(inner.poll(20)), sorted([(level[0], 1), (edge[0], 1)]), "the inner one")
        equal(inner.poll(20), [(level[0], 1)], "the level, and not the edge again")
        os.read(level[0], 1)
        os.read(edge[0], 1)
        if os.path.exists(os.environ.get("STATE_STOP", "stop")):
            inner.modify(once[0], select.EPOLLIN | select.EPOLLONESHOT)
            equal(inner.poll(5), [(once[0], select.EPOLLIN)], "the one-shot event, armed again")
            yield
        yield


run(program)
