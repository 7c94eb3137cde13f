"""Child process that compiles grammars one after the other: ``python -m services.scheduler.grammar.child``.

Its input and output are lines with a JSON string each. A grammar may make the system kill it, at its limit of CPU time,
memory or stack. Its first line is empty when it is ready, or the reason why it cannot be. Then it returns one line for
each grammar: empty if the grammar compiles and some tens of its masks are computed in time, or else the reason. It
exits at the end of its input.
"""

import json
import re
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from services.common.errors import TokaError
from services.common.process.service import exit_with_parent
from services.common.text.grammar import Grammars
from services.common.text.tokenizer import Tokenizer
from services.scheduler.grammar.walk import MOST_WALK_S, mask_time_problem

_LONGEST_REASON = 300
# Less than the stack of any thread that uses grammars in a worker. llguidance's threads have the smallest, 2 MiB.
_STACK_BYTES = 1024**2
_REGEX_ERROR = re.compile(r"^[ \t]*error: (.*)", re.MULTILINE)
# the library's error codes and their meaning
_CODES = (
    ("NoExtension", "no text matches it"),
    ("ParserTooComplex", "it is too complex for the limits of this server"),
    ("LexerTooComplex", "it is too complex for the limits of this server"),
    ("panic:", "it is larger than the compiler can hold"),
)


def main() -> None:
    """Run the child. Its argument is ``{"tokenizer", "eos_token_ids", "cpu_seconds", "memory_bytes"}`` as JSON."""
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
    _reason(grammars, "start: /(.|\\n)*/")  # initialises the library before the limits apply
    limit_memory(settings["memory_bytes"])
    _write("")
    for grammar in map(json.loads, sys.stdin.buffer):
        _limit_time(settings["cpu_seconds"])
        reason = _reason(grammars, grammar)
        _limit_time(0)
        _write(reason)


def _reason(grammars: Grammars, grammar: str) -> str:
    """Return why ``grammar`` does not compile, or an empty string if it does and allows a first token."""
    try:
        matcher = grammars.matcher(grammar)
    except TokaError as error:
        return _readable(error.message)
    matcher.compute_bitmask()
    if matcher.is_error():
        return _readable(matcher.get_error())
    if warnings := matcher.get_grammar_warnings():
        return _readable("; ".join(warnings))
    _limit_time(2 * MOST_WALK_S)  # the walk checks its clock only between masks
    return _readable(mask_time_problem(matcher, grammars.ends))


def _readable(message: str) -> str:
    """Return one line of the library's message, without internal details."""
    for code, meaning in _CODES:
        if message.startswith(code):
            return meaning
    inner = _REGEX_ERROR.search(message)
    line = message.strip().partition("\n")[0].replace("failed to compile JSON schema: ", "")
    if inner is not None:
        line = f"{line.partition(' (in regex)')[0]}: {inner[1]}"
    return line if len(line) <= _LONGEST_REASON else line[: _LONGEST_REASON - 3] + "..."


def _write(text: str) -> None:
    print(json.dumps(text), flush=True)


def limit_memory(more: int) -> None:
    """Limit the memory to ``more`` bytes above its current size. The process is aborted beyond it."""
    if not sys.platform.startswith("linux"):  # other systems have neither the figure nor the limit
        return
    most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + more
    allowed = resource.getrlimit(resource.RLIMIT_AS)[1]
    if allowed != resource.RLIM_INFINITY:
        most = min(most, allowed)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _limit_time(seconds: float) -> None:
    """Limit the CPU time from now on to ``seconds``. 0 means no limit.

    The process is killed by SIGPROF beyond it. The system's resource limit would have a resolution of one second.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    main()
