"""A model of random weights, and one sequence run through it without a runner."""

from dataclasses import fields, replace

import numpy as np
import torch

from services.worker.attention.base import AttentionBatch, AttentionStep, RotatingAttentionStep
from services.worker.attention.kv_cache import KvCache
from services.worker.attention.plain import PlainAttention
from services.worker.described.config import ModelConfig, Windows
from services.worker.described.layer import LLAMA_LAYER, AttentionConfig, LayerConfig, MlpConfig
from services.worker.described.rope import RopeSettings
from services.worker.layers.factory import make_linear
from services.worker.layers.kernels import TorchKernels
from services.worker.layers.rotary import Rotary
from services.worker.models import weights
from services.worker.models.decoder import DecoderModel

CPU = torch.device("cpu")
PAGE_SIZE = 16


def changed(layer: LayerConfig, **changes) -> LayerConfig:
    """Return ``layer`` with ``changes`` of its fields, or of the fields of its parts."""
    parts = {"attention": layer.attention, "mlp": layer.mlp}
    for name, part in parts.items():
        known = {field.name for field in fields(part)} & changes.keys()
        parts[name] = replace(part, **{field: changes.pop(field) for field in known})
    return replace(layer, **parts | changes)


def small_config(layers: int = 3, windows: Windows = (), **changes) -> ModelConfig:
    """Return a config with ``changes`` of its fields, or of the fields of all its layers."""
    names = {field.name for kind in (LayerConfig, AttentionConfig, MlpConfig) for field in fields(kind)}
    layer = changed(LLAMA_LAYER, **{name: changes.pop(name) for name in names & changes.keys()})
    values = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "layers": tuple(changed(layer, window=window) for window in windows) or (layer,) * layers,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "norm_eps": 1e-5,
        "max_context_tokens": 512,
        "ropes": (RopeSettings("default", 10000.0),),
        "tied_embeddings": True,
    }
    return ModelConfig(**values | changes)


def small_model(
    config: ModelConfig, dtype=torch.float32, *, quantization="none", linear=None, **arguments
) -> DecoderModel:
    linear = linear or make_linear(config, dtype, CPU, quantization)
    model = DecoderModel(config, dtype, CPU, TorchKernels(), linear, **arguments)
    weights.load_dummy(model, seed=0)
    with torch.inference_mode():  # norms that are not all one, biases that are not all zero
        for vector in (parameter for parameter in model.parameters() if parameter.dim() == 1):
            vector.add_(torch.randn(vector.shape, generator=torch.Generator().manual_seed(1)).to(dtype) / 4)
    return model


def one_sequence(config: ModelConfig, tokens: int, dtype=torch.float32) -> tuple[KvCache, AttentionStep]:
    """An empty cache and a step that prefills ``tokens`` into it."""
    pages = -(-tokens // PAGE_SIZE)
    shape = {"layers": len(config.layers), "kv_heads": config.kv_heads, "head_dim": config.head_dim}
    cache = KvCache(page_count=pages, page_size=PAGE_SIZE, dtype=dtype, device=CPU, **shape)
    batch = AttentionBatch(
        token_slots=np.zeros(tokens, np.int64),
        positions=np.arange(tokens),
        row_slots=np.zeros(1, np.int64),
        row_starts=np.zeros(1, np.int64),
        row_counts=np.array([tokens]),
        page_table=np.arange(pages, dtype=np.int32)[None],
    )
    return cache, PlainAttention(cache).step(batch, lambda: None)


class PlainRotatingStep(RotatingAttentionStep):
    """Norms and rotates in float32, then leaves the rest to ``inner``: how attention on CUDA is called."""

    def __init__(self, config: ModelConfig, rotary: Rotary, positions: torch.Tensor, inner: AttentionStep) -> None:
        self._config, self._inner = config, inner
        self._cos, self._sin = rotary.cos[positions].unsqueeze(1), rotary.sin[positions].unsqueeze(1)

    def run_qkv(self, layer_index, qkv, norms):
        config, kernels = self._config, TorchKernels()
        widths = config.heads, config.kv_heads, config.kv_heads
        queries, keys, values = qkv.view(len(qkv), -1, config.head_dim).float().split(widths, dim=1)
        if norms is not None:
            queries = kernels.norm(queries, norms.queries.float(), norms.eps)
            keys = kernels.norm(keys, norms.keys.float(), norms.eps)
        rotated = [kernels.rotate(each, self._cos, self._sin) for each in (queries, keys)]
        return self._inner.run(layer_index, *(each.to(qkv.dtype) for each in (*rotated, values)))
