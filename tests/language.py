"""Check the language of docstrings, comments and documentation pages: ``python tests/language.py [PATH...]``.

Prints each breach that a program can see, with its file and line, and exits with 1 if there is one. A program sees only
openings and words; a reader judges the rest.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Glob patterns of the files and rooms that were rewritten by these rules, which ``make lint`` checks.
ROOMS = (
    "CHANGELOG.md",
    "README.md",
    "bench",
    "docs/*.md",
    "docs/performance",
    "docs/reference",
    "protos",
    "services/cli/*.py",
    "services/cli/bench",
    "services/cli/doctor",
    "services/cli/top",
    "services/client",
    "services/common/*.py",
    "services/common/config",
    "services/common/flags",
    "services/common/host",
    "services/common/metrics",
    "services/common/model",
    "services/common/plan",
    "services/common/process",
    "services/common/rpc",
    "services/common/text",
    "services/gateway/*.py",
    "services/gateway/anthropic",
    "services/gateway/app",
    "services/gateway/batch",
    "services/gateway/console",
    "services/gateway/engine",
    "services/gateway/http",
    "services/gateway/openai/*.py",
    "services/gateway/openai/grammar",
    "services/gateway/openai/output/*.py",
    "services/gateway/openai/responses",
    "services/gateway/rollout",
    "services/gateway/sglang",
    "services/gateway/store",
    "services/gateway/vllm",
    "services/launcher",
    "services/scheduler",
    "services/worker",
    "tests/common/plan",
    "tests/language.py",
)
# First words of a docstring that state no fact and give no order.
OPENINGS = ("What", "Whether", "How", "Of", "As", "So", "Until", "From", "Those", "One", "Who", "Whoever", "Where")
# Words that stand for a missing noun or an everyday image. The value says what to write.
WORDS = {
    r"whoever|somebody|nobody|someone|anybody": "name the object: the caller, the client, the request",
    r"so many|as many as|so much|as much as|so long as it": "give the number a noun",
    r"one that|ones that|what is there": "name the object",
    r"what came|came of|are told|is told|hears? of|tells? it": "name the event and the object",
    r"dies?|died|lives on": "a program exits or runs",
    r"by itself alone|of its own accord": "say what causes it",
}
_WORDS = [(re.compile(rf"\b(?:{words})\b", re.IGNORECASE), advice) for words, advice in WORDS.items()]
_CODE = re.compile(r"``[^`]*``|`[^`]*`")


def breaches(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the breach of each rule that ``path`` does not keep."""
    text = path.read_text()
    if path.suffix != ".py":
        yield from _words(enumerate(text.splitlines(), 1))
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring is None:
                continue
            line = node.body[0].lineno
            first = re.match(r"\w*", docstring)
            if first is not None and first[0] in OPENINGS:
                yield line, f"docstring begins with {first[0]!r}; begin with a verb or a noun"
            yield from _words(enumerate(docstring.splitlines(), line))
    comments = (each for each in tokenize.generate_tokens(io.StringIO(text).readline) if each.type == tokenize.COMMENT)
    yield from _words((each.start[0], each.string) for each in comments)


def _words(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    for number, line in lines:
        prose = _CODE.sub("", line)
        for pattern, advice in _WORDS:
            if found := pattern.search(prose):
                yield number, f"{found[0]!r}: {advice}"


def _pages(directory: Path) -> list[Path]:
    return sorted(path for kind in ("*.py", "*.md", "*.proto") for path in directory.rglob(kind))


def main() -> int:
    """Print every breach in the given files and directories, by default in ``ROOMS``. Return the exit status."""
    given = [Path(name).resolve() for name in sys.argv[1:]] or [path for room in ROOMS for path in ROOT.glob(room)]
    paths = [path for each in given for path in ([each] if each.is_file() else _pages(each))]
    count = 0
    for path in paths:
        for line, breach in sorted(breaches(path)):
            print(f"{path.relative_to(ROOT)}:{line}: {breach}")
            count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
