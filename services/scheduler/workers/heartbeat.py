"""Detects a connection that transmits nothing although its worker is reachable."""

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.rpc.channel import Dialer

INTERVAL_S = 1.0  # between two checks
TIMEOUT_S = 8.0  # of a health call
_PROBE_TIMEOUT_S = 3.0

NO_CONNECTION = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class WorkerHeartbeat:
    """Health calls to one worker on the channel of its step stream. Used by the link's thread.

    Bytes that were garbled or lost can leave both ends of a connection waiting for the rest of a frame. Neither end
    detects this, and keepalive pings are lost too. If a health call is overdue, the heartbeat makes another one on a
    new connection. The old connection is closed only if the new one responds. A worker that is busy, suspended or
    unreachable keeps its stream until ``step_deadline``.
    """

    def __init__(self, address: str, channel: grpc.Channel, dialer: Dialer) -> None:
        self._address, self._dialer = address, dialer
        self._stub: Any = health_pb2_grpc.HealthStub(channel)  # the type stub lacks the methods
        self._call: Any = None
        self._overdue_s = 0.0
        self._probe: tuple[grpc.Channel, Any] | None = None

    def check(self) -> str:
        """Return why the connection must be closed, or an empty string.

        Call it every ``INTERVAL_S`` seconds. It counts intervals, so a scheduler that was suspended does not blame the
        connection.
        """
        if self._call is None or self._call.done():
            self.stop()
            self._call = self._stub.Check.future(health_pb2.HealthCheckRequest())
            self._overdue_s = 0.0
            return ""
        self._overdue_s += INTERVAL_S
        if self._overdue_s < TIMEOUT_S:
            return ""
        if self._probe is None:
            self._probe = self._begin_probe()
            return ""
        channel, probe = self._probe
        if not probe.done():
            return ""
        reachable = probe.code() not in NO_CONNECTION
        channel.close()
        self._probe = None
        if not reachable:
            return ""
        return (
            f"worker {self._address} has not responded for {self._overdue_s:.0f} s on this connection, but responds on"
            " a new one"
        )

    def stop(self) -> None:
        """Cancel the calls in progress."""
        if self._call is not None:
            self._call.cancel()
        if self._probe is not None:
            self._probe[0].close()
            self._probe = None

    def _begin_probe(self) -> tuple[grpc.Channel, Any]:
        channel = self._dialer.open(self._address)
        stub: Any = health_pb2_grpc.HealthStub(channel)
        call = stub.Check.future(health_pb2.HealthCheckRequest(), timeout=_PROBE_TIMEOUT_S, wait_for_ready=True)
        return channel, call
