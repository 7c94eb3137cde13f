"""docker/k8s describes what Kubernetes takes, and every pod in it gets flags that its program takes."""

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from services.common.allowed_hosts import AllowedHosts
from services.common.config import GatewayConfig, SchedulerConfig, WorkerConfig
from services.common.flags import ENV_PREFIX, Config, load
from services.launcher.supervisor import STOP_GRACE_S

ROOT = Path(__file__).parents[2]
KUSTOMIZATION = yaml.safe_load((ROOT / "docker" / "k8s" / "kustomization.yaml").read_text())
MANIFESTS = [
    manifest
    for name in KUSTOMIZATION["resources"]
    for manifest in yaml.safe_load_all((ROOT / "docker" / "k8s" / name).read_text())
]
KINDS = {"worker": WorkerConfig, "scheduler": SchedulerConfig, "gateway": GatewayConfig}
LISTENING = {
    "worker": ("worker_listen", "0.0.0.0:10410", 10410),
    "scheduler": ("scheduler_listen", "0.0.0.0:10310", 10310),
    "gateway": ("port", 10210, 10210),
}
GROUP_INDEX = "metadata.labels['leaderworkerset.sigs.k8s.io/group-index']"


ADMIN_PORT = 10211


def named(kind: str, name: str | None = None) -> dict[str, Any]:
    [manifest] = [
        manifest for manifest in MANIFESTS if manifest["kind"] == kind and name in (None, manifest["metadata"]["name"])
    ]
    return manifest


REPLICAS = named("LeaderWorkerSet")["spec"]
GROUP = REPLICAS["leaderWorkerTemplate"]
TEMPLATES = {
    "leader": GROUP["leaderTemplate"],
    "worker": GROUP["workerTemplate"],
    "gateway": named("Deployment")["spec"]["template"],
}
CONTAINERS = [(pod, container) for pod, template in TEMPLATES.items() for container in template["spec"]["containers"]]


def environment(container: dict[str, Any], group: int, index: int) -> dict[str, str]:
    """What the container of pod ``index`` in ``group`` gets from its image, its manifest and LeaderWorkerSet."""
    pod = f"tokasaurus-{group}" + (f"-{index}" if index else "")
    fields = {"metadata.name": pod, "metadata.namespace": "default", GROUP_INDEX: str(group)}
    flags = named("ConfigMap")["data"]
    own = {
        "LWS_LEADER_ADDRESS": f"tokasaurus-{group}.tokasaurus.default",
        "LWS_GROUP_SIZE": str(GROUP["size"]),
        "LWS_WORKER_INDEX": str(index),
    }
    for entry in container["env"]:
        match entry:
            case {"value": value}:
                own[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda name: own[name[1]], value)
            case {"valueFrom": {"fieldRef": {"fieldPath": path}}}:
                own[entry["name"]] = fields[path]
            case {"valueFrom": {"configMapKeyRef": {"name": "tokasaurus", "key": key}}}:
                own[entry["name"]] = flags[key]
    image = (ROOT / "docker" / f"{container['name']}.Dockerfile").read_text()
    return dict(re.findall(rf"({ENV_PREFIX}\w+)=(\S+)", image)) | flags | own


def config(pod: str, name: str, group: int = 0, index: int = 0) -> Any:
    container = next(container for place, container in CONTAINERS if (place, container["name"]) == (pod, name))
    return load(KINDS[name], [], environment(container, group, index))


def workers(group: int) -> list[WorkerConfig]:
    return [config("worker" if index else "leader", "worker", group, index) for index in range(GROUP["size"])]


@pytest.mark.parametrize("version", ["1.28", kubernetes_validate.latest_version()])
def test_kubernetes_takes_the_manifests(version):
    own = [manifest for manifest in MANIFESTS if manifest["kind"] != "LeaderWorkerSet"]
    pods = [{"apiVersion": "v1", "kind": "PodTemplate", "template": template} for template in TEMPLATES.values()]
    for manifest in [*own, *pods]:
        kubernetes_validate.validate(manifest, version, strict=True)


