"""What docs/architecture.md says of processes and threads, as a table of values."""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SERVICES = ROOT / "services"
PAGE = ROOT / "docs" / "architecture.md"
CALLERS = re.compile(r"\bcaller\b|\bcaller's\b|\bwhoever\b")  # words for: any thread


class Row(NamedTuple):
    """Of the table "Where each file runs"."""

    path: str  # below services/; a folder's ends with a slash
    processes: frozenset[str]
    threads: frozenset[str]
    text: str  # of the last column


@cache
def rows() -> tuple[Row, ...]:
    """All rows, in their order."""
    found = []
    for what, process, thread in _cells("Where each file runs"):
        processes = frozenset(each.strip().strip("`") for each in process.split(","))
        found.append(Row(what.strip("`"), processes, frozenset(re.findall(r"`([^`]+)`", thread)), thread))
    return tuple(found)


@cache
def threads() -> dict[str, frozenset[str]]:
    """Thread -> the processes that have it."""
    table = {}
    for name, processes, *_ in _cells("Processes and threads", columns=4):
        table[name.strip("`")] = frozenset(each.strip().strip("`") for each in processes.split(","))
    return table


@cache
def row_of(path: str) -> Row:
    """Of a file below services/: its own row, or that of the nearest folder."""
    by_path = {row.path: row for row in rows()}
    parents = [f"{parent}/" for parent in Path(path).parents]
    return next(by_path[each] for each in (path, *parents) if each in by_path)


def folders() -> set[str]:
    """Below services/, with Python in them."""
    return {f"{path.parent.relative_to(SERVICES)}/" for path in SERVICES.rglob("*.py") if any(path.parent.iterdir())}


def _cells(heading: str, columns: int = 3) -> list[list[str]]:
    """Of the tables with so many columns below ``heading``."""
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ") and not line.startswith("|--")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [each for each in cells if len(each) == columns and each[0].startswith("`")]
