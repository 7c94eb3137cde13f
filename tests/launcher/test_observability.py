"""What Prometheus asks is there, and what Grafana's panels show is what the services tell."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from bench.server import free_port
from services.launcher.compose import MOST_RANKS
from tests.gateway.deployment import Deployment, eventually

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
PROMETHEUS = yaml.safe_load((ROOT / "docker" / "prometheus" / "prometheus.yml").read_text())
GRAFANA = ROOT / "docker" / "grafana"
DASHBOARDS = {path.stem: json.loads(path.read_text()) for path in sorted((GRAFANA / "dashboards").glob("*.json"))}
WORKER_METRICS = ROOT / "services" / "worker" / "metrics.py"
GRAFANAS = {"$__rate_interval": "1m", "$model": ".*", "$replica": ".*", "$device": ".*"}
WORDS = {"by", "on", "group_left", "without", "ignoring", "and", "or", "unless", "bool", "offset"}


def expressions(dashboard: dict[str, Any]) -> Iterator[str]:
    """In PromQL: of panels, and of the variables' choices."""
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    for variable in dashboard["templating"]["list"]:
        yield re.fullmatch(r"label_values\((.+), \w+\)", variable["query"]["query"])[1]


def metrics_in(expression: str) -> set[str]:
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\b(?:by|on|group_left|without)\s*\([^)]*\)", " ", expression)
    return set(re.findall(r"(?<![\w:.])([a-zA-Z_:][\w:]*)(?!\s*\(|[\w:])", bare)) - WORDS


def labels_in(expression: str) -> set[str]:
    matched = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", " ".join(re.findall(r"\{([^}]*)\}", expression)))
    grouped = re.findall(r"\w+", " ".join(re.findall(r"\bby\s*\(([^)]*)\)", expression)))
    return {*matched, *grouped}


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict[str, set[str]]:
    """Every sample's name that a gateway, a scheduler and a worker tell, with its labels, as Prometheus gets them. A
    worker's are read from its source: on a CPU it knows nothing of power."""
    port = free_port()
    deployment = Deployment(tmp_path_factory.mktemp("observed"), scheduler={"metrics_port": port}).wait_ready()
    try:
        assert deployment.complete(model="tokasaurus-builtin", prompt="One,", max_tokens=4).status_code == 200
        found: dict[str, set[str]] = {}
        for url in (deployment.url, f"http://127.0.0.1:{port}"):
            eventually(lambda url=url: "toka_forecast_kv_pages{" in httpx.get(f"{url}/metrics").text)
            for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
                for name in {family.name, *(sample.name for sample in family.samples)}:
                    labels = [set(sample.labels) for sample in family.samples if sample.name == name]
                    found.setdefault(name, set()).update(*labels)
    finally:
        deployment.stop()
    source = WORKER_METRICS.read_text()
    ranks = {"device", "dp_rank", "tp_rank", "pp_rank"}
    for kind, name in re.findall(r'self\._(counter|gauge)\(\s*"(\w+)"', source):
        found[f"toka_worker_{name}" + ("_total" if kind == "counter" else "")] = ranks | {"part", "kind"}
    return found


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_metric_in_a_panel_is_one_that_a_service_exports(told: dict[str, set[str]], name: str):
    of_prometheus = {"job", "instance", "le"}
    for expression in expressions(DASHBOARDS[name]):
        metrics = metrics_in(expression)
        assert metrics, expression
        assert metrics <= set(told), f"{metrics - set(told)} in {expression}"
        known = of_prometheus.union(*(told[metric] for metric in metrics))
        if not metrics <= {"toka_failovers_total", "toka_http_disconnects_total"}:
            assert labels_in(expression) <= known, f"{labels_in(expression) - known} in {expression}"


def test_the_three_dashboards_are_there_and_each_panel_says_what_it_shows():
    assert set(DASHBOARDS) == {"overview", "scheduler", "workers"}
    for dashboard in DASHBOARDS.values():
        assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
        assert all(panel["title"] and panel["description"] for panel in dashboard["panels"])
    assert len({dashboard["uid"] for dashboard in DASHBOARDS.values()}) == 3


def test_panels_lie_beside_and_not_upon_each_other():
    for dashboard in DASHBOARDS.values():
        taken = set()
        for panel in dashboard["panels"]:
            at = panel["gridPos"]
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            assert at["x"] + at["w"] <= 24
            assert not cells & taken, panel["title"]
            taken |= cells


def test_what_grafana_is_provisioned_with_is_where_it_looks():
    sources = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "sources.yml").read_text())["datasources"]
    addresses = {source["uid"]: source["url"] for source in sources}
    assert addresses == {"prometheus": "http://prometheus:9090", "jaeger": "http://jaeger:16686"}
    used = set(re.findall(r'"uid": "(\w+)"', json.dumps([each["panels"] for each in DASHBOARDS.values()])))
    assert used == {"prometheus"}
    [provider] = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "dashboards.yml").read_text())["providers"]
    mounted = dict(mount.split(":")[:2] for mount in COMPOSE["grafana"]["volumes"])
    assert mounted["./docker/grafana/dashboards"] == provider["options"]["path"]
    home = COMPOSE["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (GRAFANA / "dashboards" / Path(home).name).exists()


def test_prometheus_asks_every_rank_that_a_replica_may_have_at_its_port():
    jobs = {job["job_name"]: job for job in PROMETHEUS["scrape_configs"]}
    asked = {
        name: [(target["names"], target["port"]) for target in job["dns_sd_configs"]] for name, job in jobs.items()
    }
    first = {name: int(COMPOSE[name]["environment"]["TOKA_METRICS_PORT"]) for name in ("scheduler", "worker")}
    assert asked["gateway"] == [(["gateway"], 10210)]
    assert asked["scheduler"] == [(["toka-schedulers"], first["scheduler"])]
    assert asked["worker"] == [([f"toka-rank-{rank}"], first["worker"] + rank) for rank in range(MOST_RANKS)]
    for name, alias in (("scheduler", "toka-schedulers"), ("worker", "toka-rank-0")):
        assert COMPOSE[name]["networks"]["default"]["aliases"] == [alias]


def test_traces_go_through_the_collector_to_where_grafana_reads_them():
    collector = yaml.safe_load((ROOT / "docker" / "otel-collector.yml").read_text())
    pipeline = collector["service"]["pipelines"]["traces"]
    assert all(name in collector["receivers"] for name in pipeline["receivers"])
    assert all(name in collector["processors"] for name in pipeline["processors"])
    assert [collector["exporters"][name]["endpoint"] for name in pipeline["exporters"]] == ["jaeger:4317"]
    assert collector["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"] == "0.0.0.0:4317"


def promtool(*arguments: str) -> subprocess.CompletedProcess:
    if not shutil.which("promtool"):
        pytest.skip("promtool is not there")
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True)


def test_prometheus_takes_its_configuration():
    outcome = promtool("check", "config", str(ROOT / "docker" / "prometheus" / "prometheus.yml"))
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_prometheus_understands_every_panel(tmp_path):
    rules = []
    for name, dashboard in DASHBOARDS.items():
        for index, expression in enumerate(expressions(dashboard)):
            for variable, value in GRAFANAS.items():
                expression = expression.replace(variable, value)
            rules.append({"record": f"{name}:{index}", "expr": expression})
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    outcome = promtool("check", "rules", str(path))
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
