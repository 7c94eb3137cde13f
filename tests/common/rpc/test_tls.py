"""TLS and mTLS on both kinds of servers: who gets in, who does not, and what happens when files are replaced."""

import asyncio
import inspect
import os
import ssl
import stat
from collections.abc import Awaitable, Callable
from dataclasses import replace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from services.common.config import GrpcFlags
from services.common.errors import InvalidRequest
from services.common.host import file_watch
from services.common.rpc import channel
from services.common.rpc.blocking import BlockingRpcServer
from services.common.rpc.certificates import Certificates
from services.common.rpc.channel import Dialer
from services.common.rpc.server import RpcServer
from tests.common.rpc.authority import Authority, Pair, links
from tokasaurus.scheduler.v1 import observe_pb2, scheduler_pb2_grpc

SERVICE = "tokasaurus.scheduler.v1.SchedulerService"
PATIENCE_S = 60.0


class Servicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    calls = 0

    async def GetLoad(self, request, context):
        self.calls += 1
        return observe_pb2.GetLoadResponse()


class BlockingServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    calls = 0

    def GetLoad(self, request, context):
        self.calls += 1
        return observe_pb2.GetLoadResponse()


@pytest.fixture(params=[(Servicer, RpcServer), (BlockingServicer, BlockingRpcServer)], ids=["asyncio", "blocking"])
async def start(request):
    """Starts a server with the certificates of a config; gives its address, the servicer and the server."""
    started = []

    async def begin(config: GrpcFlags, address: str = "127.0.0.1:0"):
        servicer, server = request.param[0](), request.param[1](SERVICE, certificates=Certificates.of(config))
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(servicer, server.grpc_server)
        started.append(server)
        return await done(server.start(address)), servicer, server

    yield begin
    for server in started:
        await done(server.stop(0))


async def done(found):
    return await found if inspect.isawaitable(found) else found


@pytest.fixture(scope="module")
def authority(tmp_path_factory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def clients(authority, tmp_path_factory) -> dict[str, Dialer]:
    """By what is wrong with them."""
    stranger = Authority(tmp_path_factory.mktemp("other"), "other")
    return {
        "plain": Dialer(),
        "no certificate": Dialer.of(links(authority)),
        "trusts others": Dialer.of(links(stranger, authority.issue("client"))),
        "certified by others": Dialer.of(links(authority, stranger.issue("stranger"))),
        "expired": Dialer.of(links(authority, authority.issue("expired", expired=True))),
        "right": Dialer.of(links(authority, authority.issue("right"))),
    }


SERVED = {
    "none": {"plain"},
    "tls": {"no certificate", "certified by others", "expired", "right"},
    "mtls": {"right"},
}


async def ask(dialer: Dialer, address: str) -> grpc.StatusCode:
    async with dialer.open_aio(address) as channel:
        try:
            await scheduler_pb2_grpc.SchedulerServiceStub(channel).GetLoad(observe_pb2.GetLoadRequest(), timeout=60)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("security", SERVED)
async def test_only_who_shows_what_is_asked_for_gets_in(start, authority, clients, security):
    pair = authority.issue("server")
    config = {"none": links(None), "tls": links(None, pair), "mtls": links(authority, pair)}[security]
    address, servicer, _ = await start(config)
    answers = {name: await ask(dialer, address) for name, dialer in clients.items()}
    refused = grpc.StatusCode.UNAVAILABLE
    assert answers == {name: grpc.StatusCode.OK if name in SERVED[security] else refused for name in clients}
    assert servicer.calls == len(SERVED[security])  # the others did not get so far


async def test_the_blocking_client_is_as_the_other(start, authority, clients):
    address, _, _ = await start(links(authority, authority.issue("server")))

    def healthy(dialer: Dialer) -> bool:
        with dialer.open(address) as channel:
            try:
                health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
            except grpc.RpcError:
                return False
            return True

    assert {name for name, dialer in clients.items() if await asyncio.to_thread(healthy, dialer)} == {"right"}


async def test_a_server_with_an_expired_certificate_is_not_talked_to(start, authority, clients):
    address, servicer, _ = await start(links(None, authority.issue("late", expired=True)))
    assert await ask(clients["right"], address) is grpc.StatusCode.UNAVAILABLE
    assert servicer.calls == 0


async def test_a_server_is_known_by_the_name_in_its_certificate(start, authority):
    address, _, _ = await start(links(None, authority.issue("named", host="worker.internal")))
    dialer = Dialer.of(links(authority))
    assert await ask(dialer, address) is grpc.StatusCode.UNAVAILABLE
    assert await ask(replace(dialer, server_name="worker.internal"), address) is grpc.StatusCode.OK
    assert await ask(replace(dialer, server_name="scheduler.internal"), address) is grpc.StatusCode.UNAVAILABLE


async def test_a_unix_socket_has_no_tls_and_is_for_this_user(start, authority, clients, tmp_path):
    before = os.umask(0)
    try:
        address, _, _ = await start(links(authority, authority.issue("server")), f"unix:{tmp_path}/s.sock")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "s.sock").stat().st_mode) == 0o600
    assert await ask(clients["right"], address) is grpc.StatusCode.OK
    assert await ask(clients["plain"], address) is grpc.StatusCode.OK


