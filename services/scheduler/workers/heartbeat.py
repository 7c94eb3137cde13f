"""Detects a connection to a worker that carries nothing while the worker can be reached."""

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.rpc.channel import Dialer

INTERVAL_S = 1.0  # between two looks
TIMEOUT_S = 8.0  # without an answer
_PROBE_TIMEOUT_S = 3.0

_NO_CONNECTION = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class Heartbeat:
    """Asks for the health of one worker on the channel of its step stream. Owned by the link's thread.

    Bytes that were garbled or lost can leave both ends of a connection waiting for the rest of a frame. Neither end
    notices, and keepalive pings are swallowed with everything else. If an answer is overdue, the heartbeat asks on a
    new connection. The old connection is given up only if the new one answers: a worker that is busy, suspended or cut
    off keeps its stream until ``step_deadline``.
    """

    def __init__(self, address: str, channel: grpc.Channel, dialer: Dialer) -> None:
        self._address, self._dialer = address, dialer
        self._stub: Any = health_pb2_grpc.HealthStub(channel)  # the types leave out its methods
        self._call: Any = None
        self._silent_s = 0.0
        self._probe: tuple[grpc.Channel, Any] | None = None

    def look(self) -> str:
        """Return why the connection is to be given up, or an empty string. Called every ``INTERVAL_S`` seconds; counts
        intervals, so a scheduler that was suspended does not blame the connection."""
        if self._call is None or self._call.done():
            self.stop()
            self._call = self._stub.Check.future(health_pb2.HealthCheckRequest())
            self._silent_s = 0.0
            return ""
        self._silent_s += INTERVAL_S
        if self._silent_s < TIMEOUT_S:
            return ""
        if self._probe is None:
            self._probe = self._begin_probe()
            return ""
        channel, answer = self._probe
        if not answer.done():
            return ""
        answered = answer.code() not in _NO_CONNECTION
        channel.close()
        self._probe = None
        if not answered:
            return ""
        return (
            f"worker {self._address} does not answer on this connection since {self._silent_s:.0f} s, but on a new one"
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
