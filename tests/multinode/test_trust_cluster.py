"""One cluster, several people: who may do what, and that nobody gets round it. The tests share the cluster."""

from __future__ import annotations

import asyncio
import os
import pwd
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509

from moorage import rpc, trust
from moorage.barrier import cmp, op
from moorage.barrier.client import EtcdClient
from moorage.dev import layout, network
from moorage.errors import Conflict, Forbidden, MoorageError, NotFound, Unavailable
from moorage.localsocket import ask, path_of
from moorage.records import Keys
from moorage.tls import SERVER_NAME, TlsFiles
from moorage.v1 import POOL, worker_pb2
from moorage.v1 import coordinator_pb2 as pb
from tests.support.cluster import DevCluster
from tests.support.strangers import ANN, BOB, as_user, certificate, output_of, person, unreadable
from tests.unit.test_roles import COORDINATOR, WORKER, allowed, methods

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]

SECRET = "ann-told-nobody"
COUNT = """\
exec 3>result; umask 022; echo $TOKEN >private; chmod 600 private; i=0
while :; do i=$((i+1)); echo "step $i $(id -u)"; echo $i >&3; sleep 0.1; done
"""
#: Everything that a process without rights might try, each on a line of its own; none may succeed.
GAIN_ROOT = {
    "read what is of root": "cat /etc/shadow",
    "write what is of root": "echo x >>/etc/passwd",
    "become root": "exec 2>&1; python3 -c 'import os; os.setuid(0)' && id -u | grep -qx 0",
    "a setuid program": "p=$(command -v su) && timeout 2 $p -c true root </dev/null",
    "the files of init": "cat /.moorage/config || ls /.moorage",
    "the environment of init": "cat /proc/1/environ",
    "the root of init": "ls /proc/1/root/",
    "end init": "kill -9 1",
    "a mount": "mount -t tmpfs none /mnt",
    "another root": "chroot / true",
    "a device": "mknod /tmp/disk b 8 0",
    "a raw socket": "python3 -c 'import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)'",
    "the clock": "date -s @0",
    "settings of the kernel": "echo 1 >/proc/sys/kernel/sysrq",
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    with DevCluster(nodes=2) as made:
        yield made


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A working directory of ann's."""
    where = Path("/var/tmp") / f"moorage-trust-{os.getpid()}"
    where.mkdir(mode=0o755)
    user = pwd.getpwnam(ANN)
    os.chown(where, user.pw_uid, user.pw_gid)
    yield where
    subprocess.run(["rm", "-rf", str(where)], check=True)


@pytest.fixture(scope="module")
def job(cluster: DevCluster, folder: Path) -> Iterator[Any]:
    """A job of ann's that counts, as she sees it."""
    with person(cluster, ANN) as ann:
        started = ann.run(
            ["/bin/sh", "-c", COUNT],
            name="anns",
            working_directory=str(folder),
            env={"TOKEN": SECRET},
        )
        started.until(lambda found: found.phase == "running", timeout=120)
        yield started


def answers(tls: TlsFiles, service: str, endpoint: str, names: list[str]) -> dict[str, str]:
    """How an empty call of each method is answered: the name of the error, or ``ok``."""
    found = {}
    options = [("grpc.ssl_target_name_override", SERVER_NAME)]
    with grpc.secure_channel(endpoint, rpc.channel_credentials(tls), options) as channel:
        stub: Any = POOL.stub(service)(channel)
        for name in names:
            request = POOL.request(service, name)()
            argument = iter([request]) if name == "Exec" else request
            try:
                answer = getattr(stub, name)(argument, timeout=5, metadata=rpc.metadata())
                if hasattr(answer, "cancel"):
                    next(answer, None)
                    answer.cancel()
                found[name] = "ok"
            except grpc.RpcError as error:
                found[name] = type(rpc.translate(error, "peer")).__name__
    return found


def test_no_call_without_a_certificate_of_the_cluster_gets_past_the_handshake(
    cluster: DevCluster, tmp_path: Path
) -> None:
    trust.create_authority(tmp_path / "other", "another")
    foreign = trust.issue(tmp_path / "other", tmp_path / "foreign", "user:root", role="administer")
    ca = Path(cluster.config.tls.ca).read_bytes()
    mixed = tmp_path / "mixed"
    trust.lay(mixed, ca, Path(foreign.cert).read_bytes(), Path(foreign.key).read_bytes())
    record = cluster.record
    for endpoint in (cluster.config.coordinator, record.nodes[0].worker_endpoint()):
        for credentials in (None, grpc.ssl_channel_credentials(ca)):
            options = [("grpc.ssl_target_name_override", SERVER_NAME)]
            channel = (
                grpc.secure_channel(endpoint, credentials, options) if credentials else grpc.insecure_channel(endpoint)
            )
            with channel, pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(f"/{COORDINATOR}/Status", None, None)(b"", timeout=5)
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        service = COORDINATOR if endpoint == cluster.config.coordinator else WORKER
        for tls in (foreign, TlsFiles.in_folder(mixed)):
            first = methods(service)[0]
            assert answers(tls, service, endpoint, [first]) == {first: "Unavailable"}


def test_every_rpc_with_every_role(cluster: DevCluster) -> None:
    worker = cluster.record.nodes[0].worker_endpoint()
    principals = {"coordinator": "coordinator", "worker": "worker:node-9", "join": "join:x"}
    wrong = []
    for role in ("", "read", "operate", "operate-all", "administer", "coordinator", "worker", "join"):
        tls = certificate(cluster, principals.get(role, "user:games"), role)
        for service, endpoint in ((COORDINATOR, cluster.config.coordinator), (WORKER, worker)):
            may = allowed(role, service)
            for method, answer in answers(tls, service, endpoint, methods(service)).items():
                # A worker may have a node removed, but only itself: the name of none is another's.
                expected = method in may and (role, method) != ("worker", "RemoveNode")
                if (answer != "Forbidden") != expected:
                    wrong.append(f"{role or 'no role'}: {method}: {answer}")
    assert not wrong


def steps_of(job: Any) -> list[list[str]]:
    """The whole lines of the job's log: ``step``, its number, the user's."""
    text = b"".join(piece.data for piece in job.logs()).decode()
    return [line.split() for line in text[: text.rfind("\n")].splitlines() if line.startswith("step")]


def test_a_plain_users_job_is_saved_moved_and_runs_on_as_that_user(job: Any, folder: Path) -> None:
    uid = pwd.getpwnam(ANN).pw_uid
    job.checkpoint()
    first = job.status().pods[0].node
    job.move(to=["node-1" if first == "node-2" else "node-2"])
    last = int(steps_of(job)[-1][1])
    deadline = time.monotonic() + 30
    while int((steps := steps_of(job))[-1][1]) <= last + 3:
        assert time.monotonic() < deadline, steps[-3:]
        time.sleep(0.1)
    assert {words[2] for words in steps} == {str(uid)}
    said = output_of(job, "grep -E 'Cap|NoNew|Uid|Groups' /proc/self/status")
    capabilities = {line.split()[0]: line.split()[1] for line in said.splitlines() if line.startswith("Cap")}
    assert set(capabilities.values()) == {"0" * 16}, said
    assert "NoNewPrivs:\t1" in said


def test_no_way_to_root_leads_through_the_pod(job: Any) -> None:
    tries = "\n".join(f"( {script} ) >/dev/null 2>&1 && echo 'GOT {name}'" for name, script in GAIN_ROOT.items())
    said = output_of(job, f"cd /tmp; {tries}\necho all tried")
    assert said.strip() == "all tried"


def test_no_mount_takes_the_place_of_the_pods_init(cluster: DevCluster, folder: Path) -> None:
    """It runs as root, and what it wrote into the mount would be root's on the host, setuid bit and all."""
    mine = folder / "mine"
    mine.mkdir(mode=0o777)
    mine.chmod(0o777)
    (mine / "init").write_text("#!/bin/sh\nid >/.moorage/got\n")
    (mine / "init").chmod(0o755)
    (folder / "to-init").symlink_to("/.moorage")
    with person(cluster, ANN) as ann:
        job = ann.run(["id", "-u"], working_directory="/tmp", mounts=[f"{mine}:{folder}/to-init"])
        ended = job.wait(timeout=60)
        assert ended.exit_code == 0, ended.reason
        said = b"".join(piece.data for piece in job.logs()).decode()
    assert said.strip() == str(pwd.getpwnam(ANN).pw_uid)
    assert [path.name for path in mine.iterdir()] == ["init"]


def test_no_mount_gets_by_a_symlink_where_it_may_not_be_named(cluster: DevCluster, folder: Path) -> None:
    """runc's to refuse; a fake null would have it bind what ann likes over what it masks, writable."""
    fake = folder / "fake"
    fake.mkdir(mode=0o777)
    (fake / "null").symlink_to("/proc/sys/kernel/core_pattern")
    with person(cluster, ANN) as ann:
        for place in ("/", "/dev", "/proc"):
            link = folder / f"to-{place.strip('/') or 'root'}"
            link.symlink_to(place)
            job = ann.run(["true"], name="faker", working_directory="/tmp", mounts=[f"{fake}:{link}"])
            ended = job.wait(timeout=120)
            assert (ended.phase, "runc run failed" in ended.reason) == ("failed", True), (place, ended.reason)


def test_a_pod_sees_neither_the_nodes_state_nor_the_store_nor_keys(cluster: DevCluster, job: Any) -> None:
    state = cluster.folder / "state"
    said = output_of(job, f"find {state} 2>/dev/null; ls /run/moorage/*.sock; cat /run/moorage/*.sock")
    assert "key" not in said
    assert "pem" not in said


def test_anothers_job_can_be_seen_and_nothing_of_it_read_or_done(cluster: DevCluster, job: Any, tmp_path: Path) -> None:
    for role in ("read", "operate", "operate-all", "administer"):
        with person(cluster, BOB, role) as bob:
            theirs = bob.job("anns")
            assert SECRET not in str(theirs.status())
            assert SECRET not in str(bob.jobs())
            checkpoint = bob.checkpoints("anns")[-1]
            for reading in (
                lambda t=theirs: list(t.logs()),
                lambda t=theirs: t.pull(to=tmp_path),
                lambda t=theirs: t.pull("/etc/hostname", to=tmp_path),
                lambda t=theirs: t.exec(["id"]),
                lambda c=checkpoint, b=bob: b.inspect(c),
            ):
                with pytest.raises(Forbidden):
                    reading()
            if role in ("read", "operate"):
                for doing in (theirs.checkpoint, theirs.park, theirs.stop, lambda c=checkpoint, b=bob: b.pin(c)):
                    with pytest.raises(Forbidden):
                        doing()
                for if_exists in ("resume", "replace"):
                    with pytest.raises(Forbidden):
                        bob.run(["true"], name="anns", if_exists=if_exists)
    with person(cluster, BOB, "operate-all") as bob:
        assert bob.job("anns").checkpoint().owner == f"user:{ANN}"
    assert not list(tmp_path.iterdir())


def _below(top: Path) -> Iterator[Path]:
    """All but the merged root file systems of pods, which are as large as the machine's own."""
    for folder, names, found in os.walk(top):
        names[:] = [name for name in names if name not in ("merged", "work")]
        yield from (Path(folder) / name for name in (*names, *found) if not (Path(folder) / name).is_symlink())


def test_another_user_of_the_machine_can_open_neither_file_nor_socket(cluster: DevCluster, job: Any) -> None:
    state = cluster.folder / "state"
    bob = pwd.getpwnam(BOB).pw_uid
    files = list(_below(state))
    assert any(path.name == "guard.sock" for path in files)
    assert any("packs" in path.parts for path in files)
    assert not unreadable(bob, iter(files))
    sockets = [path for path in files if path.is_socket()] + [cluster.record.control, path_of(cluster.name, "node-1")]
    for path in sockets:
        with socket.socket(socket.AF_UNIX) as probe:
            assert "PermissionError" in as_user(bob, lambda p=path, s=probe: s.connect(str(p)))  # type: ignore[misc]
    # The way alone is not what keeps them out: the files themselves are root's, and nobody else's to read.
    own = [path for path in (state / "store").rglob("*") if path.is_file()]
    assert {oct(path.stat().st_mode & 0o077) for path in own} == {"0o0"}


def test_nobody_runs_as_somebody_else_and_no_path_leads_past_its_owners_rights(
    cluster: DevCluster, folder: Path, tmp_path: Path
) -> None:
    hidden = tmp_path / "root-only"
    hidden.mkdir(mode=0o700)
    (hidden / "open").mkdir(mode=0o755)
    (hidden / "open" / "file").write_text(SECRET)
    link = folder / "link"
    link.symlink_to(hidden / "open")
    with person(cluster, ANN) as ann:
        for user in ("root", "0", BOB, "1000:0"):
            with pytest.raises(Forbidden, match="only"):
                ann.run(["id"], user=user)
        for options in (
            {"mounts": [f"{hidden}/open:/x"]},
            {"mounts": [f"{link}:/x:ro"]},
            {"image": str(hidden / "open")},
        ):
            refused = ann.run(["/bin/cat", "/x/file"], name="curious", working_directory=str(folder), **options)
            ended = refused.wait(timeout=120)
            assert ended.phase == "failed"
            assert "may not reach" in ended.reason, ended.reason
            assert SECRET not in str(list(refused.logs()))
        told = set()
        for place in ("open", "nothing"):
            for command, where in ((f"{hidden}/{place}", str(folder)), ("/bin/true", f"{hidden}/{place}")):
                ended = ann.run([command], name="asking", working_directory=where).wait(timeout=120)
                told.add(ended.reason.replace(f"{hidden}/{place}", "IT"))
        assert len(told) == 2 and all("may not reach" in reason for reason in told), told
        given = folder / "given"
        given.write_text(SECRET)
        mounts = [f"{folder}:/x", f"{given}:/y:ro"]
        let = ann.run(["/bin/cat", "/x/given", "/y"], name="let", working_directory="/tmp", image="/", mounts=mounts)
        assert let.wait(timeout=30).exit_code == 0, let.status().reason
        assert SECRET in str(list(let.logs()))
        assert given.read_text() == SECRET  # what is taken away at the end is the mount alone
        for name in ("../up", "a/b", ".hidden", "x" * 100, "a\nb"):
            with pytest.raises(MoorageError):
                ann.run(["true"], name=name)
        for odd in ("../../etc/passwd", "anns-0001/../../x", "anns/../../../x"):
            with pytest.raises((NotFound, MoorageError)):
                ann.inspect(odd)


def test_a_command_in_the_pod_enters_no_folder_that_is_closed_to_the_user(
    cluster: DevCluster, job: Any, folder: Path, tmp_path: Path
) -> None:
    """runc would go there as root; from within, what everybody may read lies open."""
    closed = tmp_path / "root-only"
    (closed / "open").mkdir(parents=True)
    closed.chmod(0o700)
    (closed / "open" / "file").write_text(SECRET)
    (folder / "wd").mkdir()
    os.chown(folder / "wd", pwd.getpwnam(ANN).pw_uid, -1)
    tls = certificate(cluster, f"user:{ANN}", "operate")
    options = [("grpc.ssl_target_name_override", SERVER_NAME)]
    with grpc.secure_channel(cluster.config.coordinator, rpc.channel_credentials(tls), options) as channel:
        stub: Any = POOL.stub(COORDINATOR)(channel)

        def said(folder: str) -> tuple[str, int]:
            first = worker_pb2.ExecInput(
                fence=worker_pb2.Fence(job=job.id), command=["/bin/sh", "-c", "pwd; cat file"], working_directory=folder
            )
            got = list(stub.Exec(iter([first]), timeout=30, metadata=rpc.metadata()))
            return b"".join(piece.stdout for piece in got).decode(), got[-1].exit_code

        assert said(str(closed / "open")) == ("", 126)
        assert said("/var/tmp")[0].strip() == "/var/tmp"
        # The job's own working directory may lead there by now.
        place = folder / "wd"
        with person(cluster, ANN) as ann:
            turned = ann.run(["sleep", "60"], name="turned", working_directory=str(place))
            turned.until(lambda found: found.phase == "running", timeout=60)
            output_of(turned, f"cd /tmp; rmdir {place}; ln -s {closed}/open {place}")
            assert "ever" not in output_of(turned, "echo ever; cat file")
            turned.stop()


def test_a_pull_gives_what_the_job_could_read_and_nothing_more(job: Any, tmp_path: Path) -> None:
    assert "private" in job.pull(to=tmp_path / "own")
    assert (tmp_path / "own" / "private").read_text().strip() == SECRET
    for path in ("/etc/shadow", "/root", "/.moorage/config", "../../../../etc/shadow"):
        try:
            got = job.pull(path, to=tmp_path / "others")
        except (Forbidden, NotFound):
            continue
        assert not got, (path, got)
    output_of(job, "ln -s /etc/shadow shadow; ln -s /root root")
    for path in ("shadow", "root"):
        try:
            assert not job.pull(path, to=tmp_path / "links")
        except (Forbidden, NotFound):
            continue


def test_the_local_socket_knows_who_asks(cluster: DevCluster, job: Any) -> None:
    node = job.status().pods[0].node
    path = path_of(cluster.name, node)
    assert next(ask(path, {"do": "node"}))["registered"]
    assert [pod["name"] for pod in ask(path, {"do": "pods"})] == ["anns"]
    path.chmod(0o666)  # as it would be for the members of the group

    def of_ann() -> None:
        assert [pod["name"] for pod in ask(path, {"do": "pods"})] == ["anns"]
        assert any("step" in line["text"] for line in ask(path, {"do": "logs", "job": job.id, "pod": 0}))

    def of_bob() -> None:
        assert not list(ask(path, {"do": "pods"}))
        try:
            list(ask(path, {"do": "logs", "job": job.id, "pod": 0}))
        except Forbidden:
            return
        raise AssertionError("bob reads ann's log")

    try:
        assert not as_user(pwd.getpwnam(ANN).pw_uid, of_ann)
        assert not as_user(pwd.getpwnam(BOB).pw_uid, of_bob)
    finally:
        path.chmod(0o600)


def test_etcd_lets_each_process_do_what_it_is_for(cluster: DevCluster, job: Any) -> None:
    keys, endpoint = Keys(cluster.name), f"{cluster.record.gateway}:{cluster.record.etcd_port}"

    async def go() -> None:
        node = TlsFiles.in_folder(cluster.node_folder("node-1") / "tls")
        async with EtcdClient([endpoint], tls=node) as etcd:
            assert await etcd.get(keys.incarnation(job.id)) is not None
            for key in (keys.state(job.id), keys.incarnation(job.id), keys.leader + "me", keys.node("node-2"), "/x"):
                with pytest.raises(Forbidden):
                    await etcd.put(key, b"mine")
                with pytest.raises(Forbidden):
                    await etcd.txn([cmp.mod_revision(keys.incarnation(job.id), 1)], [op.delete(key)])
            with pytest.raises(Forbidden):
                await etcd.list(keys.audit)
        for tls in (certificate(cluster, f"user:{ANN}", "operate"), certificate(cluster, "user:games", "administer")):
            async with EtcdClient([endpoint], tls=tls, timeout=2) as etcd:
                with pytest.raises((Forbidden, MoorageError)):
                    await etcd.get(keys.incarnation(job.id))

    asyncio.run(go())


def served_serial(endpoint: str, tls: TlsFiles) -> int:
    """The serial number of the certificate that a server shows."""
    context = ssl.create_default_context(cafile=tls.ca)
    context.load_cert_chain(tls.cert, tls.key)
    context.set_alpn_protocols(["h2"])
    host, _, port = endpoint.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=5) as plain,
        context.wrap_socket(plain, server_hostname=SERVER_NAME) as wrapped,
    ):
        shown = wrapped.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number


