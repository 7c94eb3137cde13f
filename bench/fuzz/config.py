"""The flags."""

from typing import Literal

from pydantic import Field

from services.common.flags import Bool, Config, Float, Int

SURFACES = ("http", "grpc", "plans", "certificates", "models", "costs")
# Shares of `requests`, with surface=all. A plan is a step of a real model and takes as long as many requests. Each call
# with a certificate begins with a handshake. A model is loaded, which takes longer still, as does measuring a body.
_SHARES = {"http": 0.5487, "grpc": 0.439, "plans": 0.01, "certificates": 0.001, "models": 0.001, "costs": 0.0003}


class FuzzConfig(Config):
    """Of the fuzzers."""

    requests: Int = Field(1_000_000, ge=1, description="messages on a stream, and plans, count as one each")
    seed: Int = Field(1, ge=0, description="of every request, with its number")
    first: Int = Field(0, ge=0, description="number of the first request; first=N requests=1 sends one once more")
    surface: Literal["all", "http", "grpc", "plans", "certificates", "models", "costs", "attacks"] = Field(
        "all", description="attacks: on memory, file descriptors and slow reading; they count for no request"
    )
    concurrency: Int = Field(64, ge=1, description="requests at once, on as many connections")
    keys: Bool = Field(False, description="services want API keys; requests have right ones, wrong ones, and none")
    answer_seconds: Float = Field(120.0, gt=0, description="an answer takes longer: a finding")
    blocked_ms: Float = Field(50.0, gt=0, description="a body blocks a gateway's event loop for longer: a finding")
    directory: str | None = Field(
        None, description="for logs and findings; default: a temporary one, which stays only if something was found"
    )

    def share(self, surface: str) -> int:
        """Requests for ``surface``."""
        if self.surface == "all":
            return round(self.requests * _SHARES[surface])
        return self.requests if self.surface == surface else 0
