"""Experts of tokens as a runner returns them, and as transformers chooses them."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from services.common.plan.types import Admission
from services.worker.step.output import StepOutput
from tests.worker.driver import admission


def asking(slot: int, token_ids: Iterable[int], pages: Iterable[int], start: int = 0, **parts: Any) -> Admission:
    """Return an admission that asks for the experts of tokens from ``start`` on."""
    return replace(admission(slot, token_ids, pages, **parts), routed_start=start)


def expected_experts(model: torch.nn.Module, token_ids: list[int]) -> np.ndarray:
    """Return the experts that ``model`` chooses for each token, ``[tokens, layers, chosen]`` int64."""
    with torch.inference_mode():
        routers = model(torch.tensor([token_ids]), output_router_logits=True).router_logits
    chosen = [logits.topk(model.config.num_experts_per_tok).indices for logits in routers]
    return torch.stack(chosen, 1).numpy()


class Received:
    """Collects the experts that results carry, by slot."""

    def __init__(self, layers: int, chosen: int) -> None:
        self._shape = -1, layers, chosen
        self._pieces: dict[int, list[tuple[int, np.ndarray]]] = {}

    def take(self, output: StepOutput) -> StepOutput:
        for slot, start, experts in [] if output.routed is None else output.routed.pieces():
            self._pieces.setdefault(slot, []).append((start, experts.reshape(self._shape)))
        return output

    def of(self, slot: int, start: int = 0) -> np.ndarray:
        """Return the experts of ``slot``, which came without gaps from ``start`` on, and forget them."""
        pieces = self._pieces.pop(slot)
        for begin, experts in pieces:
            assert begin == start
            start += len(experts)
        return np.concatenate([experts for _, experts in pieces])

    def __contains__(self, slot: int) -> bool:
        return slot in self._pieces
