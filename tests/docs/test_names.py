"""Flags, commands and words of the services that pages name are those that there are."""

import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from services.cli.bench.app import COMMANDS
from services.cli.doctor.command import DoctorConfig
from services.cli.top.command import TopConfig
from services.common.config import DeploymentConfig, GatewayConfig, SchedulerConfig, WorkerConfig
from services.common.config.flag import flags_of
from services.common.flags import arithmetic
from tests.docs.pages import ROOT, blocks, pages, prose

PAGES = pages()
SCRIPTS = set(re.findall(r'"((?:toka|tksrs)[\w-]*) = ', (ROOT / "setup.py").read_text()))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
FLAGS = set(DeploymentConfig.known())  # with those that it refuses: they are those of its children
FIELDS = {
    name: field
    for kind in (DeploymentConfig, GatewayConfig, SchedulerConfig, WorkerConfig)
    for name, field in kind.fields_by_flag().items()
}
SERVICES = {"toka", "toka-gateway", "toka-scheduler", "toka-worker", "toka-workers"}  # whose flags are all in FLAGS
PROGRAMS = {"toka-bench": list(COMMANDS.values()), "toka-doctor": [DoctorConfig], "toka-top": [TopConfig]}
PLAYBOOK = ROOT / "docs" / "operations.md"

of_pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@cache
def commands(page: Path) -> tuple[list[str], ...]:
    """Of blocks for a shell and of code within the text: each as its words."""
    lines = [block.code.replace("\\\n", " ") for block in blocks(page) if block.language == "sh"]
    lines += re.findall(r"`([^`\n]+)`", prose(page))
    found = []
    for line in "\n".join(lines).splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quotation over several lines
            continue
        while words and re.match(r"[A-Z_]+=|export$|cd$", words[0]):
            words = words[1:]
        if words:
            found.append(words)
    return tuple(found)


@of_pages
def test_commands_are_there(page: Path):
    for words in commands(page):
        if re.fullmatch(r"toka(-[a-z-]+)?", words[0]) and words[0] != "toka-":
            assert words[0] in SCRIPTS | NOT_COMMANDS, f"{' '.join(words)}: there is no such command"
        if words[0] == "make":
            assert set(words[1:2]) <= TARGETS, f"{' '.join(words)}: the Makefile has no such target"
        if words[:2] == ["python", "-m"] and re.fullmatch(r"(bench|services|training)[a-z_.]+", words[2]):
            module = ROOT / words[2].replace(".", "/")
            assert module.with_suffix(".py").exists() or (module / "__main__.py").exists(), words[2]


NOT_COMMANDS = {"toka-schedulers", "toka-rank-0"}  # names in Compose's network


@of_pages
def test_flags_of_commands_are_there(page: Path):
    for words in commands(page):
        if words[0] in SERVICES:
            given = {word.partition("=")[0] for word in words[1:] if re.match(r"[a-z_]+=", word)}
            assert given <= FLAGS | {"key"}, f"{' '.join(words)}: {given - FLAGS}"


@cache
def options(program: str) -> frozenset[str]:
    """Return the options of a command of ``services.cli``, those of its own commands included."""
    flags = [flag for kind in PROGRAMS[program] for flag in flags_of(kind)]
    negated = {f"--no-{flag.option.removeprefix('--')}" for flag in flags if flag.is_boolean}
    return frozenset({"--help", "--completion", *(flag.option for flag in flags), *negated})


@of_pages
def test_options_of_commands_are_there(page: Path):
    for words in commands(page):
        if words[0] in PROGRAMS:
            given = {word.partition("=")[0] for word in words[1:] if word.startswith("-")}
            assert given <= options(words[0]), f"{' '.join(words)}: {given - options(words[0])}"
    if page.name in ("benchmarking.md", "command-line.md"):
        told = {option.replace("_", "-") for option in re.findall(r"`(--[a-z][a-z_-]+)", prose(page))}
        there = frozenset().union(*map(options, PROGRAMS))
        assert told <= there, told - there


@of_pages
def test_flags_in_tables_are_there_with_their_defaults(page: Path):
    for table in re.findall(r"^\| flag \|.*\n(?:\|.*\n)+", prose(page), re.M):
        head, _, *rows = table.splitlines()
        for row in rows:
            cells = row.strip("| ").split(" | ")
            names = re.findall(r"`([a-z_0-9]+)`", cells[0])
            assert names, row
            assert set(names) <= FLAGS, set(names) - FLAGS
            if "default" in head and page.parent.name != "reference":
                for name, told in zip(names, cells[1].split(", "), strict=True):
                    kept = FIELDS[name].default
                    in_words = kept in (None, ()) and not re.search(r"\d", told)
                    assert in_words or default(told) == kept, f"{name}: {told}, not {kept}"


def default(told: str) -> object:
    """A value as tables have it."""
    sizes = {"KiB": 2**10, "MiB": 2**20}
    number, _, unit = told.strip("`").partition(" ")
    if unit in sizes:
        return int(number) * sizes[unit]
    value = arithmetic(told.strip("`"))
    if value in ("T", "F"):
        return value == "T"
    return float(value) if re.fullmatch(r"[\d.]+", str(value)) else value


def test_what_the_playbook_quotes_is_what_the_code_says():
    """With words in capitals, numbers and dots for what differs."""
    table = PLAYBOOK.read_text().partition("## Failure playbook")[2]
    quoted = [text for row in re.findall(r"^\| (.*?) \|", table, re.M)[1:] for text in re.findall(r"`([^`]+)`", row)]
    said = "\n".join(path.read_text() for path in (ROOT / "services").rglob("*.py"))
    said = re.sub(r'"\s*\n\s*f?"', "", said)  # sentences over several lines
    for text in set(quoted) - OF_GRPC:
        pieces = [piece.strip(" ;:") for piece in re.split(r"\b[A-Z]+\b|\d+|\.\.\.", text)]
        for piece in pieces:
            assert piece in said or piece.upper() in said, f"{text}: nothing says {piece!r}"
    assert len(quoted) > 35


OF_GRPC = {"failed to connect to all addresses"}


@of_pages
def test_metrics_are_told(page: Path):
    """By the part of their names that is in the sources; the console's and Grafana's are held elsewhere."""
    sources = [
        ROOT / "services" / path
        for path in ("gateway/engine/metrics.py", "gateway/engine/replica_metrics.py", "worker/metrics.py")
    ]
    said = "".join(path.read_text() for path in [*sources, *(ROOT / "services" / "common" / "metrics").glob("*.py")])
    for name in re.findall(r"\b(?:toka|vllm)[_:]([a-z_]+[a-z])\b", page.read_text()):
        bare = re.sub(r"_(total|bucket|sum|count)$", "", name).removeprefix("worker_")
        assert bare in said, f"{name}: no metric has it"
