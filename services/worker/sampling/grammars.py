"""Grammar states of all slots, and masks of the tokens that each may sample next."""

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import structlog
from llguidance import LLExecutor, LLMatcher

from services.common.errors import InvalidRequest
from services.common.model.files import ModelCard
from services.common.plan.types import Plan
from services.common.text.grammar import Grammars
from services.common.text.tokenizer import Tokenizer
from services.worker.sampling.grammar_state import GrammarState
from services.worker.sampling.grammar_timeouts import call_timed, compile_deadline
from services.worker.sampling.matchers import Matchers
from services.worker.step.output import Failure

# Computing a mask of a large vocabulary takes 10 us to 1 ms, and consuming a token 20 us.
_MOST_THREADS = 16

log = structlog.get_logger(__name__)


def load_grammars(tokenizer: str, card: ModelCard) -> Grammars | None:
    """Return the grammar compiler for the model of ``card``. ``tokenizer`` is a directory or a hub id.

    If the tokenizer does not support grammars, log a warning and return None.
    """
    try:
        return Grammars(Tokenizer.load(tokenizer), card.eos_token_ids)
    except InvalidRequest as error:
        log.warning("no grammars", model=card.name, reason=str(error))
        return None


class RowMasks(NamedTuple):
    """Tokens that the rows with a grammar may draw."""

    rows: np.ndarray  # [n] int64, ascending
    bits: (
        np.ndarray
    )  # [n, words] int32: bit i of word w allows token 32 w + i; tokens beyond the last word are not allowed

    def within(self, start: int, stop: int) -> "RowMasks | None":
        """Return the masks of rows ``start`` to ``stop``, with rows counted from ``start``; None if there are none."""
        first, last = np.searchsorted(self.rows, (start, stop))
        return RowMasks(self.rows[first:last] - start, self.bits[first:last]) if first < last else None

    def allowed(self, vocab_size: int) -> np.ndarray:
        """Return the masks as ``[n, vocab_size]`` bool, true for allowed tokens."""
        bits = np.ascontiguousarray(self.bits).view(np.uint8)
        return np.unpackbits(bits, axis=1, count=vocab_size, bitorder="little").view(bool)


class SlotGrammars:
    """Grammar states of all slots.

    Only the reporting rank of a replica has them, because time limits depend on its clock. The other ranks of its stage
    receive its masks. Owned by the compute thread. Several threads may call ``masks`` and ``fill`` concurrently for
    different slots.
    """

    def __init__(self, grammars: Grammars, vocab_size: int) -> None:
        """``vocab_size`` is the model's, which may differ from the tokenizer's."""
        self._grammars, self._vocab_size = grammars, vocab_size
        self.words = -(-grammars.vocab_size // 32)
        self._states: dict[int, GrammarState] = {}
        self._matchers = Matchers(grammars)
        self._executor = LLExecutor(max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // 2)))

    def apply(self, plan: Plan) -> None:
        """Apply the releases and admissions of ``plan``."""
        self._release(plan.releases.tolist())
        for admission in plan.admissions:
            if grammar := admission.sampling.grammar:
                known = admission.token_ids
                generated = known[admission.prompt_tokens or len(known) :].tolist()
                self._states[admission.slot] = GrammarState(self._matchers.make(grammar, generated))

    def clear(self) -> None:
        """Free all slots."""
        self._release(list(self._states))

    def _release(self, slots: list[int]) -> None:
        for slot in slots:
            if (state := self._states.pop(slot, None)) is not None:
                state.release()

    def close(self) -> None:
        """Free all slots and stop the threads."""
        self.clear()
        self._matchers.close()

    def states(self, slots: np.ndarray) -> list[GrammarState]:
        """Return the states of ``slots [n]``, all of which have a grammar."""
        return [self._states[slot] for slot in slots.tolist()]

    def failures(self, slots: np.ndarray) -> dict[int, Failure]:
        """Return the failures of ``slots [n]``, by slot. A slot without a failure is absent."""
        states = ((slot, self._states.get(slot)) for slot in slots.tolist())
        return {slot: state.failure for slot, state in states if state is not None and state.failure}

    def masks(self, slots: np.ndarray) -> np.ndarray:
        """Return the masks of ``slots [n]``, all of which have a grammar, ``[n, words]`` int32 as in ``RowMasks``."""
        bits = np.empty((len(slots), self.words), np.int32)
        self.fill(self.states(slots), bits)
        return bits

    def fill(self, states: Sequence[GrammarState], bits: np.ndarray) -> None:
        """Write the mask of each state to its row of ``bits [n, words]`` int32, contiguous.

        The mask of a sequence that has ended allows all tokens. That of a sequence that has failed, or that fails here,
        allows only token 0, so that all ranks continue with the same token.
        """
        deadline = compile_deadline()
        found = ((each.matcher(deadline), row) for row, each in enumerate(states))
        matchers = [(matcher, row) for matcher, row in found if matcher is not None]
        if len(matchers) < len(states):
            bits[:] = -1
        if matchers:
            self._compute(matchers, states, bits)
        for row, state in enumerate(states):
            if state.failure:
                bits[row], bits[row, 0] = 0, 1

    def _compute(self, matchers: list[tuple[LLMatcher, int]], states: Sequence[GrammarState], bits: np.ndarray) -> None:
        """Write the mask of each of ``matchers`` to its row of ``bits``."""
        start, size = bits.ctypes.data, bits.strides[0]
        call_timed(
            [states[row] for _, row in matchers],
            lambda index: matchers[index][0].unsafe_compute_mask_ptr(start + matchers[index][1] * size, size),
            lambda indices: self._executor.unsafe_compute_mask_ptr(
                [matchers[i] for i in indices], start, size, len(bits)
            ),
        )
        if self._grammars.vocab_size > self._vocab_size:
            bits[:, -(-self._vocab_size // 32) :] = 0
            if rest := self._vocab_size % 32:
                bits[:, self._vocab_size // 32] &= (1 << rest) - 1
        allows_any = bits.view(np.uint32).max(axis=1)
        for matcher, row in matchers:
            state = states[row]
            if not state.failure:  # a timeout may have set it
                if matcher.is_error():
                    state.fail(matcher.get_error())
                elif not allows_any[row]:
                    state.fail("no token of this model may come next")

    def consume(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Advance the grammars of ``slots [n]`` by the sampled ``tokens [n]``. Slots without a grammar are skipped.

        A token below 0 means that no token was sampled because logits were not finite.
        """
        pairs = zip(slots.tolist(), tokens.tolist(), strict=True)
        self.advance([(self._states[slot], token) for slot, token in pairs if slot in self._states])

    def advance(self, tokens: Iterable[tuple[GrammarState, int]]) -> None:
        """Advance each state by its token, as ``consume`` does."""
        pairs, states, deadline = [], [], compile_deadline()
        for state, token in tokens:
            if (matcher := state.matcher(deadline)) is None:
                continue
            if token < 0 or token in self._grammars.ends:
                state.release()
                continue
            pairs.append((matcher, token))
            states.append(state)
        if not pairs:
            return
        call_timed(
            states,
            lambda index: pairs[index][0].consume_token(pairs[index][1]),
            lambda indices: self._executor.consume_token_par([pairs[index] for index in indices]),
        )
        for state, (matcher, _) in zip(states, pairs, strict=True):
            if not state.failure and matcher.is_error():
                state.fail(matcher.get_error())
