"""What a gateway tells: ``/console/state``, what its console shows, and the distributions of ``/metrics``."""

import ssl
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

_PATIENCE_S = 10.0
_STATE, _METRICS = "/console/state", "/metrics"
# The only ones of the page that are looked at.
_DISTRIBUTIONS = {
    "toka_time_to_first_token_seconds": "first token",
    "toka_inter_token_latency_seconds": "between tokens",
    "toka_e2e_request_latency_seconds": "whole request",
}
_ENDED = "toka_request_success_total"


class Away(Exception):
    """There are no figures now; the message says why, and what to do."""


class Refused(Exception):
    """There will be none, however often it is asked."""


@dataclass(frozen=True)
class Sample:
    """Of one moment."""

    state: dict[str, Any]  # as /console/state has it
    ended: float  # samples of requests, since the gateways began
    # Of each distribution: how many were observed up to a bound, by the bound; cumulative over bounds and time.
    counts: dict[str, dict[float, float]] = field(default_factory=dict)


class Source:
    """A gateway's figures. Used by one thread; ``close`` it."""

    def __init__(self, url: str, api_key: str | None = None, ca: str | None = None) -> None:
        """Raises ``Refused`` for an address that cannot be one, or a file of authorities that cannot be read."""
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        try:
            if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).hostname:
                raise Refused(f"{url} is no address: expected http://HOST:PORT, as toka prints it")
            verify = ssl.create_default_context(cafile=ca)
            self._client = httpx.Client(
                base_url=self.url, headers=headers, verify=verify, timeout=_PATIENCE_S, trust_env=False
            )
        except OSError as error:
            raise Refused(f"--ca {ca}: {error.strerror or error}") from None
        except (ValueError, httpx.InvalidURL) as error:
            raise Refused(f"{url} is no address: {error}") from None

    def read(self) -> Sample:
        """Raises ``Away``, ``Refused``."""
        try:
            state = self._get(_STATE).json()
            return _sample(state, self._get(_METRICS).text)
        except httpx.HTTPError as error:
            raise Away(f"no answer from {self.url} ({error or type(error).__name__}): is toka running there?") from None
        except (ValueError, AttributeError):
            raise Refused(f"{self.url} is no Tokasaurus gateway: its {_STATE} is something else") from None

    def close(self) -> None:
        self._client.close()

    def _get(self, path: str) -> httpx.Response:
        answer = self._client.get(path)
        match answer.status_code:
            case httpx.codes.OK:
                return answer
            case httpx.codes.UNAUTHORIZED:
                raise Refused(f"{self.url} wants an API key: give --api-key, or set TOKA_API_KEY")
            case httpx.codes.FORBIDDEN:
                raise Refused(f"{path} is for operators: use a key with the scope admin (toka-key scopes=admin)")
            case httpx.codes.NOT_FOUND:
                raise Refused(f"{self.url} has no {path}: where admin_port= is set, ask there (--url http://HOST:PORT)")
            case status:
                raise Away(f"{self.url}{path} answers {status}: {answer.text[:200]}")


def _sample(state: dict[str, Any], metrics: str) -> Sample:
    if not {"at", "gateway", "replicas"} <= state.keys():
        raise ValueError("no state of a gateway")
    ended, counts = 0.0, {label: dict[float, float]() for label in _DISTRIBUTIONS.values()}
    for family in text_string_to_metric_families(metrics):
        for each in family.samples:
            if each.name == _ENDED:
                ended += each.value
            elif family.name in _DISTRIBUTIONS and each.name.endswith("_bucket"):
                bounds, bound = counts[_DISTRIBUTIONS[family.name]], float(each.labels["le"])
                bounds[bound] = bounds.get(bound, 0.0) + each.value
    return Sample(state, ended, counts)
