"""docker-compose.yml passes every flag on, because a missing flag would be ignored silently. Its profiles name only
existing services.
"""

import re
from pathlib import Path

import pytest
import yaml

from services.common.config import GatewayConfig, SchedulerConfig, ServiceFlags, WorkerConfig
from services.common.flags import Config, load
from services.launcher.supervisor import SHUTDOWN_MARGIN_S, STOP_GRACE_S

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
KINDS: dict[str, type[Config]] = {"gateway": GatewayConfig, "scheduler": SchedulerConfig, "worker": WorkerConfig}
OURS = tuple(KINDS)
PROFILES = {
    "observability": {"prometheus", "grafana", "otel-collector", "jaeger"},
    "postgres": {"postgres"},
}
# Given by the images, by Compose's ports, or meaningless with one replica of one worker.
TENSOR_RANKS = {"tp_size", "tp_rank", "async_tp_threshold", "expert_parallel"}
STAGES = {"pp_size", "pp_rank", "pp_layers", "pp_num_buffer_stages"}
MEETING = {"master_addr", "master_port"}
FIXED = {"host", "port", "scheduler_listen", "worker_listen", "dp_size", "dp_rank"} | TENSOR_RANKS | STAGES | MEETING


@pytest.mark.parametrize(("service", "kind"), list(KINDS.items()))
def test_a_container_is_given_every_flag_of_its_service(service: str, kind: type[Config]):
    given = {name.removeprefix("TOKA_").lower() for name in COMPOSE["services"][service]["environment"]}
    assert given == set(kind.model_fields) - FIXED


@pytest.mark.parametrize(("service", "kind"), list(KINDS.items()))
def test_without_variables_no_flag_is_set_to_its_default(service: str, kind: type[Config]):
    """A copy of a default would become outdated when the program's default changes."""
    written = COMPOSE["services"][service]["environment"]
    values = {name: re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", str(value)) for name, value in written.items()}
    given = {name: value for name, value in values.items() if value and not value.startswith("${")}
    config, defaults = load(kind, [], given), kind()
    flags = [name.removeprefix("TOKA_").lower() for name in given]
    assert [name for name in flags if getattr(config, name) == getattr(defaults, name)] == []


@pytest.mark.parametrize(("name", "volume"), [("scheduler", "recordings"), ("worker", "cache"), ("gateway", "store")])
def test_a_service_has_a_place_of_its_own_to_write_to(name: str, volume: str):
    service = COMPOSE["services"][name]
    assert set(COMPOSE["x-service"]["volumes"]) < set(service["volumes"])
    assert f"{volume}:/{volume}" in service["volumes"]
    assert volume in COMPOSE["volumes"]
    before_user, _, _ = (ROOT / service["build"]["dockerfile"]).read_text().partition("USER toka")
    assert f"install -d -o toka -m 700 /{volume}" in before_user  # a new volume takes owner and mode from the image


def test_there_is_time_to_drain():
    period = COMPOSE["x-service"]["stop_grace_period"]
    seconds = int(re.fullmatch(r"\$\{STOP_GRACE_PERIOD:-(\d+)s\}", period)[1])
    assert seconds >= ServiceFlags().drain_seconds + SHUTDOWN_MARGIN_S + STOP_GRACE_S


@pytest.mark.parametrize("name", OURS)
def test_process_1_listens_to_signals_while_a_service_is_loaded(name: str):
    dockerfile = (ROOT / COMPOSE["services"][name]["build"]["dockerfile"]).read_text()
    assert dockerfile.endswith(f'ENTRYPOINT ["python", "-m", "services.common.process.init", "toka-{name}"]\n')


@pytest.mark.parametrize("name", OURS)
def test_a_container_can_write_nowhere_else_and_gain_nothing(name: str):
    service = COMPOSE["services"][name]
    assert (service["read_only"], service["tmpfs"], service["cap_drop"]) == (True, ["/tmp"], ["ALL"])
    assert service["security_opt"] == ["no-new-privileges:true"]
    [writable] = [mount for mount in service["volumes"] if not mount.endswith(":ro")]
    assert writable.partition(":")[0] in COMPOSE["volumes"]


def test_certificates_and_keys_can_be_read_and_not_written():
    for name in OURS:
        assert "${TOKA_SECRETS_DIR:-./docker/secrets}:/secrets:ro" in COMPOSE["services"][name]["volumes"]
    assert (ROOT / "docker" / "secrets" / "README").exists()


def test_only_a_worker_whose_port_nobody_else_reaches_has_no_certificate():
    worker = COMPOSE["services"]["worker"]
    assert worker["environment"]["TOKA_INSECURE_WORKER"] == "${TOKA_INSECURE_WORKER:-T}"
    assert "ports" not in worker
    assert "network_mode" not in worker


def test_compiled_code_is_kept_in_the_volume():
    assert COMPOSE["services"]["worker"]["environment"]["TOKA_COMPILE_CACHE_DIR"] == "/cache"


def test_without_a_profile_only_the_services_run():
    for name, service in COMPOSE["services"].items():
        assert service.get("profiles", []) == [profile for profile, names in PROFILES.items() if name in names]
    assert set(COMPOSE["services"]) == {*OURS, *(name for names in PROFILES.values() for name in names)}


@pytest.mark.parametrize("name", sorted(COMPOSE["services"]))
def test_no_service_can_take_all_of_the_host_or_come_from_somewhere_tomorrow(name: str):
    service = COMPOSE["services"][name]
    assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory", "pids"}
    if name not in OURS:
        assert re.fullmatch(r"[a-z/-]+:v?\d+\.\d+(\.\d+)?(-\w+)?", service["image"])
    assert service["restart"] == "unless-stopped"
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert "/tmp" in service["tmpfs"]


@pytest.mark.parametrize("name", sorted(set().union(*PROFILES.values())))
def test_a_profiles_container_finds_its_files_and_is_reached_from_this_host_only(name: str):
    service = COMPOSE["services"][name]
    for mount in service.get("volumes", ()):
        source, _, target = mount.partition(":")
        assert (
            (ROOT / source).exists() and target.endswith(":ro")
            if source.startswith(".")
            else source in COMPOSE["volumes"]
        )
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_the_gateways_store_is_the_profiles_database_where_it_has_a_password():
    url = COMPOSE["services"]["gateway"]["environment"]["TOKA_STORE_URL"]
    settings = COMPOSE["services"]["postgres"]["environment"]
    user, database = settings["POSTGRES_USER"], settings["POSTGRES_DB"]
    assert f"${{TOKA_POSTGRES_PASSWORD:+postgresql://{user}:${{TOKA_POSTGRES_PASSWORD:-}}@postgres/{database}}}" in url
    assert settings["POSTGRES_PASSWORD"] == "${TOKA_POSTGRES_PASSWORD:-}"  # with none the server refuses to start
    assert COMPOSE["services"]["gateway"]["depends_on"]["postgres"]["required"] is False
