"""Tokens, units and the authority, without a cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest

from moorage import dialing, jointoken, machine, rpc, trust
from moorage.access import Gate
from moorage.config import WorkerConfig, to_toml
from moorage.errors import Conflict, Forbidden, NotFound, Unavailable, UsageError
from moorage.jointoken import JoinToken
from moorage.roles import PERSONS
from moorage.tls import TlsFiles
from moorage.v1 import coordinator_pb2 as pb

TOKEN = JoinToken(coordinators=["10.0.0.1:7300"], ca=b"ca", certificate=b"cert", key=b"key", node="n1")


def test_a_token_is_one_word_and_comes_back_as_it_was(tmp_path: Path) -> None:
    text = TOKEN.encode()
    assert len(text.split()) == 1
    assert jointoken.decode(f" {text}\n") == TOKEN
    (tmp_path / "token").write_text(text + "\n")
    assert jointoken.read(str(tmp_path / "token")) == TOKEN
    assert jointoken.read("-", text) == TOKEN


@pytest.mark.parametrize("text", ["", "moorage-join-1.", "moorage-join-1.AAAA", TOKEN.encode()[:-9], "x" * 300])
def test_what_is_no_token_is_said_to_be_none(text: str) -> None:
    with pytest.raises(UsageError, match="join token"):
        jointoken.decode(text)


def test_a_token_in_the_command_line_is_refused() -> None:
    with pytest.raises(UsageError, match="every user of this machine"):
        jointoken.read(TOKEN.encode())
    with pytest.raises(NotFound):
        jointoken.read("/nonexistent")


@pytest.mark.parametrize(
    ("host", "name"), [("gpu-17.example.org", "gpu-17"), ("Rack_3", "rack-3"), ("...", "node"), ("a" * 80, "a" * 48)]
)
def test_a_node_is_called_as_its_host(host: str, name: str) -> None:
    assert machine.node_name(host) == name


def test_the_unit_keeps_pods_when_the_worker_is_restarted(tmp_path: Path) -> None:
    text = machine.unit("c", tmp_path / "a b" / "worker.toml")
    assert "KillMode=process\n" in text
    assert "Type=notify\n" in text
    assert f"--config {tmp_path}/a\\x20b/worker.toml\n" in text


def test_the_settings_of_a_node_that_joined_are_a_workers() -> None:
    reply = pb.JoinReply(
        cluster="c", node="n1", etcd_endpoints=["10.0.0.1:2379"], store="s3://bucket/x", lease_seconds=7,
        store_settings='{"region":"eu-1"}',
    )  # fmt: skip
    config = machine.settings_of(machine.Plan(node="n1", address="10.0.0.9", state="/var/lib/moorage"), reply)
    assert isinstance(config, WorkerConfig)
    assert (config.listen, config.lease_seconds, config.store_settings.region) == ("10.0.0.9:7400", 7, "eu-1")
    assert "[etcd.tls]" in to_toml(config)


@pytest.mark.parametrize(
    ("principal", "role", "serves"),
    [
        ("coordinator", "coordinator", True),
        ("worker:n", "worker", True),
        ("etcd", "", True),
        *((f"user:{role}", role, False) for role in PERSONS),
        ("user:nobody", "", False),
        ("join:x", "join", False),
    ],
)
def test_nobody_plays_a_server_with_a_certificate_that_is_for_clients(
    tmp_path: Path, principal: str, role: str, serves: bool
) -> None:
    trust.create_authority(tmp_path / "ca", "test")
    client = trust.issue(tmp_path / "ca", tmp_path / "admin", "user:root", role="administer")
    played = trust.issue(tmp_path / "ca", tmp_path / "played", principal, role=role, addresses=("127.0.0.1",))

    async def go() -> bool:
        server = rpc.aio_server()
        port = server.add_secure_port("127.0.0.1:0", rpc.server_credentials(played))
        await server.start()
        try:
            async with rpc.aio_channel(f"127.0.0.1:{port}", client) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    call = channel.unary_unary("/moorage.v1.Coordinator/Status", None, None)
                    await call(b"", timeout=10)
        finally:
            await server.stop(None)
        return refused.value.code() == grpc.StatusCode.UNIMPLEMENTED  # it was reached, and has no such method

    assert asyncio.run(go()) is serves


def pem(tls: TlsFiles) -> dict[str, list[bytes]]:
    """What gRPC says of a connection with this certificate."""
    return {"x509_pem_cert": [Path(tls.cert).read_bytes()]}


def test_an_authority_issues_rotates_lists_and_revokes(tmp_path: Path) -> None:
    authority = tmp_path / "ca"
    trust.create_authority(authority, "test")
    with pytest.raises(Conflict):
        trust.create_authority(authority, "test")
    ann = trust.issue(authority, tmp_path / "ann", "user:ann", role="read")
    first = pem(ann)
    assert Gate.identify(first)[:2] == ("user:ann", "read")
    trust.rotate(authority, tmp_path / "ann")
    second = pem(ann)
    assert second != first
    assert Gate.identify(second)[:2] == ("user:ann", "read")
    assert [entry.principal for entry in trust.listing(authority)] == ["user:ann", "user:ann"]

    server = trust.issue(authority, tmp_path / "server", "coordinator")
    gate = Gate(server)
    gate.check(first)
    trust.revoke(authority, trust.listing(authority)[0].serial)
    (tmp_path / "server" / "crl.pem").write_bytes((authority / "crl.pem").read_bytes())
    fresh = Gate(server)
    with pytest.raises(Forbidden, match="was revoked"):
        fresh.check(first)
    fresh.check(second)
    assert [len(trust.revoke(authority, "user:ann")), *(e.revoked > 0 for e in trust.listing(authority))] == [
        1, True, True, False,
    ]  # fmt: skip
    with pytest.raises(NotFound):
        trust.revoke(authority, "user:ann")
    with pytest.raises(Forbidden, match="revoked"):
        trust.rotate(authority, tmp_path / "ann")
    for path in (authority, tmp_path / "ann"):
        assert {file.stat().st_mode & 0o077 for file in path.iterdir()} == {0}


def test_a_revocation_list_of_another_authority_changes_nothing(tmp_path: Path) -> None:
    for name in ("one", "two"):
        trust.create_authority(tmp_path / name, name)
    server = trust.issue(tmp_path / "one", tmp_path / "server", "coordinator")
    ann = trust.issue(tmp_path / "one", tmp_path / "ann", "user:ann")
    with pytest.raises(Forbidden, match="not signed"):
        trust.read_crl((tmp_path / "two" / "crl.pem").read_bytes(), Path(server.ca).read_bytes())
    (tmp_path / "server" / "crl.pem").write_bytes((tmp_path / "two" / "crl.pem").read_bytes())
    Gate(server).check(pem(ann))


def test_an_expired_certificate_is_refused_although_its_connection_still_stands(tmp_path: Path) -> None:
    trust.create_authority(tmp_path / "ca", "test")
    server = trust.issue(tmp_path / "ca", tmp_path / "server", "coordinator")
    old = trust.issue(tmp_path / "ca", tmp_path / "old", "user:ann", days=-0.001)
    with pytest.raises(Forbidden, match="has run out"):
        Gate(server).check(pem(old))


def test_a_coordinator_is_known_by_its_certificate_and_a_worker_cannot_play_it(tmp_path: Path) -> None:
    ca = tmp_path / "ca"
    trust.create_authority(ca, "test")
    client = trust.issue(ca, tmp_path / "admin", "user:root", role="administer")
    server = trust.issue(ca, tmp_path / "server", "coordinator", addresses=("127.0.0.1",))

    async def go() -> None:
        listening = rpc.aio_server()
        port = listening.add_secure_port("127.0.0.1:0", rpc.server_credentials(server))
        await listening.start()

        async def reached(channel: grpc.aio.Channel) -> bool:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary("/moorage.v1.Coordinator/Status", None, None)(b"", timeout=10)
            return refused.value.code() == grpc.StatusCode.UNIMPLEMENTED

        async def dial() -> grpc.aio.Channel:
            return await dialing.coordinator_channel(f"localhost:{port}", client)

        try:
            async with await dial() as channel:
                assert await reached(channel)
            # One of a release before, whose certificates had no such name.
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(trust, "COORDINATOR_NAME", "x.example")
                trust.issue(ca, tmp_path / "server", "coordinator", addresses=("127.0.0.1",))
            async with await dial() as channel:
                assert await reached(channel)
            async with await dial() as pinned:
                # The look met the coordinator, the channel a worker that has taken its place since.
                trust.issue(ca, tmp_path / "server", "worker:n", addresses=("127.0.0.1",))
                assert not await reached(pinned)
            with pytest.raises(Unavailable, match="is no coordinator: the certificate there is that of worker:n"):
                await dial()
            trust.issue(ca, tmp_path / "server", "worker:n", addresses=("coordinator.example", "moorage"))
            with pytest.raises(Unavailable, match="is no coordinator"):
                await dial()
            trust.create_authority(tmp_path / "other", "other")
            trust.issue(tmp_path / "other", tmp_path / "server", "coordinator")
            with pytest.raises(Unavailable, match="of another authority"):
                await dial()
        finally:
            await listening.stop(None)
        with pytest.raises(Unavailable, match="cannot be reached"):
            await dial()

    asyncio.run(go())


@pytest.mark.parametrize("survives", [0, 1])
def test_a_death_between_index_and_revocation_list_forgets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survives: int
) -> None:
    """``survives``: how many of the two files were written. A release before wrote the list first."""
    ca = tmp_path / "ca"
    trust.create_authority(ca, "test")
    for name in ("ann", "bob"):
        trust.issue(ca, tmp_path / name, f"user:{name}")
    write = trust.write_private
    done: list[str] = []

    def dying(path: Path, data: bytes) -> None:
        if len(done) == survives:
            raise KeyboardInterrupt
        done.append(path.name)
        write(path, data)

    monkeypatch.setattr(trust, "write_private", dying)
    with pytest.raises(KeyboardInterrupt):
        trust.revoke(ca, "user:ann")
    monkeypatch.setattr(trust, "write_private", write)
    assert done == ["index.json"][:survives]
    number = _both(ca)[0]
    assert [entry.principal for entry in trust.revoke(ca, "user:bob")] == ["user:bob"]
    assert len(_both(ca)[1]) == 1 + survives and _both(ca)[0] > number
    with pytest.raises(NotFound):
        trust.revoke(ca, "user:bob")
    if not survives:
        assert [entry.principal for entry in trust.revoke(ca, "user:ann")] == ["user:ann"]
    revoked = {int(entry.serial, 16) for entry in trust.listing(ca) if entry.revoked}
    assert len(revoked) == 2 and _both(ca)[1] == revoked


def test_what_is_on_the_revocation_list_alone_stays_there(tmp_path: Path) -> None:
    ca = tmp_path / "ca"
    trust.create_authority(ca, "test")
    for name in ("ann", "bob"):
        trust.issue(ca, tmp_path / name, f"user:{name}")
    before = (ca / "index.json").read_bytes()
    trust.revoke(ca, "user:ann")
    (ca / "index.json").write_bytes(before)  # as a release left it that wrote the list first, and died
    trust.revoke(ca, "user:bob")
    assert len(_both(ca)[1]) == 2
    assert all(entry.revoked for entry in trust.listing(ca))


def _both(authority: Path) -> tuple[int, frozenset[int]]:
    return trust.read_crl((authority / "crl.pem").read_bytes(), (authority / "ca.pem").read_bytes())
