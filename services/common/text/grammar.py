"""Grammars that an answer matches, by llguidance: the scheduler proves that they compile, the worker follows them.

A grammar is text in llguidance's own forms: its Lark dialect, or JSON that holds a JSON Schema or a regular expression.
"""

from collections.abc import Iterable
from functools import cached_property

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from services.common.errors import InvalidRequest
from services.common.text.tokenizer import Tokenizer

# Work that a grammar may make, in the library's units: some 100 ms when it is compiled, some 10 ms a token. Some work
# it does not count, such as that of long chains of terminals: so schedulers measure what a grammar takes (their
# grammar/child.py), and workers wait for none of them for long.
LIMITS = LLParserLimits(
    initial_lexer_fuel=2_000_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


class Grammars:
    """Of one tokenizer. Safe to share between threads; a matcher belongs to one sequence and one thread at a time."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Iterable[int]) -> None:
        """Raises ``InvalidRequest`` where no token ends a sequence: an answer could not end where its grammar does."""
        ends = sorted(set(eos_token_ids))
        if not ends:
            raise InvalidRequest("the model names no end-of-sequence token, without which no grammar can end")
        self.ends = frozenset(ends)  # a sequence that matches may have one of these next, and nothing behind it
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Tokens(tokenizer, ends)), eos_token=ends)

    @property
    def vocab_size(self) -> int:
        """Tokens that a mask speaks of."""
        return self._tokenizer.vocab_size

    def matcher(self, grammar: str) -> LLMatcher:
        """At its start. Raises ``InvalidRequest`` with the library's reason. Lets other threads run meanwhile."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise InvalidRequest(matcher.get_error())
        return matcher


class _Tokens:
    """A tokenizer as the library asks for it."""

    def __init__(self, tokenizer: Tokenizer, ends: list[int]) -> None:
        vocabulary = tokenizer.vocabulary
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = ends[0], None
        # Marks such as <tool_call> are special to some tokenizers and text to us.
        marks = {token for token in vocabulary.special_ids if vocabulary.token_bytes[token]}
        # What ends a sequence is no text here, though it may have some: an answer would end in the middle.
        self.special_token_ids = sorted((vocabulary.special_ids - marks).union(ends))
        self.tokens = vocabulary.with_specials.token_bytes

    def __call__(self, text: bytes) -> list[int]:
        """How a text that is forced is cut into tokens: as the model has learnt it."""
        ids = self._tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False)
        return ids if self._tokenizer.vocabulary.text_bytes(ids) == text else self._longest_first(text)

    def _longest_first(self, text: bytes) -> list[int]:
        """Where the tokenizer adds or changes something, as some do with spaces."""
        ids = []
        while text:
            length = next(size for size in range(min(self._longest, len(text)), 0, -1) if text[:size] in self._ids)
            ids.append(self._ids[text[:length]])
            text = text[length:]
        return ids

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {piece: token for token, piece in enumerate(self.tokens) if piece and token not in special}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids))
