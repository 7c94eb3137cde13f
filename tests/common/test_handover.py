"""A port is one deployment's, however many sockets listen on it; and a gateway reads what it was handed."""

import asyncio
import contextlib
import socket
import sys

import pytest

from services.common.errors import Unavailable
from services.common.host.reuseport import select_listeners
from services.common.process.handover import Handover, listen


@pytest.fixture
def listening():
    """``listen``, with its sockets closed at the end."""
    opened: list[socket.socket] = []

    def make(*arguments, **options) -> list[socket.socket]:
        listeners = listen(*arguments, **options)
        opened.extend(listeners)
        return listeners

    yield make
    for listener in opened:
        listener.close()


def address_of(listeners: list[socket.socket]):
    [address] = {listener.getsockname() for listener in listeners}
    return address


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_each_listens_on_the_same_port(listening, host):
    listeners = listening(host, 0, 3)
    assert len(listeners) == 3
    assert address_of(listeners)[1] > 0


def test_connections_are_spread_over_all_and_wait_in_the_queue_of_one_that_nobody_reads(listening):
    listeners = listening("127.0.0.1", 0, 2)
    clients = [socket.create_connection(address_of(listeners)) for _ in range(64)]
    accepted = []
    for listener in listeners:
        listener.setblocking(False)
        before = len(accepted)
        try:
            while True:
                accepted.append(listener.accept()[0])
        except BlockingIOError:
            assert len(accepted) > before
    assert len(accepted) == len(clients)
    for connection in clients + accepted:
        connection.close()


def shares(listeners: list[socket.socket]) -> list[int]:
    """Of 64 new connections those that each socket gets."""
    clients = [socket.create_connection(address_of(listeners)) for _ in range(64)]
    counts = []
    for listener in listeners:
        listener.setblocking(False)
        counts.append(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                listener.accept()[0].close()
                counts[-1] += 1
    for client in clients:
        client.close()
    return counts


needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other kernels spread as they like")


@needs_linux
def test_new_connections_get_to_those_that_are_there(listening, tmp_path):
    listeners = listening("127.0.0.1", 0, 3)
    gateways = [Handover(str(tmp_path), index, 3) for index in range(3)]

    assert gateways[1].leave(listeners[0])
    first, second, third = shares(listeners)
    assert (bool(first), second, bool(third)) == (True, 0, True)
    assert gateways[0].leave(listeners[0])
    assert shares(listeners) == [0, 0, 64]
    assert not gateways[2].leave(listeners[2])  # there is nobody to take them: they wait for whoever comes first
    assert all(shares(listeners))
    gateways[0].join(listeners[0])
    assert shares(listeners) == [64, 0, 0]
    for gateway in gateways:
        gateway.join(listeners[0])
    assert all(shares(listeners))


@needs_linux
def test_who_waits_in_the_queue_of_one_that_leaves_stays_there(listening):
    first, second = listening("127.0.0.1", 0, 2)
    assert select_listeners(first, [1])
    with socket.create_connection(first.getsockname()) as client:
        assert select_listeners(first, [0])
        second.settimeout(10)
        with second.accept()[0] as accepted:
            assert accepted.getpeername() == client.getsockname()


def test_a_gateway_alone_leaves_to_nobody(listening, tmp_path):
    [alone] = listening("127.0.0.1", 0, 1)
    assert not Handover(str(tmp_path), 0, 1).leave(alone)


@pytest.mark.parametrize(("first", "second"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_a_port_in_use_is_refused_also_one_that_could_be_shared(listening, first, second):
    port = address_of(listening("127.0.0.1", 0, first))[1]
    with pytest.raises(Unavailable, match=rf"cannot listen on 127.0.0.1:{port} .*choose another with host= or port="):
        listening("127.0.0.1", port, second)


@pytest.mark.parametrize("count", [1, 2])
def test_a_port_is_free_again_once_all_are_closed(listening, count):
    listeners = listening("127.0.0.1", 0, count)
    port = address_of(listeners)[1]
    for listener in listeners:
        listener.close()
    listening("127.0.0.1", port, count)


def test_a_host_that_does_not_exist_is_named():
    with pytest.raises(Unavailable, match=r"cannot listen on no\.such\.host\.invalid:10210"):
        listen("no.such.host.invalid", 10210)


def test_a_gateway_reads_what_it_was_handed(tmp_path):
    handover = Handover(str(tmp_path), 1, 3, listener=7)
    assert Handover.read(handover.environment) == handover
    assert Handover.read({"PATH": "/bin"}) is None


def test_gateways_have_places_of_their_own_and_one_alone_counts_for_itself(tmp_path):
    several = [Handover(str(tmp_path), index, 2) for index in range(2)]
    assert [each.name for each in several] == ["gateway-0", "gateway-1"]
    assert several[0].own_socket != several[1].own_socket
    assert several[0].counter_files == several[1].counter_files
    assert len(set(several[0].counter_files)) == 2
    alone = Handover(str(tmp_path), 0, 1)
    assert (alone.name, alone.counter_files) == ("gateway", [])


async def test_small_writes_on_its_connections_are_sent_at_once(listening):
    [listener] = listening("127.0.0.1", 0)
    connected: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        connected.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    server = await asyncio.start_server(answer, sock=listener)
    async with server:
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await connected == 1
        writer.close()
