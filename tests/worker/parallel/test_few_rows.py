"""The decoder for few rows, with the shares of several ranks."""

from functools import partial

import pytest
import torch

from bench.server import free_port
from services.worker.described.config import ModelConfig
from services.worker.described.ranks import Ranks
from services.worker.layers.grouped import GroupedLinear
from services.worker.layers.linear import Linear
from services.worker.parallel.exchange import AllReduce
from services.worker.parallel.group import RankGroup
from tests.worker.interpreter import INTERPRETED, interpreter_ready, needs_triton
from tests.worker.small_models import CPU, PlainRotatingStep, one_sequence, small_config, small_model

pytestmark = [needs_triton, pytest.mark.skipif(not INTERPRETED, reason="attention here is the reference, on the CPU")]

DTYPE = torch.float16  # the interpreter multiplies no bfloat16
LINEARS = {
    "plain": partial(Linear, transposed=True),
    "int8": partial(GroupedLinear, bits=8, group=32),
    "int4": partial(GroupedLinear, bits=4, group=32),
}
CONFIGS = {
    "llama": {},
    "biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "qwen3": {"qk_norm": "per_head", "tied_embeddings": False},
}


@torch.inference_mode()
def hidden_states(
    ranks: Ranks, port: int, config: ModelConfig, linear: str, tokens: int, keep: list[int] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the hidden states of the model, and those of the decoder for few rows. This is a job."""
    with pytest.MonkeyPatch.context() as patch, interpreter_ready(patch):
        from services.worker.models.skinny_cuda import SkinnyDecoder

        group = RankGroup(ranks, "127.0.0.1", port, CPU, {})
        try:
            model = small_model(config, DTYPE, linear=LINEARS[linear], ranks=ranks)
            token_ids, positions = torch.arange(tokens) * 7 % config.vocab_size, torch.arange(tokens)
            kept, exchange = keep if keep is None else torch.tensor(keep), AllReduce(ranks.tp_size)
            found = []
            for run in (model, SkinnyDecoder(model)):
                _, inner = one_sequence(model.local, tokens, DTYPE)
                step = PlainRotatingStep(model.local, model.rotaries[0], positions, inner)
                found.append(run(token_ids, positions, step, kept, exchange))
            return found[0], found[1]
        finally:
            group.close()


def check(pool, config: ModelConfig, tp_size: int, linear: str, tokens: int, keep: list[int] | None = None) -> None:
    results = pool.run(hidden_states, tp_size, 1, free_port(), config, linear, tokens, keep)
    for expected, found in results:
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
        assert torch.equal(found, results[0][1])


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(("tokens", "keep"), [(1, None), pytest.param(7, None, marks=pytest.mark.slow), (8, [3])])
def test_the_decoder_gives_what_the_model_gives(changes, tokens, keep, pool):
    check(pool, small_config(layers=2, **changes), 2, "plain", tokens, keep)


@pytest.mark.parametrize("linear", ["int8", "int4"])
def test_quantized_weights_of_a_rank_give_what_the_model_gives(linear, pool):
    check(pool, small_config(layers=2, intermediate_size=128), 2, linear, 5)
