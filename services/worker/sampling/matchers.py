"""Compilation of grammars in the background, and matchers for the sequences that use them."""

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from llguidance import LLMatcher

from services.common.boundaries import errors_to
from services.common.errors import InvalidRequest
from services.common.text.grammar import Grammars
from services.worker.sampling.grammar_state import FORBIDDEN_TOKENS

# Limits of the cache of compiled grammars.
_MOST_COMPILED = 32
_MOST_TEXT_BYTES = 1024**2
# The scheduler checks each grammar with a stack of 1 MiB (scheduler/grammar/child.py). Threads of LLExecutor have 2.
_STACK_BYTES = 16 * 1024**2

_Start = Future[LLMatcher]
_Made = Future["LLMatcher | None"]


class Matchers:
    """Cache of compiled grammars, from which each sequence gets a matcher. Owned by the compute thread.

    One background thread compiles grammars. Another copies compiled grammars and advances the copies over generated
    tokens, so that a sequence with a cached grammar does not wait for a compilation.
    """

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._starts: OrderedDict[str, _Start] = OrderedDict()  # least recently used first
        self._waiting: dict[_Start, list[_Made]] = {}  # matchers to make, by each grammar that is not compiled yet
        self._lock = threading.Lock()  # guards `_waiting`
        self._compiling = _thread("grammars")
        self._copying = _thread("matchers")

    def make(self, grammar: str, generated: list[int]) -> _Made:
        """Return the future of a matcher that has consumed the tokens ``generated``.

        The result is None if these tokens ended the sequence. The caller may cancel the future.
        A grammar is not compiled if all its futures are cancelled first.
        """
        made: _Made = Future()
        with self._lock:
            start = self._starts.get(grammar)
            if start is None or start.cancelled():
                start = self._starts[grammar] = Future()
                self._waiting[start] = []
                self._compiling.submit(self._compile, grammar, start)
            if start in self._waiting:
                self._waiting[start].append(made)
        self._starts.move_to_end(grammar)
        start.add_done_callback(partial(self._submit_copy, generated, made))
        self._evict()
        return made

    def close(self) -> None:
        """Cancel queued work and stop the threads."""
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._copying.shutdown(wait=False, cancel_futures=True)

    def _evict(self) -> None:
        size = sum(map(len, self._starts))
        while len(self._starts) > 1 and (len(self._starts) > _MOST_COMPILED or size > _MOST_TEXT_BYTES):
            grammar, _ = self._starts.popitem(last=False)
            size -= len(grammar)

    def _compile(self, grammar: str, start: _Start) -> None:
        """Compile ``grammar`` on the compiling thread, and set the result of ``start``."""
        with self._lock:
            if all(made.cancelled() for made in self._waiting.pop(start)):
                start.cancel()
                return
        with errors_to(partial(_fail, start, "it cannot be compiled"), BaseException):
            start.set_result(self._grammars.matcher(grammar))

    def _submit_copy(self, generated: list[int], made: _Made, start: _Start) -> None:
        if start.cancelled():
            made.cancel()
            return
        try:
            self._copying.submit(self._copy, start, generated, made)
        except RuntimeError:  # the pool is shut down
            made.cancel()

    def _copy(self, start: _Start, generated: list[int], made: _Made) -> None:
        """Copy the matcher of ``start`` on the copying thread, and set the result of ``made``."""
        if not made.set_running_or_notify_cancel():
            return
        with errors_to(partial(_fail, made, "it cannot be begun"), BaseException):
            made.set_result(self._advanced(start.result(), generated))

    def _advanced(self, start: LLMatcher, generated: list[int]) -> LLMatcher | None:
        if not self._grammars.ends.isdisjoint(generated):
            return None
        matcher = start.deep_copy()
        if not matcher.consume_tokens(generated):
            text = f"what was generated before does not match: {matcher.get_error()}"
            raise InvalidRequest(text, reason=FORBIDDEN_TOKENS)
        return matcher


def _thread(name: str) -> ThreadPoolExecutor:
    """Return a pool of one started thread with a stack of ``_STACK_BYTES``.

    The stack size is a setting of the process, so it is changed only until the thread has started.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix=name)
    before = threading.stack_size(_STACK_BYTES)
    try:
        pool.submit(int).result()
    finally:
        threading.stack_size(before)
    return pool


def _fail(future: "Future[Any]", what: str, error: BaseException) -> None:
    """Fail one sequence instead of the worker."""
    future.set_exception(error if isinstance(error, InvalidRequest) else InvalidRequest(f"{what}: {error}"))
