"""Ports for servers that listen later."""

import socket
from pathlib import Path

import pytest

from services.common.errors import Unavailable
from services.launcher import ports


def test_no_outgoing_connection_gets_a_free_port():
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(50):
        assert ports.free_ports(3) + 2 < min(first_ephemeral, 32_768)


def test_a_preferred_port_is_taken_only_if_it_and_those_behind_it_are_free(monkeypatch):
    free = ports.free_ports(6)
    other = free + 3
    assert ports.free_ports(3, free) == free
    with socket.create_server(("127.0.0.1", free + 2)):
        with pytest.raises(Unavailable, match=f"cannot listen on 127.0.0.1:{free + 2} "):
            ports.check_is_free(free + 2)
        tried = iter([free + 1, other])
        monkeypatch.setattr(ports, "_random", lambda _: next(tried))
        assert ports.free_ports(3, free) == other
