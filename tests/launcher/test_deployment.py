import asyncio
from pathlib import Path

import pytest

from services.common.config import DeploymentConfig, GatewayConfig, SchedulerConfig, WorkerConfig
from services.common.errors import InvalidRequest
from services.common.flags import load
from services.launcher import toka
from services.launcher.deployment import child_environment, plan_children

RUNTIME = Path("/run/toka")
KINDS = {"worker": WorkerConfig, "scheduler": SchedulerConfig, "gateway": GatewayConfig}


def children_of(*arguments: str):
    return plan_children(load(DeploymentConfig, arguments, {}), RUNTIME)


def test_one_replica_is_a_worker_a_scheduler_and_a_gateway():
    children = children_of()
    assert [child.name for child in children] == ["worker-0", "scheduler-0", "gateway"]
    worker, scheduler, gateway = (load(KINDS[child.role], child.flags, {}) for child in children)
    assert scheduler.worker_address == worker.worker_listen == children[0].address
    assert gateway.scheduler_addresses == (scheduler.scheduler_listen,)


def test_each_replica_has_its_own_scheduler_and_worker():
    children = children_of("dp_size=3", "grpc_port=7000")
    schedulers = [load(SchedulerConfig, child.flags, {}) for child in children if child.role == "scheduler"]
    assert [config.scheduler_listen for config in schedulers] == ["127.0.0.1:7000", "127.0.0.1:7001", "127.0.0.1:7002"]
    assert len({config.worker_address for config in schedulers}) == 3
    assert len(load(GatewayConfig, children[-1].flags, {}).scheduler_addresses) == 3


@pytest.mark.parametrize(
    "argument",
    [
        "model=/models/x",
        "kv_cache_num_tokens=(512 * 1024)",
        "torch_compile=T",
        "prefix_caching=F",
        "stats_report_seconds=0",
        "port=1234",
        "log_level=DEBUG",
        "max_context_tokens=100",
        "admission=guaranteed",
        "guaranteed_classes=high,low",
        "admission_margin=2.5",
        "priority_ageing_seconds=0",
        "record_plans=/tmp/plans",
    ],
)
def test_a_flag_reaches_the_children_that_take_it(argument):
    config = load(DeploymentConfig, [argument], {})
    name = argument.partition("=")[0]
    for child in plan_children(config, RUNTIME):
        kind = KINDS[child.role]
        if name in kind.model_fields:
            assert getattr(load(kind, child.flags, {}), name) == getattr(config, name)


def test_a_child_does_not_read_its_parents_flags_from_the_environment():
    environment = {"TOKA_PORT": "1", "PATH": "/bin"}
    assert child_environment(children_of()[0], environment) == {"PATH": "/bin"}


def test_each_replica_gets_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    workers = [child for child in children_of("dp_size=2", "device=cuda") if child.role == "worker"]
    assert [worker.environment["CUDA_VISIBLE_DEVICES"] for worker in workers] == ["4", "6"]
    assert children_of("dp_size=2", "device=cpu")[0].environment == {}


def test_a_gateway_on_all_interfaces_is_asked_on_loopback():
    assert children_of("host=0.0.0.0", "port=8000")[-1].address == "http://127.0.0.1:8000"
    assert children_of("host=::", "port=8000")[-1].address == "http://[::1]:8000"
    assert children_of("host=fe80::2", "port=8000")[-1].address == "http://[fe80::2]:8000"


@pytest.mark.parametrize("place", ["/proc/recordings", "/dev/null", "/proc"])
async def test_a_place_that_cannot_be_recorded_to_is_refused_before_anything_is_loaded(place, monkeypatch):
    def read_card(*arguments, **options):
        raise AssertionError("the model is looked for already")

    monkeypatch.setattr(toka, "read_card", read_card)
    with pytest.raises(InvalidRequest, match=rf"flag record_plans={place}: no directory .*\(.+\); name another"):
        await toka.serve(load(DeploymentConfig, [f"record_plans={place}"], {}), asyncio.Event())


async def test_the_directory_for_recordings_is_made_and_left_empty(tmp_path, monkeypatch):
    monkeypatch.setattr(toka, "read_card", lambda *arguments, **options: None)
    stop, place = asyncio.Event(), tmp_path / "new" / "recordings"
    stop.set()
    await toka.serve(load(DeploymentConfig, [f"record_plans={place}"], {}), stop)
    assert list(place.iterdir()) == []