def test_leaderworkerset_takes_the_replicas():
    """Its schema, as far as we use it; the pods' is Kubernetes' own."""
    assert named("LeaderWorkerSet")["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert set(REPLICAS) == {"replicas", "leaderWorkerTemplate"}
    assert set(GROUP) == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
    assert GROUP["restartPolicy"] in ("RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None")
    assert min(REPLICAS["replicas"], GROUP["size"]) >= 1


def test_the_pods_of_a_group_are_the_ranks_of_a_replica():
    for group in range(REPLICAS["replicas"]):
        ranks = workers(group)
        tp_size, pp_size = ranks[0].tp_size, ranks[0].pp_size
        grid = [(pp_rank, tp_rank) for pp_rank in range(pp_size) for tp_rank in range(tp_size)]
        assert [(rank.pp_rank, rank.tp_rank) for rank in ranks] == grid
        assert {rank.dp_rank for rank in ranks} == {group}
        assert {(rank.master_addr, rank.tp_size, rank.pp_size) for rank in ranks} == {
            (f"tokasaurus-{group}.tokasaurus.default", tp_size, pp_size)
        }


def test_a_scheduler_knows_its_workers_and_a_gateway_all_schedulers():
    for group in range(REPLICAS["replicas"]):
        scheduler = config("leader", "scheduler", group)
        others = [f"tokasaurus-{group}-{index}.tokasaurus:10410" for index in range(1, GROUP["size"])]
        assert scheduler.worker_addresses == ("127.0.0.1:10410", *others)
        assert scheduler.pp_size == workers(group)[0].pp_size
    schedulers = tuple(f"tokasaurus-{group}.tokasaurus:10310" for group in range(REPLICAS["replicas"]))
    assert config("gateway", "gateway").scheduler_addresses == schedulers
    assert named("LeaderWorkerSet")["metadata"]["name"] == "tokasaurus"


def test_no_flag_is_set_to_its_default():
    data = named("ConfigMap")["data"]
    flags = {name.removeprefix(ENV_PREFIX).lower() for name in data}
    for kind in KINDS.values():
        config, defaults = load(kind, [], data), kind()
        known = flags.intersection(kind.model_fields)
        assert [name for name in known if getattr(config, name) == getattr(defaults, name)] == []


def test_gateways_answer_under_every_name_of_their_service():
    gateway = config("gateway", "gateway")
    hosts = AllowedHosts(gateway.host, gateway.allowed_hosts)
    name = named("Service")["metadata"]["name"]
    for suffix in ("", ".default", ".default.svc", ".default.svc.cluster.local"):
        assert hosts.allows(f"{name}{suffix}")
        assert hosts.allows(f"{name}{suffix}:80")
    assert not hosts.allows(f"{name}.another")


def test_everybody_listens_where_the_others_and_the_probes_ask():
    for pod, container in CONTAINERS:
        flag, address, port = LISTENING[container["name"]]
        assert getattr(config(pod, container["name"]), flag) == address
        assert container["ports"][0]["containerPort"] == port
        asked = [probe.get("grpc") or probe["httpGet"] for key, probe in container.items() if key.endswith("Probe")]
        assert {probe["port"] for probe in asked} <= {port, "admin"}
    assert named("Service")["spec"]["selector"].items() <= TEMPLATES["gateway"]["metadata"]["labels"].items()


def test_probes_need_neither_key_nor_certificate_nor_a_free_connection():
    [container] = TEMPLATES["gateway"]["spec"]["containers"]
    probes = {key: probe["httpGet"] for key, probe in container.items() if key.endswith("Probe")}
    assert probes == {
        "startupProbe": {"path": "/health", "port": "admin"},
        "readinessProbe": {"path": "/ready", "port": "admin"},
        "livenessProbe": {"path": "/health", "port": "admin"},
    }
    assert {"name": "admin", "containerPort": ADMIN_PORT} in container["ports"]
    gateway = config("gateway", "gateway")
    assert (gateway.admin_host, gateway.admin_port) == ("0.0.0.0", ADMIN_PORT)
    assert ADMIN_PORT not in [port["targetPort"] for port in named("Service")["spec"]["ports"]]


def test_nobody_but_probes_reaches_what_is_for_operators():
    policy = named("NetworkPolicy", "tokasaurus-gateway")["spec"]
    assert policy["podSelector"]["matchLabels"] == TEMPLATES["gateway"]["metadata"]["labels"]
    assert policy["ingress"] == [{"ports": [{"port": LISTENING["gateway"][2]}]}]


def test_only_ranks_and_gateways_reach_a_replica():
    """Which is why its workers may listen without certificates."""
    policy = named("NetworkPolicy", "tokasaurus")["spec"]
    labels = {pod: template["metadata"]["labels"] for pod, template in TEMPLATES.items()}
    guarded = policy["podSelector"]["matchLabels"]
    assert guarded.items() <= labels["leader"].items() & labels["worker"].items()
    among_ranks, from_gateways = policy["ingress"]
    assert among_ranks == {"from": [{"podSelector": {"matchLabels": guarded}}]}
    assert from_gateways == {
        "from": [{"podSelector": {"matchLabels": labels["gateway"]}}],
        "ports": [{"port": LISTENING["scheduler"][2]}],
    }
    assert all(rank.insecure_worker for rank in workers(0))


def test_clients_reach_gateways_on_their_port_only():
    policy = named("NetworkPolicy", "tokasaurus-gateway")["spec"]
    assert policy["podSelector"]["matchLabels"] == TEMPLATES["gateway"]["metadata"]["labels"]
    assert policy["ingress"] == [{"ports": [{"port": LISTENING["gateway"][2]}]}]


def test_only_gateways_reach_the_store():
    policy = named("NetworkPolicy", "tokasaurus-store")["spec"]
    assert policy["ingress"] == [
        {
            "from": [{"podSelector": {"matchLabels": TEMPLATES["gateway"]["metadata"]["labels"]}}],
            "ports": [{"port": 5432}],
        }
    ]


def test_pods_connect_to_what_they_need_only():
    dns = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}
    replica, gateway = (named("NetworkPolicy", name)["spec"] for name in ("tokasaurus", "tokasaurus-gateway"))
    store = named("NetworkPolicy", "tokasaurus-store")["spec"]["podSelector"]
    assert replica["egress"] == [{"to": [{"podSelector": replica["podSelector"]}]}, dns]
    assert gateway["egress"] == [
        {"to": [{"podSelector": replica["podSelector"]}], "ports": [{"port": LISTENING["scheduler"][2]}]},
        {"to": [{"podSelector": store}], "ports": [{"port": 5432}]},
        dns,
    ]


