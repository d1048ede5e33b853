"""Getting into etcd: addresses, TLS, users, and releases that are refused."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import grpc
import grpc.aio
import pytest

from moorage.barrier.client import EtcdClient
from moorage.barrier.etcdpb import POOL, rpc_pb2
from moorage.errors import EnvironmentLacking, Forbidden, Unavailable, UsageError
from moorage.trust import create_authority, issue
from tests.support.etcd import Etcd

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    with Etcd() as running:
        yield running


def test_nobody_listening_is_said_in_one_line() -> None:
    async def main() -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
            async with EtcdClient([f"127.0.0.1:{port}"], timeout=0.3) as client:
                with pytest.raises(Unavailable, match="cannot be reached") as raised:
                    await client.put("/a", b"")
        assert "is it running?" in raised.value.hint
        assert "outcome unknown" not in str(raised.value)

    asyncio.run(main())


@pytest.mark.parametrize("endpoint", ["https://127.0.0.1:1", "ftp://127.0.0.1:1", "127.0.0.1", "localhost:x"])
def test_an_endpoint_that_cannot_be_meant_is_a_usage_error(endpoint: str) -> None:
    with pytest.raises(UsageError, match="endpoint"):
        EtcdClient([endpoint])
    with pytest.raises(UsageError, match="no etcd endpoint"):
        EtcdClient([])


def test_tls_is_mutual_and_a_wrong_authority_is_named() -> None:
    async def main() -> None:
        with Etcd(tls=True, auth=True) as etcd:
            async with etcd.client() as client:
                await client.put("/moorage/tls", b"1")
            create_authority(etcd.folder / "other-ca", "other")
            wrong = issue(etcd.folder / "other-ca", etcd.folder / "other", "client")
            async with EtcdClient(etcd.endpoints, tls=wrong, timeout=1) as client:
                with pytest.raises(Unavailable) as raised:
                    await client.get("/tls")
            assert "not this TLS" in raised.value.hint
            plain = [endpoint.removeprefix("https://") for endpoint in etcd.endpoints]
            async with EtcdClient(plain, timeout=1) as client:
                with pytest.raises(Unavailable) as raised:
                    await client.get("/tls")
            assert "does it want TLS?" in raised.value.hint

    asyncio.run(main())


def test_users_are_authenticated_and_lost_tokens_are_renewed() -> None:
    async def main() -> None:
        with Etcd(auth=True) as etcd:
            async with etcd.client() as client:
                await asyncio.gather(*(client.put(f"/moorage/{n}", b"") for n in range(8)))
                with pytest.raises(Forbidden, match="permission denied"):
                    await client.put("/elsewhere", b"")
                etcd.restart_member()  # its tokens are gone
                for _ in range(3):
                    await client.put("/moorage/after", b"")
                    assert await client.lease_grant(10)
                assert len((await client.list("/moorage/")).items) == 9
            async with EtcdClient(etcd.endpoints, tls=etcd.tls, user=etcd.user, password="wrong") as client:
                with pytest.raises(Forbidden, match="does not accept user"):
                    await client.get("/moorage/0")
            async with EtcdClient(etcd.endpoints, tls=etcd.tls) as client:
                with pytest.raises(Forbidden, match="an unnamed user"):
                    await client.get("/moorage/0")

    asyncio.run(main())


def test_a_user_is_not_needed_where_users_are_off(etcd: Etcd) -> None:
    async def main() -> None:
        async with EtcdClient(etcd.endpoints, user="someone", password="x") as client:
            await client.put("/off", b"")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("version", "good"), [("3.5.2", False), ("3.5.0-rc.1", False), ("3.5.3", True), ("3.4.9", True)]
)
def test_releases_that_lose_data_are_refused(version: str, good: bool) -> None:
    class Server:
        async def Status(self, request: object, context: object) -> rpc_pb2.StatusResponse:
            return rpc_pb2.StatusResponse(version=version)

        async def Range(self, request: object, context: object) -> rpc_pb2.RangeResponse:
            return rpc_pb2.RangeResponse()

        def __getattr__(self, name: str) -> object:
            return None

    async def main() -> None:
        server = grpc.aio.server()
        POOL.adder("etcdserverpb.Maintenance")(Server(), server)
        POOL.adder("etcdserverpb.KV")(Server(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with EtcdClient([f"127.0.0.1:{port}"]) as client:
            if good:
                assert await client.get("/a") is None
            else:
                with pytest.raises(EnvironmentLacking, match="can lose data"):
                    await client.get("/a")
        await server.stop(None)

    asyncio.run(main())
