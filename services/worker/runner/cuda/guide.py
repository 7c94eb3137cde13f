"""Masks of rows with grammars, which the host writes while it is several steps ahead of the device."""

import numpy as np
import torch

from services.common.plan.types import Plan
from services.worker.runner.cuda.ring import Place
from services.worker.sampling.grammar_state import GrammarState
from services.worker.sampling.grammars import SlotGrammars
from services.worker.step.output import Failure


class Guide:
    """A writer of the masks of rows with grammars.

    A mask depends on the previous token. So a step with such rows is launched up to its sampling. Then the host waits
    for the last tokens of these rows, and writes the masks while the device computes. Owned by the compute thread.

    Only the reporting rank has a guide. The devices of the other ranks of its stage wait for its masks, and their hosts
    do not. The guide waits only for earlier steps, which those hosts launch without waiting for it. So ranks cannot
    deadlock.
    """

    def __init__(self, grammars: SlotGrammars, masks: torch.Tensor) -> None:
        """``masks [max_slots, words]`` int32, pinned: the sampler reads a step's masks from it."""
        self._grammars, self._masks = grammars, masks.numpy()
        self._sent = torch.cuda.Event()  # the device has read the masks
        self._clear_owed()

    def _clear_owed(self) -> None:
        # Tokens that are not read yet: the place of each step, with the states and the rows of its results.
        self._owed: dict[Place, list[tuple[GrammarState, int]]] = {}
        self._owing: dict[GrammarState, Place] = {}

    def apply(self, plan: Plan) -> None:
        """Apply releases and admissions of ``plan``."""
        self._grammars.apply(plan)

    def clear(self) -> None:
        """Free all slots."""
        self._grammars.clear()
        self._clear_owed()

    def close(self) -> None:
        """End the threads."""
        self._grammars.close()

    def write(self, slots: np.ndarray) -> dict[int, Failure]:
        """Write the masks of ``slots [n]``, which have grammars. Return the failures by slot."""
        states = self._grammars.states(slots)
        for state in states:
            if state in self._owing:
                self.catch_up(self._owing[state])
        self._sent.synchronize()
        self._grammars.fill(states, self._masks[: len(slots)])
        return self._grammars.failures(slots)

    def sent(self) -> None:
        """Record that the launches that read the masks were made."""
        self._sent.record()

    def expect(self, place: Place, slots: np.ndarray, rows: np.ndarray) -> None:
        """Expect the tokens of ``slots [n]`` at ``rows [n]`` of the results of ``place``."""
        owed = list(zip(self._grammars.states(slots), rows.tolist(), strict=True))
        self._owed[place] = owed
        self._owing |= {state: place for state, _ in owed}

    def catch_up(self, place: Place) -> None:
        """Wait for the expected tokens of ``place``, and read them. Then the place may be used again."""
        if (owed := self._owed.pop(place, None)) is None:
            return
        place.wait()
        self._grammars.advance([(state, int(place.tokens[row])) for state, row in owed])
        for state, _ in owed:
            del self._owing[state]


class NoGuide:
    """A substitute for ``Guide`` if sequences have no grammars, or on a rank that does not report."""

    def apply(self, plan: Plan) -> None: ...

    def clear(self) -> None: ...

    def close(self) -> None: ...

    def write(self, slots: np.ndarray) -> dict[int, Failure]:
        return {}

    def sent(self) -> None: ...

    def expect(self, place: Place, slots: np.ndarray, rows: np.ndarray) -> None: ...

    def catch_up(self, place: Place) -> None: ...
