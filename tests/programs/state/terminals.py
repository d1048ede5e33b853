"""Pseudo-terminals: size, settings, text that waits both ways, a session with its controlling terminal."""

import fcntl
import os
import pty
import signal
import struct
import termios
import time
from collections.abc import Iterator

from kit import equal, fork, run


def program(nonce: bytes) -> Iterator[None]:
    master, slave = os.openpty()
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 111, 0, 0))
    settings = termios.tcgetattr(slave)
    settings[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(slave, termios.TCSANOW, settings)
    os.write(master, b"typed ahead")
    os.write(slave, b"not yet shown")
    lines_master, lines_slave = os.openpty()
    os.write(lines_slave, b"one line\nanother\r\n")
    shell_master, shell_slave = pty.openpty()

    def shell() -> None:
        os.setsid()
        fcntl.ioctl(shell_slave, termios.TIOCSCTTY, 0)
        told = []
        signal.signal(signal.SIGWINCH, lambda *_: told.append(1))
        os.write(shell_slave, b"$")
        while True:
            line = os.read(shell_slave, 100).strip()
            size = fcntl.ioctl(shell_slave, termios.TIOCGWINSZ, bytes(8))
            terminal = os.open("/dev/tty", os.O_RDWR)
            os.write(terminal, b"<%s %d %d>\n" % (line, struct.unpack("HHHH", size)[1], len(told)))
            os.close(terminal)

    fork(shell)
    settings = termios.tcgetattr(shell_slave)
    settings[3] &= ~termios.ECHO
    termios.tcsetattr(shell_slave, termios.TCSANOW, settings)
    equal(os.read(shell_master, 10), b"$", "the prompt")
    step = 0
    yield
    while True:
        step += 1
        fcntl.ioctl(shell_master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, step % 200 + 1, 0, 0))
        os.write(shell_master, b"line %d\n" % step)
        wanted = b"<line %d %d %d>\r\n" % (step, step % 200 + 1, step)
        got, deadline = b"", time.monotonic() + 200
        while len(got) < len(wanted) and time.monotonic() < deadline:
            got += os.read(shell_master, 100)
        equal(got, wanted, "what the session on the terminal says")
        size = struct.unpack("HHHH", fcntl.ioctl(slave, termios.TIOCGWINSZ, bytes(8)))
        equal(size[:2], (33, 111), "the size of the terminal")
        equal(termios.tcgetattr(slave)[3] & (termios.ECHO | termios.ICANON), 0, "its settings")
        if os.path.exists(os.environ.get("STATE_STOP", "stop")):
            equal(os.read(slave, 100), b"typed ahead", "what was typed ahead")
            equal(os.read(master, 100), b"not yet shown", "what was not yet shown")
            equal(os.read(lines_master, 100), b"one line\r\nanother\r\r\n", "lines that were not yet shown")
            yield
        yield


run(program)
