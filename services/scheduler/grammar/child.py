"""``python -m services.scheduler.grammar.child``: compiles grammars, one behind the other, until its input ends.

It may be killed over any of them: by its limit of CPU seconds, for want of memory, or of stack. Its first frame says
that it is ready (empty) or why it cannot be; then each grammar is answered by one frame, empty when it compiles and
some tens of its masks are made in time.
"""

import json
import re
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from services.common.errors import TokaError
from services.common.process.service import exit_with_parent
from services.common.text.grammar import Grammars
from services.common.text.tokenizer import Tokenizer
from services.scheduler.grammar.frames import LENGTH, frame
from services.scheduler.grammar.walk import MOST_WALK_S, too_slow

_LONGEST_REASON = 300
# Less than any thread has that compiles or follows in a worker, of which those of llguidance's have least, 2 MiB.
_STACK_BYTES = 1024**2
_REGEX_ERROR = re.compile(r"^[ \t]*error: (.*)", re.MULTILINE)
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
    exit_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        grammars = Grammars(Tokenizer.load(settings["tokenizer"]), settings["eos_token_ids"])
    except TokaError as error:
        _write(error.message)
        return
    threading.stack_size(_STACK_BYTES)
    serving = threading.Thread(target=_serve, args=(grammars, settings))
    serving.start()
    serving.join()


def _serve(grammars: Grammars, settings: dict[str, Any]) -> None:
    _reason(grammars, "start: /(.|\\n)*/")  # whatever is made once is made now
    _limit_memory(settings["memory_bytes"])
    _write("")
    for grammar in _frames(sys.stdin.buffer):
        _limit_time(settings["cpu_seconds"])
        reason = _reason(grammars, grammar)
        _limit_time(0)
        _write(reason)


def _reason(grammars: Grammars, grammar: str) -> str:
    """Why ``grammar`` does not compile; empty when it does, and some token may come first."""
    try:
        matcher = grammars.matcher(grammar)
    except TokaError as error:
        return _readable(error.message)
    matcher.compute_bitmask()
    if matcher.is_error():
        return _readable(matcher.get_error())
    if warnings := matcher.get_grammar_warnings():
        return _readable("; ".join(warnings))
    _limit_time(2 * MOST_WALK_S)  # it looks at its clock between masks only
    return _readable(too_slow(matcher, grammars.ends))


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
    allowed = resource.getrlimit(resource.RLIMIT_AS)[1]
    if allowed != resource.RLIM_INFINITY:
        most = min(most, allowed)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _limit_time(seconds: float) -> None:
    """Of computing, from now on; 0 = no limit. Beyond them the process is killed by SIGPROF: a limit of the system's
    would know whole seconds only."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    main()
