"""Number of tokens of each expert, for metrics."""

import numpy as np
import torch

from services.worker.models.base import RankModel
from services.worker.models.experts import Experts


class ExpertLoad:
    """Reads the counts that the layers of a model with experts keep on its device. Any thread may use it.

    All ranks of a stage compute the routes of all tokens, so they have the same counts.
    """

    def __init__(self, model: RankModel) -> None:
        """Reset the counts. The model must have experts, and must not run during the call."""
        self._loads = [module.load for module in model.modules() if isinstance(module, Experts)]
        for load in self._loads:
            load.zero_()
        # With a separate stream, a reader does not wait for steps, and steps do not wait for a reader.
        self._stream = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None

    @staticmethod
    def of(model: RankModel) -> "ExpertLoad | None":
        """Return the load of ``model``, or None if it has no ``Experts``."""
        return ExpertLoad(model) if any(isinstance(module, Experts) for module in model.modules()) else None

    def read(self) -> np.ndarray:
        """Return the tokens of each expert in each layer that has experts, ``[layers, experts]`` int64."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            return torch.stack(self._loads).cpu().numpy()


def imbalance(counts: np.ndarray) -> float:
    """Return the tokens of a layer's busiest expert divided by the mean of its experts, as a mean over layers.

    ``counts`` are from ``ExpertLoad.read``. 1 means that all experts of a layer have the same number of tokens. The
    result is 1 before the first token.
    """
    means = counts.mean(axis=1)
    return float(np.where(means > 0, counts.max(axis=1) / np.maximum(means, 1e-9), 1.0).mean())