def test_certificates_are_rotated_under_a_running_job(cluster: DevCluster, job: Any) -> None:
    authority = cluster.folder / "state" / "authority"
    before, node = job.status().incarnation, job.status().pods[0].node
    pids = {name: running.pid for name, running in cluster.status().items()}
    places = {
        cluster.folder / "state" / "coordinator" / "tls": cluster.config.coordinator,
        cluster.node_folder(node) / "tls": cluster.record.node(node).worker_endpoint(),
    }
    own = cluster.config.tls
    for folder, endpoint in places.items():
        old = served_serial(endpoint, own)
        trust.rotate(authority, folder)
        new = served_serial(endpoint, own)
        assert new != old
        # The old ones are of no use from now on: what still works, works with the new ones.
        trust.revoke(authority, f"{old:x}")
    assert job.checkpoint().id
    assert {name: running.pid for name, running in cluster.status().items()} == pids
    assert job.status().incarnation == before


def until_refused(work: Any) -> None:
    end = time.monotonic() + 20
    while True:
        try:
            work()
        except (Forbidden, Unavailable):
            return
        assert time.monotonic() < end, "still let in"
        time.sleep(0.1)


def test_a_revoked_certificate_is_refused_without_a_restart_also_on_an_open_connection(cluster: DevCluster) -> None:
    authority = cluster.folder / "state" / "authority"
    with person(cluster, "games", "read") as gone, person(cluster, "man", "read") as stays:
        assert gone.nodes()
        cluster.arm("coordinator.crl.before", role="coordinator")
        trust.revoke(authority, f"{x509_serial(gone):x}")
        until_refused(gone.nodes)
        cluster.disarm()
        assert stays.nodes()
        # etcd and the workers have it too.
        end = time.monotonic() + 20
        wanted = (authority / "crl.pem").read_bytes()
        while (cluster.node_folder("node-1") / "tls" / "crl.pem").read_bytes() != wanted:
            assert time.monotonic() < end
            time.sleep(0.1)


