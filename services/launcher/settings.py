"""Chooses the number of gateways, and prints the settings that a deployment chose."""

import shlex
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from services.common.config import DeploymentConfig
from services.common.flags import Needs, as_text
from services.launcher.deployment import ChildSpec
from tokasaurus.worker.v1 import worker_pb2, worker_pb2_grpc

# Processors that a worker and a scheduler use, and that a gateway uses at full load.
_OF_WORKER, _OF_SCHEDULER, _OF_GATEWAY = 2, 2, 3
_MOST_GATEWAYS = 4  # per replica
_DEADLINE_S = 10.0
# flags whose values may contain a password
_SECRET = ("store_url", "otlp_endpoint")
_WIDTH = 140


class Setting(NamedTuple):
    """Row of the table of settings."""

    name: str
    value: str
    reason: str


def choose_gateways(config: DeploymentConfig, *, has_gpus: bool, processors: int) -> tuple[int, str]:
    """Return the number of gateways to start, and the reason. ``processors`` is the number this process may use."""
    if config.gateways != "auto":
        return config.gateways, "set by you"
    if config.api_keys_file is not None:
        return 1, "gateways would divide the limits of API keys among themselves"
    if not has_gpus or config.device == "cpu":
        return 1, "workers on CPUs need the processors"
    workers = config.dp_size * config.tp_size * config.pp_size
    spare = processors - _OF_WORKER * workers - _OF_SCHEDULER * config.dp_size
    return (
        max(1, min(spare // _OF_GATEWAY, _MOST_GATEWAYS * config.dp_size)),
        f"of {processors} processors, {max(0, spare)} are not used by workers and schedulers",
    )


async def read_settings(given: DeploymentConfig, gateways: Setting, worker: ChildSpec) -> str:
    """Return the table of settings, some of which ``worker`` reports, and the command that repeats them.

    ``given`` is the config as set by the user.
    """
    async with worker.dialer.open_aio(worker.address) as channel:
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        response = await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest(), timeout=_DEADLINE_S)
        info = response.info
    chosen = [Setting(each.name, each.value, each.reason) for each in info.choices]
    return describe(given, [*chosen, hydragen_setting(given, info), gateways], info.device)


def hydragen_setting(config: DeploymentConfig, info: worker_pb2.WorkerInfo) -> Setting:
    """Return the setting of Hydragen attention, and its reason."""
    if config.use_hydragen != "auto":
        return Setting("use_hydragen", as_text(config.use_hydragen), "set by you")
    reason = "this device shares" if info.hydragen else "only GPUs share"
    return Setting("use_hydragen", as_text(info.hydragen), f"{reason} the attention to common prefixes")


def describe(config: DeploymentConfig, settings: Sequence[Setting], device: str) -> str:
    """Return ``settings`` as a table with aligned columns, and the command line that repeats them."""
    names, values = (max(len(row[column]) for row in settings) for column in (0, 1))
    indent = " " * (names + values + 6)
    lines = [f"Settings, for {device}:", ""]
    for each in settings:
        start = f"  {each.name:<{names}}  {each.value:>{values}}  "
        lines += textwrap.wrap(each.reason, _WIDTH, initial_indent=start, subsequent_indent=indent)
    given = {name: value for name, value in config.changed().items() if name not in _SECRET}
    chosen = given | {each.name: each.value for each in settings if each.value not in ("", "auto")}
    flags = [f"{name}={value}" for name, value in chosen.items() if not _without_effect(name, chosen)]
    return "\n".join([*lines, "", f"The same again: toka {shlex.join(flags)}"])


def _without_effect(name: str, chosen: dict[str, str]) -> bool:
    """Return whether the flag ``name`` would be refused with the others."""
    rules = (rule for rule in DeploymentConfig.model_fields[name].metadata if isinstance(rule, Needs))
    return any(chosen.get(needed) == "F" for rule in rules for needed in rule.names)
