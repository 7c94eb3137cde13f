"""``toka-doctor model=... tp_size=2`` looks at exactly the start that ``toka`` would make with these flags. What it
takes besides are ``--options``: see ``services/cli/__init__.py``."""

import json
import os
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.cli.doctor import model
from services.cli.doctor.findings import Finding, Level
from services.cli.doctor.host import (
    look_at_docker,
    look_at_limits,
    look_at_places,
    look_at_ports,
    look_at_shared_memory,
)
from services.cli.doctor.machine import Machine
from services.cli.doctor.memory import look_at_memory
from services.cli.doctor.software import look_at_gpus, look_at_packages
from services.common.config import DeploymentConfig
from services.common.config.flag import flags_of
from services.common.flags import FlagError, load

_STYLES = {Level.OK: "green", Level.UNKNOWN: "dim", Level.WARN: "yellow", Level.FAIL: "bold red"}
_EPILOG = "\n\n".join(
    (
        "Examples:",
        "    toka-doctor      (this machine, and the built-in model)",
        "    toka-doctor model=/models/Llama-3.1-8B-Instruct tp_size=2",
        "    toka-doctor model=/models/Llama-3.1-8B-Instruct --gpu-memory 80      (for a GPU that is elsewhere)",
        "Flags are those of toka, see toka help; TOKA_FLAG in the environment counts as it does there. Exit status: 0;"
        " 1 where something fails; 2 for a wrong flag.",
    )
)

app = typer.Typer(rich_markup_mode="markdown", pretty_exceptions_enable=False)


def complete_flag(incomplete: str) -> list[tuple[str, str]]:
    """For shells: names of flags, and behind one its choices."""
    flags, (name, equals, _) = flags_of(DeploymentConfig), incomplete.partition("=")
    if equals:
        return [(f"{name}={choice}", "") for flag in flags if flag.name == name for choice in flag.choices]
    return [(f"{flag.name}=", flag.description) for flag in flags if flag.name.startswith(name)]


@app.command(epilog=_EPILOG)
def doctor(
    flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="FLAG=VALUE", help="What you would give to toka.", autocompletion=complete_flag),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
    gpu_memory: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            metavar="GIB",
            help="Plan for GPUs with so much memory, as many as the flags ask for, instead of those here.",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only what is not right.")] = False,
) -> None:
    """Would this start work here? Says of GPUs, driver, packages, ports, limits, disks, the model's files and memory
    whether they are right, and if not, what to do. Starts, loads and fetches nothing."""
    try:
        config = load(DeploymentConfig, flags or [], os.environ)
        if gpu_memory is not None and config.device == "cpu":
            raise FlagError("--gpu-memory: has no effect with device=cpu; leave one of them out")
    except FlagError as error:
        typer.echo(f"toka-doctor: {error}", err=True)
        raise typer.Exit(2) from None
    findings = look(Machine(config, None if gpu_memory is None else int(gpu_memory * 2**30)))
    if as_json:
        found = list(findings)
        document = [{key: value for key, value in vars(each).items() if value} for each in found]
        typer.echo(json.dumps({"ok": not _failed(found), "findings": document}, indent=2))
    else:
        found = _print(findings, quiet=quiet)
    raise typer.Exit(1 if _failed(found) else 0)


def look(machine: Machine) -> Iterator[Finding]:
    """Everything there is to look at."""
    config = machine.config
    yield from look_at_packages(machine)
    yield from look_at_gpus(machine)
    yield from look_at_ports(machine)
    yield from look_at_limits(machine)
    yield from look_at_shared_memory(machine)
    yield from look_at_places(machine)
    directory, findings = model.find(config)
    yield from findings
    if directory is not None:
        shape, findings = model.look_at_config(config, directory)
        yield from findings
        yield from model.look_at_tokenizer(config, directory)
        yield from model.look_at_weights(config, directory, None if shape is None else shape.described)
        if shape is not None:
            yield from model.look_at_device(machine, shape)
            yield from look_at_memory(machine, shape)
    yield from look_at_docker(machine)


def _failed(findings: list[Finding]) -> int:
    return sum(each.level is Level.FAIL for each in findings)


def _print(findings: Iterator[Finding], *, quiet: bool) -> list[Finding]:
    console = Console(highlight=False)
    found = []
    for each in findings:
        found.append(each)
        if quiet and each.level in (Level.OK, Level.UNKNOWN):
            continue
        if console.is_terminal:
            console.print(_cells(each))
        else:  # a line is a line, for grep
            console.print(f"{each.level:7} {each.subject:15} {each.text}", markup=False, soft_wrap=True)
            if each.fix:
                console.print(f"{'':23} → {each.fix}", markup=False, soft_wrap=True)
    counts = {level: sum(each.level is level for each in found) for level in (Level.FAIL, Level.WARN)}
    console.print(f"{counts[Level.FAIL]} fail, {counts[Level.WARN]} warn, of {len(found)}")
    return found


def _cells(finding: Finding) -> Table:
    """As wide as the terminal, long texts below each other."""
    line = Table.grid(padding=(0, 1))
    line.add_column(width=7)
    line.add_column(width=15)
    line.add_column(overflow="fold")
    line.add_row(Text(finding.level, _STYLES[finding.level]), Text(finding.subject, "bold"), Text(finding.text))
    if finding.fix:
        line.add_row("", "", Text(f"→ {finding.fix}", "cyan"))
    return line
