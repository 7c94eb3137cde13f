"""The grammars that sequences follow: where each of them stands, and which tokens it may have next."""

import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import structlog
from llguidance import LLExecutor, LLMatcher

from services.common.errors import InvalidRequest
from services.common.model_files import ModelCard
from services.common.text.grammar import Grammars
from services.common.text.tokenizer import Tokenizer
from services.worker.runner.plan import Plan

# Compiled grammars that are kept for the next sequence that has the same.
_MOST_COMPILED = 32
# A mask of a large vocabulary takes 10 us to 1 ms.
_MOST_THREADS = 8

log = structlog.get_logger(__name__)


def load_grammars(tokenizer: str, card: ModelCard) -> Grammars | None:
    """For the model of ``card``, whose ``tokenizer`` is a directory or hub id; None, and a line in the log, where there
    is none that grammars can be followed with."""
    try:
        return Grammars(Tokenizer.load(tokenizer), card.eos_token_ids)
    except InvalidRequest as error:
        log.warning("no grammars", model=card.name, reason=str(error))
        return None


class RowMasks(NamedTuple):
    """What some rows of a batch may draw."""

    rows: np.ndarray  # [n] int64, ascending
    bits: np.ndarray  # [n, words] int32: bit i of word w = token 32 w + i; tokens behind the last word are ruled out

    def within(self, start: int, stop: int) -> "RowMasks | None":
        """Of the rows from ``start`` to ``stop``, counted from there; None where none has a mask."""
        first, last = np.searchsorted(self.rows, (start, stop))
        return RowMasks(self.rows[first:last] - start, self.bits[first:last]) if first < last else None

    def allowed(self, vocab_size: int) -> np.ndarray:
        """``[n, vocab_size]`` bool."""
        bits = np.ascontiguousarray(self.bits).view(np.uint8)
        return np.unpackbits(bits, axis=1, count=vocab_size, bitorder="little").view(bool)


class Follower:
    """Where one sequence stands in its grammar. Used by one thread at a time."""

    def __init__(self, matcher: "Future[LLMatcher | None]") -> None:
        """``matcher``: behind what was generated before the admission; None = that ended the sequence."""
        self._matcher: Future[LLMatcher | None] | None = matcher  # None = any token may come
        self.reason = ""  # why the grammar cannot be followed any more

    def matcher(self) -> LLMatcher | None:
        """Waits for it. None where any token may come: the sequence has ended, or failed."""
        if self._matcher is None:
            return None
        try:
            matcher = self._matcher.result()
        except InvalidRequest as error:
            return self.fail(str(error))
        if matcher is None:
            self.let_go()
        return matcher

    def let_go(self) -> None:
        """Any token may come from here on."""
        if self._matcher is not None:
            self._matcher.cancel()
        self._matcher = None

    def fail(self, reason: str) -> None:
        """The sequence cannot be continued."""
        said = " ".join(reason.removesuffix("<non-verbose/>").split())
        self.reason = f"the grammar cannot be followed: {said}"
        self.let_go()


