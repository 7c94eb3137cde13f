"""All layers of the decoder as one compiled function, for decode steps on CPUs with activations in float32.

A decode step of a small model runs hundreds of operators that take a few microseconds each. Called from Python, each
operator acquires the interpreter lock again, so concurrent threads block one another. Here a thread releases the lock
once for all layers.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import numba
import numpy as np
import torch

from services.worker.attention.attend_cpu import new_scores
from services.worker.attention.base import AttentionBatch
from services.worker.attention.fast_cpu import STORAGES
from services.worker.attention.kernels import ELEMENTS, Storage, kernels, pages_of
from services.worker.attention.kv_cache import KvCache
from services.worker.described.config import ModelConfig
from services.worker.described.layer import AnyValue, LayerConfig, MlpConfig, SupportedValues, undeclared
from services.worker.layers import matmul_cpu
from services.worker.layers.bfloat16_cpu import widened
from services.worker.layers.compiled_cpu import compile_function
from services.worker.layers.fast_cpu import FastCpuKernels, compiled
from services.worker.layers.linear import AnyLinear
from services.worker.layers.linear_cpu import WithAddress, addresses, storage_of
from services.worker.layers.products_cpu import WeightStorage, make_product
from services.worker.models.base import RankModel
from services.worker.models.decoder import DecoderLayer, DecoderModel
from services.worker.sampling.plain_cpu import PlainHead

_MATRIX, _CUBE, _INDICES = numba.float32[:, ::1], numba.float32[:, :, ::1], numba.int64[::1]
_NO_WINDOW = 1 << 62  # exceeds any context
# The layers that ``FusedDecoder`` computes. They may differ in their windows only.
SUPPORTED: SupportedValues = {
    "qk_norm": ("none", "per_head"),
    "window": AnyValue(),
    "scale": AnyValue(),
    "qkv_bias": (False, True),
    "output_bias": (False, True),
    "mlp_bias": (False, True),
}


class FusedDecoder:
    """Decoder that reads the matrices of ``model`` in place and writes the cache.

    It changes only in ``copy_vectors``, and any thread may call it. Raises ``ValueError`` if ``supports(model)`` is
    false.
    """

    def __init__(self, model: DecoderModel, cache: KvCache) -> None:
        if not supports(model) or model.norm is None:
            raise ValueError(
                "the model must have activations in float32 with FastCpuKernels, without fp8 and on one rank, and its"
                " layers equal with all features in SUPPORTED; use the model itself"
            )
        config = model.config
        self._model, self._norm, self._hidden_size = model, model.norm, config.hidden_size
        rules = model.attention_layers()
        linears = [_linears(layer) for layer in model.layers]
        embeddings, layer = model.vocabulary.embedding_weight, _without_window(config.layers[0])
        storages = storage_of(linears[0][0]), STORAGES[cache.all_keys.dtype], STORAGES[embeddings.dtype]
        self._forward = make_forward(config, layer, rules[0].scale, cache.page_size, *storages)
        self._group = config.heads // config.kv_heads
        # Rows are panels of one column.
        self._embeddings = pages_of(embeddings if embeddings.dim() == 4 else embeddings[:, :, None, None])
        self._rotation = model.rotaries[0]
        self._multiplier = np.float32(model.vocabulary.multiplier)
        self._tokens = cache.tokens.numpy()
        head = model.head
        # Draws the tokens of rows that need at most a temperature. None = the head has another form, or logits change.
        self.plain_head = PlainHead(head) if isinstance(head, WithAddress) and config.final_soft_cap is None else None
        self._keys, self._values = pages_of(cache.all_keys), pages_of(cache.all_values)
        self._weights = np.array([[addresses(linear) for linear in four] for four in linears], np.int64)
        self._windows = np.array([_NO_WINDOW if each.window is None else each.window for each in rules])
        self.copy_vectors()

    def copy_vectors(self) -> None:
        """Copy the norms and biases of the model, which the compiled function reads as arrays over all layers."""
        layers = self._model.layers
        linears = [_linears(layer) for layer in layers]
        self._biases = [_rows([four[index].bias for four in linears]) for index in range(4)]
        norms = [norm for each in layers for norm in each.input_norms]
        self._norms = _rows([*norms, self._norm])
        self._head_norms = np.stack([_rows([each.attention.q_norm, each.attention.k_norm]) for each in layers])

    def __call__(self, last_tokens: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Return the result of ``DecoderModel.forward`` for tokens that do not attend to one another.

        They are the ``last_tokens [slots]`` int64 of the slots of ``batch``, and are stored in the cache.
        """
        hidden = np.empty((len(batch.positions), self._hidden_size), np.float32)
        self._forward(
            hidden,
            last_tokens.numpy(),
            self._tokens,
            self._embeddings,
            self._multiplier,
            self._rotation.cos.numpy(),
            self._rotation.sin.numpy(),
            self._windows,
            batch.token_slots,
            batch.positions,
            batch.page_table,
            self._keys,
            self._values,
            self._weights,
            self._norms,
            self._head_norms,
            *self._biases,
            new_scores(self._group, int(batch.positions.max()) + 1),
        )
        return torch.from_numpy(hidden)


