from pathlib import Path

import pytest

from services.common.config import ChosenDeploymentConfig, GatewayConfig, SchedulerConfig, WorkerConfig
from services.common.errors import InvalidRequest
from services.common.flags import FlagError, load
from services.common.process.service import Stop
from services.launcher import deployment, toka
from services.launcher.deployment import child_environment, choose_gpus, plan_children

RUNTIME = Path("/run/toka")
KINDS = {"worker": WorkerConfig, "scheduler": SchedulerConfig, "gateway": GatewayConfig}


def children_of(*arguments: str):
    return plan_children(load(ChosenDeploymentConfig, arguments, {}), RUNTIME)


def test_one_replica_is_a_worker_a_scheduler_and_a_gateway():
    children = children_of()
    assert [child.name for child in children] == ["worker-0", "scheduler-0", "gateway"]
    worker, scheduler, gateway = (load(KINDS[child.role], child.flags, {}) for child in children)
    assert scheduler.worker_addresses == (worker.worker_listen,) == (children[0].address,)
    assert gateway.scheduler_addresses == (scheduler.scheduler_listen,)


def test_there_may_be_no_gateway():
    assert [child.role for child in children_of("gateways=0", "dp_size=2")] == [*["worker"] * 2, *["scheduler"] * 2]
    assert children_of("gateways=0", "grpc_port=10210")  # the port that gateways have otherwise
    with pytest.raises(FlagError, match="port=7000: has no effect with gateways=0"):
        children_of("gateways=0", "port=7000")


def test_each_replica_has_its_own_scheduler_and_worker():
    children = children_of("dp_size=3", "grpc_port=7000")
    schedulers = [load(SchedulerConfig, child.flags, {}) for child in children if child.role == "scheduler"]
    assert [config.scheduler_listen for config in schedulers] == ["127.0.0.1:7000", "127.0.0.1:7001", "127.0.0.1:7002"]
    assert len({config.worker_addresses for config in schedulers}) == 3
    assert len(load(GatewayConfig, children[-1].flags, {}).scheduler_addresses) == 3


def test_a_replica_is_a_grid_of_ranks():
    children = children_of("dp_size=2", "tp_size=2", "pp_size=2", "pp_layers=5,3")
    workers = [load(WorkerConfig, child.flags, {}) for child in children if child.role == "worker"]
    grid = [(replica, pp_rank, tp_rank) for replica in (0, 1) for pp_rank in (0, 1) for tp_rank in (0, 1)]
    assert [(config.dp_rank, config.pp_rank, config.tp_rank) for config in workers] == grid
    assert {(config.tp_size, config.pp_size, config.pp_layers) for config in workers} == {(2, 2, (5, 3))}
    assert len({config.worker_listen for config in workers}) == 8
    assert len({child.name for child in children}) == len(children)

    meetings = {(config.dp_rank, config.master_addr, config.master_port) for config in workers}
    assert {address for _, address, _ in meetings} == {"127.0.0.1"}
    assert len(meetings) == len({port for _, _, port in meetings}) == 2

    schedulers = [load(SchedulerConfig, child.flags, {}) for child in children if child.role == "scheduler"]
    assert [config.pp_size for config in schedulers] == [2, 2]
    for replica, config in enumerate(schedulers):
        assert config.worker_addresses == tuple(w.worker_listen for w in workers if w.dp_rank == replica)


def test_only_the_workers_of_a_replica_depend_on_each_other():
    children = children_of("dp_size=2", "tp_size=2")
    assert [child.unit for child in children] == ["worker-0", "worker-0", "worker-1", "worker-1", "", "", ""]


def test_the_cores_are_divided_among_all_workers(monkeypatch):
    monkeypatch.setattr(deployment, "usable_processors", lambda: 16)
    for flags, threads in (((), None), (("dp_size=2", "tp_size=2"), 4), (("tp_size=2", "torch_num_threads=3"), 3)):
        for child in children_of(*flags):
            if child.role == "worker":
                assert load(WorkerConfig, child.flags, {}).torch_num_threads == threads


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
        "tp_size=2",
        "pp_size=2",
    ],
)
def test_a_flag_reaches_the_children_that_take_it(argument):
    config = load(ChosenDeploymentConfig, [argument], {})
    name = argument.partition("=")[0]
    for child in plan_children(config, RUNTIME):
        kind = KINDS[child.role]
        if name in kind.model_fields:
            assert getattr(load(kind, child.flags, {}), name) == getattr(config, name)


def test_a_child_does_not_read_its_parents_flags_from_the_environment():
    environment = {"TOKA_PORT": "1", "PATH": "/bin"}
    assert child_environment(children_of()[0], environment) == {"PATH": "/bin"}