@pytest.mark.parametrize("pod", TEMPLATES)
def test_a_policy_rules_each_pod_in_both_directions(pod):
    labels = TEMPLATES[pod]["metadata"]["labels"]
    [policy] = [
        manifest["spec"]
        for manifest in MANIFESTS
        if manifest["kind"] == "NetworkPolicy"
        and manifest["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    ]
    assert policy["policyTypes"] == ["Ingress", "Egress"]


def test_every_flag_is_one():
    for _, container in CONTAINERS:
        given = {entry["name"] for entry in container["env"] if entry["name"].startswith(ENV_PREFIX)}
        assert given <= variables(KINDS[container["name"]])
    assert set(named("ConfigMap")["data"]) <= set().union(*map(variables, KINDS.values()))


def variables(kind: type[Config]) -> set[str]:
    return {ENV_PREFIX + name.upper() for name in kind.model_fields}


def test_no_container_can_take_all_memory_of_its_node():
    units = {"Gi": 2**30}
    for _, container in CONTAINERS:
        requested, limit = (container["resources"][kind]["memory"] for kind in ("requests", "limits"))
        assert int(requested[:-2]) * units[requested[-2:]] <= int(limit[:-2]) * units[limit[-2:]]


def test_no_pod_has_a_token_of_the_cluster():
    for template in TEMPLATES.values():
        assert template["spec"]["automountServiceAccountToken"] is False


def test_a_rank_has_one_gpu_and_no_container_runs_as_root():
    for _, container in CONTAINERS:
        limits = container["resources"]["limits"]
        assert limits.get("nvidia.com/gpu") == (1 if container["name"] == "worker" else None)
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}
        assert (
            "useradd --system --create-home --uid 10001 toka"
            in (ROOT / "docker" / f"{container['name']}.Dockerfile").read_text()
        )
    for template in TEMPLATES.values():
        pod = template["spec"]["securityContext"]
        assert (pod["runAsUser"], pod["runAsNonRoot"], pod["seccompProfile"]) == (
            10001,
            True,
            {"type": "RuntimeDefault"},
        )


def test_there_is_time_to_drain():
    for pod, container in CONTAINERS:
        hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        drain_s = int(hook[1]) + config(pod, container["name"]).drain_seconds
        assert TEMPLATES[pod]["spec"]["terminationGracePeriodSeconds"] >= drain_s + STOP_GRACE_S


def test_what_is_mounted_is_there():
    for pod, container in CONTAINERS:
        volumes = {volume["name"]: volume for volume in TEMPLATES[pod]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
        claim = volumes["models"]["persistentVolumeClaim"]["claimName"]
        assert claim == named("PersistentVolumeClaim")["metadata"]["name"]
    assert config("leader", "worker").compile_cache_dir == "/cache"
