"""Whether a grammar's masks are made in time, found out on some answers that it allows."""

import time
from collections.abc import Collection

import numpy as np
from llguidance import LLMatcher

_WALKS = 2  # from the start, each with tokens of its own
_STEPS = 16  # tokens of each, at most
_MOST_MASK_S = 0.25  # for a token: all sequences of a worker wait for it
MOST_WALK_S = 0.5  # for all of them together: 16 ms each


def too_slow(start: LLMatcher, ends: Collection[int]) -> str:
    """Why nobody should have to wait for ``start``'s masks; empty when they are quick. Times are this thread's CPU.

    Tokens are drawn evenly, the same whenever it is asked. A walk that the library's limits end counts for nothing
    where another goes on: in a worker that costs its sequence only.
    """
    began, failed, stopped = time.thread_time(), "", 0
    for walk in range(_WALKS):
        matcher, draw = start.deep_copy(), np.random.default_rng(walk)
        for _ in range(_STEPS):
            before = time.thread_time()
            allowed = matcher.compute_bitmask()
            tokens = np.flatnonzero(np.unpackbits(np.frombuffer(allowed, np.uint8), bitorder="little"))
            tokens = tokens[~np.isin(tokens, list(ends))]
            moved = not matcher.is_error() and len(tokens) > 0 and matcher.consume_token(int(draw.choice(tokens)))
            now = time.thread_time()
            if now - before > _MOST_MASK_S or now - began > MOST_WALK_S:
                return "it is too complex: what may come next takes too long to find out at each token"
            if not moved:
                break
        if matcher.is_error():
            stopped, failed = stopped + 1, matcher.get_error()
    return failed if stopped == _WALKS else ""
