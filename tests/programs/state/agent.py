"""An agent with a long history in memory: conversation, embeddings, a database in memory, tools as child processes."""

import asyncio
import hashlib
import json
import random
import sqlite3
import sys
from collections.abc import Iterator

from kit import equal, pattern, run

TOOL = "import sys\nfor line in sys.stdin: print(line.strip()[::-1], flush=True)"


def program(nonce: bytes) -> Iterator[None]:
    history: list[dict[str, object]] = []
    digest = b""
    chance = random.Random(nonce)
    for number in range(20_000):
        entry = {"role": "user" if number % 2 else "tool", "number": number, "text": pattern(nonce, 40, number).hex()}
        history.append(entry)
        digest = hashlib.sha256(digest + json.dumps(entry).encode()).digest()
    memory = sqlite3.connect(":memory:")
    memory.execute("create table facts (number integer primary key, fact text)")
    memory.executemany("insert into facts values (?, ?)", [(n, pattern(nonce, 9, n).hex()) for n in range(5000)])
    loop = asyncio.new_event_loop()

    async def start() -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(sys.executable, "-Sc", TOOL, stdin=pipe, stdout=pipe)

    tool = loop.run_until_complete(start())
    timers: list[int] = []

    def heartbeat() -> None:
        timers.append(1)
        loop.call_later(0.03, heartbeat)

    heartbeat()
    drawn = [chance.random()]

    async def think(text: str) -> str:
        assert tool.stdin and tool.stdout
        tool.stdin.write(text.encode() + b"\n")
        await asyncio.sleep(0.01)
        return (await asyncio.wait_for(tool.stdout.readline(), 30)).decode().strip()

    yield
    while True:
        number = len(history)
        text = pattern(nonce, 10, number).hex()
        equal(loop.run_until_complete(think(text)), text[::-1], "the tool's answer")
        drawn.append(chance.random())
        entry = {"role": "user", "number": number, "text": text}
        history.append(entry)
        digest = hashlib.sha256(digest + json.dumps(entry).encode()).digest()
        if number % 25 == 0:
            again = b""
            for old in history:
                again = hashlib.sha256(again + json.dumps(old).encode()).digest()
            equal(again, digest, "the history")
            same = random.Random(nonce)
            equal([same.random() for _ in drawn], drawn, "what chance draws")
        n = number % 5000
        fact = memory.execute("select fact from facts where number = ?", (n,)).fetchone()[0]
        equal(fact, pattern(nonce, 9, n).hex(), "the database")
        yield


run(program)
