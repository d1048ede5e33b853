"""Python multiprocessing: a pool, a queue with things in it, a manager, locks, shared arrays, an executor."""

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from kit import equal, pattern, run


def square(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


def program(nonce: bytes) -> Iterator[None]:
    context = multiprocessing.get_context("fork")
    pool = context.Pool(2)
    executor = ProcessPoolExecutor(1, mp_context=context)
    queue = context.Queue()
    for number in range(5):
        queue.put((number, pattern(nonce, 1000, number)))
    array = context.Array("i", range(100))
    manager = context.Manager()
    table = manager.dict(nonce=nonce.hex())
    workers = {process.pid for process in pool._pool}  # type: ignore[attr-defined]
    step = 0
    yield
    while True:
        step += 1
        results = pool.map(square, range(step, step + 10), chunksize=2)
        equal([value for value, _ in results], [n * n for n in range(step, step + 10)], "the pool's results")
        equal({pid for _, pid in results} - workers, set(), "the pool's workers")
        equal(executor.submit(square, step).result(60)[0], step * step, "the executor's result")
        number, data = queue.get(timeout=60)
        equal((number, data), (step - 1, pattern(nonce, 1000, step - 1)), "the queue")
        queue.put((step + 4, pattern(nonce, 1000, step + 4)))
        with array:
            array[step % 100] += 1
        equal(sum(array[:]), sum(range(100)) + step, "the shared array")
        table["step"] = str(step)
        equal(table.copy(), {"nonce": nonce.hex(), "step": str(step)}, "the manager's table")
        if os.path.exists(os.environ.get("STATE_STOP", "stop")):
            pool.terminate()
            executor.shutdown()
            manager.shutdown()
            yield
        yield


run(program)
