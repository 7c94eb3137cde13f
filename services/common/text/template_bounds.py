"""A sandbox that limits the time and the output of templates.

Python code cannot be interrupted from outside, so each loop iteration and each call checks the time. Operations that
can create a large value in one step are checked before they run. Memory is limited by the container only.
"""

import re
import threading
import time
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import jinja2
import jinja2.runtime
import jinja2.sandbox
from jinja2 import nodes
from jinja2.exceptions import SecurityError

MAX_SECONDS = 5.0  # of processor time; the longest conversations take a tenth of it
MAX_CHARACTERS = 64 * 1024 * 1024
_MAX_WIDTH = 100_000  # of padded or repeated text
_CHECK_EVERY = 8  # ticks
_TICK = "_toka_tick"
_NESTED = re.compile(r":[^{}]*\{")  # "{:{width}}"
# filters with a number that determines the size of their result
_SIZED = ("batch", "center", "indent", "slice", "wordwrap")

_meter = threading.local()  # ``ends_at`` and ``ticks`` of this thread's rendering


def bounded(parts: Iterable[str]) -> str:
    """Return the joined parts of a template's ``generate()``. Raises ``SecurityError`` at a limit."""
    _meter.ends_at, _meter.ticks = time.thread_time() + MAX_SECONDS, 0
    written, size = [], 0
    for part in parts:
        written.append(part)
        size += len(part)
        if size > MAX_CHARACTERS:
            raise SecurityError(f"it writes more than {MAX_CHARACTERS} characters")
    return "".join(written)


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Template environment with limits. Threads may share it; each renders one template at a time with ``bounded``."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.globals[_TICK] = _tick
        del self.globals["lipsum"]
        del self.filters["format"]  # "%9999999999d"
        for name in _SIZED:
            self.filters[name] = _sized(self.filters[name])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Insert a tick into the body of each loop."""
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            tick = nodes.ExprStmt(nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None))
            loop.body.insert(0, tick.set_lineno(loop.lineno).set_environment(self))
        return template

    def call(self, context: jinja2.runtime.Context, called: Any, /, *arguments: Any, **named: Any) -> Any:
        """Check the time and the arguments of a call. Filters and tests are not called by this method."""
        _tick()
        if isinstance(getattr(called, "__self__", None), str):
            _check_widths(arguments)
        return super().call(context, called, *arguments, **named)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Check ``str.format`` and ``str.format_map``, for which the sandbox has its own implementation."""
        if (make := super().wrap_str_format(value)) is None:
            return None

        def checked(*arguments: Any, **named: Any) -> str:
            _check_format(value.__self__)
            _check_widths((*arguments, *named.values()))
            return make(*arguments, **named)

        return checked

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Check an intercepted operator."""
        numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
        if operator == "%" and not numbers:
            raise SecurityError("'%' is for numbers")
        if operator == "**" and not (numbers and abs(right) <= 64):
            raise SecurityError("'**' is for small exponents")
        if operator == "*" and not numbers:
            times, text = (left, right) if isinstance(left, int) else (right, left)
            if not isinstance(times, int) or times * len(text) > _MAX_WIDTH:
                raise SecurityError(f"'*' makes at most {_MAX_WIDTH} characters")
        return super().call_binop(context, operator, left, right)


def _tick() -> str:
    _meter.ticks = getattr(_meter, "ticks", 0) + 1
    if _meter.ticks % _CHECK_EVERY == 0 and time.thread_time() > _meter.ends_at:
        raise SecurityError(f"it takes more than {MAX_SECONDS:g} s")
    return ""


def _sized(make: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(make)
    def checked(*arguments: Any, **named: Any) -> Any:
        _check_widths((*arguments, *named.values()))
        return make(*arguments, **named)

    return checked


def _check_widths(arguments: Iterable[Any]) -> None:
    for argument in arguments:
        if isinstance(argument, int) and argument > _MAX_WIDTH:
            raise SecurityError(f"text is made at most {_MAX_WIDTH} characters wide")


def _check_format(text: str) -> None:
    if _NESTED.search(text):
        raise SecurityError("the width of a field is a number in the text")
    digits = "".join(character if character.isdecimal() else " " for character in text).split()
    if any(len(number) > len(str(_MAX_WIDTH)) - 1 for number in digits):
        raise SecurityError(f"text is made at most {_MAX_WIDTH} characters wide")
