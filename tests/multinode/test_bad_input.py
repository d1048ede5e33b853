"""Mistakes and trouble: one clear line, the documented exit code, and nothing half-done left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moorage.coordinator.client import Client, Job, JobInfo
from moorage.errors import (
    Conflict,
    CorruptData,
    EnvironmentLacking,
    JobFailed,
    MoorageError,
    NewerVersion,
    NoCapacity,
    NotFound,
    Refused,
    Unavailable,
    UsageError,
)
from moorage.store import Store
from tests.support.cluster import DevCluster
from tests.support.pingpong_job import PingPong
from tests.support.shell import COMMAND, Shell

pytestmark = pytest.mark.root

SECONDS = 120.0
COUNT = """\
import itertools, os, sys, time
{before}
for number in itertools.count():
    with open({now!r} + ".new", "w") as file:
        file.write(f"{{number}} {{os.getpid()}}")
    os.rename({now!r} + ".new", {now!r})
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    with DevCluster(nodes=2, lease_seconds=5) as made:
        yield made


@pytest.fixture
def shell(cluster: DevCluster, tmp_path: Path) -> Shell:
    return Shell(cluster, tmp_path)


@pytest.fixture
def client(cluster: DevCluster) -> Client:
    return cluster.client()


class Counting:
    """A job of one pod that counts for ever, and shows in a live folder how far it is."""

    def __init__(self, client: Client, folder: Path, name: str, *, before: str = "", **options: Any) -> None:
        live, work = folder / "live", folder / "work"
        live.mkdir()
        work.mkdir()
        self._now = live / "now"
        script = COUNT.format(before=before, now=str(self._now))
        command = [sys.executable, "-u", "-c", script]
        mounts = [f"{live}:{live}"]
        self.job: Job = client.run(command, name=name, working_directory=str(work), mounts=mounts, **options)
        self.until_it_moves()

    def at(self) -> int:
        """The number that it has reached; -1 before the first."""
        with contextlib.suppress(FileNotFoundError):
            return int(self._now.read_text().split()[0])
        return -1

    def until_it_moves(self) -> None:
        """Wait for another number than now."""
        before = self.at()
        until(lambda: self.at() != before, self.job.status)


