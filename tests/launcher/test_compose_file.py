"""docker-compose.yml hands every flag on: one that it left out would be ignored in silence."""

import re
from pathlib import Path

import pytest
import yaml

from services.common.config import GatewayConfig, SchedulerConfig, ServiceConfig, WorkerConfig
from services.common.flags import Config
from services.launcher.supervisor import LAST_WORDS_S, STOP_GRACE_S

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
# Given by the images, by Compose's ports, or meaningless with one replica of one worker.
TENSOR_RANKS = {"tp_size", "tp_rank", "async_tp_threshold"}
STAGES = {"pp_size", "pp_rank", "pp_layers", "pp_num_buffer_stages"}
MEETING = {"master_addr", "master_port"}
FIXED = {"host", "port", "scheduler_listen", "worker_listen", "dp_rank"} | TENSOR_RANKS | STAGES | MEETING


@pytest.mark.parametrize(
    ("service", "kind"), [("gateway", GatewayConfig), ("scheduler", SchedulerConfig), ("worker", WorkerConfig)]
)
def test_a_container_is_given_every_flag_of_its_service(service: str, kind: type[Config]):
    given = {name.removeprefix("TOKA_").lower() for name in COMPOSE["services"][service]["environment"]}
    assert given == set(kind.model_fields) - FIXED


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
    assert seconds >= ServiceConfig().drain_seconds + LAST_WORDS_S + STOP_GRACE_S


@pytest.mark.parametrize("name", ["gateway", "scheduler", "worker"])
def test_process_1_listens_to_signals_while_a_service_is_loaded(name: str):
    dockerfile = (ROOT / COMPOSE["services"][name]["build"]["dockerfile"]).read_text()
    assert dockerfile.endswith(f'ENTRYPOINT ["python", "-m", "services.common.init", "toka-{name}"]\n')


@pytest.mark.parametrize("name", ["gateway", "scheduler", "worker"])
def test_a_container_can_write_nowhere_else_and_gain_nothing(name: str):
    service = COMPOSE["services"][name]
    assert (service["read_only"], service["tmpfs"], service["cap_drop"]) == (True, ["/tmp"], ["ALL"])
    assert service["security_opt"] == ["no-new-privileges:true"]
    [writable] = [mount for mount in service["volumes"] if not mount.endswith(":ro")]
    assert writable.partition(":")[0] in COMPOSE["volumes"]


def test_certificates_and_keys_can_be_read_and_not_written():
    for service in COMPOSE["services"].values():
        assert "${TOKA_SECRETS_DIR:-./docker/secrets}:/secrets:ro" in service["volumes"]
    assert (ROOT / "docker" / "secrets" / "README").exists()


def test_only_a_worker_whose_port_nobody_else_reaches_has_no_certificate():
    worker = COMPOSE["services"]["worker"]
    assert worker["environment"]["TOKA_INSECURE_WORKER"] == "${TOKA_INSECURE_WORKER:-T}"
    assert "ports" not in worker
    assert "network_mode" not in worker


def test_compiled_code_is_kept_in_the_volume():
    assert COMPOSE["services"]["worker"]["environment"]["TOKA_COMPILE_CACHE_DIR"] == "/cache"


def test_what_is_laid_over_for_a_gpu_names_what_there_is():
    laid_over = yaml.safe_load((ROOT / "docker" / "compose.cuda.yml").read_text())["services"]
    assert set(laid_over) == {"worker"}
    own = COMPOSE["services"]["worker"]
    dockerfile = (ROOT / own["build"]["dockerfile"]).read_text()
    assert all(f"ARG {name}=" in dockerfile for name in laid_over["worker"]["build"]["args"])
    assert f"AS base-{laid_over['worker']['build']['args']['VARIANT']}\n" in dockerfile
    assert set(laid_over["worker"]["environment"]) <= set(own["environment"])
