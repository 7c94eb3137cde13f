"""A step for attention on CUDA, whose outcome is held against plain torch's."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from services.worker.attention.base import AttentionBatch, HeadNorms, LayerAttention
from services.worker.attention.kv_cache import KvCache
from services.worker.attention.plain import PlainAttention
from services.worker.attention.spans import Spans
from services.worker.described.rope import RopeSettings
from services.worker.layers.fp8 import FP8
from services.worker.layers.kernels import TorchKernels
from services.worker.layers.rotary import Rotary
from tests.worker.interpreter import DEVICE, INTERPRETED

LAYERS = 2
TOLERANCE = {
    torch.float32: {"atol": 1e-5, "rtol": 1e-5},
    torch.float16: {"atol": 2e-3, "rtol": 2e-3},
    torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2},
}


class Case:
    """A step of decode rows by ``contexts``, then chunks by ``(context, tokens)``; one slot each, on a cache full of
    noise.

    ``groups``: (first decode row, rows, prefix pages). ``holes``: padding behind so many decode rows. ``rules``: fields
    of ``LayerAttention`` of the second layer; ``sinks=True`` stands for noise.
    """

    def __init__(
        self, contexts, chunks=(), groups=(), *, heads=4, kv_heads=2, head_dim=16, page=16, padding=0,
        holes=(), dtype=torch.float32, cached=None, norm=False, sinks=False, **rules,
    ):  # fmt: skip
        noise = torch.randn(heads, generator=torch.Generator().manual_seed(2)) * 2 if sinks else None
        plain = LayerAttention(head_dim**-0.5)
        self.layers = [plain, replace(plain, sinks=noise, **rules)]
        self.heads, self.kv_heads, self.head_dim, self.page = heads, kv_heads, head_dim, page
        counts = np.array([1] * len(contexts) + [tokens for _, tokens in chunks])
        ends = np.array([*contexts, *(context for context, _ in chunks)])
        slots = np.arange(len(counts))[::-1]
        widest = int(-(-ends.max() // page))
        random = np.random.default_rng(0)
        table = random.permutation(len(slots) * widest).astype(np.int32).reshape(len(slots), widest)
        self.prefix_tokens = np.zeros(len(contexts), np.int32)
        for first, rows, pages in groups:
            self.prefix_tokens[first : first + rows] = pages * page
            table[slots[first : first + rows], :pages] = table[slots[first], :pages]
        starts = np.cumsum(counts) - counts
        self.plain = AttentionBatch(
            token_slots=np.repeat(slots, counts),
            positions=np.concatenate([np.arange(end - n, end) for end, n in zip(ends, counts, strict=True)]),
            row_slots=slots, row_starts=starts, row_counts=counts, page_table=table,
        )  # fmt: skip
        holes = np.asarray(holes, int)
        self.places = np.arange(len(self.plain.positions))
        self.places += np.searchsorted(np.sort(holes), self.places, side="right")
        self.tokens = len(self.places) + len(holes) + padding
        self.decodes = len(contexts) + len(holes) + (0 if chunks else padding)
        self.longest = int(max(contexts, default=0))
        self.groups = self.chunks = None
        if groups:
            columns = zip(*((self.places[a], n, slots[a], pages * page) for a, n, pages in groups), strict=True)
            self.groups = Spans(*(np.array(column, np.int32) for column in columns))
        if chunks:
            rows = slice(len(contexts), None)
            columns = (self.places[starts[rows]], counts[rows], slots[rows], ends[rows])
            self.chunks = Spans(*(np.array(column, np.int32) for column in columns))
        generator = torch.Generator().manual_seed(1)
        self.dtype, self.cached = dtype, cached or dtype
        noise = torch.randn(LAYERS, 2, table.size, kv_heads, page, head_dim, generator=generator)
        self.noise = noise.to(self.cached).to(dtype)
        self.qkv = torch.randn(self.tokens, (heads + 2 * kv_heads) * head_dim, generator=generator).to(dtype)
        self.rotaries = [
            Rotary(RopeSettings("default", theta), head_dim, int(ends.max()), torch.float32, torch.device("cpu"))
            for theta in (10000.0, 100.0)
        ]
        self.norms: HeadNorms | None = None
        if norm:
            weights = (1 + torch.randn(head_dim, generator=generator).to(dtype) / 4 for _ in range(2))
            self.norms = HeadNorms(*weights, 1e-5)

    def device_norms(self) -> HeadNorms | None:
        if self.norms is None:
            return None
        return HeadNorms(self.norms.queries.to(DEVICE), self.norms.keys.to(DEVICE), self.norms.eps)

    def device_layers(self) -> list[LayerAttention]:
        return [rules if rules.sinks is None else replace(rules, sinks=rules.sinks.to(DEVICE)) for rules in self.layers]

    def cache(self, dtype, device) -> KvCache:
        _, _, pages, kv_heads, page, head_dim = self.noise.shape
        made = KvCache(
            layers=LAYERS, page_count=pages, page_size=page, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype,
            device=device,
        )  # fmt: skip
        made.all_keys.copy_(self.noise[:, 0])
        made.all_values.copy_(self.noise[:, 1])
        return made

    def expected(self, layer: int, stored: KvCache | None = None) -> tuple[torch.Tensor, KvCache]:
        """``[tokens without padding, heads * head_dim]`` float32, and the cache after it. ``stored``: the tokens' keys
        and values are not theirs, but what is in that cache."""
        cache, kernels = self.cache(torch.float32, torch.device("cpu")), TorchKernels()
        heads = self.qkv.float()[self.places].view(len(self.places), -1, self.head_dim)
        queries, keys, values = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if self.norms:
            queries = kernels.norm(queries, self.norms.queries.float(), self.norms.eps)
            keys = kernels.norm(keys, self.norms.keys.float(), self.norms.eps)
        if (rope := self.layers[layer].rope) is not None:
            angles = self.rotaries[rope].at(torch.from_numpy(self.plain.positions))
            queries, keys = kernels.rotate(queries, *angles), kernels.rotate(keys, *angles)
        if stored is not None:
            keys, values = (self.of_tokens(pages[layer]) for pages in (stored.keys, stored.values))
        return PlainAttention(cache, self.layers).step(self.plain, lambda: None).run(
            layer, queries, keys, values
        ), cache

    def of_tokens(self, pages: torch.Tensor) -> torch.Tensor:
        """The step's tokens of a layer: ``[tokens without padding, kv_heads, head_dim]`` float32."""
        table = self.plain.page_table[self.plain.token_slots, self.plain.positions // self.page]
        return pages.cpu().float()[table.astype(np.int64), :, self.plain.positions % self.page]

    def batch(self):
        from services.worker.attention.cuda import CudaBatch

        slots, positions = np.full(self.tokens, -1, np.int32), np.zeros(self.tokens, np.int32)
        slots[self.places], positions[self.places] = self.plain.token_slots, self.plain.positions
        prefix = np.zeros(self.decodes, np.int32)
        prefix[self.places[: len(self.prefix_tokens)]] = self.prefix_tokens
        return CudaBatch(
            put(slots), put(positions), put(self.plain.page_table), self.decodes, self.longest, self.chunks,
            self.groups, None if self.groups is None else put(prefix),
        )  # fmt: skip

    def attention(self, cache: KvCache, backend="triton", compiled=False):
        from services.worker.attention.cuda import CudaAttention

        rotaries = [SimpleNamespace(cos=each.cos.to(DEVICE), sin=each.sin.to(DEVICE)) for each in self.rotaries]
        return CudaAttention(
            cache, self.heads, rotaries, dtype=self.dtype, prefixes=backend, chunks=backend,
            layers=self.device_layers(), compiled=compiled,
        )  # fmt: skip

    def found(self, layer: int, splits: int | None = None, backend="triton", compiled=False):
        """All tokens' output on the CPU, and the cache."""
        cache = self.cache(self.cached, DEVICE)
        attention = self.attention(cache, backend, compiled)
        step = attention.prepare(self.batch(), self.plain.page_table, put)
        if splits is not None:
            step._splits = [splits] * LAYERS
        return step.run_qkv(layer, self.qkv.to(DEVICE), self.device_norms()).cpu(), cache

    def check(self, layer: int = 1, **how) -> None:
        (expected, stored), (output, cache) = self.expected(layer), self.found(layer, **how)
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(output[self.places].float(), expected, **tolerance)
        torch.testing.assert_close(cache.all_keys.cpu().float(), stored.all_keys, **tolerance)
        torch.testing.assert_close(cache.all_values.cpu().float(), stored.all_values, **tolerance)
        padding = np.setdiff1d(np.arange(self.tokens), self.places)
        assert not output[padding].any()

    def check_fp8(self, layer: int = 1, **how) -> None:
        """What is stored is what torch rounds, but for what the interpreter does not round as torch and the hardware
        do, and the output is attention over what was stored."""
        output, cache = self.found(layer, **how)
        assert cache.keys[0].dtype == FP8
        expected, _ = self.expected(layer, stored=cache)
        torch.testing.assert_close(output[self.places].float(), expected, **TOLERANCE[self.dtype])
        for found, exact in zip((cache.all_keys, cache.all_values), stores(self.expected(layer)[1]), strict=True):
            found, rounded = found.cpu().float(), exact.clamp(-448, 448).to(FP8).float()
            same = (self.of_tokens(found[layer]) == self.of_tokens(rounded[layer])).float().mean()
            assert same > (0.9 if INTERPRETED else 0.99)
            rest = torch.ones_like(found, dtype=torch.bool)
            table = self.plain.page_table[self.plain.token_slots, self.plain.positions // self.page]
            rest[layer, table.astype(np.int64), :, self.plain.positions % self.page] = False
            assert torch.equal(found[rest], rounded[rest])


def without_pages_left_behind(case: Case, window: int) -> Case:
    """Put infinities on the pages before the window of each row's first token, as on pages of other sequences."""
    rows = case.plain
    for slot, start in zip(rows.row_slots, rows.row_starts, strict=True):
        end = max(0, int(rows.positions[start]) + 1 - window) // case.page
        case.noise[:, :, torch.from_numpy(rows.page_table[slot, :end].astype(np.int64))] = torch.inf
    return case


def stores(cache: KvCache) -> tuple[torch.Tensor, torch.Tensor]:
    return cache.all_keys, cache.all_values


def put(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(DEVICE)
