"""The bound on the bytes of all request bodies that a gateway holds."""

import asyncio
import contextlib

from starlette.requests import Request
from starlette.responses import PlainTextResponse

from services.common.errors import TooManyBodies
from services.common.keys import Key
from services.gateway.http.bodies import HeldBodies
from services.gateway.http.errors import to_response
from services.gateway.http.guard import KEY
from services.gateway.http.request import read_body
from tests.gateway.access.http_server import Client, serving

KIB = 1024
HEAD = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
SIZED = HEAD + b"content-length: %d\r\n\r\n"


class App:
    """Reads bodies of at most 64 KiB, of which it may hold 100 KiB, and answers when it is told to."""

    def __init__(self) -> None:
        self.bodies = HeldBodies(100 * KIB, 64 * KIB)
        self.read, self.answer = asyncio.Semaphore(0), asyncio.Event()

    async def __call__(self, scope, receive, send):
        with self.bodies.holding(scope):
            try:
                await read_body(Request(scope, receive), 64 * KIB)
            except TooManyBodies as error:
                await to_response(error)(scope, receive, send)
                return
            self.read.release()
            await self.answer.wait()
            await PlainTextResponse("yes")(scope, receive, send)


@contextlib.asynccontextmanager
async def clients(server, count):
    """``count`` connections, which are closed at the end."""
    made = [await Client.of(server.port) for _ in range(count)]
    try:
        yield made
    finally:
        for client in made:
            client.writer.close()
            with contextlib.suppress(ConnectionError):
                await client.writer.wait_closed()


async def test_beyond_the_bound_a_body_is_refused_until_another_is_answered():
    app = App()
    async with serving(app) as server, clients(server, 3) as (first, second, third):
        await first.send(SIZED % (60 * KIB) + b"a" * 60 * KIB)
        await app.read.acquire()
        await second.send(SIZED % (60 * KIB) + b"a" * 60 * KIB)
        refused = await second.head()
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in refused
        app.answer.set()
        assert (await first.head()).startswith(b"HTTP/1.1 200 ")
        await third.send(SIZED % (60 * KIB) + b"a" * 60 * KIB)
        assert (await third.head()).startswith(b"HTTP/1.1 200 ")
    assert app.bodies.bytes == 0


async def test_a_body_of_unknown_length_is_refused_when_it_grows_beyond_the_bound():
    app = App()
    async with serving(app) as server, clients(server, 2) as (first, second):
        await first.send(SIZED % (60 * KIB) + b"a" * 60 * KIB)
        await app.read.acquire()
        chunk = b"%x\r\n%b\r\n" % (20 * KIB, b"a" * 20 * KIB)
        await second.send(HEAD + b"transfer-encoding: chunked\r\n\r\n" + 3 * chunk + b"0\r\n\r\n")
        assert (await second.head()).startswith(b"HTTP/1.1 503 ")
        assert app.bodies.bytes == 60 * KIB
        app.answer.set()


async def test_a_client_that_only_announces_a_body_holds_nothing():
    app = App()
    app.answer.set()
    async with serving(app) as server, clients(server, 2) as (first, second):
        await first.send(SIZED % (60 * KIB))
        await second.send(SIZED % (60 * KIB) + b"a" * 60 * KIB)
        assert (await second.head()).startswith(b"HTTP/1.1 200 ")


def test_one_key_holds_at_most_half():
    bodies = HeldBodies(100, 10)
    greedy, other = {KEY: Key("a", frozenset())}, {KEY: Key("b", frozenset())}
    with bodies.holding(greedy), bodies.holding(other):
        assert greedy["toka.body"].resize(50) is None
        assert isinstance(greedy["toka.body"].resize(51), TooManyBodies)
        assert other["toka.body"].resize(50) is None
    assert bodies.bytes == 0
