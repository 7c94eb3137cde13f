"""Keeps rows to their grammars where the host is steps ahead of the device."""

import numpy as np
import torch

from services.worker.runner.cuda.ring import Place
from services.worker.sampling.follower import Follower
from services.worker.sampling.grammars import SlotGrammars
from services.worker.step.plan import Failure, Plan


class Guide:
    """A mask needs the token before it. So a step of which some rows have grammars is launched up to where it samples;
    then the host waits until those rows' last tokens have come, and writes masks while the device computes.

    Owned by the compute thread. What it waits for was launched before, by all ranks in the same order, so that no waits
    go round in a circle.
    """

    def __init__(self, grammars: SlotGrammars, masks: torch.Tensor) -> None:
        """``masks [max_slots, words]`` int32, pinned: where the sampler finds those of a step."""
        self._grammars, self._masks = grammars, masks.numpy()
        self._sent = torch.cuda.Event()  # the device has read them
        self._clear_owed()

    def _clear_owed(self) -> None:
        # Results that were not looked at: whose they are, and where among the tokens of their place.
        self._owed: dict[Place, list[tuple[Follower, int]]] = {}
        self._owing: dict[Follower, Place] = {}

    def apply(self, plan: Plan) -> None:
        """Slots are released and taken."""
        self._grammars.apply(plan)

    def clear(self) -> None:
        """Free all slots."""
        self._grammars.clear()
        self._clear_owed()

    def close(self) -> None:
        """Let the threads end."""
        self._grammars.close()

    def write(self, slots: np.ndarray) -> dict[int, Failure]:
        """The masks of ``slots [n]``, all of which have a grammar. Returns why those fail that fail."""
        followers = self._grammars.followers(slots)
        for follower in followers:
            if follower in self._owing:
                self.catch_up(self._owing[follower])
        self._sent.synchronize()
        self._grammars.fill(followers, self._masks[: len(slots)])
        return self._grammars.failures(slots)

    def sent(self) -> None:
        """What reads the masks is launched."""
        self._sent.record()

    def expect(self, place: Place, slots: np.ndarray, rows: np.ndarray) -> None:
        """The tokens of ``slots [n]`` will be at ``rows [n]`` of the results of ``place``."""
        owed = list(zip(self._grammars.followers(slots), rows.tolist(), strict=True))
        self._owed[place] = owed
        self._owing |= {follower: place for follower, _ in owed}

    def catch_up(self, place: Place) -> None:
        """Wait for what is owed of ``place``, which may be used again then."""
        if (owed := self._owed.pop(place, None)) is None:
            return
        place.wait()
        self._grammars.advance([(follower, int(place.tokens[row])) for follower, row in owed])
        for follower, _ in owed:
            del self._owing[follower]