@pytest.mark.parametrize("secured", [False, True])
async def test_who_connects_and_says_nothing_is_cut_off(start, authority, monkeypatch, secured):
    monkeypatch.setattr(channel, "HANDSHAKE_TIMEOUT_MS", 100)
    address, _, _ = await start(links(None, authority.issue("server") if secured else None))
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(PATIENCE_S):
        await reader.read()  # to its end
    writer.close()


# Files that are replaced


async def shown(address: str) -> str:
    """The certificate that a new connection to ``address`` is shown."""
    host, _, port = address.rpartition(":")
    return await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))


async def shows(address: str, pair: Pair) -> bool:
    return (await shown(address)).strip() == pair.cert.read_text().strip()


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture
def looks_at_once(monkeypatch):
    """Files are looked at whenever there is a reason, not once a second."""
    monkeypatch.setattr(file_watch, "CHECK_EVERY_S", 0.0)


@pytest.mark.usefixtures("looks_at_once")
async def test_new_connections_are_shown_the_new_certificate_and_old_ones_go_on(start, authority, clients):
    pair, other = authority.issue("first"), authority.issue("second")
    address, _, server = await start(links(authority, pair))
    async with clients["right"].open_aio(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        pair.replace(other)
        await eventually(lambda: shows(address, other))
        assert await ask(clients["right"], address) is grpc.StatusCode.OK
        await done(server.set_ready(True))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


@pytest.mark.usefixtures("looks_at_once")
async def test_wrong_files_change_nothing_until_they_are_right(start, authority, clients):
    pair, other = authority.issue("kept"), authority.issue("next")
    before = pair.cert.read_text().strip()
    address, _, _ = await start(links(authority, pair))
    with capture_logs() as logs:
        pair.cert.write_bytes(other.cert.read_bytes())  # and its key is still the old one
        for _ in range(3):
            assert (await shown(address)).strip() == before
            assert await ask(clients["right"], address) is grpc.StatusCode.OK
    [error] = logs  # told once
    assert error["log_level"] == "error"
    assert "is not the key of grpc_cert=" in error["reason"]
    pair.key.write_bytes(other.key.read_bytes())
    await eventually(lambda: shows(address, other))


@pytest.mark.usefixtures("looks_at_once")
async def test_a_client_shows_its_new_certificate_when_it_connects_again(start, authority, tmp_path):
    successor = Authority(tmp_path, "successor")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(successor.cert.read_bytes())
    server = authority.issue("server")
    address, _, _ = await start(GrpcFlags(grpc_cert=str(server.cert), grpc_key=str(server.key), grpc_ca=str(trusted)))
    pair = authority.issue("client")
    dialer = Dialer.of(links(authority, pair))
    assert await ask(dialer, address) is grpc.StatusCode.UNAVAILABLE
    pair.replace(successor.issue("client"))
    assert await ask(dialer, address) is grpc.StatusCode.OK
    trusted.write_bytes(authority.cert.read_bytes())  # and the server trusts whom it is told to
    assert await ask(dialer, address) is grpc.StatusCode.UNAVAILABLE


# Files that are wrong


def test_wrong_files_end_the_start_with_a_sentence(authority, tmp_path):
    pair, other = authority.issue("one"), authority.issue("two")
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    ca = str(authority.cert)
    for config, sentence in (
        (GrpcFlags(grpc_ca=f"{tmp_path}/none"), f"flag grpc_ca={tmp_path}/none: cannot be read \\(No such file"),
        (GrpcFlags(grpc_ca=str(text)), f"flag grpc_ca={text}: contains no certificate in PEM"),
        (links(None, Pair(text, pair.key)), f"flag grpc_cert={text}: contains no certificate in PEM"),
        (links(None, Pair(pair.cert, text)), f"flag grpc_key={text}: contains no private key in PEM"),
        (links(None, Pair(pair.cert, pair.cert)), f"flag grpc_key={pair.cert}: contains no private key in PEM"),
        (
            links(None, Pair(pair.cert, other.key)),
            f"flag grpc_key={other.key}: is not the key of grpc_cert={pair.cert}",
        ),
        (links(authority, Pair(tmp_path, pair.key)), f"flag grpc_cert={tmp_path}: cannot be read \\(Is a directory"),
    ):
        with pytest.raises(InvalidRequest, match=sentence):
            Certificates(config)
    assert Certificates.of(GrpcFlags()) is None
    assert Certificates(GrpcFlags(grpc_ca=ca)).verifies


async def test_a_bundle_of_authorities_may_have_comments(start, authority, tmp_path):
    other, bundle = Authority(tmp_path, "other"), tmp_path / "bundle.pem"
    comment = "Főtanúsítvány\n".encode()
    bundle.write_bytes(comment + other.cert.read_bytes() + comment + authority.cert.read_bytes())
    address, _, _ = await start(links(None, authority.issue("server")))
    assert await ask(Dialer.of(GrpcFlags(grpc_ca=str(bundle))), address) is grpc.StatusCode.OK


def test_a_key_with_a_password_is_refused_and_nobody_asked_for_it(authority, tmp_path):
    from cryptography.hazmat.primitives import serialization

    pair = authority.issue("locked")
    key = serialization.load_pem_private_key(pair.key.read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"secret")
    pair.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, locked)
    )
    with pytest.raises(InvalidRequest, match="or one with a password; remove the password"):
        Certificates(links(None, pair))
