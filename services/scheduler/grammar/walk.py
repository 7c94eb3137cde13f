"""Measures the masks of a grammar on some answers that it allows."""

import time
from collections.abc import Collection

import numpy as np
from llguidance import LLMatcher

_WALKS = 2  # from the start, with different random tokens
_STEPS = 16  # limit of tokens of each walk
_MOST_MASK_S = 0.25  # of one token; all sequences of a worker wait for it
MOST_WALK_S = 0.5  # of all masks together; 16 ms each


def mask_time_problem(start: LLMatcher, ends: Collection[int]) -> str:
    """Return why the masks of ``start`` take too long, or an empty string. Times are CPU times of this thread.

    Tokens are drawn uniformly with a fixed seed. If the library's limits end one walk and another one continues, the
    grammar is accepted: in a worker only that sequence fails.
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
                return "it is too complex: computing the allowed next tokens takes too long"
            if not moved:
                break
        if matcher.is_error():
            stopped, failed = stopped + 1, matcher.get_error()
    return failed if stopped == _WALKS else ""
