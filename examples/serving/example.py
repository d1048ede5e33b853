"""A serving job is moved, and then loses its node, with requests in flight: none is lost, every answer is right."""

from __future__ import annotations

import hashlib
import http.client
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from moorage import Client
from moorage.coordinator.client import Job
from moorage.errors import MoorageError

SERVER = Path(__file__).resolve().with_name("server.py")
MOORAGE = [sys.executable, "-P", "-m", "moorage.cli.main"]
HOST_PORT, POD_PORT, CLIENTS = 18080, 8080, 4


class Outside:
    """Clients outside of the cluster. A request whose connection breaks is sent again, to where the server is then."""

    def __init__(self, job: Job, addresses: dict[str, str]) -> None:
        self._job = job
        self._addresses = addresses
        self.answers: dict[str, tuple[str, str]] = {}  # question: model and answer
        self.sent = 0
        self.retried = 0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(CLIENTS)]

    def __enter__(self) -> Outside:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _where(self) -> str:
        pods = self._job.status().pods
        return self._addresses.get(pods[0].node, "") if pods else ""

    def _ask(self, number: int) -> None:
        connection: http.client.HTTPConnection | None = None
        count = 0
        while not self._over.is_set():
            question = f"/outside/{number}/{count}"
            with self._lock:
                self.sent += 1
            while question not in self.answers:
                try:
                    if connection is None:
                        connection = http.client.HTTPConnection(self._where(), HOST_PORT, timeout=5)
                    connection.request("GET", question)
                    reply = json.loads(connection.getresponse().read())
                    self.answers[question] = reply["model"], reply["answer"]
                except (OSError, http.client.HTTPException, MoorageError):
                    with self._lock:
                        self.retried += 1
                    if connection is not None:
                        connection.close()
                    connection = None
                    time.sleep(0.2)
            count += 1

    def until_more(self, count: int) -> None:
        """Wait until so many more answers have come."""
        start, deadline = len(self.answers), time.monotonic() + 120
        while len(self.answers) < start + count:
            if time.monotonic() > deadline:
                raise SystemExit("example: no answers any more")
            time.sleep(0.05)


def main() -> int:
    with Client() as client, tempfile.TemporaryDirectory() as text:
        live, work = Path(text, "live"), Path(text, "work")
        live.mkdir()
        work.mkdir()
        job = client.run(
            [sys.executable, "-u", str(SERVER), str(live)],
            name="serving",
            pods=2,
            rendezvous=True,
            working_directory=str(work),
            mounts=[f"{live}:{live}"],
            publish_ports=[f"{HOST_PORT}:{POD_PORT}"],
            if_exists="replace",
        )
        job.until(lambda info: info.phase == "running", timeout=60)
        addresses = {node.node: node.address for node in client.nodes() if node.live}
        with Outside(job, addresses) as outside:
            outside.until_more(20)
            here = [pod.node for pod in job.status().pods]
            free = next(node for node in addresses if node not in here)
            print(f"serves on {here[0]}; moving it to {free} with requests in flight")
            job.move(to=[free, here[1]])
            outside.until_more(20)
            checkpoint = job.checkpoint()
            print(f"checkpoint {checkpoint.id}: it stood still for {checkpoint.pause_seconds:.2f} s")
            outside.until_more(20)
            lost = job.status().pods[0].node
            print(f"losing {lost} for good, with requests in flight")
            cluster = client.status().cluster
            destroy = [*MOORAGE, "dev", "destroy", lost, "--name", cluster]
            subprocess.run(destroy, check=True, stderr=subprocess.DEVNULL)
            job.until(lambda info: info.phase == "running" and info.incarnation > 2, timeout=120)
            outside.until_more(20)
            print("it serves again, on", job.status().pods[0].node)
        (live / "end").touch()
        result = job.wait(timeout=60)
        subprocess.run([*MOORAGE, "dev", "add", "--name", cluster], check=True, stdout=subprocess.DEVNULL)

        output = b"".join(piece.data for piece in job.logs(rank=0)).decode().splitlines()
        model = output[-1].split()[-1]
        inside = json.loads(b"".join(piece.data for piece in job.logs(rank=1)).decode().splitlines()[-1])
        print(f"outside: {len(outside.answers)} requests, {outside.retried} sent again")
        print(f"inside:  {inside['asked']} requests, {inside['broken']} connections broken")
        right = all(
            told == (model, hashlib.sha256(f"{model} {question}".encode()).hexdigest())
            for question, told in outside.answers.items()
        )
        right = right and not inside["wrong"] and not inside["broken"] and outside.sent == len(outside.answers)
        survived = inside["models"] == [model] and output[0].endswith(model)
        print(f"none lost, every answer right: {_yes(right)}; nonce survived: {_yes(survived)}")
        return 0 if right and survived and result.exit_code == 0 else 1


def _yes(true: bool) -> str:
    return "yes" if true else "no"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MoorageError as error:
        sys.exit(f"example: {error}")
