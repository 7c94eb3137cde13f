"""The options of ``toka-doctor``. Its arguments are the flags of ``toka`` for the start to check.

Its own options are ``--options``: see ``services/cli/__init__.py``.
"""

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
    check_directories,
    check_docker,
    check_limits,
    check_ports,
    check_shared_memory,
)
from services.cli.doctor.machine import Machine
from services.cli.doctor.memory import check_memory
from services.cli.doctor.software import check_gpus, check_packages
from services.common.config import DeploymentConfig
from services.common.config.flag import flags_of
from services.common.flags import FlagError, load

_STYLES = {Level.OK: "green", Level.UNKNOWN: "dim", Level.WARN: "yellow", Level.FAIL: "bold red"}
_EPILOG = "\n\n".join(
    (
        "Examples:",
        "    toka-doctor      (this machine, and the built-in model)",
        "    toka-doctor model=/models/Llama-3.1-8B-Instruct tp_size=2",
        "    toka-doctor model=/models/Llama-3.1-8B-Instruct --gpu-memory 80      (for a GPU of another machine)",
        "Flags are those of toka, see toka help; TOKA_FLAG in the environment is used too. Exit status: 0;"
        " 1 if a check fails; 2 for a wrong flag.",
    )
)

app = typer.Typer(rich_markup_mode="markdown", pretty_exceptions_enable=False)


def complete_flag(incomplete: str) -> list[tuple[str, str]]:
    """Return completions for shells: names of flags, and after a name its choices."""
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
            help="Plan for GPUs with this memory, in the number that the flags need, not for the GPUs of this machine.",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and failures only.")] = False,
) -> None:
    """Check whether this start would work here, and print what to change if not.

    It checks GPUs, driver, packages, ports, limits, disks, and the model's files and memory. It starts, loads and
    downloads nothing.
    """
    try:
        config = load(DeploymentConfig, flags or [], os.environ)
        if gpu_memory is not None and config.device == "cpu":
            raise FlagError("--gpu-memory: has no effect with device=cpu; leave one of them out")
    except FlagError as error:
        typer.echo(f"toka-doctor: {error}", err=True)
        raise typer.Exit(2) from None
    findings = run_checks(Machine(config, None if gpu_memory is None else int(gpu_memory * 2**30)))
    if as_json:
        found = list(findings)
        document = [{key: value for key, value in vars(each).items() if value} for each in found]
        typer.echo(json.dumps({"ok": not _failed(found), "findings": document}, indent=2))
    else:
        found = _print(findings, quiet=quiet)
    raise typer.Exit(1 if _failed(found) else 0)


def run_checks(machine: Machine) -> Iterator[Finding]:
    """Run all checks."""
    config = machine.config
    yield from check_packages(machine)
    yield from check_gpus(machine)
    yield from check_ports(machine)
    yield from check_limits(machine)
    yield from check_shared_memory(machine)
    yield from check_directories(machine)
    directory, findings = model.find(config)
    yield from findings
    if directory is not None:
        shape, findings = model.check_config(config, directory)
        yield from findings
        yield from model.check_tokenizer(config, directory)
        yield from model.check_weights(config, directory, None if shape is None else shape.described)
        if shape is not None:
            yield from model.check_device(machine, shape)
            yield from check_memory(machine, shape)
    yield from check_docker(machine)


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
        else:  # one line for each finding, for grep
            console.print(f"{each.level:7} {each.subject:15} {each.text}", markup=False, soft_wrap=True)
            if each.fix:
                console.print(f"{'':23} → {each.fix}", markup=False, soft_wrap=True)
    counts = {level: sum(each.level is level for each in found) for level in (Level.FAIL, Level.WARN)}
    console.print(f"{counts[Level.FAIL]} fail, {counts[Level.WARN]} warn, of {len(found)}")
    return found


def _cells(finding: Finding) -> Table:
    """Return a finding as a row with wrapped text."""
    line = Table.grid(padding=(0, 1))
    line.add_column(width=7)
    line.add_column(width=15)
    line.add_column(overflow="fold")
    line.add_row(Text(finding.level, _STYLES[finding.level]), Text(finding.subject, "bold"), Text(finding.text))
    if finding.fix:
        line.add_row("", "", Text(f"→ {finding.fix}", "cyan"))
    return line
