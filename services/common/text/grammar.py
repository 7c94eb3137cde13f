"""Grammars of answers, by llguidance. The scheduler checks that they compile, the worker applies them.

A grammar is text in llguidance's own forms: its Lark dialect, or JSON that contains a JSON Schema or a regular
expression.
"""

from collections.abc import Iterable
from functools import cached_property

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from services.common.errors import InvalidRequest
from services.common.text.tokenizer import Tokenizer

# Limits in the library's units: about 100 ms for compilation and 10 ms for a token. They do not count all work, such as
# that of long chains of terminals. So schedulers also measure the time of a grammar (grammar/child.py), and workers
# limit the time that they wait for one.
LIMITS = LLParserLimits(
    initial_lexer_fuel=2_000_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


class Grammars:
    """Compiler of grammars for one tokenizer. Thread-safe, but a matcher belongs to one sequence and one thread."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Iterable[int]) -> None:
        """Create a compiler. Raises ``InvalidRequest`` without an EOS token, since an answer could not end."""
        ends = sorted(set(eos_token_ids))
        if not ends:
            raise InvalidRequest(
                "the model names no end-of-sequence token, without which an answer with a grammar cannot end"
            )
        self.ends = frozenset(ends)  # tokens that may end a sequence that matches
        self._tokenizer = LLTokenizer(TokenizerWrapper(_Tokens(tokenizer, ends)), eos_token=ends)

    @property
    def vocab_size(self) -> int:
        """The number of tokens in a mask."""
        return self._tokenizer.vocab_size

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher in its initial state.

        Raises ``InvalidRequest`` with the library's reason. Releases the GIL.
        """
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise InvalidRequest(matcher.get_error())
        return matcher


class _Tokens:
    """Adapter of a tokenizer to the library's interface."""

    def __init__(self, tokenizer: Tokenizer, ends: list[int]) -> None:
        vocabulary = tokenizer.vocabulary
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = ends[0], None
        # Some tokenizers declare marks such as <tool_call> special, but here they are text.
        marks = {token for token in vocabulary.special_ids if vocabulary.token_bytes[token]}
        # A token that ends a sequence has no text here, or an answer could end in the middle.
        self.special_token_ids = sorted((vocabulary.special_ids - marks).union(ends))
        self.tokens = vocabulary.with_specials.token_bytes

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of a forced ``text`` as the tokenizer encodes it, because the model has learnt these."""
        ids = self._tokenizer.encode(text.decode(errors="replace"), add_special_tokens=False)
        return ids if self._tokenizer.vocabulary.text_bytes(ids) == text else self._longest_first(text)

    def _longest_first(self, text: bytes) -> list[int]:
        """Encode ``text`` greedily, for tokenizers that add or change characters, such as spaces."""
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
