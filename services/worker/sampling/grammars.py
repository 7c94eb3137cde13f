"""The grammars that sequences follow: where each of them stands, and which tokens it may have next."""

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import structlog
from llguidance import LLExecutor

from services.common.errors import InvalidRequest
from services.common.model.files import ModelCard
from services.common.plan.types import Plan
from services.common.text.grammar import Grammars
from services.common.text.tokenizer import Tokenizer
from services.worker.sampling.follower import Follower
from services.worker.sampling.matchers import Matchers
from services.worker.sampling.patience import Patience
from services.worker.step.output import Failure

# A mask of a large vocabulary takes 10 us to 1 ms, and a token that is taken in 20 us.
_MOST_THREADS = 16

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


class SlotGrammars:
    """Of all slots. Owned by the compute thread, but for ``masks`` and ``fill``, which several threads may call at once
    for different slots."""

    def __init__(self, grammars: Grammars, vocab_size: int, *, reports: bool = True) -> None:
        """``vocab_size``: the model's, which the tokenizer's may differ from. ``reports``: this rank tells the
        scheduler which sequences fail."""
        self._grammars, self._vocab_size = grammars, vocab_size
        self.words = -(-grammars.vocab_size // 32)
        self._followers: dict[int, Follower] = {}
        self._matchers = Matchers(grammars)
        self._patience = Patience(bounded=reports)
        self._masking = LLExecutor(max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // 2)))

    def apply(self, plan: Plan) -> None:
        """Slots are released and taken."""
        self._release(plan.releases.tolist())
        for admission in plan.admissions:
            if grammar := admission.sampling.grammar:
                known = admission.token_ids
                generated = known[admission.prompt_tokens or len(known) :].tolist()
                self._followers[admission.slot] = Follower(self._matchers.make(grammar, generated))

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
        self._matchers.close()

    def followers(self, slots: np.ndarray) -> list[Follower]:
        """Of ``slots [n]``, all of which have a grammar."""
        return [self._followers[slot] for slot in slots.tolist()]

    def failures(self, slots: np.ndarray) -> dict[int, Failure]:
        """Why those of ``slots [n]`` fail whose grammar cannot be followed."""
        found = ((slot, self._followers.get(slot)) for slot in slots.tolist())
        return {slot: follower.failure for slot, follower in found if follower is not None and follower.failure}

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
        until = self._patience.until()
        found = ((each.matcher(until), row) for row, each in enumerate(followers))
        matchers = [(matcher, row) for matcher, row in found if matcher is not None]
        if len(matchers) < len(followers):
            bits[:] = -1
        if not matchers:
            return
        start, size = bits.ctypes.data, bits.strides[0]
        self._patience.call(
            [followers[row] for _, row in matchers],
            lambda index: matchers[index][0].unsafe_compute_mask_ptr(start + matchers[index][1] * size, size),
            lambda those: self._masking.unsafe_compute_mask_ptr([matchers[i] for i in those], start, size, len(bits)),
        )
        if self._grammars.vocab_size > self._vocab_size:
            bits[:, -(-self._vocab_size // 32) :] = 0
            if rest := self._vocab_size % 32:
                bits[:, self._vocab_size // 32] &= (1 << rest) - 1
        some = bits.view(np.uint32).max(axis=1)
        for matcher, row in matchers:
            follower = followers[row]
            if not follower.failure:  # else it has taken too long
                if matcher.is_error():  # then the mask means nothing
                    follower.fail(matcher.get_error())
                elif not some[row]:
                    follower.fail("no token of this model may come next")
            if follower.failure:
                bits[row] = -1

    def consume(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """``tokens [n]`` were sampled for ``slots [n]``, with a grammar or without; less than 0 = none, since logits
        were not numbers."""
        pairs = zip(slots.tolist(), tokens.tolist(), strict=True)
        self.advance([(self._followers[slot], token) for slot, token in pairs if slot in self._followers])

    def advance(self, tokens: Iterable[tuple[Follower, int]]) -> None:
        """As ``consume``."""
        pairs, whose, until = [], [], self._patience.until()
        for follower, token in tokens:
            if (matcher := follower.matcher(until)) is None:
                continue
            if token < 0 or token in self._grammars.ends:
                follower.let_go()
                continue
            pairs.append((matcher, token))
            whose.append(follower)
        if not pairs:
            return
        self._patience.call(
            whose,
            lambda index: pairs[index][0].consume_token(pairs[index][1]),
            lambda those: self._masking.consume_token_par([pairs[index] for index in those]),
        )
        for follower, (matcher, _) in zip(whose, pairs, strict=True):
            if not follower.failure and matcher.is_error():
                follower.fail(matcher.get_error())
