"""docker-compose.yml hands every flag on: one that it left out would be ignored in silence."""

from pathlib import Path

import pytest
import yaml

from services.common.config import Config, GatewayConfig, SchedulerConfig, WorkerConfig

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
# Given by the images, by Compose's ports, or meaningless with one replica.
FIXED = {"host", "port", "scheduler_listen", "worker_listen", "dp_rank"}


@pytest.mark.parametrize(
    ("service", "kind"), [("gateway", GatewayConfig), ("scheduler", SchedulerConfig), ("worker", WorkerConfig)]
)
def test_a_container_is_given_every_flag_of_its_service(service: str, kind: type[Config]):
    given = {name.removeprefix("TOKA_").lower() for name in COMPOSE["services"][service]["environment"]}
    assert given == set(kind.model_fields) - FIXED


def test_the_scheduler_has_a_place_of_its_own_to_record_to():
    service = COMPOSE["services"]["scheduler"]
    assert set(COMPOSE["x-service"]["volumes"]) < set(service["volumes"])
    assert "recordings:/recordings" in service["volumes"]
    assert "recordings" in COMPOSE["volumes"]
    before_user, _, _ = (ROOT / service["build"]["dockerfile"]).read_text().partition("USER toka")
    assert "install -d -o toka -m 700 /recordings" in before_user  # a new volume takes owner and mode from the image
