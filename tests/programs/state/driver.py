"""Starts the programs of this folder side by side and tells for each what it said.

Usage: ``driver.py FOLDER-OF-BUILT-PROGRAMS NAME …``. Prints ``started NAME NONCE`` for each (``lacks NAME why`` for
what this machine does not offer), ``all ready``, and in the end ``kept NAME NONCE STEPS`` or ``lost NAME why``.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import threading

HERE = pathlib.Path(__file__).resolve().parent


def command(built: pathlib.Path, name: str) -> list[str]:
    if (HERE / f"{name}.py").exists():
        return [sys.executable, "-u", str(HERE / f"{name}.py")]
    if name == "node_program":
        return ["node", str(HERE / "node_program.js")]
    if name == "JavaProgram":
        return ["java", "-Xmx64m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", str(built), name]
    return [str(built / name)]


def main() -> None:
    built, names = pathlib.Path(sys.argv[1]), sys.argv[2:]
    say = threading.Lock()
    ready = threading.Barrier(len(names) + 1)

    def tell(line: str) -> None:
        with say:
            print(line, flush=True)

    def follow(name: str) -> None:
        folder = pathlib.Path(name)
        folder.mkdir()
        process = subprocess.Popen(command(built, name), stdout=subprocess.PIPE, cwd=folder, text=True)
        assert process.stdout
        nonce, verdict = "", ""
        for line in process.stdout:
            word, _, rest = line.rstrip().partition(" ")
            if word == "ready":
                nonce = rest
                tell(f"started {name} {nonce}")
                ready.wait()
            elif word == "lacks":
                verdict = f"lacks {name} {rest}"
            elif word == "pass":
                same = rest.split()[0] == nonce
                verdict = f"kept {name} {rest}" if same else f"lost {name} the nonce is another one: {rest}"
            else:
                verdict = verdict or f"lost {name} {line.strip()}"
                tell(f"note {name} {line.strip()}")
            if verdict:
                break  # its children may hold the pipe
        code = process.wait()
        if not nonce:
            tell(verdict if verdict.startswith("lacks") else f"lost {name} did not start: {verdict} ({code})")
            ready.wait()
            return
        tell(verdict if verdict and (code == 0 or verdict.startswith("lost")) else f"lost {name} ended with {code}")

    threads = [threading.Thread(target=follow, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    ready.wait()
    tell(f"all ready {os.getpid()}")
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
