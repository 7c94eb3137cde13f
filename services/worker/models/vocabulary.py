"""Both ends of the decoder: token ids to hidden states, and hidden states to logits."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from services.worker.described.config import ModelConfig
from services.worker.described.ranks import Ranks
from services.worker.described.shares import vocabulary_of
from services.worker.layers.fp8 import Copies, Quantized
from services.worker.layers.linear import AnyLinear, LinearMaker
from services.worker.parallel.exchange import TENSOR_RANKS

_EMBEDDING, _HEAD, _PADDING = "model.embed_tokens", "lm_head", "padding"


class Vocabulary(nn.Module):
    """A rank's rows of the embedding and of the head; of several ranks the last ones may have rows behind the
    vocabulary, of zeros, whose logits nobody sees."""

    def __init__(
        self, config: ModelConfig, ranks: Ranks, linear: LinearMaker, quantizes: bool, *, looks_up: bool, heads: bool
    ) -> None:
        """``config``: of the whole model. ``looks_up``, ``heads``: what this stage does."""
        super().__init__()
        self._size, self._ranks, self._tied = config.vocab_size, ranks, config.tied_embeddings
        self._share, self._padding = vocabulary_of(config, ranks)
        # A quantised head is a copy of the embedding even where the two are one: rows are looked up as they are.
        separate = quantizes or not config.tied_embeddings
        self.embedding = self.head = None
        if looks_up or (heads and not separate):
            rows = self._share.size + self._padding
            self.embedding = nn.Parameter(torch.empty(rows, config.hidden_size), requires_grad=False)
        if heads and separate:
            outputs = config.vocab_size if ranks.tp_size == 1 else (self._share.size, self._padding)
            self.head = linear(config.hidden_size, outputs, False)

    def look_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``[tokens]`` -> ``[tokens, hidden_size]``; of several ranks, the sum of what they give is meant: one has the
        token, the others give zeros."""
        if self._ranks.tp_size == 1:
            return F.embedding(token_ids, self.embedding)  # type: ignore[arg-type]  # this stage looks up
        own = token_ids - self._share.start
        elsewhere = (own < 0) | (own >= self._share.size)
        found = F.embedding(own.masked_fill(elsewhere, 0), self.embedding)  # type: ignore[arg-type]  # as above
        return found.masked_fill(elsewhere.unsqueeze(1), 0)

    def project(self, hidden: torch.Tensor | Quantized) -> torch.Tensor:
        """``[rows, hidden_size]`` as the head takes them -> logits of the whole vocabulary, ``[rows, vocab_size]``."""
        logits: torch.Tensor = (
            F.linear(hidden, self.embedding)  # type: ignore[arg-type]  # it is there then, and takes rows as they are
            if self.head is None
            else self.head(hidden)
        )
        if self._ranks.tp_size == 1:
            return logits
        whole: torch.Tensor = torch.ops.tokasaurus.gather_columns(logits, self._ranks.tp_size, TENSOR_RANKS)
        return whole[:, : self._size]

    def targets(self) -> dict[str, Any]:
        """Checkpoint name -> this rank's rows."""
        found: dict[str, Any] = {}
        if self.embedding is not None:
            found[f"{_EMBEDDING}.weight"] = self.embedding[: self._share.size] if self._padding else self.embedding
        if self.head is None:
            return found
        head = self._head_targets(self.head)[f"{_HEAD}.weight"]
        if not self._tied:
            return found | {f"{_HEAD}.weight": head}
        return {f"{_EMBEDDING}.weight": Copies(*found.values(), head)}

    @torch.no_grad()
    def clear_padding(self) -> None:
        """Zeros where nothing is loaded."""
        if not self._padding:
            return
        if self.embedding is not None:
            self.embedding[self._share.size :].zero_()
        if self.head is not None:
            rest = self._head_targets(self.head)[f"{_PADDING}.weight"]
            rest.copy_(torch.zeros(rest.shape, device=rest.device))

    def _head_targets(self, head: AnyLinear) -> dict[str, Any]:
        return {**(head.targets(_HEAD) if self._ranks.tp_size == 1 else head.targets(_HEAD, _PADDING))}
