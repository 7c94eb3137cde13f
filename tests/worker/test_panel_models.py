"""Models whose weights are in panels on CPUs, against plain layers with the same weights."""

import pytest
import torch

from services.common.config import WorkerConfig
from services.worker.boot.common import boot
from services.worker.layers.linear import Linear
from services.worker.layers.panels import PanelLinear
from services.worker.models import fused_cpu
from services.worker.models.decoder import DecoderModel
from tests.quick import quick_if
from tests.worker.driver import Driver
from tests.worker.small_models import one_sequence

PROMPTS = ([3 + index * 7 % 300 for index in range(90)], [5, 6], list(range(20, 40)))


def as_floats(model: DecoderModel) -> DecoderModel:
    """Replace the layers of ``model`` by plain ones with the same weights in float32. Return it."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PanelLinear) and name != "_lookup":
                plain = Linear(child.inputs, child.outputs)
                with torch.no_grad():
                    plain.weight.copy_(child.columns(torch.arange(child.width)).t())
                plain.bias = child.bias
                setattr(parent, name, plain)
    return model


@pytest.mark.parametrize(
    ("stored", "error", "tied", "architecture"),
    quick_if(
        lambda stored, error, tied, architecture: stored == "float32" or (tied, architecture) == (False, "llama"),
        [
            (*stored, tied, architecture)
            for stored in [("float32", 1e-4), ("bfloat16", 0.05)]
            for tied in (True, False)
            for architecture in ("llama", "qwen2", "qwen3")
        ],
    ),
)
def test_decoding_agrees_with_plain_layers_in_float32(architecture, tied, stored, error, checkpoint, monkeypatch):
    calls, call = [], fused_cpu.FusedDecoder.__call__
    monkeypatch.setattr(
        fused_cpu.FusedDecoder, "__call__", lambda *arguments: calls.append(arguments) or call(*arguments)
    )
    flags = {"device": "cpu", "kv_cache_num_tokens": 4096, "torch_num_threads": 2, "dtype": stored}
    booted = boot(WorkerConfig(model=str(checkpoint(architecture, tied=tied)), **flags))
    assert booted.dtype == stored
    assert booted.runner.cache.all_keys.dtype == getattr(torch, stored)
    driver = Driver(booted.runner)
    answers = driver.generate(list(PROMPTS), 12, logprobs=True)
    assert calls
    model = as_floats(booted.loaded.model)
    for slot, (prompt, tokens) in enumerate(zip(PROMPTS, answers, strict=True)):
        sequence = torch.tensor(prompt + tokens)
        _, step = one_sequence(model.config, len(sequence))
        with torch.inference_mode():
            logits = model.logits(model(sequence, torch.arange(len(sequence)), step))[len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)
        # In bfloat16, inputs of products, keys and values are rounded.
        found = torch.tensor(driver.logprobs[slot])
        torch.testing.assert_close(found, expected[torch.arange(12), tokens], rtol=0, atol=error)
        assert (expected.max(-1).values - found < 2 * error).all()
    booted.runner.close()


def test_other_models_keep_their_dtype(checkpoint):
    model = checkpoint("qwen3_moe")
    booted = boot(WorkerConfig(model=str(model), device="cpu", dtype="bfloat16", kv_cache_num_tokens=4096))
    assert booted.loaded.model.embedding.dtype == torch.bfloat16
    booted.runner.close()
