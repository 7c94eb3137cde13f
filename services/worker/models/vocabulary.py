"""Embedding and vocabulary head of the decoder."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from services.worker.described.config import ModelConfig
from services.worker.described.ranks import Ranks
from services.worker.described.shares import vocabulary_of
from services.worker.layers.fp8 import MultiTarget, Quantized
from services.worker.layers.kernels import LayerKernels
from services.worker.layers.linear import AnyLinear, LinearMaker
from services.worker.layers.panels import PanelLinear
from services.worker.parallel.exchange import TENSOR_RANKS

_EMBEDDING, _HEAD, _PADDING = "model.embed_tokens", "lm_head", "padding"


class VocabularyLayers(nn.Module):
    """A rank's rows of the embedding and of the head.

    With several ranks, the last ones may have padding rows of zeros, whose logits are dropped.
    """

    def __init__(
        self,
        config: ModelConfig,
        ranks: Ranks,
        kernels: LayerKernels,
        linear: LinearMaker,
        narrows: bool,
        panel_dtype: torch.dtype | None,
        *,
        has_embedding: bool,
        has_head: bool,
    ) -> None:
        """Create uninitialised weights for a stage. ``config`` describes the whole model.

        ``panel_dtype`` is the dtype of weights in panels, which need one rank; None means other weights. The embedding
        then is in panels, too.
        """
        super().__init__()
        self._kernels = kernels
        self._size, self._ranks, self._tied = config.vocab_size, ranks, config.tied_embeddings
        self._share, self._padding = vocabulary_of(config, ranks)
        self._soft_cap = config.final_soft_cap
        # As in transformers, the multiplier is rounded to the model's dtype, which is torch's default in this context.
        self.multiplier = float(torch.tensor(config.embedding_multiplier, device="cpu"))
        # A head with fewer bits is a separate copy even if it is tied, because the embedding has the model's dtype.
        separate = narrows or not config.tied_embeddings
        self.embedding: nn.Parameter | None = None
        self.head: AnyLinear | None = None
        self._lookup: PanelLinear | None = None  # has the embeddings as its columns, in place of ``embedding``
        if panel_dtype is not None:
            self._lookup = PanelLinear(config.hidden_size, config.vocab_size, dtype=panel_dtype)
            self.head = self._lookup if self._tied else linear(config.hidden_size, config.vocab_size, False)
            return
        if has_embedding or (has_head and not separate):
            rows = self._share.size + self._padding
            self.embedding = nn.Parameter(torch.empty(rows, config.hidden_size), requires_grad=False)
        if has_head and separate:
            outputs = config.vocab_size if ranks.tp_size == 1 else (self._share.size, self._padding)
            self.head = linear(config.hidden_size, outputs, False)

    @property
    def embedding_weight(self) -> torch.Tensor:
        """Weight of the embedding, ``[rows, hidden_size]``, or that of a ``PanelLinear`` if it is in panels."""
        return self.embedding if self._lookup is None else self._lookup.weight  # type: ignore[return-value]  # set on the first stage

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings ``[tokens, hidden_size]`` of ``token_ids [tokens]``.

        With several ranks, the embedding is the sum of their results. Ranks that do not have the token return zeros.
        """
        if self._lookup is not None:
            return self._scaled(self._lookup.columns(token_ids).float())
        if self._ranks.tp_size == 1:
            return self._scaled(F.embedding(token_ids, self.embedding))  # type: ignore[arg-type]  # set on this stage
        local = token_ids - self._share.start
        absent = (local < 0) | (local >= self._share.size)
        rows = F.embedding(local.masked_fill(absent, 0), self.embedding)  # type: ignore[arg-type]  # as above
        return self._scaled(rows.masked_fill(absent.unsqueeze(1), 0))

    def _scaled(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.multiplier == 1 else rows * self.multiplier

    def project(self, hidden: torch.Tensor | Quantized) -> torch.Tensor:
        """Return the logits of the whole vocabulary, ``[rows, vocab_size]``.

        ``hidden [rows, hidden_size]`` is quantized if the head is.
        """
        logits: torch.Tensor = (
            self._kernels.project(hidden, self.embedding)  # type: ignore[arg-type]  # set if there is no head
            if self.head is None
            else self.head(hidden)
        )
        if self._soft_cap is not None:
            logits = torch.tanh(logits / self._soft_cap) * self._soft_cap
        if self._ranks.tp_size == 1:
            return logits
        whole: torch.Tensor = torch.ops.tokasaurus.gather_columns(logits, self._ranks.tp_size, TENSOR_RANKS)
        return whole[:, : self._size]

    def targets(self) -> dict[str, Any]:
        """Return the load targets of this rank's rows, by the model's names."""
        targets: dict[str, Any] = {}
        if self.embedding is not None:
            targets[f"{_EMBEDDING}.weight"] = self.embedding[: self._share.size] if self._padding else self.embedding
        if self._lookup is not None and not self._tied:
            targets = {**self._lookup.targets(_EMBEDDING)}
        if self.head is None:
            return targets
        head = self._head_targets(self.head)[f"{_HEAD}.weight"]
        if not self._tied:
            return targets | {f"{_HEAD}.weight": head}
        return {f"{_EMBEDDING}.weight": MultiTarget(*targets.values(), head)}

    @torch.no_grad()
    def clear_padding(self) -> None:
        """Set the padding rows to zero. The load targets do not include them."""
        if not self._padding:
            return
        if self.embedding is not None:
            self.embedding[self._share.size :].zero_()
        if self.head is not None:
            rest = self._head_targets(self.head)[f"{_PADDING}.weight"]
            rest.copy_(torch.zeros(rest.shape, device=rest.device))

    def _head_targets(self, head: AnyLinear) -> dict[str, Any]:
        return {**(head.targets(_HEAD) if self._ranks.tp_size == 1 else head.targets(_HEAD, _PADDING))}