def until(done: Callable[[], bool], state: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not done():
        assert time.monotonic() < deadline, state()
        time.sleep(0.1)


def nothing_runs(cluster: DevCluster, client: Client) -> None:
    """No pod stands on any node, and no folder of one is left."""
    until(lambda: not any(node.pods for node in client.nodes()), client.nodes)
    left = [path for node in cluster.nodes for path in cluster.node_folder(node).glob("pods/*/*/*")]
    assert left == []


@pytest.mark.parametrize(
    ("error", "words", "line"),
    [
        (NotFound, "nobody", "checkpoint nobody"),
        (NotFound, "nobody", "stop nobody"),
        (NotFound, "nobody", "logs -f nobody"),
        (NotFound, "nobody", "exec nobody -- true"),
        (NotFound, "nobody", "pull nobody"),
        (NotFound, "nobody", "wait nobody"),
        (NotFound, "nothing", "show nothing"),
        (NotFound, "nothing", "inspect nothing"),
        (NotFound, "nothing", "check --read-data nothing"),
        (NotFound, "nowhere", "doctor --node nowhere"),
        (NotFound, "nowhere", "run --on nowhere -- true"),
        (NotFound, "job.yaml", "run -f job.yaml"),
        (NoCapacity, "GPU", "run --gpus-per-pod 1 -- true"),
        (UsageError, "--pods", "run --pods 0 -- true"),
        (UsageError, "no command", "run"),
        (UsageError, "no/good", "run --name no/good -- true"),
        (UsageError, "--if-exists", "run --if-exists nonsense -- true"),
        (UsageError, "nonsense", "nonsense"),
        (UsageError, "s3://x/y", "dev up --name never --store s3://x/y"),
        (NotFound, "/proc/x", "dev up --name never --state /proc/x"),
        (NotFound, "nobody", "delete -y nobody"),
        (UsageError, "somewhere", "--coordinator somewhere jobs"),
        (UsageError, "--checkpoint-every", "torchrun --checkpoint-every soon train.py"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(
    shell: Shell, client: Client, error: type[MoorageError], words: str, line: str
) -> None:
    before = client.jobs(all=True)
    assert words in shell.refused(error, *line.split())
    assert [job.id for job in client.jobs(all=True)] == [job.id for job in before]


def test_a_job_that_cannot_start_says_why_and_leaves_nothing(cluster: DevCluster, shell: Shell, client: Client) -> None:
    for words, line in [
        ("no-such-program does not exist", "run -- no-such-program"),
        ("user nobody-such does not exist", "run --user nobody-such -- true"),
        ("image /nowhere", "run --image /nowhere -- true"),
        ("/nowhere, which is to be mounted", "run --mount /nowhere:/x -- true"),
    ]:
        said = shell.refused(JobFailed, *line.split())
        assert words in said and "\n  " in said, said
    done = shell("run", "--name", "dies", "--", "sh", "-c", "echo why >&2; exit 5", code=5)
    assert "why\n" in done.stderr and "rank 0 exited with 5" in done.stderr
    nothing_runs(cluster, client)


def test_a_name_that_is_taken(shell: Shell, client: Client, tmp_path: Path) -> None:
    job = Counting(client, tmp_path, "taken").job
    assert "--if-exists" in shell.refused(Conflict, "run", "--name", "taken", "--", "true")
    same = shell.json("run", "-d", "--name", "taken", "--if-exists", "resume", "--", "true")
    assert same["id"] == job.id
    shell("run", "--name", "taken", "--if-exists", "replace", "--", "true")
    assert job.status().phase == "stopped"


def test_what_cannot_be_saved_is_named_and_the_job_runs_on(
    cluster: DevCluster, shell: Shell, client: Client, tmp_path: Path
) -> None:
    first, second = cluster.nodes
    raw = "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)"
    job = Counting(client, tmp_path, "raw", before=raw, nodes=[first])
    assert f"may run on {first} only" in shell.refused(NoCapacity, "move", "raw", "--to", second)
    said = shell.refused(Refused, "checkpoint", "raw")
    assert "python" in said and "descriptor 3" in said and "use TCP or UDP" in said
    job.until_it_moves()
    with pytest.raises(Refused):
        job.job.park()
    job.until_it_moves()
    info = job.job.status()
    assert (info.phase, info.incarnation, info.latest_checkpoint) == ("running", 1, "")
    job.job.stop(grace=0)


# What the store has lost


def _files(store: Path, kind: str) -> set[Path]:
    return {path for path in (store / kind).rglob("*") if path.is_file()}


def _alter(path: Path, how: str) -> None:
    if how == "lose":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    if how == "cut":
        del data[len(data) // 2 :]
    else:
        data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_damaged_checkpoint_is_refused_and_an_older_one_still_works(
    cluster: DevCluster, shell: Shell, client: Client, tmp_path: Path
) -> None:
    store = cluster.folder / "state" / "store"
    first, second = cluster.nodes
    counting = Counting(client, tmp_path, "damaged", nodes=[first, second])
    job = counting.job
    job.move(to=[first])
    older = job.checkpoint()
    before = {kind: _files(store, kind) for kind in ("index", "packs", "pods", "checkpoints")}
    counting.until_it_moves()
    lost = min(before["packs"])
    lost.rename(store / "lost")
    with pytest.raises(CorruptData, match="damaged"):  # seen before the job is taken down for it
        job.restore(older)
    assert (job.status().phase, job.status().incarnation) == ("running", 2)
    (store / "lost").rename(lost)
    newest = job.park()
    new = {kind: min(_files(store, kind) - files) for kind, files in before.items()}
    # The index first: a node that has read it once needs it no more.
    damages = [("index", "flip"), ("packs", "flip"), ("packs", "cut"), ("pods", "cut"), ("checkpoints", "flip")]
    for kind, how in [*damages, ("pods", "lose"), ("checkpoints", "lose")]:
        sound = tmp_path / "sound"
        shutil.copy2(new[kind], sound)
        _alter(new[kind], how)
        try:
            with pytest.raises(CorruptData):
                found = client.check(newest, read_data=True)
                raise CorruptData(found.errors[0]) if found.errors else AssertionError((kind, how))
            was = job.status()
            with pytest.raises(CorruptData) as refused:
                job.restore(newest, on=[second])
            assert refused.value.hint
            info = job.status()
            assert (info.phase, info.latest_checkpoint) == (was.phase, newest.id)
            assert was.phase == "parked" or info.incarnation == was.incarnation
            if kind == "packs" and how == "flip":
                assert newest.id in shell.refused(CorruptData, "check", "--read-data", newest.id)
                # What a slow store has compressed cannot be unpacked, what it has not does not match its digest.
                assert "chunk" in shell.refused(CorruptData, "restore", "damaged")
                assert client.check(older, read_data=True).errors == []
                assert job.restore(older).phase == "running"
                counting.until_it_moves()
        finally:
            shutil.copy2(sound, new[kind])
    assert {checkpoint.id for checkpoint in client.checkpoints(job.id)} >= {older.id, newest.id}
    assert job.restore(newest, on=[second]).phase == "running"
    counting.until_it_moves()
    job.stop(grace=0)


def test_without_space_for_a_checkpoint_the_job_runs_on_and_the_next_one_works(
    cluster: DevCluster, shell: Shell, client: Client, tmp_path: Path
) -> None:
    store = cluster.folder / "state" / "store"
    counting = Counting(client, tmp_path, "full")
    small = tmp_path / "small"
    small.mkdir()
    with contextlib.ExitStack() as stack:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m,mode=0700", "tmpfs", str(small)], check=True)
        stack.callback(subprocess.run, ["umount", "-l", str(small)], check=True)
        subprocess.run(["cp", "-a", f"{store}/.", str(small)], check=True)
        subprocess.run(["mount", "--bind", str(small), str(store)], check=True)
        stack.callback(subprocess.run, ["umount", "-l", str(store)], check=True)
        filler = small / "filler"
        room = os.statvfs(small)
        # Seen before anything is touched.
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, (room.f_bavail * room.f_frsize) - (1 << 20))
        said = shell.refused(NoCapacity, "checkpoint", "full")
        assert "MiB are free" in said and "prune" in said
        counting.until_it_moves()
        # Seen when half is written: the space goes after it was looked at.
        filler.unlink()
        cluster.arm("store.pack.before", "error NoCapacity: no space left on device")
        with pytest.raises(MoorageError, match="no space left"):
            counting.job.checkpoint()
        cluster.disarm()
        counting.until_it_moves()
        info = counting.job.status()
        assert (info.phase, info.incarnation, info.latest_checkpoint) == ("running", 1, "")
        # There is room again.
        checkpoint = counting.job.checkpoint()
        assert client.check(checkpoint, read_data=True).errors == []
        counting.job.stop(grace=0)


# What does not answer


def test_without_etcd_a_clear_error_and_jobs_that_live_on(cluster: DevCluster, shell: Shell) -> None:
    job = PingPong(cluster, pods=2, steps=1_000_000)
    job.until_step(10)
    cluster.stop("etcd")
    try:
        # Until its lease is over the coordinator answers what it knows; the pods are frozen by then too.
        refusals: list[Unavailable] = []
        with Client(config=cluster.config, patience=1) as impatient:

            def refused() -> bool:
                try:
                    impatient.jobs()
                except Unavailable as error:
                    refusals.append(error)
                return bool(refusals)

            until(refused, lambda: "it answers")
        assert cluster.config.coordinator in refusals[0].message and refusals[0].hint
    finally:
        cluster.start("etcd")
    job.until_it_moves()
    job.end()
    info = job.assert_right()
    assert info.phase == "finished"
    until(lambda: all(node.live and node.ready for node in job.client.nodes()), job.client.nodes)
    shell("run", "--", "true")


def test_without_a_coordinator_a_clear_error_and_jobs_that_run_on(
    cluster: DevCluster, shell: Shell, client: Client, tmp_path: Path
) -> None:
    counting = Counting(client, tmp_path, "alone")
    cluster.stop("coordinator")
    try:
        said = shell.refused(Unavailable, "status")
        assert cluster.config.coordinator in said
        counting.until_it_moves()
    finally:
        cluster.start("coordinator")
    info: JobInfo = counting.job.status()
    assert (info.phase, info.incarnation) == ("running", 1)
    counting.job.stop(grace=0)


def test_a_store_of_a_newer_version_is_left_alone(cluster: DevCluster, shell: Shell, client: Client) -> None:
    config = cluster.folder / "state" / "store" / "config"
    sound = config.read_bytes()
    cluster.stop("node-1")
    config.write_bytes(sound.replace(b'"version": 1', b'"version": 99'))
    assert config.read_bytes() != sound
    try:
        command = [str(COMMAND), "worker", "--config", str(cluster.node_folder("node-1") / "config.toml")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    finally:
        config.write_bytes(sound)
        cluster.start("node-1")
    assert done.returncode == NewerVersion.exit_code, done.stderr
    assert "version 99" in done.stderr and "Traceback" not in done.stderr
    until(lambda: all(node.live and node.ready for node in client.nodes()), client.nodes)


def test_doctor_and_dev_say_what_a_machine_lacks(shell: Shell) -> None:
    def unprivileged(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", str(COMMAND), *arguments]
        return subprocess.run(command, env=shell.environment, capture_output=True, text=True, check=False, cwd="/")

    if unprivileged("--version").returncode:
        pytest.skip("nobody may not read where moorage is installed")
    for line in (["doctor"], ["dev", "up", "--name", "never"]):
        done = unprivileged(*line)
        assert done.returncode == EnvironmentLacking.exit_code, (line, done.stdout, done.stderr)
        assert "root" in done.stdout + done.stderr and "Traceback" not in done.stderr


def test_a_node_that_opened_another_store_gets_no_pod(
    cluster: DevCluster, shell: Shell, client: Client, tmp_path: Path
) -> None:
    """As with a folder of one's own host under the name of what the others share."""
    _, second = cluster.nodes
    config = cluster.node_folder(second) / "config.toml"
    sound = config.read_text()
    shared = str(cluster.folder / "state" / "store")
    assert shared in sound

    def live() -> bool:
        return any(node.node == second and node.live for node in client.nodes())

    def begin_anew(text: str) -> None:
        cluster.stop(second)
        until(lambda: not live(), client.nodes)
        config.write_text(text)
        cluster.start(second)
        until(live, lambda: cluster.log(second))

    Store.open(str(tmp_path / "store"), create=True)
    begin_anew(sound.replace(shared, str(tmp_path / "store")))
    try:
        said = shell.refused(NoCapacity, "run", "--on", second, "--", "true")
        assert f"{second} opened another store than the coordinator" in said and "S3 bucket" in said
    finally:
        begin_anew(sound)
    shell("run", "--on", second, "--", "true")
