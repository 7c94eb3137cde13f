"""Runs a whole deployment on one host as supervised child processes: the command ``toka key=value ...``."""

import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import grpc
import structlog

from services.common.config import ChosenDeploymentConfig, DeploymentConfig
from services.common.errors import InvalidRequest
from services.common.host.resources import has_gpus, usable_processors, visible_gpus
from services.common.model.files import read_card
from services.common.model.uploads import uploads_of
from services.common.process.handover import listen
from services.common.process.log import is_coloured, is_console
from services.common.process.service import Stop, run_service, run_unless_stopped
from services.common.rpc.token import make_token_file
from services.launcher.deployment import choose_gpus, plan_children
from services.launcher.display import StartDisplay
from services.launcher.ports import check_is_free, free_ports
from services.launcher.settings import Setting, choose_gateways, read_settings
from services.launcher.supervisor import supervise, write_line

ADDRESSES = "scheduler_addresses"

# Deployments whose gateways have neighbouring ports prefer ports for their ranks that are ``_MASTER_PORT_STEP`` apart.
# The number of such ports is prime, so no round distance of gateways' ports is a multiple of it.
_MASTER_PORTS, _MASTER_PORT_STEP = 997, 16

log = structlog.get_logger(__name__)


def main() -> None:
    run_service("toka", DeploymentConfig, serve)


async def serve(given: DeploymentConfig, stop: Stop) -> None:
    """Run the deployment until ``stop`` is set. Raises ``TokaError`` if it cannot start or continue."""
    if given.record_plans is not None:
        _check_writable(given.record_plans)
    gpus = choose_gpus(given, visible_gpus())
    count, reason = choose_gateways(given, has_gpus=has_gpus(), processors=usable_processors())
    config = ChosenDeploymentConfig.model_construct(**{**dict(given), "gateways": count})
    # Downloaded once, before the children start.
    weights = config.load_format != "dummy"
    card = await run_unless_stopped(lambda: read_card(config.model, config.served_model_name, weights=weights), stop)
    if card is None:
        return
    listeners = listen(config.host, config.port, config.gateways) if config.gateways else []
    with contextlib.ExitStack() as opened:
        for listener in listeners:
            opened.enter_context(listener)
        runtime_dir = opened.enter_context(tempfile.TemporaryDirectory(prefix="toka-"))
        config = _with_free_ports(config, listeners[0].getsockname()[1] if listeners else config.port)
        config = _with_log_format(_with_token(config, Path(runtime_dir)))
        for replica in range(config.dp_size):
            check_is_free(config.grpc_port + replica)
        children = plan_children(config, Path(runtime_dir), gpus)
        for child in children:
            if child.role == "worker" and config.weight_directories:  # no later worker has its address
                uploads = uploads_of(config.weight_directories[0], child.address)
                opened.callback(shutil.rmtree, uploads, ignore_errors=True)
        schedulers = [child.address for child in children if child.role == "scheduler"]
        banner = (
            _banner(card.name, children[-1].address, schedulers, keys=config.api_keys_file is not None)
            if listeners
            else _short_banner(card.name, schedulers)
        )
        display, write = None, write_line
        if sys.stderr.isatty() and config.log_format == "console":
            display, children = StartDisplay.of(children, Path(runtime_dir))
            opened.callback(display.close)
            opened.callback(asyncio.create_task(display.run()).cancel)
            write = display.write

        async def announce() -> None:
            if display is not None:
                display.close()
            try:
                print(await read_settings(given, Setting("gateways", str(count), reason), children[0]))
            except grpc.aio.AioRpcError as error:  # the worker is restarting
                log.info("settings are unknown", reason=error.details())
            print(banner, flush=True)

        await supervise(children, listeners, stop, announce, config.drain_seconds, write)


def _check_writable(record_plans: str) -> None:
    """Create the directory and try to write to it, before workers load for minutes.

    The permissions alone are not enough: root may write everywhere, but not to a read-only file system.
    """
    try:
        Path(record_plans).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=record_plans).close()
    except OSError as error:
        raise InvalidRequest(
            f"flag record_plans={record_plans}: not a writable directory ({error.strerror}); choose another directory",
            field="record_plans",
        ) from error


def _with_free_ports(config: ChosenDeploymentConfig, port: int) -> ChosenDeploymentConfig:
    """Replace port 0 by free ports, and choose the port on which ranks connect.

    ``port`` is the port that was bound for the gateways.
    """
    ports = {"port": port, "grpc_port": config.grpc_port or free_ports(config.dp_size)}
    if config.tp_size * config.pp_size > 1:
        fields = type(config).model_fields
        offset = master_port_offset(port - fields["port"].default)
        ports["master_port"] = free_ports(config.dp_size, fields["master_port"].default + offset)
    return config.model_copy(update=ports)


def master_port_offset(gateway_offset: int) -> int:
    """Return the distance of ``master_port`` from its default if the gateways' port is ``gateway_offset`` from its own.

    Restarted ranks use the port again, so the system should not give it to clients. Deployments that start on one host
    at the same time have different ports, so they prefer different ones here, too.
    """
    return gateway_offset * _MASTER_PORT_STEP % _MASTER_PORTS


def _with_token(config: ChosenDeploymentConfig, runtime_dir: Path) -> ChosenDeploymentConfig:
    """If schedulers require API keys, create a token that authenticates the gateways."""
    if config.api_keys_file is None or config.grpc_token_file is not None:
        return config
    make_token_file(path := runtime_dir / "grpc-token")
    return config.model_copy(update={"grpc_token_file": str(path)})


def _with_log_format(config: ChosenDeploymentConfig) -> ChosenDeploymentConfig:
    """Set the log format of the children, whose stderr is a pipe to this process."""
    if is_coloured():
        os.environ.setdefault("FORCE_COLOR", "1")
    return config.model_copy(update={"log_format": "console" if is_console(config.log_format) else "json"})


def _banner(model: str, url: str, schedulers: list[str], *, keys: bool) -> str:
    body = json.dumps(
        {
            "model": model,
            "messages": [
                {
                    "role": "user",
                    "content": "Tom buys 3 books for $7 each and 4 pens for $2 each. How much does he pay?",
                }
            ],
            "max_tokens": 200,
            "temperature": 0,
        }
    )
    shown = ' -H "Authorization: Bearer $KEY"' if keys else ""
    return (
        f"\nTokasaurus serves {model} on {url}/v1 (direct gRPC: {', '.join(schedulers)}). Try:\n\n"
        f"  curl -s {url}/v1/chat/completions{shown} -H 'Content-Type: application/json' -d '{body}'\n\n"
        "Ctrl-C stops it."
    )


def _short_banner(model: str, schedulers: list[str]) -> str:
    """Return the banner of a deployment without gateways. ``services.client`` parses it."""
    return (
        f"\nTokasaurus serves {model} over gRPC. A gateway finds it by\n\n"
        f"  {ADDRESSES}={','.join(schedulers)}\n\n"
        "Ctrl-C stops it."
    )


if __name__ == "__main__":
    main()
