"""How the fake follows grammars: the token that its hash chose, or the nearest one that may come."""

from functools import cache, lru_cache

import numpy as np
from llguidance import LLMatcher

from services.common.errors import InvalidRequest
from services.common.model.files import read_card
from services.common.text.grammar import Grammars
from services.common.text.tokenizer import Tokenizer
from tokasaurus.worker.v1 import plan_pb2


@cache
def builtin_grammars() -> Grammars:
    """Of the built-in model's tokenizer, which the fake's sizes suit."""
    return Grammars(Tokenizer.load("builtin"), read_card("builtin").eos_token_ids)


@lru_cache(maxsize=32)
def _start(grammar: str) -> LLMatcher:
    """Compiled once for all of its sequences, as the worker does."""
    return builtin_grammars().matcher(grammar)


class FollowedGrammars:
    """Of the slots of one fake. None = the sequence has ended, and any token may come."""

    def __init__(self) -> None:
        self._matchers: dict[int, LLMatcher | None] = {}
        self.failures: dict[int, str] = {}  # slots whose grammar cannot be followed
        self.forbidden: set[int] = set()  # those of them that it does not allow what was generated before

    def admit(self, admission: plan_pb2.Admission) -> None:
        slot, known = admission.slot, list(admission.token_ids)
        self._matchers.pop(slot, None)
        self.failures.pop(slot, None)
        self.forbidden.discard(slot)
        if not admission.sampling.grammar:
            return
        try:
            self._matchers[slot] = _start(admission.sampling.grammar).deep_copy()
        except InvalidRequest as error:
            self.failures[slot] = str(error)
        for token in known[admission.prompt_tokens or len(known) :]:
            self._consume(slot, token)
        if slot in self._matchers and slot in self.failures:
            self.forbidden.add(slot)

    def follow(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Replace what may not come among ``tokens [n]``, and go on with what is there then."""
        for row, slot in enumerate(slots.tolist()):
            if (matcher := self._matchers.get(slot)) is None:
                continue
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[: builtin_grammars().vocab_size])
            tokens[row] = allowed[np.abs(allowed - int(tokens[row])).argmin()]
            self._consume(slot, int(tokens[row]))

    def _consume(self, slot: int, token: int) -> None:
        if (matcher := self._matchers.get(slot)) is None:
            return
        if token in builtin_grammars().ends:
            self._matchers[slot] = None
        elif not matcher.consume_token(token):
            self.failures[slot] = matcher.get_error()
            self._matchers[slot] = None
