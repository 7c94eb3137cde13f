"""All layers of the decoder as one compiled function, for decode steps on CPUs with activations in float32.

A decode step of a small model runs hundreds of operators that take a few microseconds each. Called from Python, each
operator acquires the interpreter lock again, so concurrent threads block one another. Here a thread releases the lock
once for all layers. Several threads share the work of each operator, so that each weight is read once in a step.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import numba
import numpy as np
import torch

from services.worker.attention.attend_cpu import new_scores
from services.worker.attention.fast_cpu import STORAGES
from services.worker.attention.kernels import ELEMENTS, Storage, kernels, pages_of
from services.worker.attention.kv_cache import KvCache
from services.worker.described.config import ModelConfig
from services.worker.described.layer import AnyValue, LayerConfig, SupportedValues, undeclared
from services.worker.layers import matmul_cpu
from services.worker.layers.bfloat16_cpu import widened
from services.worker.layers.compiled_cpu import compile_function
from services.worker.layers.fast_cpu import FastCpuKernels, compiled
from services.worker.layers.linear import AnyLinear
from services.worker.layers.linear_cpu import WithAddress, addresses, storage_of
from services.worker.layers.products_cpu import WeightStorage, make_team_product
from services.worker.layers.team_cpu import Team, run_in_team, share, team_size
from services.worker.models.base import RankModel
from services.worker.models.decoder import DecoderLayer, DecoderModel
from services.worker.sampling.plain_cpu import PlainHead

_MATRIX, _CUBE, _INDICES = numba.float32[:, ::1], numba.float32[:, :, ::1], numba.int64[::1]
_NO_WINDOW = 1 << 62  # exceeds any context
_PHASES = 8  # of a layer
_THREAD_ITEMS = 4  # into which a thread's share of the rows is divided
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
        # Rows are panels of one column.
        self._embeddings = pages_of(embeddings if embeddings.dim() == 4 else embeddings[:, :, None, None])
        self._rotation = model.rotaries[0]
        self._multiplier = np.float32(model.vocabulary.multiplier)
        self._tokens = cache.tokens.numpy()
        self._phases, self._workspace = _PHASES * len(model.layers) + 2, workspace_size(config)
        self._bytes = sum(tensor.nbytes for layer in model.layers for tensor in layer.state_dict().values())
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

    def __call__(
        self,
        last_tokens: torch.Tensor,
        slots: np.ndarray,
        positions: np.ndarray,
        page_table: np.ndarray,
        team: Team | None = None,
    ) -> torch.Tensor:
        """Return the result of ``DecoderModel.forward`` for tokens that do not attend to one another.

        They are the ``last_tokens [all slots]`` int64 of ``slots [tokens]``, at ``positions [tokens]`` of their
        sequences, and are stored in the cache. ``page_table`` is that of all slots. ``team`` shares the work; None =
        the calling thread does all.
        """
        hidden = np.empty((len(positions), self._hidden_size), np.float32)
        threads = team_size(team, self._bytes, len(positions))
        run_in_team(
            self._forward,
            team,
            threads,
            self._phases,
            hidden,
            np.empty(len(positions) * self._workspace, np.float32),
            last_tokens.numpy(),
            self._tokens,
            self._embeddings,
            self._multiplier,
            self._rotation.cos.numpy(),
            self._rotation.sin.numpy(),
            self._windows,
            slots,
            positions,
            page_table,
            self._keys,
            self._values,
            self._weights,
            self._norms,
            self._head_norms,
            *self._biases,
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
    product = make_team_product(weights)
    heads, kv_heads, head_dim, width = config.heads, config.kv_heads, config.head_dim, config.intermediate_size
    half, eps, score_scale = head_dim // 2, np.float32(config.norm_eps), np.float32(attention_scale)
    group, rotated, hidden_size = heads // kv_heads, heads + kv_heads, config.hidden_size
    store, attend = kernels(head_dim, group, page_size, cached)
    norm, gate = compiled().norm, compiled().gate
    qk_norm = layer.attention.qk_norm == "per_head"
    phases, thread_items = _PHASES, _THREAD_ITEMS

    @share
    def embed(token, _tokens, x, last_tokens, stored_tokens, embeddings, multiplier, slots, positions, table):
        columns, together = embeddings.shape[2], embeddings.shape[3]
        position, token_id = positions[token], last_tokens[slots[token]]
        stored_tokens[table[slots[token], position // page_size], position % page_size] = token_id
        panel, column = token_id // columns, token_id % columns
        for i in range(embeddings.shape[1]):
            for j in range(together):
                x[token, i * together + j] = widened(embeddings[panel, i, column, j]) * multiplier

    @share
    def normalize(piece, pieces, x, weight, output):
        first, last = len(x) * piece // pieces, len(x) * (piece + 1) // pieces
        norm(x[first:last], weight, eps, output[first:last])

    @share
    def multiply_gates(piece, pieces, gate_up, output):
        first, last = len(output) * piece // pieces, len(output) * (piece + 1) // pieces
        gate(gate_up[first:last], output[first:last])

    @numba.njit(nogil=True)
    def rotate(states, positions, cos, sin, weight):
        """Normalise and rotate queries or keys ``states [tokens, heads, head_dim]``."""
        for token in range(states.shape[0]):
            at = positions[token]
            for head in range(states.shape[1]):
                if qk_norm:
                    total = np.float32(0)
                    for i in range(head_dim):
                        total += states[token, head, i] * states[token, head, i]
                    scale = np.float32(1) / np.sqrt(total / np.float32(head_dim) + eps)
                    for i in range(head_dim):
                        states[token, head, i] *= scale * weight[i]
                for i in range(half):
                    low, high = states[token, head, i], states[token, head, half + i]
                    states[token, head, i] = low * cos[at, i] + high * sin[at, i]
                    states[token, head, half + i] = high * cos[at, half + i] + low * sin[at, half + i]

    @share
    def attend_rows(
        item, items, parts, qkv, cos, sin, window, slots, positions, table, keys, values, head_norms, scores, attended
    ):
        """Rotate, store and attend. An item is a piece of the rows and one of ``parts`` of the kv heads."""
        piece, part, pieces = item // parts, item % parts, items // parts
        begin, end = len(qkv) * piece // pieces, len(qkv) * (piece + 1) // pieces
        first, last = kv_heads * part // parts, kv_heads * (part + 1) // parts
        rows, slots, positions = np.arange(begin, end), slots[begin:end], positions[begin:end]
        queries, new_keys = qkv[:, first * group : last * group], qkv[begin:end, heads + first : heads + last]
        new_values = qkv[begin:end, rotated + first : rotated + last]
        rotate(queries[begin:end], positions, cos, sin, head_norms[0])
        rotate(new_keys, positions, cos, sin, head_norms[1])
        store(new_keys, new_values, keys, values, slots, positions, table, first)
        lengths = positions + 1
        firsts = np.maximum(lengths - window, 0)
        attend(queries, keys, values, rows, slots, firsts, lengths, table, score_scale, scores, attended, first)

    def forward(
        thread, counters, hidden, workspace, last_tokens, stored_tokens, embeddings, multiplier, cos, sin, windows,
        slots, positions, table, keys, values, weights, norms, head_norms, qkv_biases, output_biases, gate_up_biases,
        down_biases,
    ):  # fmt: skip
        """Write the normalised hidden states of the last token of each of ``slots [tokens]``.

        Each thread of a team may call it with its number, and otherwise the same arguments. ``counters`` are those of
        the team; ``hidden [tokens, hidden_size]``; ``workspace [tokens * workspace_size]``; ``last_tokens [all
        slots]``; ``stored_tokens [pages, page_size]``; ``embeddings [panels, hidden_size / n, columns, n]``;
        ``cos``/``sin [all positions, head_dim]``; ``windows [layers]``; ``positions [tokens]``; ``keys``/``values
        [layers, pages, kv_heads, page_size, head_dim]``; ``weights [layers, 4, 2]``, addresses of weight and scale;
        ``norms [2 * layers + 1, hidden_size]``; ``head_norms [layers, 2, head_dim]``; biases ``[layers, outputs or
        0]``.
        """
        tokens, threads, start = hidden.shape[0], counters.shape[1] - 1, 0
        x = workspace[: tokens * hidden_size].reshape(tokens, hidden_size)
        start += x.size
        normed = workspace[start : start + tokens * hidden_size].reshape(tokens, hidden_size)
        start += normed.size
        flat = workspace[start : start + tokens * (rotated + kv_heads) * head_dim].reshape(tokens, -1)
        qkv = flat.reshape(tokens, rotated + kv_heads, head_dim)
        start += flat.size
        attended = workspace[start : start + tokens * heads * head_dim].reshape(tokens, heads * head_dim)
        start += attended.size
        gate_up = workspace[start : start + tokens * 2 * width].reshape(tokens, 2 * width)
        start += gate_up.size
        gated = workspace[start : start + tokens * width].reshape(tokens, width)
        pieces = min(tokens, thread_items * threads)
        parts = kv_heads if tokens < 2 * threads else 1
        scores = new_scores(group, positions.max() + 1)
        zero, one = np.float32(0), np.float32(1)
        embed(
            thread, counters, 0, tokens, x, last_tokens, stored_tokens, embeddings, multiplier, slots, positions, table
        )
        for layer in range(weights.shape[0]):
            address, phase = weights[layer], 1 + phases * layer
            normalize(thread, counters, phase, pieces, x, norms[2 * layer], normed)
            product(thread, counters, phase + 1, normed, address[0, 0], address[0, 1], qkv_biases[layer], flat, zero)
            attend_rows(
                thread, counters, phase + 2, pieces * parts, parts, qkv, cos, sin, windows[layer], slots, positions,
                table, keys[layer], values[layer], head_norms[layer], scores, attended,
            )  # fmt: skip
            product(thread, counters, phase + 3, attended, address[1, 0], address[1, 1], output_biases[layer], x, one)
            normalize(thread, counters, phase + 4, pieces, x, norms[2 * layer + 1], normed)
            product(
                thread, counters, phase + 5, normed, address[2, 0], address[2, 1], gate_up_biases[layer], gate_up,
                zero,
            )  # fmt: skip
            multiply_gates(thread, counters, phase + 6, pieces, gate_up, gated)
            product(thread, counters, phase + 7, gated, address[3, 0], address[3, 1], down_biases[layer], x, one)
        normalize(thread, counters, 1 + phases * weights.shape[0], pieces, x, norms[2 * weights.shape[0]], hidden)

    pages, page_table = (ELEMENTS[cached][:, :, :, :, ::1],) * 2, numba.int32[:, ::1]
    signature = numba.void(
        *(numba.int64, numba.int64[:, :, ::1], _MATRIX, numba.float32[::1], _INDICES, page_table),
        *(ELEMENTS[embedded][:, :, :, ::1], numba.float32, _MATRIX, _MATRIX),
        *(_INDICES, _INDICES, _INDICES, page_table, *pages, numba.int64[:, :, ::1]),
        *(_MATRIX, _CUBE, _MATRIX, _MATRIX, _MATRIX, _MATRIX),
    )
    return compile_function(forward, signature)


def workspace_size(config: ModelConfig) -> int:
    """Return the number of float32 values that ``make_forward``'s function needs for a token, beside its result."""
    attention = (2 * config.heads + 2 * config.kv_heads) * config.head_dim
    return 2 * config.hidden_size + attention + 3 * config.intermediate_size
