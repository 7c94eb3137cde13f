"""The experts of the fake worker's tokens: a function of the token and its position."""

from collections.abc import Sequence

import numpy as np

from services.common.packed import fill
from tokasaurus.worker.v1 import plan_pb2

LAYERS, PER_TOKEN = 2, 2
LAYOUT = {"layers": LAYERS, "experts_per_token": PER_TOKEN, "bytes_per_expert": 1}


def fake_experts(tokens: Sequence[int], start: int = 0) -> np.ndarray:
    """Return the experts of ``tokens`` from position ``start`` on, ``[tokens, layers, experts per token]`` uint8."""
    first = 3 * np.asarray(tokens, np.int64) + np.arange(len(tokens))
    columns = first[:, None] + np.arange(LAYERS * PER_TOKEN)
    return (columns % 251).astype(np.uint8).reshape(-1, LAYERS, PER_TOKEN)[start:]


class FollowedExperts:
    """The tokens of the slots that ask for experts."""

    def __init__(self) -> None:
        self._tokens: dict[int, list[int]] = {}
        self._starts: dict[int, int] = {}  # position of the next token to send

    def admit(self, admission: plan_pb2.Admission) -> None:
        self._starts.pop(admission.slot, None)
        if admission.HasField("routed_experts_start"):
            self._tokens[admission.slot] = list(admission.token_ids)
            self._starts[admission.slot] = admission.routed_experts_start

    def send(self, result: plan_pb2.StepResult, slots: np.ndarray, computed: np.ndarray) -> None:
        """Add the experts of the batch ``slots`` to ``result``. ``computed [max_slots]``: tokens after the step."""
        found = []
        for slot in slots.tolist():
            start, end = self._starts.get(slot), int(computed[slot])
            if start is not None and start < end:
                found.append((slot, start, end - start, fake_experts(self._tokens[slot][:end], start)))
                self._starts[slot] = end
        if found:
            for name, column in zip(("slots", "starts", "token_counts"), zip(*found, strict=False), strict=False):
                fill(result.routed_experts, name, np.array(column))
            result.routed_experts.experts = b"".join(experts.tobytes() for *_, experts in found)

    def sampled(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True) if self._starts else ():
            if slot in self._starts:
                self._tokens[slot].append(token)
