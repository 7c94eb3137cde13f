"""The server of a measurement, and the figures to compare it with."""

import shlex
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from bench.gpus import Gpus
from bench.server import serve
from services.cli.bench.server import served_model, without_version
from services.common.addresses import is_loopback
from services.common.flags import Config, Int, Strings
from services.common.host.descriptors import raise_limit

# One H200, random weights of the Llama-3.2-1B shape, the same prompts and sampling; see docs/performance/gpu.md.
# Throughput is in output tokens per second, latency in milliseconds per output token by number of concurrent streams.
H200 = {
    "monkeys": {"tokasaurus-0.0.4": 59200, "vllm-0.26.0": 28700},
    "mixed": {"tokasaurus-0.0.4": 63500, "vllm-0.26.0": 51900},
    "latency-1": {"tokasaurus-0.0.4": 2.12, "vllm-0.26.0": 1.36},
    "latency-8": {"tokasaurus-0.0.4": 2.16, "vllm-0.26.0": 1.60},
    "latency-64": {"tokasaurus-0.0.4": 2.64, "vllm-0.26.0": 2.01},
}


class TargetConfig(Config):
    """The flags of every program that measures an OpenAI server."""

    url: str | None = Field(
        None, description="a running OpenAI server, e.g. http://127.0.0.1:10210; default: start one"
    )
    server_flags: str = Field(
        "", description="flags of the started server, quoted as in a shell: 'model=... dp_size=2'"
    )
    rival_url: str | None = Field(None, description="another server, which is measured first in the same way")
    baseline: Strings = Field((), description="figures to compare with: name:figure,... or h200 (see bench.target)")
    clients: Int = Field(4, ge=1, description="client processes")

    @field_validator("baseline")
    @classmethod
    def _figures(cls, items: tuple[str, ...]) -> tuple[str, ...]:
        for item in items:
            name, colon, figure = item.rpartition(":")
            if item != "h200" and not (name and colon and figure.replace(".", "", 1).isdigit()):
                raise ValueError(f"{item!r} is neither name:figure nor h200")
        return items

    def baselines(self, workload: str) -> dict[str, float]:
        """Return the figures to compare with for ``workload``, a key of ``H200``."""
        found: dict[str, float] = {}
        for item in self.baseline:
            if item == "h200":
                found |= H200.get(workload, {})
            else:
                name, _, figure = item.rpartition(":")
                found[name] = float(figure)
        return found


@dataclass(frozen=True)
class Target:
    """A running server. ``url`` has no ``/v1``. ``pid``: of ``toka`` if this program started it, else None."""

    name: str
    url: str
    model: str
    pid: int | None = None

    def gpus(self) -> Gpus | None:
        """Return the GPUs if the server runs on this host, or None."""
        return Gpus.visible() if is_loopback(urlsplit(self.url).hostname or "") else None


@contextmanager
def first_target(config: TargetConfig) -> Iterator[Target]:
    """Yield the server to measure: at ``url``, or started for the measurement."""
    raise_limit()
    if config.url is not None:
        yield _running("server", config.url)
        return
    flags = dict(flag.split("=", 1) for flag in shlex.split(config.server_flags))
    with serve(**flags) as server:
        yield Target("toka", server.base_url, server.model, server.process.pid)


def rival(config: TargetConfig) -> Target | None:
    """Return the server at ``rival_url``, or None if the flag is not set."""
    return None if config.rival_url is None else _running("rival", config.rival_url)


def measure_throughput(
    config: TargetConfig, workload: str, measure: Callable[[Target], dict[str, Any]]
) -> dict[str, Any]:
    """Measure the rival, if there is one, and then the server.

    Return the figures of the server, those of the rival as ``rival``, and the ratios of ``tokens_per_second`` to the
    rival and to the figures for ``workload``, a key of ``H200``.
    """
    figures: dict[str, Any] = {}
    others = config.baselines(workload)
    against = rival(config)
    if against is not None:
        figures["rival"] = measure(against)
        others = {"rival": figures["rival"]["tokens_per_second"], **others}
    with first_target(config) as target:
        figures |= measure(target)
    return figures | {"ratio": ratios(figures["tokens_per_second"], others)}


def median_run(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the run with the median ``tokens_per_second``, and add the rates of all runs as ``runs``."""
    rates = [run["tokens_per_second"] for run in runs]
    middle = statistics.median(rates)
    return min(runs, key=lambda run: abs(run["tokens_per_second"] - middle)) | {"runs": rates}


def ratios(figure: float, others: Mapping[str, float], *, lower_is_better: bool = False) -> dict[str, float]:
    """Print and return by name by how many times ``figure`` is better than each of ``others``."""
    found = {}
    for name, other in others.items():
        found[name] = (other / figure if lower_is_better else figure / other) if figure and other else 0.0
        print(f"{found[name]:.2f} times as good as {name} ({other:g})")
    return found


def _running(name: str, url: str) -> Target:
    url = without_version(url)
    return Target(name, url, served_model(url))
