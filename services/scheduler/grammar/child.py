"""``python -m services.scheduler.grammar.child``: compiles grammars, one behind the other, until its input ends.

It may be killed over any of them: by its limit of CPU seconds, or for want of memory. Its first frame says that it is
ready (empty) or why it cannot be; then each grammar is answered by one frame, empty when it compiles.
"""

import json
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from services.common.errors import TokaError
from services.common.process import die_with_parent
from services.common.text.grammar import Grammars
from services.common.text.tokenizer import Tokenizer
from services.scheduler.grammar.frames import LENGTH, frame

_LONGEST_REASON = 300
_REGEX_ERROR = re.compile(r"^\s*error: (.*)", re.MULTILINE)
# What the library calls it -> what it means.
_CODES = (
    ("NoExtension", "no text matches it"),
    ("ParserTooComplex", "it is too complex for the limits of this server"),
    ("LexerTooComplex", "it is too complex for the limits of this server"),
    ("panic:", "it is larger than the compiler can hold"),
)


def main() -> None:
    """Argument: ``{"tokenizer", "eos_token_ids", "cpu_seconds", "memory_bytes"}`` as JSON."""
    settings = json.loads(sys.argv[1])
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        grammars = Grammars(Tokenizer.load(settings["tokenizer"]), settings["eos_token_ids"])
        _reason(grammars, "start: /(.|\\n)*/")  # whatever is made once is made now
    except TokaError as error:
        _write(error.message)
        return
    _limit_memory(settings["memory_bytes"])
    _write("")
    for grammar in _frames(sys.stdin.buffer):
        _limit_time(settings["cpu_seconds"])
        _write(_reason(grammars, grammar))


def _reason(grammars: Grammars, grammar: str) -> str:
    """Why ``grammar`` does not compile; empty when it does, and some token may come first."""
    try:
        matcher = grammars.matcher(grammar)
    except TokaError as error:
        return _readable(error.message)
    matcher.compute_bitmask()
    if matcher.is_error():
        return _readable(matcher.get_error())
    return _readable("; ".join(matcher.get_grammar_warnings()))


def _readable(message: str) -> str:
    """One line of the library's message, without what it looks like inside."""
    for code, meaning in _CODES:
        if message.startswith(code):
            return meaning
    inner = _REGEX_ERROR.search(message)
    line = message.strip().partition("\n")[0].replace("failed to compile JSON schema: ", "")
    if inner is not None:
        line = f"{line.partition(' (in regex)')[0]}: {inner[1]}"
    return line if len(line) <= _LONGEST_REASON else line[: _LONGEST_REASON - 3] + "..."


def _frames(stream: BinaryIO) -> Iterator[str]:
    while len(head := stream.read(LENGTH.size)) == LENGTH.size:
        yield stream.read(*LENGTH.unpack(head)).decode()


def _write(text: str) -> None:
    sys.stdout.buffer.write(frame(text))
    sys.stdout.buffer.flush()


def _limit_memory(more: int) -> None:
    """``more`` bytes than are taken now. Beyond them the process is aborted."""
    if not sys.platform.startswith("linux"):  # others neither tell nor keep it
        return
    most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _limit_time(seconds: float) -> None:
    """Of computing, from now on. Beyond them the process is killed by SIGXCPU."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()