def supports(model: RankModel) -> TypeGuard[DecoderModel]:
    """Return whether ``FusedDecoder`` can run ``model``."""
    return (
        isinstance(model, DecoderModel)
        and model.ranks.alone
        and isinstance(model.kernels, FastCpuKernels)  # on a CPU in float32, and not compiled
        and supports_layers(model.local)
        and all(isinstance(each, WithAddress) for layer in model.layers for each in _linears(layer))
    )


def supports_layers(config: ModelConfig) -> bool:
    """Return whether ``FusedDecoder`` can run the layers of ``config``."""
    layers = config.layers
    return (
        not any(undeclared(layer, SUPPORTED) for layer in layers)
        and len({_without_window(layer) for layer in layers}) == 1
        and matmul_cpu.available()
    )


def _linears(layer: DecoderLayer) -> tuple[AnyLinear, AnyLinear, AnyLinear, AnyLinear]:
    return layer.attention.qkv, layer.attention.output, layer.dense_mlp.inner, layer.dense_mlp.down


def _without_window(layer: LayerConfig) -> LayerConfig:
    return replace(layer, attention=replace(layer.attention, window=None))


def _rows(tensors: Sequence[torch.Tensor | None]) -> np.ndarray:
    """Return the tensors stacked, ``[len(tensors), size]`` float32, with size 0 if they are None."""
    return np.stack([np.empty(0, np.float32) if tensor is None else tensor.numpy() for tensor in tensors])


def make_forward(
    config: ModelConfig,
    layer: LayerConfig,
    attention_scale: float,
    page_size: int,
    weights: WeightStorage = "float32",
    cached: Storage = "float32",
    embedded: Storage = "float32",
) -> Any:
    """Compile the layers of ``config``, all of which are ``layer`` except for their windows.

    ``weights`` is the storage of weights, ``cached`` that of keys and values, and ``embedded`` that of embeddings.
    """
    product = make_product(weights)
    heads, kv_heads, head_dim, width = config.heads, config.kv_heads, config.head_dim, config.intermediate_size
    half, eps, score_scale = head_dim // 2, np.float32(config.norm_eps), np.float32(attention_scale)
    store, attend = kernels(head_dim, heads // kv_heads, page_size, cached)
    norm, gate = compiled().norm, compiled().gate
    qk_norm = layer.attention.qk_norm == "per_head"
    mlp_bias = isinstance(layer.mlp, MlpConfig) and layer.mlp.mlp_bias
    qkv_bias, output_bias = layer.attention.qkv_bias, layer.attention.output_bias

    def forward(
        hidden, last_tokens, stored_tokens, embeddings, multiplier, cos, sin, windows, slots, positions, table, keys,
        values, weights, norms, head_norms, qkv_biases, output_biases, gate_up_biases, down_biases, scores,
    ):  # fmt: skip
        """Write the normalised hidden states of the last token of each of ``slots [tokens]``.

        ``hidden [tokens, hidden_size]``; ``last_tokens [all slots]``; ``stored_tokens [pages, page_size]``;
        ``embeddings [panels, hidden_size / n, columns, n]``; ``cos``/``sin [all positions, head_dim]``; ``windows
        [layers]``; ``positions [tokens]``; ``keys``/``values [layers, pages, kv_heads, page_size, head_dim]``;
        ``weights [layers, 4, 2]``, addresses of weight and scale; ``norms [2 * layers + 1, hidden_size]``;
        ``head_norms [layers, 2, head_dim]``; biases ``[layers, outputs]``; ``scores`` is the workspace of ``attend``.
        """
        tokens, rotated = hidden.shape[0], heads + kv_heads
        order, lengths = np.arange(tokens), positions + 1
        columns, together = embeddings.shape[2], embeddings.shape[3]
        x, normed = np.empty_like(hidden), np.empty_like(hidden)
        for token in range(tokens):
            position, token_id = positions[token], last_tokens[slots[token]]
            stored_tokens[table[slots[token], position // page_size], position % page_size] = token_id
            panel, column = token_id // columns, token_id % columns
            for i in range(embeddings.shape[1]):
                for j in range(together):
                    x[token, i * together + j] = widened(embeddings[panel, i, column, j]) * multiplier
        qkv = np.empty((tokens, heads + 2 * kv_heads, head_dim), np.float32)
        flat = qkv.reshape(tokens, (heads + 2 * kv_heads) * head_dim)
        attended = np.empty((tokens, heads * head_dim), np.float32)
        gate_up = np.empty((tokens, 2 * width), np.float32)
        gated = np.empty((tokens, width), np.float32)
        for layer in range(weights.shape[0]):
            norm(x, norms[2 * layer], eps, normed)
            product(normed, weights[layer, 0, 0], weights[layer, 0, 1], flat, np.float32(0))
            if qkv_bias:
                flat += qkv_biases[layer]
            for token in range(tokens):
                for head in range(rotated):
                    if qk_norm:
                        which = 0 if head < heads else 1
                        total = np.float32(0)
                        for i in range(head_dim):
                            total += qkv[token, head, i] * qkv[token, head, i]
                        scale = np.float32(1) / np.sqrt(total / np.float32(head_dim) + eps)
                        for i in range(head_dim):
                            qkv[token, head, i] *= scale * head_norms[layer, which, i]
                    at = positions[token]
                    for i in range(half):
                        low, high = qkv[token, head, i], qkv[token, head, half + i]
                        qkv[token, head, i] = low * cos[at, i] + high * sin[at, i]
                        qkv[token, head, half + i] = high * cos[at, half + i] + low * sin[at, half + i]
            store(qkv[:, heads:rotated], qkv[:, rotated:], keys[layer], values[layer], slots, positions, table)
            firsts = np.maximum(lengths - windows[layer], 0)
            attend(
                qkv[:, :heads], keys[layer], values[layer], order, slots, firsts, lengths, table, score_scale,
                scores, attended,
            )  # fmt: skip
            product(attended, weights[layer, 1, 0], weights[layer, 1, 1], x, np.float32(1))
            if output_bias:
                x += output_biases[layer]
            norm(x, norms[2 * layer + 1], eps, normed)
            product(normed, weights[layer, 2, 0], weights[layer, 2, 1], gate_up, np.float32(0))
            if mlp_bias:
                gate_up += gate_up_biases[layer]
            gate(gate_up, gated)
            product(gated, weights[layer, 3, 0], weights[layer, 3, 1], x, np.float32(1))
            if mlp_bias:
                x += down_biases[layer]
        norm(x, norms[2 * weights.shape[0]], eps, hidden)

    pages, page_table = (ELEMENTS[cached][:, :, :, :, ::1],) * 2, numba.int32[:, ::1]
    signature = numba.void(
        *(_MATRIX, _INDICES, page_table, ELEMENTS[embedded][:, :, :, ::1], numba.float32, _MATRIX, _MATRIX),
        *(_INDICES, _INDICES, _INDICES, page_table, *pages, numba.int64[:, :, ::1]),
        *(_MATRIX, _CUBE, _MATRIX, _MATRIX, _MATRIX, _MATRIX, _MATRIX),
    )
    return compile_function(forward, signature, keep=False)
