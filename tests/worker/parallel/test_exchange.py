"""The model on several ranks, whatever they exchange and how."""

import zlib
from functools import partial

import numpy as np
import pytest
import torch

from bench.server import free_port
from services.worker.attention.base import AttentionBatch
from services.worker.attention.compiled import TraceableAttention
from services.worker.attention.kv_cache import KvCache
from services.worker.attention.plain import PlainAttention
from services.worker.boot import compilation
from services.worker.described.config import ModelConfig
from services.worker.described.ranks import Ranks
from services.worker.described.shares import local_config
from services.worker.layers.factory import make_linear
from services.worker.layers.kernels import TorchKernels
from services.worker.models.decoder import DecoderModel
from services.worker.parallel.exchange import (
    ALONE,
    AllReduce,
    Alone,
    Exchanges,
    Overlapped,
    PeerSum,
    SequenceSharded,
    make_exchanges,
)
from services.worker.parallel.group import RankGroup
from tests.quick import quick_if
from tests.worker.small_models import CPU, PAGE_SIZE, one_sequence, small_config, small_model

FEATURES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "qk_norm": "per_head"}
KEEPS = (None, [39, 3, 17], [5], list(range(40)), [])
TOKENS = 40


def config_of(**changes) -> ModelConfig:
    return small_config(**FEATURES | {"vocab_size": 330} | changes)


