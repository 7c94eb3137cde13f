"""The stop strings of a request as one automaton over bytes (Aho and Corasick 1975)."""

from collections import deque
from collections.abc import Sequence

import numpy as np


class Automaton:
    """Automaton of a set of stop strings, immutable and shared by all requests with these strings.

    Local state 0 is the start. All bytes that occur in no string are one class. ``transitions`` is int32
    ``[states, classes]``. ``classes`` is the class of each byte, uint16 ``[256]``. ``accepts`` is bool ``[states]``.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        self.patterns = [string.encode() for string in strings]
        alphabet = sorted(set(b"".join(self.patterns)))
        self.classes = np.zeros(256, np.uint16)
        self.classes[alphabet] = np.arange(1, len(alphabet) + 1)
        children, endings = self._trie()
        self._link(children, endings, len(alphabet) + 1)

    @property
    def size(self) -> int:
        """The number of states."""
        return len(self.accepts)

    @property
    def nbytes(self) -> int:
        """The size of the transitions."""
        return self.transitions.nbytes

    def run(self, state: int, data: bytes) -> int:
        """Return the state after ``data``, which may contain matches."""
        for byte in data:
            state = int(self.transitions[state, self.classes[byte]])
        return state

    def first_match(self, state: int, data: bytes) -> tuple[int, int] | None:
        """Return ``(index, trailing)`` of the first string that ends inside ``data``, or None.

        If several end at the same byte, the longest is returned. ``trailing`` is the number of bytes from the start of
        the string, which may be in an earlier token, to the end of ``data``.
        """
        for position, byte in enumerate(data):
            state = int(self.transitions[state, self.classes[byte]])
            if self.accepts[state]:
                index = self._longest[state]
                return index, len(self.patterns[index]) + len(data) - position - 1
        return None

    def _trie(self) -> tuple[list[dict[int, int]], list[int]]:
        children: list[dict[int, int]] = [{}]
        endings = [-1]
        for index, pattern in enumerate(self.patterns):
            state = 0
            for byte in pattern:
                if byte not in children[state]:
                    children[state][byte] = len(children)
                    children.append({})
                    endings.append(-1)
                state = children[state][byte]
            if endings[state] < 0:
                endings[state] = index
        return children, endings

    def _link(self, children: list[dict[int, int]], endings: list[int], width: int) -> None:
        """Complete the trie to transitions, breadth first.

        A state without a child for a byte has the transition of its longest proper suffix that is a state.
        """
        self.transitions = np.zeros((len(children), width), np.int32)
        self.accepts = np.zeros(len(children), bool)
        self._longest = endings
        suffix = [0] * len(children)
        order = deque([0])
        while order:
            state = order.popleft()
            if state:
                self.transitions[state] = self.transitions[suffix[state]]
                if endings[state] < 0:
                    endings[state] = endings[suffix[state]]
            self.accepts[state] = endings[state] >= 0
            for byte, child in children[state].items():
                column = self.classes[byte]
                suffix[child] = int(self.transitions[state, column]) if state else 0
                self.transitions[state, column] = child
                order.append(child)
