"""The models give what transformers gives."""

import numpy as np
import pytest
import torch

from services.common.errors import InvalidRequest
from services.common.model_files import read_json
from services.worker import weights
from services.worker.attention.base import AttentionBatch
from services.worker.attention.factory import make_attention
from services.worker.kv_cache import KvCache
from services.worker.layers.fast_cpu import make_kernels
from services.worker.models.decoder import DecoderModel
from services.worker.models.registry import read_model_config
from tests.checkpoints import LLAMA3_ROPE

CPU = torch.device("cpu")
VARIANTS = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tied": True}),
    "llama-rope-llama3": ("llama", {"rope_scaling": LLAMA3_ROPE}),
    "llama-rope-linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 48}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-no-groups": ("llama", {"num_key_value_heads": 4}),
    "llama-sentencepiece": ("llama", {"tokenizer": "sentencepiece"}),
    "llama-sharded": ("llama", {"sharded": True}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-sharded": ("qwen2", {"tied": True, "sharded": True}),
    "qwen3": ("qwen3", {}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
}


def logits_of(directory, token_ids: list[int], dtype=torch.float32) -> torch.Tensor:
    """Logits after every token of one sequence, ``[tokens, vocab]``."""
    config = read_model_config(read_json(directory / "config.json"))
    model = DecoderModel(config, dtype, CPU, make_kernels(CPU, dtype))
    weights.load(directory, model.targets(), tied_embeddings=config.tied_embeddings)
    size, tokens = 16, len(token_ids)
    pages = -(-tokens // size)
    shape = {"layers": config.layers, "kv_heads": config.kv_heads, "head_dim": config.head_dim}
    cache = KvCache(page_count=pages, page_size=size, dtype=dtype, device=CPU, **shape)
    batch = AttentionBatch(
        token_slots=np.zeros(tokens, np.int64),
        positions=np.arange(tokens),
        row_slots=np.zeros(1, np.int64),
        row_starts=np.zeros(1, np.int64),
        row_counts=np.array([tokens]),
        page_table=np.arange(pages, dtype=np.int32)[None, ::-1].copy(),
    )
    with torch.inference_mode():
        step = make_attention(cache, config.heads).step(batch, lambda: None)
        return model.logits(model(torch.tensor(token_ids), torch.arange(tokens), step))


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_logits_are_those_of_transformers(variant, checkpoint, reference):
    architecture, arguments = VARIANTS[variant]
    directory = checkpoint(architecture, **arguments)
    token_ids = np.random.default_rng(0).integers(0, 390, 300).tolist()
    with torch.inference_mode():
        expected = reference(directory)(torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(logits_of(directory, token_ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_bfloat16_agrees_with_float32_in_log_probabilities(architecture, checkpoint):
    directory = checkpoint(architecture)
    token_ids = np.random.default_rng(1).integers(0, 390, 100).tolist()
    exact = logits_of(directory, token_ids).log_softmax(-1)
    rounded = logits_of(directory, token_ids, torch.bfloat16).log_softmax(-1)
    divergence = (exact.exp() * (exact - rounded)).sum(-1)
    assert divergence.mean() < 0.02
    assert (exact.argmax(-1) == rounded.argmax(-1)).float().mean() > 0.9


def write_config(directory, tmp_path, **changes):
    import json
    import shutil

    target = tmp_path / "changed"
    shutil.copytree(directory, target)
    config = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return target


def test_rope_settings_of_older_checkpoints_are_read_too(checkpoint, tmp_path):
    directory = checkpoint("llama", rope_scaling=LLAMA3_ROPE)
    older = LLAMA3_ROPE | {"type": "llama3"}
    del older["rope_type"]
    changed = write_config(directory, tmp_path, rope_parameters=..., rope_theta=10000.0, rope_scaling=older)
    new, old = (read_model_config(read_json(path / "config.json")) for path in (directory, changed))
    assert new == old


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "needs low_freq_factor, which is missing"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"architectures": ["GPT2LMHeadModel"]}, "choose a model of LlamaForCausalLM, Qwen2ForCausalLM"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, "use_sliding_window=true"),
        ({"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True}, "use_sliding_window=true"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"intermediate_size": ...}, "intermediate_size is missing"),
    ],
)
def test_what_is_not_supported_is_refused(changes, message, checkpoint, tmp_path):
    config = read_json(write_config(checkpoint(), tmp_path, **changes) / "config.json")
    with pytest.raises(InvalidRequest, match=message):
        read_model_config(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 4}, r"9 tensors that config.json asks for are missing, e.g. model.layers.3.input_layer"),
        ({"num_hidden_layers": 2}, r"9 tensors have no place in this architecture, e.g. model.layers.2.input_layer"),
        ({"intermediate_size": 96}, r"layers.0.mlp.down_proj.weight has shape \[64, 160\], config.json asks .*64, 96"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused(changes, message, checkpoint, tmp_path):
    with pytest.raises(InvalidRequest, match=message):
        logits_of(write_config(checkpoint(), tmp_path, **changes), [1])


def test_a_missing_shard_is_named(checkpoint, tmp_path):
    directory = write_config(checkpoint("llama", sharded=True), tmp_path)
    sorted(directory.glob("*.safetensors"))[1].unlink()
    with pytest.raises(InvalidRequest, match=r"model-00002-of-00006.safetensors does not exist"):
        logits_of(directory, [1])


def test_a_damaged_file_is_named(checkpoint, tmp_path):
    directory = write_config(checkpoint(), tmp_path)
    (directory / "model.safetensors").write_bytes(b"not at all")
    with pytest.raises(InvalidRequest, match=r"model.safetensors cannot be read"):
        logits_of(directory, [1])


@pytest.mark.parametrize("name", ["partial_rotary_factor", "rope_scaling", "head_dim", "num_key_value_heads"])
def test_a_setting_that_is_null_is_as_good_as_none(name, checkpoint, tmp_path):
    directory = checkpoint("llama", num_key_value_heads=4)
    absent, null = (read_json(directory / "config.json") for _ in range(2))
    absent.pop(name, None)
    assert read_model_config(null | {name: None}) == read_model_config(absent)


def test_heads_of_qwen3_have_128_values_where_the_config_does_not_say(checkpoint, tmp_path):
    changed = write_config(checkpoint("qwen3"), tmp_path, head_dim=...)
    assert read_model_config(read_json(changed / "config.json")).head_dim == 128
