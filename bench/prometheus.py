"""A Prometheus server for a deployment, with the rules of ``docker/prometheus``."""

import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import yaml

from bench.server import free_port

CONFIGURATION = Path(__file__).resolve().parents[1] / "docker" / "prometheus" / "prometheus.yml"
_PATIENCE_S = 60.0


class Series(NamedTuple):
    """The values of an expression for one set of labels: (Unix time, value), with NaN if there is no value."""

    labels: dict[str, str]
    points: list[tuple[float, float]]


class Prometheus:
    """A client of the Prometheus at ``url``."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=f"{url}/api/v1", timeout=_PATIENCE_S, trust_env=False)

    def now(self, expression: str) -> list[Series]:
        """Evaluate ``expression`` now. Raises ``ValueError`` if it is invalid."""
        return _series(self._ask("query", query=expression))

    def over(self, expression: str, start: float, end: float, step_s: float) -> list[Series]:
        """Evaluate ``expression`` from ``start`` to ``end`` (Unix time). Raises ``ValueError`` if it is invalid."""
        return _series(self._ask("query_range", query=expression, start=start, end=end, step=step_s))

    def values(self, label: str, metric: str) -> list[str]:
        """Return the values of ``label`` of ``metric``."""
        return list(self._ask(f"label/{label}/values", **{"match[]": metric}))

    def healthy(self) -> dict[str, int]:
        """Return the number of targets that answered, by job."""
        found: dict[str, int] = {}
        for target in self._ask("targets")["activeTargets"]:
            found[target["labels"]["job"]] = found.get(target["labels"]["job"], 0) + (target["health"] == "up")
        return found

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _ask(self, path: str, **query: Any) -> Any:
        answer = self._http.get(path, params=query).json()
        if answer["status"] != "success":
            raise ValueError(f"{query.get('query', path)}: {answer['error']}")
        return answer["data"]


def is_installed() -> bool:
    """Return whether the program is installed (Debian's package ``prometheus``)."""
    return shutil.which("prometheus") is not None


@contextmanager
def prometheus(directory: Path, targets: Mapping[str, Sequence[str]], every_s: int) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes ``targets`` (HOST:PORT by job) every ``every_s`` seconds.

    Its data is in ``directory``. Yield a client when all targets have answered.
    """
    (directory / "prometheus.yml").write_text(yaml.safe_dump(_configuration(targets, every_s)))
    port = free_port()
    command = ["prometheus", f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data",
               f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]  # fmt: skip
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    asked = Prometheus(f"http://127.0.0.1:{port}")
    try:
        _wait(process, asked, {job: len(addresses) for job, addresses in targets.items()}, directory)
        yield asked
    finally:
        asked.close()
        process.terminate()
        process.wait()


def _configuration(targets: Mapping[str, Sequence[str]], every_s: int) -> dict[str, Any]:
    """Return the repository's configuration with the addresses of ``targets``. Jobs keep their names."""
    configuration = yaml.safe_load(CONFIGURATION.read_text())
    configuration["global"]["scrape_interval"] = f"{every_s}s"
    assert [job["job_name"] for job in configuration["scrape_configs"]] == [*targets]
    for job in configuration["scrape_configs"]:
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": [*targets[job["job_name"]]]}]
    return configuration


def _wait(process: subprocess.Popen[bytes], asked: Prometheus, wanted: dict[str, int], directory: Path) -> None:
    give_up_at, healthy = time.monotonic() + _PATIENCE_S, {}
    while process.poll() is None and time.monotonic() < give_up_at:
        try:
            if (healthy := asked.healthy()) == wanted:
                return
        except (httpx.TransportError, ValueError):
            pass  # not listening yet
        time.sleep(0.2)
    log = (directory / "prometheus.log").read_text()
    raise RuntimeError(f"Prometheus did not reach all targets: {healthy} of {wanted}\n{log}")


def _series(data: dict[str, Any]) -> list[Series]:
    if data["resultType"] == "vector":
        return [Series(each["metric"], [_point(each["value"])]) for each in data["result"]]
    return [Series(each["metric"], [_point(point) for point in each["values"]]) for each in data["result"]]


def _point(point: tuple[float, str]) -> tuple[float, float]:
    return float(point[0]), float(point[1])
