"""The flags of ``bench.fuzz``."""

from typing import Literal

from pydantic import Field

from services.common.flags import Bool, Config, Float, Int

SURFACES = ("http", "grpc", "plans", "certificates", "models", "costs")
# Shares of `requests` with surface=all. A plan is a step of a real model and takes as long as many requests. Each call
# with a certificate begins with a handshake. Loading a model and measuring a body take even longer.
_SHARES = {"http": 0.5487, "grpc": 0.439, "plans": 0.01, "certificates": 0.001, "models": 0.001, "costs": 0.0003}


class FuzzConfig(Config):
    """The flags of the fuzzers."""

    requests: Int = Field(
        1_000_000, ge=1, description="number of requests; each message of a stream and each plan counts"
    )
    seed: Int = Field(1, ge=0, description="seed of all requests, with their numbers")
    first: Int = Field(0, ge=0, description="number of the first request; first=N requests=1 repeats request N")
    surface: Literal["all", "http", "grpc", "plans", "certificates", "models", "costs", "attacks"] = Field(
        "all", description="attacks: exhaust memory, file descriptors and connections; they do not count as requests"
    )
    concurrency: Int = Field(64, ge=1, description="concurrent requests, each on its own connection")
    keys: Bool = Field(False, description="services require API keys; requests have right keys, wrong keys or none")
    answer_seconds: Float = Field(120.0, gt=0, description="longest allowed time of an answer")
    blocked_ms: Float = Field(
        50.0, gt=0, description="longest allowed time for which a body blocks a gateway's event loop"
    )
    directory: str | None = Field(
        None, description="directory for logs and findings; default: a temporary one, which is kept only with findings"
    )

    def share(self, surface: str) -> int:
        """Return the number of requests for ``surface``."""
        if self.surface == "all":
            return round(self.requests * _SHARES[surface])
        return self.requests if self.surface == surface else 0
