"""Runs the stop automata of all sequences of a step together, token by token, without detokenising.

A token moves an automaton by all its bytes. The matcher does this byte by byte, vectorised over the sequences. A state
that occurs often gets a row, ``token -> state``, so that most steps are a single gather. Rows are built only for
frequent states and within a fixed amount of memory, so neither a vocabulary of 128k tokens nor a stop string of 4 KB
can make the tables large.
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from services.common.errors import Overloaded
from services.scheduler.core.stopping.arena import Arena
from services.scheduler.core.stopping.automaton import Automaton

_ROWS_BYTES = 64 * 1024 * 1024
_TABLE_CELLS = 64 * 1024 * 1024  # of all automata in use, 4 bytes each
_UNUSED_CELLS = 4 * 1024 * 1024  # of automata kept for the next request with the same strings
_MOST_UNUSED = 256  # unused automata; each takes some KB beside its cells


class StopMatcher:
    """Tables of all automata in use, with global state numbers so that one gather serves all sequences.

    ``states`` in the interface are int32 ``[rows]`` with global numbers. Owned by the core.
    """

    def __init__(self, token_bytes: Sequence[bytes], vocab_size: int, *, row_misses: int | None = None) -> None:
        padded = [*token_bytes[:vocab_size], *([b""] * (vocab_size - len(token_bytes)))]
        self._token_bytes = padded
        self._lengths = np.array([len(data) for data in padded], np.int64)
        self._offsets = np.concatenate(([0], np.cumsum(self._lengths)))
        self._blob = np.frombuffer(b"".join(padded) or b"\0", np.uint8)
        self._vocab_size = vocab_size
        self._bases: dict[Automaton, int] = {}  # installed automata
        self._unused: OrderedDict[Automaton, None] = OrderedDict()  # without users, least recently used first
        self._users: dict[Automaton, int] = {}
        self._state_arena, self._cell_arena, self._owner_arena = Arena(), Arena(), Arena()
        self._unused_cells = 0
        # Columns by state.
        self._starts = np.zeros(0, np.int64)  # of its transitions in ``_cells``
        self._owners = np.zeros(0, np.int32)  # row in ``_classes``
        self._accepts = np.zeros(0, bool)
        self._row_of = np.zeros(0, np.int32)  # row in ``_rows``; -1 = none
        self._misses = np.zeros(0, np.int64)
        self._cells = np.zeros(0, np.int32)
        self._classes = np.zeros((0, 256), np.uint16)
        self._most_rows = max(1, _ROWS_BYTES // (4 * max(1, vocab_size)))
        self._rows = np.zeros((0, vocab_size), np.int32)
        self._free_rows: list[int] = []
        # Building a row takes about the time of moving this number of sequences byte by byte.
        self._row_misses = max(64, vocab_size // 4) if row_misses is None else row_misses

    def acquire(self, automaton: Automaton) -> int:
        """Install ``automaton`` for one more user, if it is not installed. Return its global start state.

        Raises ``Overloaded`` if the stop strings in use fill the tables.
        """
        if automaton in self._bases:
            if self._users[automaton] == 0:
                del self._unused[automaton]
                self._unused_cells -= automaton.transitions.size
            self._users[automaton] += 1
            return self._bases[automaton]
        if self._cell_arena.used + automaton.transitions.size > _TABLE_CELLS:
            self._drop_unused(0)
            if self._cell_arena.used + automaton.transitions.size > _TABLE_CELLS:
                raise Overloaded(
                    "the stop strings of running requests fill the stop tables; use shorter ones or retry later",
                    retry_after_s=5.0,
                )
        self._users[automaton] = 1
        self._bases[automaton] = self._install(automaton)
        return self._bases[automaton]

    def release(self, automaton: Automaton) -> None:
        """Remove one user of ``automaton``."""
        self._users[automaton] -= 1
        if self._users[automaton] == 0:
            self._unused[automaton] = None
            self._unused_cells += automaton.transitions.size
            self._drop_unused(_UNUSED_CELLS)

    @property
    def nbytes(self) -> int:
        """Size of the tables of transitions and of rows, in bytes."""
        return self._cells.nbytes + self._rows.nbytes

    @property
    def in_use(self) -> bool:
        """True if an automaton has users."""
        return len(self._bases) > len(self._unused)

    def base(self, automaton: Automaton) -> int:
        """Return the global number of local state 0."""
        return self._bases[automaton]

    def advance(self, states: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Move ``states`` by ``tokens``. Return the new states, and whether a stop string ended: bool ``[rows]``.

        The state of a row with a match is that at the end of the first match, not at the end of the token.
        """
        row_of = self._row_of[states]
        moved = np.empty_like(states)
        fast = row_of >= 0
        if fast.all():
            moved = self._rows[row_of, tokens]
        else:
            moved[fast] = self._rows[row_of[fast], tokens[fast]]
            slow = ~fast
            moved[slow] = self._walk(states[slow], tokens[slow])
            self._consider_row(states[slow])
        return moved, self._accepts[moved] & (self._lengths[tokens] > 0)

    def first_match(self, automaton: Automaton, state: int, token: int) -> tuple[int, int]:
        """Return ``(index, trailing bytes)`` for a row in ``state`` that matched on ``token``."""
        match = automaton.first_match(state - self._bases[automaton], self._token_bytes[token])
        assert match is not None
        return match

    def pass_over(self, automaton: Automaton, state: int, token: int) -> int:
        """Return the state after ``token``, which may contain matches."""
        return self._bases[automaton] + automaton.run(state - self._bases[automaton], self._token_bytes[token])

    def _walk(self, states: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return ``states`` moved by ``tokens`` byte by byte. A row stops at its first match."""
        states = states.copy()
        at, ends = self._offsets[tokens], self._offsets[tokens + 1]
        rows = np.flatnonzero(at < ends)
        while len(rows):
            state = states[rows]
            column = self._classes[self._owners[state], self._blob[at[rows]]]
            state = self._cells[self._starts[state] + column]
            states[rows] = state
            at[rows] += 1
            rows = rows[(at[rows] < ends[rows]) & ~self._accepts[state]]
        return states

    def _consider_row(self, states: np.ndarray) -> None:
        """Build a row for the most missed state of the step, if it was missed often enough and a row is free."""
        np.add.at(self._misses, states, 1)
        state = states[np.argmax(self._misses[states])]
        if self._misses[state] < self._row_misses:
            return
        self._misses[state] = 0
        if not self._free_rows:
            if len(self._rows) == self._most_rows:
                return
            grown = min(self._most_rows, max(4, 2 * len(self._rows)))
            self._free_rows = list(range(len(self._rows), grown))
            self._rows = np.concatenate((self._rows, np.zeros((grown - len(self._rows), self._vocab_size), np.int32)))
        row = self._free_rows.pop()
        tokens = np.arange(self._vocab_size)
        self._rows[row] = self._walk(np.full(self._vocab_size, state, np.int32), tokens)
        self._row_of[state] = row

    def _install(self, automaton: Automaton) -> int:
        base = self._state_arena.take(automaton.size)
        cell = self._cell_arena.take(automaton.transitions.size)
        owner = self._owner_arena.take(1)
        for name, size in (("_starts", self._state_arena.size), ("_owners", self._state_arena.size),
                           ("_accepts", self._state_arena.size), ("_row_of", self._state_arena.size),
                           ("_misses", self._state_arena.size), ("_cells", self._cell_arena.size),
                           ("_classes", self._owner_arena.size)):  # fmt: skip
            setattr(self, name, _grown(getattr(self, name), size))
        states = slice(base, base + automaton.size)
        width = automaton.transitions.shape[1]
        self._starts[states] = cell + np.arange(automaton.size) * width
        self._owners[states] = owner
        self._accepts[states] = automaton.accepts
        self._row_of[states] = -1
        self._misses[states] = 0
        self._cells[cell : cell + automaton.transitions.size] = automaton.transitions.ravel() + base
        self._classes[owner] = automaton.classes
        return base

    def _drop_unused(self, keep_cells: int) -> None:
        while self._unused and (self._unused_cells > keep_cells or len(self._unused) > _MOST_UNUSED):
            automaton, _ = self._unused.popitem(last=False)
            base = self._bases.pop(automaton)
            del self._users[automaton]
            rows = self._row_of[base : base + automaton.size]
            self._free_rows.extend(rows[rows >= 0].tolist())
            self._owner_arena.give(int(self._owners[base]), 1)
            self._cell_arena.give(int(self._starts[base]), automaton.transitions.size)
            self._state_arena.give(base, automaton.size)
            self._unused_cells -= automaton.transitions.size


def _grown(array: np.ndarray, size: int) -> np.ndarray:
    if len(array) >= size:
        return array
    larger = np.zeros((max(size, 2 * len(array)), *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger
