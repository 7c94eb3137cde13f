"""The inputs of attention in a CUDA graph that serves steps with chunks."""

import numpy as np
import torch

from services.worker.attention.spans import TILE_FIELDS

# A step fits that has this number of chunks, or chunks of this number of tokens. Each may have a tile that is not full.
_CHUNKS, _CHUNK_TOKENS = 16, 16


class MixedInputs:
    """The tensors that a graph of ``size`` tokens reads. They are views of one block, which each step replaces.

    Slots of -1 and tiles of zeros have no effect.
    """

    def __init__(self, size: int, tile_tokens: int, device: torch.device) -> None:
        """``tile_tokens`` is the number of query tokens in a tile of the kernel for chunks."""
        self._size, self._tiles = size, size // tile_tokens + max(_CHUNKS, size // _CHUNK_TOKENS)
        self._block = torch.from_numpy(self._empty()).to(device)
        self.token_slots, self.decode_slots = self._block[:size], self._block[size : 2 * size]
        self.tiles = self._block[2 * size :].view(self._tiles, TILE_FIELDS)

    def block(self, token_slots: np.ndarray, decodes: int, tiles: np.ndarray) -> np.ndarray | None:
        """Return the block of a step on the host, int32, or None if it has too many tiles.

        The first ``decodes`` of ``token_slots [tokens]`` are rows of one token. ``tiles [tiles, TILE_FIELDS]`` are
        those of the chunks behind them.
        """
        if len(tiles) > self._tiles:
            return None
        block, size = self._empty(), self._size
        block[: len(token_slots)] = token_slots
        block[size : size + decodes] = token_slots[:decodes]
        block[2 * size : 2 * size + tiles.size] = tiles.ravel()
        return block

    def set(self, block: torch.Tensor) -> None:
        """Copy the block of the next step, on the device."""
        self._block.copy_(block)

    def _empty(self) -> np.ndarray:
        block = np.zeros(2 * self._size + self._tiles * TILE_FIELDS, np.int32)
        block[: 2 * self._size] = -1
        return block
