"""Output for the clients, grouped by sink."""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from services.common.plan.result import ScoredTokens, StepResult
from services.common.plan.routed_experts import RoutedExperts
from services.common.plan.top_logprobs import TopLogprobs
from services.scheduler.core.plan import NO_FLOATS, NO_TOKENS
from services.scheduler.core.request import Finish


@dataclass(eq=False)
class Delta:
    """The output of one step, or of several, for one sink: tokens of samples, and the samples that finished after them.

    ``tokens`` are grouped by handle: ``counts[i]`` tokens of ``handles[i]``, in order.
    """

    step: int
    handles: np.ndarray = field(default_factory=lambda: NO_TOKENS)  # uint32 [samples with new tokens]
    tokens: np.ndarray = field(default_factory=lambda: NO_TOKENS)  # uint32 [tokens]
    logprobs: np.ndarray = field(default_factory=lambda: NO_FLOATS)  # float32, beside tokens; empty if not wanted
    top: TopLogprobs | None = None  # beside tokens; None if not wanted
    counts: np.ndarray | None = None  # beside handles; None = each has one token
    finished: list[Finish] = field(default_factory=list)
    scored: list[tuple[int, ScoredTokens]] = field(default_factory=list)  # (handle, prompt tokens); precedes the tokens
    routed: RoutedExperts | None = None  # owners are handles; precedes the ends
    weights_version: str = ""  # of the weights that generated the tokens; empty: those of the worker's start

    def take(self, samples: np.ndarray, rows: np.ndarray) -> "Delta":
        """Return the entries ``samples`` of ``handles`` with their tokens, ``rows``, without ends and prompt tokens."""
        logprobs = self.logprobs[rows] if len(self.logprobs) else NO_FLOATS
        top = None if self.top is None else self.top[rows]
        counts = None if self.counts is None else self.counts[samples]
        part = Delta(self.step, self.handles[samples], self.tokens[rows], logprobs, top, counts)
        part.weights_version = self.weights_version
        return part


class Outbox:
    """Output since the last ``take``. Owned by the core."""

    def __init__(self) -> None:
        self._deltas: list[tuple[int, Delta]] = []
        self._finished: dict[int, list[Finish]] = defaultdict(list)
        self._scored: dict[int, list[tuple[int, ScoredTokens]]] = defaultdict(list)
        self._routed: dict[int, list[RoutedExperts]] = defaultdict(list)

    def score(self, sink: int, handle: int, scored: ScoredTokens) -> None:
        """Add log-probabilities of prompt tokens."""
        self._scored[sink].append((handle, scored))

    def route(self, routed: RoutedExperts, sinks: np.ndarray) -> None:
        """Add the experts of computed tokens. Their owners are handles. ``sinks`` has one entry for each owner."""
        for sink in np.unique(sinks).tolist():
            if (part := routed.take(sinks == sink)) is not None:
                self._routed[sink].append(part)

    def finish(self, sink: int, finish: Finish) -> None:
        """Add the end of a sample."""
        self._finished[sink].append(finish)

    def tokens(self, result: StepResult, sinks: np.ndarray, handles: np.ndarray, weights_version: str) -> None:
        """Add the tokens of one step. ``sinks`` and ``handles`` have one entry for each of ``result.slots``.

        ``weights_version`` is that of the weights that generated them.
        """
        if len(sinks) == 0:
            return
        delta = Delta(result.step, handles, result.tokens.astype(np.uint32), result.logprobs, result.top)
        delta.weights_version = weights_version
        if (sinks == sinks[0]).all():
            self._add(int(sinks[0]), delta)
            return
        order = np.argsort(sinks, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(sinks[order])) + 1):
            self._add(int(sinks[rows[0]]), delta.take(rows, rows))

    def take(self, step: int) -> list[tuple[int, Delta]]:
        """Return the output since the last call as (sink, delta). ``step`` is the number of deltas without tokens."""
        deltas, self._deltas = self._deltas, []
        if self._finished or self._scored or self._routed:
            by_sink = dict(deltas)
            for sink in dict.fromkeys((*self._scored, *self._routed, *self._finished)):
                if sink not in by_sink:
                    by_sink[sink] = Delta(step)
                    deltas.append((sink, by_sink[sink]))
            for sink, finished in self._finished.items():
                by_sink[sink].finished = finished
            for sink, scored in self._scored.items():
                by_sink[sink].scored = scored
            for sink, parts in self._routed.items():
                by_sink[sink].routed = RoutedExperts.join(parts)
            self._finished, self._scored, self._routed = defaultdict(list), defaultdict(list), defaultdict(list)
        return deltas

    def _add(self, sink: int, delta: Delta) -> None:
        if len(delta.logprobs) and np.isnan(delta.logprobs).all():
            delta.logprobs = NO_FLOATS
        if delta.top is not None and not delta.top.counts.any():
            delta.top = None
        self._deltas.append((sink, delta))
