"""The Markdown pages of this repository, read as GitHub does."""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_NOT_OURS = {"node_modules", "build", "dist", "target"}
_FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>```+|~~~+)(?P<language>[^\n`]*)\n(?P<code>.*?)^(?P=indent)(?P=fence) *$", re.M | re.S
)
_MARK = re.compile(r"<!-- (run[^>]*?) -->\n\Z")


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    code: str
    mark: str  # what a comment in the line before says, such as "run"; empty: there is none


def pages() -> list[Path]:
    """Every page, hidden folders and those of builds left out."""
    found = ROOT.rglob("*.md")
    return sorted(path for path in found if not _foreign(path.relative_to(ROOT)))


def _foreign(path: Path) -> bool:
    return any(part.startswith(".") or part in _NOT_OURS or part.endswith(".egg-info") for part in path.parts)


@cache
def prose(page: Path) -> str:
    """Without fenced blocks and comments."""
    return re.sub(r"<!--.*?-->", "", _FENCE.sub("", page.read_text()), flags=re.S)


def blocks(page: Path) -> list[Block]:
    """Every fenced block of ``page``."""
    text, name = page.read_text(), str(page.relative_to(ROOT))
    found = []
    for match in _FENCE.finditer(text):
        mark = _MARK.search(text[: match.start()])
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(name, line, match["language"].strip(), match["code"], mark[1] if mark else ""))
    return found


def links(page: Path) -> list[str]:
    """Where its links and pictures lead."""
    return re.findall(r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)", re.sub(r"`[^`\n]*`", "", prose(page)))


@cache
def anchors(page: Path) -> frozenset[str]:
    """The names of its headings, as GitHub makes them."""
    seen: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#{1,6} +(.*?) *#* *$", prose(page), re.M):
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        count = seen[name] = seen.get(name, -1) + 1
        names.add(f"{name}-{count}" if count else name)
    return frozenset(names)
