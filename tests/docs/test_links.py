"""What a page leads to is there."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.docs.pages import ROOT, anchors, links, pages

PAGES = pages()
NAMED = re.compile(r"(?<![\w/.-])docs/[\w/-]+\.(?:md|png)\b")
TEXT = {".py", ".md", ".proto", ".yml", ".yaml", ".toml", ".Dockerfile", ".js", ".go", ".java"}
SOURCES = ("services", "bench", "docker", "examples", "protos", "tests", "training")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path):
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            assert link.startswith(("https://", "http://127.0.0.1")), link
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: there is no {path}"
        assert target.is_relative_to(ROOT), f"{link}: leads out of the repository"
        if anchor:
            assert anchor in anchors(target), f"{link}: {target.name} has no such heading"


def test_every_page_can_be_found_from_the_readme():
    found, new = set(), {ROOT / "README.md"}
    while new:
        found |= new
        targets = {(page.parent / link.partition("#")[0]).resolve() for page in new for link in links(page)}
        # A folder shows what is in it.
        new = {page for page in PAGES if page in targets or not targets.isdisjoint(page.parents)} - found
    assert [str(page.relative_to(ROOT)) for page in PAGES if page not in found] == []


def test_pages_and_pictures_that_sources_name_are_there():
    files = [
        path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.suffix in TEXT or not path.suffix
    ]
    files += [path for path in ROOT.iterdir() if path.is_file() and path.suffix in TEXT | {""}]
    named = {
        (name, path) for path in files if path.is_file() for name in NAMED.findall(path.read_text(errors="ignore"))
    }
    assert len(named) > 10
    assert [f"{path.relative_to(ROOT)}: {name}" for name, path in sorted(named) if not (ROOT / name).exists()] == []
