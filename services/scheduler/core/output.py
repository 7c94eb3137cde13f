"""News for the clients, grouped by where it goes."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.scheduler.core.plan import NO_FLOATS, NO_SLOTS, Result, Scored, no_floats, no_slots, no_tokens
from services.scheduler.core.request import Finish


@dataclass(eq=False)
class Delta:
    """One step's news for one sink. One token for each handle; ``finished`` comes after the tokens."""

    step: int
    handles: np.ndarray = field(default_factory=no_tokens)  # uint32 [samples with a new token]
    tokens: np.ndarray = field(default_factory=no_tokens)  # uint32, beside handles
    logprobs: np.ndarray = field(default_factory=no_floats)  # float32, beside handles, or empty when nobody asked
    top_counts: np.ndarray = field(default_factory=no_slots)  # beside handles, or empty when nobody asked
    top_token_ids: np.ndarray = field(default_factory=no_tokens)
    top_logprobs: np.ndarray = field(default_factory=no_floats)
    finished: list[Finish] = field(default_factory=list)
    scored: list[tuple[int, Scored]] = field(default_factory=list)  # (handle, prompt tokens), before the tokens


class WithLogprobs(Protocol):
    """What ``Delta`` says of the log-probabilities of its tokens."""

    logprobs: np.ndarray
    top_counts: np.ndarray
    top_token_ids: np.ndarray
    top_logprobs: np.ndarray


class Outbox:
    """Collects the news until the shell fetches it. Owned by the core."""

    def __init__(self) -> None:
        self._deltas: list[tuple[int, Delta]] = []
        self._finished: dict[int, list[Finish]] = defaultdict(list)
        self._scored: dict[int, list[tuple[int, Scored]]] = defaultdict(list)

    def score(self, sink: int, handle: int, scored: Scored) -> None:
        self._scored[sink].append((handle, scored))

    def finish(self, sink: int, finish: Finish) -> None:
        self._finished[sink].append(finish)

    def tokens(self, result: Result, sinks: np.ndarray, handles: np.ndarray) -> None:
        """Tokens of one step; ``sinks`` and ``handles`` stand beside ``result.slots``."""
        if len(sinks) == 0:
            return
        if (sinks == sinks[0]).all():
            self._add(int(sinks[0]), result, handles, None)
            return
        order = np.argsort(sinks, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(sinks[order])) + 1):
            self._add(int(sinks[rows[0]]), result, handles, rows)

    def take(self, step: int) -> list[tuple[int, Delta]]:
        """Everything since the last call, as (sink, delta)."""
        deltas, self._deltas = self._deltas, []
        if self._finished or self._scored:
            by_sink = dict(deltas)
            for sink in dict.fromkeys((*self._scored, *self._finished)):
                if sink not in by_sink:
                    by_sink[sink] = Delta(step)
                    deltas.append((sink, by_sink[sink]))
            for sink, finished in self._finished.items():
                by_sink[sink].finished = finished
            for sink, scored in self._scored.items():
                by_sink[sink].scored = scored
            self._finished, self._scored = defaultdict(list), defaultdict(list)
        return deltas

    def _add(self, sink: int, result: Result, handles: np.ndarray, rows: np.ndarray | None) -> None:
        delta = Delta(result.step, handles, result.tokens.astype(np.uint32))
        delta.logprobs, delta.top_counts = result.logprobs, result.top_counts
        delta.top_token_ids, delta.top_logprobs = result.top_token_ids, result.top_logprobs
        if rows is not None:
            delta.handles, delta.tokens = handles[rows], delta.tokens[rows]
            take_logprobs(delta, rows)
        if len(delta.logprobs) and np.isnan(delta.logprobs).all():
            delta.logprobs = NO_FLOATS
        if len(delta.top_counts) and not delta.top_counts.any():
            delta.top_counts = NO_SLOTS
        self._deltas.append((sink, delta))


def take_logprobs(delta: WithLogprobs, rows: np.ndarray) -> None:
    """Keep those of the tokens ``rows`` only."""
    if len(delta.logprobs):
        delta.logprobs = delta.logprobs[rows]
    if len(delta.top_counts):
        at = ragged_rows(delta.top_counts, rows)
        delta.top_counts = delta.top_counts[rows]
        delta.top_token_ids, delta.top_logprobs = delta.top_token_ids[at], delta.top_logprobs[at]


def ragged_rows(counts: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where the entries of ``rows`` stand in arrays that concatenate ``counts[i]`` entries for each row ``i``."""
    starts = np.cumsum(counts) - counts
    chosen = counts[rows]
    within = np.arange(chosen.sum()) - np.repeat(np.cumsum(chosen) - chosen, chosen)
    at: npt.NDArray[np.int64] = np.repeat(starts[rows], chosen) + within
    return at