def gpus_of(*arguments: str, visible: str | None) -> list[str | None]:
    """What each worker sees; None = as toka."""
    config = load(ChosenDeploymentConfig, arguments, {})
    children = plan_children(config, RUNTIME, choose_gpus(config, visible))
    return [child.environment.get("CUDA_VISIBLE_DEVICES") for child in children if child.role == "worker"]


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_each_worker_gets_a_gpu_of_its_own(device):
    assert gpus_of("dp_size=2", f"device={device}", visible="4,6,7") == ["4", "6"]
    assert gpus_of("dp_size=2", "tp_size=2", f"device={device}", visible="7,5,3,1") == ["7", "5", "3", "1"]
    assert gpus_of("pp_size=2", f"device={device}", visible=None) == ["0", "1"]
    assert gpus_of(f"device={device}", visible="4,6") == [None]


def test_a_worker_on_a_cpu_needs_no_gpu():
    assert gpus_of("tp_size=2", "device=cpu", visible="0") == [None, None]
    for hidden in ("", "-1"):
        assert gpus_of("tp_size=2", visible=hidden) == [None, None]


@pytest.mark.parametrize(
    ("device", "visible", "seen"),
    [("auto", "4,6,7", r"3 are visible \(4,6,7\)"), ("cuda", "", r"0 are visible \(none\)")],
)
async def test_too_few_gpus_are_refused_before_anything_is_loaded(device, visible, seen, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(toka, "read_card", None)
    config = load(ChosenDeploymentConfig, ["dp_size=2", "pp_size=2", f"device={device}"], {})
    with pytest.raises(InvalidRequest, match=f"dp_size=2 tp_size=1 pp_size=2: 4 workers need a GPU each, but {seen}"):
        await toka.serve(config, Stop())


def test_a_gateway_on_all_interfaces_is_asked_on_loopback():
    assert children_of("host=0.0.0.0", "port=8000")[-1].address == "http://127.0.0.1:8000"
    assert children_of("host=::", "port=8000")[-1].address == "http://[::1]:8000"
    assert children_of("host=fe80::2", "port=8000")[-1].address == "http://[fe80::2]:8000"


def test_a_gateway_with_a_certificate_is_asked_by_https():
    assert children_of("http_cert=a.pem", "http_key=a.key")[-1].address == "https://127.0.0.1:10210"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["http_cert=a.pem"], "http_cert=a.pem: has no effect without http_key"),
        (["http_key=a.key"], "http_key=a.key: has no effect without http_cert"),
        (["isolate_keys=T"], "isolate_keys=T: has no effect without api_keys_file"),
        (["admin_host=::"], "admin_host=::: has no effect without admin_port"),
        (["admin_port=10210"], "admin_port=10210: port has it already"),
    ],
)
def test_flags_of_access_that_mean_nothing_are_refused(flags, problem):
    with pytest.raises(FlagError, match=problem):
        children_of(*flags)


@pytest.mark.parametrize("place", ["/proc/recordings", "/dev/null", "/proc"])
async def test_a_place_that_cannot_be_recorded_to_is_refused_before_anything_is_loaded(place, monkeypatch):
    def read_card(*arguments, **options):
        raise AssertionError("the model is looked for already")

    monkeypatch.setattr(toka, "read_card", read_card)
    expected = rf"flag record_plans={place}: not a writable directory \(.+\); choose another"
    with pytest.raises(InvalidRequest, match=expected):
        await toka.serve(load(ChosenDeploymentConfig, [f"record_plans={place}"], {}), Stop())


async def test_the_directory_for_recordings_is_made_and_left_empty(tmp_path, monkeypatch):
    monkeypatch.setattr(toka, "read_card", lambda *arguments, **options: None)
    stop, place = Stop(), tmp_path / "new" / "recordings"
    stop.set()
    await toka.serve(load(ChosenDeploymentConfig, [f"record_plans={place}"], {}), stop)
    assert list(place.iterdir()) == []


def test_each_scheduler_and_worker_has_a_metrics_page_of_its_own():
    def ports(*arguments: str) -> dict[str, str]:
        flags = {child.name: child.flags for child in children_of("dp_size=2", "tp_size=2", *arguments)}
        return {name: flag for name, own in flags.items() for flag in own if flag.startswith("metrics_port=")}

    assert ports() == {}
    assert ports("metrics_port=9400") == {
        "scheduler-0": "metrics_port=9400",
        "scheduler-1": "metrics_port=9401",
        "worker-0-tp0-pp0": "metrics_port=9402",
        "worker-0-tp1-pp0": "metrics_port=9403",
        "worker-1-tp0-pp0": "metrics_port=9404",
        "worker-1-tp1-pp0": "metrics_port=9405",
    }
    for first in (10309, 65531, 10205):
        with pytest.raises(FlagError, match="metrics_port"):
            ports(f"metrics_port={first}")


@pytest.mark.parametrize("distance", [1, 16, 100, 256, 1000, 1024, 10_000])
def test_deployments_that_start_at_the_same_time_prefer_different_ports_for_their_ranks(distance):
    """Both find the preferred ports free, so the ports of their replicas must not overlap."""
    first, second = (toka.master_port_offset(offset) for offset in (37, 37 + distance))
    assert abs(first - second) >= 4
