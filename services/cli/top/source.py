"""Reads the state of a gateway: ``/console/state``, and the histograms of ``/metrics``."""

import ssl
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT_S = 10.0
_STATE, _METRICS = "/console/state", "/metrics"
# the histograms that are read, with their labels
_DISTRIBUTIONS = {
    "toka_time_to_first_token_seconds": "first token",
    "toka_inter_token_latency_seconds": "between tokens",
    "toka_e2e_request_latency_seconds": "whole request",
}
_FINISHED = "toka_request_success_total"


class GatewayUnavailable(Exception):
    """The gateway does not respond now. The message contains the reason and the remedy."""


class SourceError(Exception):
    """The gateway cannot be read, and a retry would not help."""


@dataclass(frozen=True)
class Snapshot:
    """State of a gateway at one time."""

    state: dict[str, Any]  # the content of /console/state
    finished: float  # samples finished since the gateways started
    # Histograms: observations up to each bound, cumulative over bounds and time.
    counts: dict[str, dict[float, float]] = field(default_factory=dict)


class Source:
    """Reader of a gateway's state. Used by one thread, which must ``close`` it."""

    def __init__(self, url: str, api_key: str | None = None, ca: str | None = None) -> None:
        """Create a reader. Raises ``SourceError`` for an invalid URL, or if the file of authorities cannot be read."""
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        try:
            if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).hostname:
                raise SourceError(f"{url} is not a URL: expected http://HOST:PORT, as toka prints it")
            verify = ssl.create_default_context(cafile=ca)
            self._client = httpx.Client(
                base_url=self.url, headers=headers, verify=verify, timeout=_TIMEOUT_S, trust_env=False
            )
        except OSError as error:
            raise SourceError(f"--ca {ca}: {error.strerror or error}") from None
        except (ValueError, httpx.InvalidURL) as error:
            raise SourceError(f"{url} is not a URL: {error}") from None

    def read(self) -> Snapshot:
        """Return the current state. Raises ``GatewayUnavailable`` and ``SourceError``."""
        try:
            state = self._get(_STATE).json()
            return _sample(state, self._get(_METRICS).text)
        except httpx.HTTPError as error:
            raise GatewayUnavailable(
                f"no answer from {self.url} ({error or type(error).__name__}): is toka running there?"
            ) from None
        except (ValueError, AttributeError):
            raise SourceError(f"{self.url} is not a Tokasaurus gateway: its {_STATE} has another content") from None

    def close(self) -> None:
        self._client.close()

    def _get(self, path: str) -> httpx.Response:
        answer = self._client.get(path)
        match answer.status_code:
            case httpx.codes.OK:
                return answer
            case httpx.codes.UNAUTHORIZED:
                raise SourceError(f"{self.url} requires an API key: give --api-key, or set TOKA_API_KEY")
            case httpx.codes.FORBIDDEN:
                raise SourceError(f"{path} is for operators: use a key with the scope admin (toka-key scopes=admin)")
            case httpx.codes.NOT_FOUND:
                raise SourceError(
                    f"{self.url} has no {path}: if admin_port= is set, use that port (--url http://HOST:PORT)"
                )
            case status:
                raise GatewayUnavailable(f"{self.url}{path} answers {status}: {answer.text[:200]}")


def _sample(state: dict[str, Any], metrics: str) -> Snapshot:
    if not {"at", "gateway", "replicas"} <= state.keys():
        raise ValueError("not the state of a gateway")
    finished, counts = 0.0, {label: dict[float, float]() for label in _DISTRIBUTIONS.values()}
    for family in text_string_to_metric_families(metrics):
        for each in family.samples:
            if each.name == _FINISHED:
                finished += each.value
            elif family.name in _DISTRIBUTIONS and each.name.endswith("_bucket"):
                bounds, bound = counts[_DISTRIBUTIONS[family.name]], float(each.labels["le"])
                bounds[bound] = bounds.get(bound, 0.0) + each.value
    return Snapshot(state, finished, counts)
