"""HTTPS: verified, renewed while connections are open, and refused when its files are wrong."""

import asyncio
import ssl

import pytest

from services.common.errors import InvalidRequest
from services.common.host import file_watch
from services.gateway.http.tls import Certificate
from tests.common.rpc.authority import Authority
from tests.gateway.access.http_server import HEAD, Client, answer, serving, until

REQUEST = HEAD + b"content-length: 0\r\n\r\n"


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


def flags(pair) -> dict[str, str]:
    return {"http_cert": str(pair.cert), "http_key": str(pair.key)}


async def connect(port: int, authority: Authority, *, named: bool = True) -> Client:
    """``named``: the handshake names the host that it wants."""
    context = ssl.create_default_context(cafile=str(authority.cert))
    if not named:
        return await Client.of(port, ssl=context, server_hostname="127.0.0.1")
    return await Client.of(port, ssl=context, server_hostname="localhost")


def subject(client: Client) -> str:
    return dict(pair for [pair] in client.writer.get_extra_info("peercert")["subject"])["commonName"]


@pytest.mark.parametrize("named", [True, False])
async def test_a_certificate_that_is_replaced_is_shown_to_whoever_comes_next(authority, monkeypatch, named):
    monkeypatch.setattr(file_watch, "CHECK_EVERY_S", 0.0)
    pair = authority.issue("first")
    async with serving(answer, **flags(pair)) as server:
        early = await connect(server.port, authority, named=named)
        assert subject(early) == "first"
        pair.replace(authority.issue("second"))
        late = await connect(server.port, authority, named=named)
        assert subject(late) == "second"
        pair.cert.write_text("not yet")
        later = await connect(server.port, authority, named=named)
        assert subject(later) == "second"
        for client in (early, late, later):
            await client.send(REQUEST)
            assert b" 200 " in await client.head()
            client.writer.close()


async def test_who_does_not_speak_tls_hears_nothing(authority):
    async with serving(answer, **flags(authority.issue("server"))) as server:
        client = await Client.of(server.port)
        await client.send(REQUEST)
        assert b"200" not in await client.rest()


async def test_an_unknown_authority_is_noticed(authority, tmp_path):
    other = Authority(tmp_path, "other")
    async with serving(answer, **flags(authority.issue("server"))) as server:
        with pytest.raises(ssl.SSLCertVerificationError):
            await connect(server.port, other)


async def test_old_versions_are_refused(authority):
    async with serving(answer, **flags(authority.issue("server"))) as server:
        context = ssl.create_default_context(cafile=str(authority.cert))
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        client = await Client.of(server.port, ssl=context, server_hostname="localhost")
        client.writer.close()
        context.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await Client.of(server.port, ssl=context, server_hostname="localhost")


async def test_a_client_over_tls_that_does_not_read_is_cut_off(authority):
    gone = asyncio.Event()

    async def endpoint(scope, receive, send):
        body = b"x" * 20_000_000
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})
        gone.set()

    async with serving(endpoint, slow_client_seconds=0.5, **flags(authority.issue("server"))) as server:
        client = await connect(server.port, authority)
        await client.send(REQUEST)
        client.writer.transport.pause_reading()
        await gone.wait()
        await until(lambda: not server.server_state.connections)
        client.writer.close()


@pytest.mark.parametrize("wrong", ["missing", "no PEM", "another key"])
def test_wrong_files_are_refused_at_the_start(authority, wrong):
    pair = authority.issue("server")
    if wrong == "missing":
        pair.cert.unlink()
    elif wrong == "no PEM":
        pair.cert.write_text("what")
    else:
        pair.key.write_bytes(authority.issue("other").key.read_bytes())
    with pytest.raises(InvalidRequest, match="http_cert="):
        Certificate(str(pair.cert), str(pair.key))
