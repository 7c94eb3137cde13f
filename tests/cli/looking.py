"""What toka-doctor finds, in the test's own process."""

import itertools
from pathlib import Path
from typing import Any

from services.cli.doctor.command import run_checks
from services.cli.doctor.findings import Finding
from services.cli.doctor.machine import Machine
from services.common.config import DeploymentConfig
from services.common.flags import build


def findings(subject: str, model: Path | str = "builtin", planned: float | None = None, **flags: Any) -> list[Finding]:
    """Those of ``subject``, which come one after the other, in this process."""
    config = build(DeploymentConfig, {"model": str(model), "port": 0, "grpc_port": 0} | flags)
    machine = Machine(config, planned and int(planned * 2**30))
    rest = itertools.dropwhile(lambda each: each.subject != subject, run_checks(machine))
    return list(itertools.takewhile(lambda each: each.subject == subject, rest))


def only(*arguments: Any, **flags: Any) -> Finding:
    [found] = findings(*arguments, **flags)
    return found