def x509_serial(client: Any) -> int:
    return x509.load_pem_x509_certificate(Path(client.config.tls.cert).read_bytes()).serial_number


def test_the_audit_trail_says_who_did_what_and_what_was_refused(cluster: DevCluster, job: Any) -> None:
    with person(cluster, BOB, "operate") as bob:
        with pytest.raises(Forbidden):
            list(bob.job("anns").logs())
        with pytest.raises(Forbidden, match="administer"):
            list(bob.audit())
    admin = cluster.client()
    end = time.monotonic() + 10
    while True:
        said = [event.sentence for event in admin.audit()]
        refused = f"user:{BOB} (operate) was refused ReadLogs of job {job.id}: job {job.id} belongs to user:{ANN}"
        if any(refused in line for line in said):
            break
        assert time.monotonic() < end, said[-5:]
        time.sleep(0.1)
    assert any(f"user:{ANN} (operate) did Submit of job {job.id}" in line for line in said)
    assert any(f"user:{BOB} (operate-all) did Checkpoint of job {job.id}" in line for line in said)
    assert {event.job for event in admin.audit(job.id)} == {job.id}


def moorage(node: layout.Node, cluster: DevCluster, *words: str) -> subprocess.CompletedProcess[str]:
    """The command on a "machine" that knows of no cluster: a namespace of its own, no settings, no certificates."""
    enter = ["nsenter", f"--net={network.namespace_path(cluster.record, node)}", "--"]
    return subprocess.run(
        [*enter, sys.executable, "-P", "-m", "moorage.cli.main", *words],
        env={**os.environ, "MOORAGE_CONFIG": "/nonexistent", "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_machine_that_has_nothing_but_a_token_becomes_a_node_and_leaves_again(
    cluster: DevCluster, tmp_path: Path
) -> None:
    record = cluster.record
    node = record.new_node()
    record.write()  # so that what is made here goes with the cluster
    network.create_node(record, node)
    place = cluster.node_folder(node.name)
    folder = place / "etc"
    folder.mkdir(mode=0o700, parents=True)
    options = ["--folder", str(folder), "--unit", str(folder / "moorage-worker.service")]
    admin = cluster.client()
    token = tmp_path / "token"
    words = ["node", "join", "--token", str(token), "--name", node.name, "--uplink", "eth0", *options]
    words += ["--state", str(place / "state"), "--label", "rack=r7"]

    # A name whose certificate is good is taken, also while its machine is down.
    admin_join(cluster, admin.node_token().token, "twin")
    with pytest.raises(Conflict, match="another machine joined as twin"):
        admin_join(cluster, admin.node_token().token, "twin")
    assert len(admin.remove_node("twin")) == 1
    admin_join(cluster, admin.node_token().token, "twin")
    admin.remove_node("twin")

    token.write_text(admin.node_token(seconds=1).token)
    time.sleep(1.5)
    late = moorage(node, cluster, *words)
    assert late.returncode == Forbidden.exit_code, late.stderr
    assert "has run out" in late.stderr
    assert not (folder / "worker.toml").exists()

    token.write_text(admin.node_token(node="another").token)
    other = moorage(node, cluster, *words)
    assert other.returncode == Forbidden.exit_code, other.stderr

    # The coordinator dies when it has written the node down, and before it could answer: the machine asks again.
    token.write_text(admin.node_token(node=node.name).token)
    cluster.arm("coordinator.join.after", role="coordinator")
    joined = moorage(node, cluster, *words)
    assert joined.returncode == 0, joined.stderr
    assert not cluster.armed()
    assert (folder / "tls" / "key.pem").stat().st_mode & 0o777 == 0o600
    unit = (folder / "moorage-worker.service").read_text()
    assert f"--config {folder / 'worker.toml'}" in unit
    assert "KillMode=process" in unit

    again = admin.run(["/bin/sh", "-c", "echo here; sleep 0.2"], nodes=[node.name], working_directory="/tmp").wait(
        timeout=60
    )
    assert again.exit_code == 0, again.reason
    with pytest.raises(Conflict, match="live node"):
        admin_join(cluster, admin.node_token().token, node.name)
    with pytest.raises(Conflict, match="was used"):
        admin_join(cluster, token.read_text(), node.name)

    worker = TlsFiles.in_folder(folder / "tls")
    kept = tmp_path / "kept"
    trust.lay(kept, *(Path(path).read_bytes() for path in (worker.ca, worker.cert, worker.key)))
    left = moorage(node, cluster, "node", "leave", *options)
    assert left.returncode == 0, left.stderr
    assert not list(folder.glob("**/*.pem"))
    assert node.name not in [found.node for found in admin.nodes() if found.live]

    async def with_its_old_certificate() -> None:
        endpoint = f"{record.gateway}:{record.etcd_port}"
        async with EtcdClient([endpoint], tls=TlsFiles.in_folder(kept), timeout=2) as etcd:
            await etcd.put(Keys(cluster.name).node(node.name), b"still here")

    until_refused(lambda: asyncio.run(with_its_old_certificate()))


def admin_join(cluster: DevCluster, token: str, node: str) -> pb.JoinReply:
    """A join from this process."""
    from cryptography.hazmat.primitives import serialization

    from moorage import jointoken, machine

    public = (
        trust.new_key()
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    request = pb.JoinRequest(node=node, address="127.0.0.1", public_key=public)
    return asyncio.run(machine._ask(jointoken.decode(token), request, 5.0))


def test_results_are_written_back_as_their_owner(job: Any, folder: Path) -> None:
    job.stop()
    result = (folder / "result").stat()
    assert result.st_uid == pwd.getpwnam(ANN).pw_uid
    assert (folder / "private").stat().st_mode & 0o777 == 0o600