class SlotGrammars:
    """Of all slots. Owned by the compute thread, but for ``masks`` and ``fill``, which several threads may call at once
    for different slots. Grammars are compiled in a thread of their own, while the model computes."""

    def __init__(self, grammars: Grammars, vocab_size: int) -> None:
        """``vocab_size``: the model's, which the tokenizer's may differ from."""
        self._grammars, self._vocab_size = grammars, vocab_size
        self.words = -(-grammars.vocab_size // 32)
        self._followers: dict[int, Follower] = {}
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # of the compiling thread
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._masking = LLExecutor(max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // 2)))

    def apply(self, plan: Plan) -> None:
        """Slots are released and taken."""
        self._release(plan.releases.tolist())
        for admission in plan.admissions:
            if grammar := admission.sampling.grammar:
                known = admission.token_ids
                generated = known[admission.prompt_tokens or len(known) :].tolist()
                made = self._compiling.submit(self._make, grammar, generated)
                self._followers[admission.slot] = Follower(made)

    def clear(self) -> None:
        """Free all slots."""
        self._release(list(self._followers))

    def _release(self, slots: list[int]) -> None:
        for slot in slots:
            if (follower := self._followers.pop(slot, None)) is not None:
                follower.let_go()

    def close(self) -> None:
        """Let the threads end."""
        self.clear()
        self._compiling.shutdown(wait=False, cancel_futures=True)

    def followers(self, slots: np.ndarray) -> list[Follower]:
        """Of ``slots [n]``, all of which have a grammar."""
        return [self._followers[slot] for slot in slots.tolist()]

    def reasons(self, slots: np.ndarray) -> dict[int, str]:
        """Why those of ``slots [n]`` fail whose grammar cannot be followed."""
        found = ((slot, self._followers.get(slot)) for slot in slots.tolist())
        return {slot: follower.reason for slot, follower in found if follower is not None and follower.reason}

    def masks(self, slots: np.ndarray) -> RowMasks | None:
        """What may come next in ``slots [rows]``; None where none has a grammar."""
        rows = np.array([row for row, slot in enumerate(slots.tolist()) if slot in self._followers], np.int64)
        if not len(rows):
            return None
        bits = np.empty((len(rows), self.words), np.int32)
        self.fill(self.followers(slots[rows]), bits)
        return RowMasks(rows, bits)

    def fill(self, followers: Sequence[Follower], bits: np.ndarray) -> None:
        """What each of ``followers`` may have next into ``bits [n, words]`` int32, contiguous: anything where it has
        ended, or fails here."""
        matchers = [(matcher, row) for row, each in enumerate(followers) if (matcher := each.matcher()) is not None]
        if len(matchers) < len(followers):
            bits[:] = -1
        if not matchers:
            return
        self._masking.unsafe_compute_mask_ptr(matchers, bits.ctypes.data, bits.strides[0], len(bits))
        if self._grammars.vocab_size > self._vocab_size:
            bits[:, -(-self._vocab_size // 32) :] = 0
            if rest := self._vocab_size % 32:
                bits[:, self._vocab_size // 32] &= (1 << rest) - 1
        some = bits.any(axis=1)
        for matcher, row in matchers:
            if matcher.is_error():  # then the mask means nothing
                followers[row].fail(matcher.get_error())
            elif not some[row]:
                followers[row].fail("no token of this model may come next")
            if followers[row].reason:
                bits[row] = -1

    def consume(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """``tokens [n]`` were sampled for ``slots [n]``, with a grammar or without; less than 0 = none, since logits
        were not numbers."""
        pairs = zip(slots.tolist(), tokens.tolist(), strict=True)
        self.advance([(self._followers[slot], token) for slot, token in pairs if slot in self._followers])

    def advance(self, tokens: Iterable[tuple[Follower, int]]) -> None:
        """As ``consume``."""
        pairs, whose = [], []
        for follower, token in tokens:
            if (matcher := follower.matcher()) is None:
                continue
            if token < 0 or token in self._grammars.ends:
                follower.let_go()
                continue
            pairs.append((matcher, token))
            whose.append(follower)
        if not pairs:
            return
        for follower, (matcher, _), good in zip(whose, pairs, self._masking.consume_token_par(pairs), strict=True):
            if not good:
                follower.fail(matcher.get_error())

    def _make(self, grammar: str, generated: list[int]) -> LLMatcher | None:
        """The compiling thread."""
        if not self._grammars.ends.isdisjoint(generated):
            return None
        matcher = self._start(grammar).deep_copy()
        if not matcher.consume_tokens(generated):
            raise InvalidRequest(f"what was generated before does not match: {matcher.get_error()}")
        return matcher

    def _start(self, grammar: str) -> LLMatcher:
        if grammar in self._compiled:
            self._compiled.move_to_end(grammar)
            return self._compiled[grammar]
        start = self._grammars.matcher(grammar)
        self._compiled[grammar] = start
        if len(self._compiled) > _MOST_COMPILED:
            self._compiled.popitem(last=False)
        return start
