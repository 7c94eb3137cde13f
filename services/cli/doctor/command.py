"""The ``toka-doctor`` command: checks the start that ``toka`` would make with the same flags."""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar

from pydantic import Field
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
from services.common.config import DeploymentConfig, from_command_line
from services.common.flags import Bool, Examples, Excludes, Float

_STYLES = {Level.OK: "green", Level.UNKNOWN: "dim", Level.WARN: "yellow", Level.FAIL: "bold red"}


class DoctorConfig(DeploymentConfig):
    """Check whether the start that toka would make with these flags works on this machine.

    Checks GPUs, driver, packages, ports, limits, disks, the model's files and memory, and says what to do. It starts,
    loads and fetches nothing. Exit status: 0; 1 if a check fails; 2 for a wrong flag.
    """

    shorthands: ClassVar[Mapping[str, str]] = {**DeploymentConfig.shorthands, "-q": "quiet=T"}
    examples: ClassVar[Examples] = (
        ("", "this machine, and the built-in model"),
        ("model=/models/Llama-3.1-8B-Instruct tp_size=2", "a model on two GPUs"),
        ("model=/models/Llama-3.1-8B-Instruct --gpu-memory 80", "for a GPU of another machine"),
    )

    as_json: Bool = Field(False, alias="json", description="one JSON object, for programs")
    gpu_memory: Annotated[Float | None, Excludes(device="cpu")] = Field(
        None, ge=0.1, description="GiB of each GPU: plan for GPUs of this size, instead of those of this machine"
    )
    quiet: Bool = Field(False, description="only what is not right")


def main() -> None:
    """Run the ``toka-doctor`` command."""
    config = from_command_line(DoctorConfig)
    findings = run_checks(Machine(config, None if config.gpu_memory is None else int(config.gpu_memory * 2**30)))
    if config.as_json:
        found = list(findings)
        document = [{key: value for key, value in vars(each).items() if value} for each in found]
        print(json.dumps({"ok": not _failed(found), "findings": document}, indent=2))
    else:
        found = _print(findings, quiet=config.quiet)
    raise SystemExit(1 if _failed(found) else 0)


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
            shape = shape.laid_out("cuda" if machine.on_cuda else "cpu")
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
