"""Talks to an echo server outside of the pod over one connection; opens another if it is reset.

``external.py HOST PORT``: for each step one line there and back. Prints ``connected N``, ``lost after STEP: why`` and
at the end ``done steps=… connections=…``. Exit code 70 when an echo is wrong, 72 when the server cannot be reached.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--delay", type=float, default=0.1, help="seconds between steps")
    options = parser.parse_args()
    connections = step = refused = 0
    while step < options.steps:
        try:
            with socket.create_connection((options.host, options.port), timeout=30) as connection:
                connections += 1
                refused = 0
                print(f"connected {connections}", flush=True)
                while step < options.steps:
                    line = b"%d\n" % (step + 1)
                    connection.sendall(line)
                    got = connection.recv(len(line), socket.MSG_WAITALL)
                    if not got:
                        raise ConnectionResetError("closed by the other end")
                    if got != line:
                        print(f"FATAL sent {line!r}, got {got!r}", flush=True)
                        return 70
                    step += 1
                    print(f"step {step}", flush=True)
                    time.sleep(options.delay)
        except ConnectionRefusedError as error:
            refused += 1
            if refused > 100:
                print(f"FATAL {error}", flush=True)
                return 72
            time.sleep(0.1)
        except OSError as error:
            print(f"lost after {step}: {error}", flush=True)
    print(f"done steps={step} connections={connections}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
