"""Grammars are compiled beside the steps, and what sequences follow them with is made of the outcome."""

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from llguidance import LLMatcher

from services.common.errors import InvalidRequest
from services.common.text.grammar import Grammars
from services.worker.sampling.follower import FORBIDDEN_TOKENS

# Compiled grammars that are kept for the next sequence that has the same.
_MOST_COMPILED = 32
_MOST_TEXT_BYTES = 1024**2
# More than the 1 MiB in which the scheduler has tried them (scheduler/grammar/child.py). LLExecutor's have 2 MiB.
_STACK_BYTES = 16 * 1024**2

_Start = Future[LLMatcher]
_Made = Future["LLMatcher | None"]


class Matchers:
    """Owned by the compute thread. Two others work: one compiles, the other makes copies and lets them read what was
    generated before, so that a grammar that is there already does not wait for one that is being compiled."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._starts: OrderedDict[str, _Start] = OrderedDict()  # the last one used at the end
        self._wanted: dict[_Start, list[_Made]] = {}  # by what is not compiled yet
        self._lock = threading.Lock()  # of `_wanted`
        self._compiling = _thread("grammars")
        self._copying = _thread("matchers")

    def make(self, grammar: str, generated: list[int]) -> _Made:
        """Behind ``generated``; None where that ended the sequence. It may be cancelled; a grammar that nobody waits
        for is not compiled."""
        made: _Made = Future()
        with self._lock:
            start = self._starts.get(grammar)
            if start is None or start.cancelled():
                start = self._starts[grammar] = Future()
                self._wanted[start] = []
                self._compiling.submit(self._compile, grammar, start)
            if start in self._wanted:
                self._wanted[start].append(made)
        self._starts.move_to_end(grammar)
        start.add_done_callback(partial(self._then_copy, generated, made))
        self._forget_some()
        return made

    def close(self) -> None:
        """Let the threads end."""
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._copying.shutdown(wait=False, cancel_futures=True)

    def _forget_some(self) -> None:
        size = sum(map(len, self._starts))
        while len(self._starts) > 1 and (len(self._starts) > _MOST_COMPILED or size > _MOST_TEXT_BYTES):
            grammar, _ = self._starts.popitem(last=False)
            size -= len(grammar)

    def _compile(self, grammar: str, start: _Start) -> None:
        """The compiling thread."""
        with self._lock:
            if all(made.cancelled() for made in self._wanted.pop(start)):
                start.cancel()
                return
        try:
            start.set_result(self._grammars.matcher(grammar))
        except InvalidRequest as error:
            start.set_exception(error)
        except BaseException as error:  # one grammar's trouble is not the worker's
            start.set_exception(InvalidRequest(f"it cannot be compiled: {error}"))

    def _then_copy(self, generated: list[int], made: _Made, start: _Start) -> None:
        if start.cancelled():
            made.cancel()
            return
        try:
            self._copying.submit(self._copy, start, generated, made)
        except RuntimeError:  # the worker ends
            made.cancel()

    def _copy(self, start: _Start, generated: list[int], made: _Made) -> None:
        """The copying thread."""
        if not made.set_running_or_notify_cancel():
            return
        try:
            made.set_result(self._behind(start.result(), generated))
        except InvalidRequest as error:
            made.set_exception(error)
        except BaseException as error:
            made.set_exception(InvalidRequest(f"it cannot be begun: {error}"))

    def _behind(self, start: LLMatcher, generated: list[int]) -> LLMatcher | None:
        if not self._grammars.ends.isdisjoint(generated):
            return None
        matcher = start.deep_copy()
        if not matcher.consume_tokens(generated):
            text = f"what was generated before does not match: {matcher.get_error()}"
            raise InvalidRequest(text, reason=FORBIDDEN_TOKENS)
        return matcher


def _thread(name: str) -> ThreadPoolExecutor:
    """Its thread has begun: with its own size of stack, which is the process' setting for a moment."""
    pool = ThreadPoolExecutor(1, thread_name_prefix=name)
    before = threading.stack_size(_STACK_BYTES)
    try:
        pool.submit(int).result()
    finally:
        threading.stack_size(before)
    return pool