def model_of(config: ModelConfig, ranks: Ranks, quantization: str = "none") -> DecoderModel:
    linear = make_linear(
        local_config(config, ranks, range(len(config.layers))), torch.float32, CPU, quantization, ranks.tp_size
    )
    model = DecoderModel(config, torch.float32, CPU, TorchKernels(), linear, ranks=ranks)
    for name, target in model.targets().items():
        noise = torch.randn(target.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        target.copy_(1 + noise / 5 if "norm" in name else noise / 8)
    return model


def attention_of(model: DecoderModel, tokens: int):
    pages = -(-tokens // PAGE_SIZE)
    local = model.local
    shape = {"layers": len(local.layers), "kv_heads": local.kv_heads, "head_dim": local.head_dim}
    cache = KvCache(page_count=pages, page_size=PAGE_SIZE, dtype=torch.float32, device=CPU, **shape)
    batch = AttentionBatch(
        token_slots=np.zeros(tokens, np.int64),
        positions=np.arange(tokens),
        row_slots=np.zeros(1, np.int64),
        row_starts=np.zeros(1, np.int64),
        row_counts=np.array([tokens]),
        page_table=np.arange(pages, dtype=np.int32)[None],
    )
    return TraceableAttention(PlainAttention(cache)).step(batch, lambda: None)


def hidden_of(model: DecoderModel, exchange: Alone | SequenceSharded, keep, tokens: int = TOKENS) -> torch.Tensor:
    keep = None if keep is None else torch.tensor(keep, dtype=torch.int32)
    token_ids = torch.arange(tokens) * 7 % model.config.vocab_size
    return model(token_ids, torch.arange(tokens), attention_of(model, tokens), keep, exchange)


@torch.inference_mode()
def forward(ranks: Ranks, port: int, config: ModelConfig, quantization: str) -> list[list[torch.Tensor]]:
    """A job: logits of each of ``KEEPS``, by each way to exchange; for tokens that ranks cannot share equally."""
    group = RankGroup(ranks, "127.0.0.1", port, CPU, {})
    try:
        model = model_of(config, ranks, quantization)
        ways = AllReduce(ranks.tp_size), SequenceSharded(ranks.tp_rank, ranks.tp_size)
        return [
            [model.logits(hidden_of(model, way, keep)) for keep in KEEPS]
            + [model.logits(hidden_of(model, way, None, tokens)) for tokens in (1, 7)]
            for way in ways
        ]
    finally:
        group.close()


@torch.inference_mode()
def forward_compiled(ranks: Ranks, port: int, config: ModelConfig) -> tuple[list[float], int]:
    """A job: how far compiled logits are from the others, and how many graphs were compiled."""
    group = RankGroup(ranks, "127.0.0.1", port, CPU, {})
    try:
        eager, compiled = (model_of(config, ranks) for _ in range(2))
        before = compilation.compilations()
        with pytest.MonkeyPatch.context() as patch:
            # The same graphs, without the minute that a C++ compiler takes for them.
            make = partial(torch.compile, dynamic=True, fullgraph=True, backend="aot_eager")
            patch.setattr(torch, "compile", lambda function, **options: make(function))
            compilation.compile_model(compiled)
        far = []
        for way in (AllReduce(ranks.tp_size), SequenceSharded(ranks.tp_rank, ranks.tp_size)):
            for tokens in (40, 7, 23):
                for keep in (None, [3, 5], [1, 2, 6]):
                    difference = hidden_of(eager, way, keep, tokens) - hidden_of(compiled, way, keep, tokens)
                    far.append(difference.abs().max().item())
        return far, compilation.compilations() - before
    finally:
        group.close()
        torch._dynamo.reset()


@pytest.mark.parametrize(
    ("tp_size", "tied"),
    quick_if(lambda tp_size, tied: tied == (tp_size == 2), [(2, False), (2, True), (4, False), (4, True)]),
)
def test_what_ranks_exchange_and_how_makes_no_difference(tp_size, tied, pool):
    """With all biases and norms, key heads that two ranks have, and rows behind the vocabulary."""
    config = config_of(tied_embeddings=tied)
    alone = model_of(config, Ranks())
    with torch.inference_mode():
        expected = [alone.logits(hidden_of(alone, ALONE, keep)) for keep in KEEPS]
        expected += [alone.logits(hidden_of(alone, ALONE, None, tokens)) for tokens in (1, 7)]
    for ways in pool.run(forward, tp_size, 1, free_port(), config, "none"):
        for found in ways:
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_quantized_rows_are_exchanged_as_they_are(pool):
    config = config_of(vocab_size=416, intermediate_size=128)
    (reduced, sharded), _ = pool.run(forward, 2, 1, free_port(), config, "fp8")
    torch.testing.assert_close(reduced, sharded, atol=1e-3, rtol=0)


@pytest.mark.slow
def test_each_way_to_exchange_is_compiled_once_for_any_number_of_tokens(pool):
    for far, graphs in pool.run(forward_compiled, 2, 1, free_port(), config_of(layers=1)):
        assert max(far) < 1e-5
        assert graphs == 4  # all tokens or some, twice


def test_one_rank_exchanges_nothing():
    """The model's operators are what they would be without any of this."""
    model, (_, step) = small_model(small_config()), one_sequence(small_config(), 8)
    seen = set()

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, kinds, arguments=(), options=None):
            seen.add(function.namespace)
            return function(*arguments, **options or {})

    with torch.inference_mode(), Seen():
        model.logits(model(torch.arange(8), torch.arange(8), step))
    assert seen == {"aten"}


MIB = 1 << 20


def test_few_tokens_are_reduced_and_many_are_sharded():
    assert make_exchanges(Ranks(), MIB) == Exchanges((ALONE,))
    ways = make_exchanges(Ranks(1, 4), MIB)
    assert isinstance(ways.of(63), AllReduce)
    assert isinstance(ways.of(64), SequenceSharded)
    assert (ways.of(64).rank, ways.of(64).size) == (1, 4)
    assert [ways.of(64).rows(tokens) for tokens in (1, 4, 5)] == [1, 1, 2]
    assert ways.of(63).rows(5) == 5


@pytest.mark.parametrize(
    ("fewest_overlapped", "kinds"),
    [
        (None, {256: PeerSum, 257: AllReduce, 65535: AllReduce, 65536: SequenceSharded}),
        (70000, {256: PeerSum, 257: AllReduce, 65536: SequenceSharded, 69999: SequenceSharded, 70000: Overlapped}),
        (1000, {256: PeerSum, 257: AllReduce, 999: AllReduce, 1000: Overlapped, 10**6: Overlapped}),
        (100, {99: PeerSum, 100: Overlapped, 257: Overlapped}),
    ],
)
def test_where_memory_is_shared_the_fewest_are_summed_through_it_and_many_may_overlap(fewest_overlapped, kinds):
    ways = make_exchanges(Ranks(1, 4), 1024, shares_memory=True, fewest_overlapped=fewest_overlapped)
    assert {tokens: type(ways.of(tokens)) for tokens in kinds} == kinds


def test_products_of_several_ranks_cannot_add_to_the_stream_themselves():
    with pytest.raises(ValueError, match="adds_in_product=False"):
        DecoderModel(config_of(), torch.float32, CPU, TorchKernels(), adds_in_product=True, ranks=Ranks(0, 2))
