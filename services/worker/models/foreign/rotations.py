"""Rotations of transformers that depend on the length of a sequence, made to depend on the position only.

Keys in the cache do not change, and sequences of any length share them.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from services.common.boundaries import errors_to
from services.worker.models.foreign.skeleton import first_line, refuse

_FIXED = "fixed"  # the ``rope_type`` of a module whose frequencies transformers leaves as they are
_FREQUENCIES = "inv_freq"  # buffer of a module, after the type of layers if there are several
# Held while a module has the frequencies of one call: several compute threads run the same module.
_exclusive = threading.RLock()
_TABLE = "tokasaurus_frequencies"  # buffer of a module, with the frequencies of each position


def fix_rotations(model: nn.Module, architecture: str, max_tokens: int) -> None:
    """Make the rotations of ``model`` independent of the length of the sequence.

    ``longrope`` uses the long factors for all positions if ``max_tokens`` exceeds the original context, and the short
    factors otherwise. ``dynamic`` rotates position p as in a sequence of p + 1 tokens. Raises ``InvalidRequest`` for
    other rotations of this kind.
    """
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else ((None, kinds),):
            if not isinstance(kind, str) or not (kind == "longrope" or "dynamic" in kind):
                continue
            errors: list[Exception] = []
            with errors_to(errors.append):
                _fix(module, kind, layer_type, max_tokens)
            if errors or kind not in ROPE_INIT_FUNCTIONS:
                reason = f"its rotation depends on the length of the sequence (rope_type {kind!r})"
                refuse(architecture, f"{reason}: {first_line(errors[0])}" if errors else reason)
            if isinstance(kinds, dict):
                module.rope_type = {**module.rope_type, layer_type: _FIXED}  # type: ignore[dict-item, assignment]
            else:
                module.rope_type = _FIXED  # type: ignore[assignment]


def _fix(module: Any, kind: str, layer_type: str | None, max_tokens: int) -> None:
    """Set the frequencies of ``module`` for layers of ``layer_type``, None = all layers."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    own: torch.Tensor = getattr(module, prefix + _FREQUENCIES)
    compute, cpu = ROPE_INIT_FUNCTIONS[kind], torch.device("cpu")
    if kind == "longrope":
        settings = module.config.rope_parameters
        original = (settings if layer_type is None else settings[layer_type])["original_max_position_embeddings"]
        length = original + 1 if max_tokens > original else original
        own.copy_(compute(module.config, cpu, seq_len=length, layer_type=layer_type)[0])
        return
    trained = module.original_max_seq_len
    if max_tokens <= trained:
        return
    lengths = torch.arange(trained + 1, max_tokens + 1)[:, None]
    scaled, _ = compute(module.config, cpu, seq_len=lengths, layer_type=layer_type)
    table = torch.cat((own.expand(trained, -1), scaled))
    module.register_buffer(prefix + _TABLE, table, persistent=False)
    module.register_forward_pre_hook(_Choose(prefix), with_kwargs=True)
    module.register_forward_hook(_release, always_call=True)


class _Choose:
    """Hook that gives a module the frequencies of the positions of its call, ``[tokens, pairs of elements]``."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def __call__(self, module: nn.Module, given: Sequence[Any], named: Mapping[str, Any]) -> None:
        _exclusive.acquire()  # until the module has run
        positions: torch.Tensor = named["position_ids"] if "position_ids" in named else given[1]
        table = module.get_buffer(self._prefix + _TABLE)
        setattr(module, self._prefix + _FREQUENCIES, table[positions.reshape(-1)])


def _release(*_: object) -> None:
    _exclusive.release()


def depends_on_position(model: nn.Module) -> bool:
    """Return whether a rotation of ``model`` has other frequencies for each position."""
    return any(name.endswith(_TABLE) for name, _ in model.named_buffers())
