"""The models give what transformers gives."""

import contextlib
import json
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from services.common.errors import InvalidRequest
from services.common.model.files import BUILTIN_MOE
from services.common.model.json_object import read_json
from services.worker.attention.base import AttentionBatch
from services.worker.attention.factory import make_attention
from services.worker.attention.kv_cache import KvCache
from services.worker.described.layer import ExpertsConfig
from services.worker.described.registry import ARCHITECTURES as NATIVE
from services.worker.described.registry import read_model_config
from services.worker.described.rope import RopeSettings
from services.worker.layers.factory import make_kernels
from services.worker.layers.linear import Linear
from services.worker.layers.rotary import Rotary
from services.worker.models import weights
from services.worker.models.decoder import DecoderModel
from tests.checkpoints import LLAMA3_ROPE
from tests.worker.small_models import PlainRotatingStep, one_sequence, small_config, small_model

CPU = torch.device("cpu")
WINDOW = {"use_sliding_window": True, "sliding_window": 40}
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tied": True}),
    "llama-rope-llama3": ("llama", {"rope_scaling": LLAMA3_ROPE}),
    "llama-rope-linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 48}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-no-groups": ("llama", {"num_key_value_heads": 4}),
    "llama-gelu": ("llama", {"hidden_act": "gelu"}),
    "llama-relu": ("llama", {"hidden_act": "relu"}),
    "llama-sentencepiece": ("llama", {"tokenizer": "sentencepiece"}),
    "llama-sharded": ("llama", {"sharded": True}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 40}),
    "mistral-window-of-one": ("mistral", {"sliding_window": 1}),
    "mistral-head-dim": ("mistral", {"sliding_window": None, "head_dim": 48}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", WINDOW | {"max_window_layers": 1}),
    "qwen2-tied-sharded": ("qwen2", {"tied": True, "sharded": True}),
    "qwen3": ("qwen3", {}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "qwen3-window": ("qwen3", WINDOW | {"max_window_layers": 2}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-not-normalized": ("qwen3_moe", {"norm_topk_prob": False, "attention_bias": True}),
    "qwen3_moe-relu-squared": ("qwen3_moe", {"hidden_act": "relu2"}),
    "qwen3_moe-some-dense": ("qwen3_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 5, "mlp_only_layers": [3]}),
    "qwen3_moe-window": ("qwen3_moe", WINDOW | {"max_window_layers": 1, "tied": True}),
    "mixtral": ("mixtral", {}),
    "mixtral-window": ("mixtral", {"sliding_window": 40, "num_experts_per_tok": 1}),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss-yarn": ("gpt_oss", {"rope_scaling": GPT_OSS_ROPE}),
    "gpt_oss-full": ("gpt_oss", {"layer_types": ["full_attention"] * 3, "attention_bias": False}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe-one-group": ("glm4_moe", {"n_group": 1, "norm_topk_prob": False, "use_qk_norm": False}),
    "glm4_moe-dense": ("glm4_moe", {"first_k_dense_replace": 5, "hidden_act": "gelu_new"}),
    "glm4_moe-two-shared": ("glm4_moe", {"n_shared_experts": 2, "first_k_dense_replace": 2, "attention_bias": True}),
    "glm4_moe-rotation": ("glm4_moe", {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.25}}),
    "gemma2": ("gemma2", {}),
    "gemma2-gelu": ("gemma2", {"hidden_activation": "gelu"}),
    "gemma2-no-caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2-caps": ("gemma2", {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0}),
    "gemma3": ("gemma3", {}),
    "gemma3-cap-without-effect": ("gemma3", {"attn_logit_softcapping": 1.5}),
    "gemma3-layers": ("gemma3", {"num_hidden_layers": 7}),
    "gemma3-full": ("gemma3", {"layer_types": ["full_attention"] * 3, "attention_bias": True}),
    "phi3": ("phi3", {}),
    "phi3-window": ("phi3", {"sliding_window": 40, "num_key_value_heads": 4}),
    "phi3-rotation": ("phi3", {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.75}, "tied": True}),
    "olmo2": ("olmo2", {}),
    "olmo2-biases": ("olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
    "granite": ("granite", {}),
    "granite-biases": ("granite", {"attention_bias": True, "mlp_bias": True, "tied": True}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "smollm3-rotations-of-more-layers": ("smollm3", {"no_rope_layers": [0, 1, 1, 0, 0]}),
    "smollm3-window-of-types": ("smollm3", {"sliding_window": 40, "layer_types": ["sliding_attention"] * 3}),
    "smollm3-window": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 40, "no_rope_layers": [0, 1, 0], "tied": True},
    ),
}


def logits_of(directory, token_ids: list[int], dtype=torch.float32) -> torch.Tensor:
    """Logits after every token of one sequence, ``[tokens, vocab]``."""
    config = read_model_config(read_json(directory / "config.json"))
    model = DecoderModel(config, dtype, CPU, make_kernels(CPU, dtype))
    weights.load(directory, model.targets(), config)
    size, tokens = 16, len(token_ids)
    pages = -(-tokens // size)
    shape = {"layers": len(config.layers), "kv_heads": config.kv_heads, "head_dim": config.head_dim}
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
        attention = make_attention(cache, config.heads, model.attention_layers())
        step = attention.step(batch, lambda: None)
        return model.logits(model(torch.tensor(token_ids), torch.arange(tokens), step))


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_logits_are_those_of_transformers(variant, checkpoint, reference):
    architecture, arguments = VARIANTS[variant]
    directory = checkpoint(architecture, **arguments)
    token_ids = np.random.default_rng(0).integers(0, 390, 300).tolist()
    with torch.inference_mode():
        expected = reference(directory)(torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(logits_of(directory, token_ids), expected, atol=1e-4, rtol=0)


def test_float32_logits_of_the_built_in_experts_are_those_of_transformers(reference):
    """Trained routers prefer some experts, and random ones do not."""
    token_ids = np.random.default_rng(0).integers(5, 2048, 300).tolist()
    with torch.inference_mode():
        expected = reference(BUILTIN_MOE)(torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(logits_of(BUILTIN_MOE, token_ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_float16_agrees_with_float32_in_log_probabilities(architecture, checkpoint):
    directory = checkpoint(architecture)
    token_ids = np.random.default_rng(1).integers(0, 390, 100).tolist()
    exact = logits_of(directory, token_ids).log_softmax(-1)
    rounded = logits_of(directory, token_ids, torch.float16).log_softmax(-1)
    assert (exact.exp() * (exact - rounded)).sum(-1).mean() < 0.0005
    assert (exact.argmax(-1) == rounded.argmax(-1)).float().mean() > 0.97


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_bfloat16_agrees_with_float32_in_log_probabilities(architecture, checkpoint):
    directory = checkpoint(architecture)
    token_ids = np.random.default_rng(1).integers(0, 390, 100).tolist()
    exact = logits_of(directory, token_ids).log_softmax(-1)
    rounded = logits_of(directory, token_ids, torch.bfloat16).log_softmax(-1)
    divergence = (exact.exp() * (exact - rounded)).sum(-1)
    assert divergence.mean() < 0.02
    assert (exact.argmax(-1) == rounded.argmax(-1)).float().mean() > 0.9


def write_config(directory, tmp_path, **changes):
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


def test_an_older_file_of_gpt_oss_has_the_published_scaling_of_its_own_base(checkpoint, tmp_path):
    changed = write_config(checkpoint("gpt_oss"), tmp_path, rope_parameters=..., rope_theta=5000.0, rope_scaling=None)
    theirs = transformers.AutoConfig.from_pretrained(changed).rope_parameters
    (rope,) = read_model_config(read_json(changed / "config.json")).ropes
    assert (rope.kind, rope.theta, rope.factor) == (theirs["rope_type"], theirs["rope_theta"], theirs["factor"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "needs low_freq_factor, which is missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported for this architecture"),
        (
            {"architectures": ["Phi3ForCausalLM"], "rope_parameters": {"partial_rotary_factor": 0.2}},
            "head_dim=16 with partial_rotary_factor=0.2 gives 3 el",
        ),
        ({"architectures": ["GPT2LMHeadModel"]}, "choose a model of Gemma2ForCausalLM, Gemma3ForCausalLM"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]}, "1 entries; expected 'full_att"),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["chunked"] * 3}, "3 entries, among them 'chunked'"),
        (
            {"architectures": ["GptOssForCausalLM"], "swiglu_limit": 5.0},
            "swiglu_limit=5.0 is not supported; expected 7, the only value",
        ),
        ({"hidden_act": "mish"}, "hidden_act='mish' is not supported; expected one of silu, swish, gelu"),
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


@pytest.mark.parametrize(("tied", "differs"), [(True, True), (True, False), (False, True)])
def test_a_head_that_differs_from_the_embedding_must_not_be_tied(tied, differs, checkpoint, tmp_path):
    directory = write_config(checkpoint("llama", tied=True), tmp_path, tie_word_embeddings=tied)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1] += differs
    save_file(tensors | {"lm_head.weight": head}, path)
    described = read_model_config(read_json(directory / "config.json"))
    refused = pytest.raises(InvalidRequest, match=r"lm_head.weight differs from model.embed_tokens.weight, and config")
    with refused if tied and differs else contextlib.nullcontext():
        weights.check(directory, described)


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


_SIZES = {"vocab_size": 96, "hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 6}
_SIZES |= {"num_attention_heads": 32, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


@pytest.mark.parametrize("name", NATIVE)
def test_a_file_of_sizes_alone_has_the_defaults_of_transformers(name):
    kind = name.removesuffix("ForCausalLM")
    theirs = getattr(transformers, {"Gemma3": "Gemma3Text"}.get(kind, kind) + "Config")
    counts = {key: 8 for key in ("num_local_experts", "num_experts", "n_routed_experts") if hasattr(theirs(), key)}
    given = _SIZES | counts | {"architectures": [name], "model_type": theirs.model_type}
    written = json.loads(theirs(**given).to_json_string(use_diff=False))
    assert read_model_config(given) == read_model_config(written)


def test_heads_of_qwen3_have_128_values_where_the_config_does_not_say(checkpoint, tmp_path):
    changed = write_config(checkpoint("qwen3"), tmp_path, head_dim=...)
    assert read_model_config(read_json(changed / "config.json")).head_dim == 128


@pytest.mark.parametrize("window", [300, None, ..., 9000])
def test_every_layer_of_mistral_has_its_window(window, checkpoint, reference, tmp_path):
    changes = {"sliding_window": window, "max_position_embeddings": 8192}
    changed = write_config(checkpoint("mistral"), tmp_path, **changes)
    expected = reference(changed).config.sliding_window
    made = read_model_config(read_json(changed / "config.json"))
    assert made.max_context_tokens == 8192
    assert made.windows == ((expected,) * 3 if expected in (300, 4096) else ())


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": 40, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 40},
        {"use_sliding_window": True, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]},
    ],
)
def test_layers_of_qwen_have_the_windows_that_transformers_gives_them(architecture, changes):
    kinds = {"qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config}
    layers = len(changes.get("layer_types", range(30)))
    config = {"num_hidden_layers": layers, "max_position_embeddings": 8192} | changes
    theirs = kinds[architecture](**config)
    expected = tuple(theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types)
    written = {"architectures": [f"{architecture.capitalize()}ForCausalLM"], "hidden_size": 64, "vocab_size": 96}
    written |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, **config}
    assert (read_model_config(written).windows or (None,) * layers) == expected


def hidden_of(model, tokens: int, keep=None):
    """The hidden states of one sequence, and the cache that it filled."""
    cache, step = one_sequence(model.config, tokens, model.embedding.dtype)
    with torch.inference_mode():
        return model(torch.arange(tokens) * 7 % 320, torch.arange(tokens), step, keep), cache


@pytest.mark.parametrize("adds_in_product", [False, True])
@pytest.mark.parametrize("features", [{}, {"qkv_bias": True, "output_bias": True, "mlp_bias": True}])
def test_keeping_some_tokens_is_the_same_as_choosing_them_afterwards(features, adds_in_product):
    model = small_model(small_config(**features), adds_in_product=adds_in_product)
    expected, full = hidden_of(model, 40)
    for keep in (torch.tensor([39, 3, 17]), torch.tensor([5], dtype=torch.int32), torch.arange(40), torch.arange(0)):
        kept, cache = hidden_of(model, 40, keep)
        torch.testing.assert_close(kept, expected[keep.long()])
        torch.testing.assert_close(cache.all_keys, full.all_keys)
        torch.testing.assert_close(cache.all_values, full.all_values)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("features", [{}, {"qkv_bias": True, "output_bias": True, "mlp_bias": True}])
def test_the_layout_of_weights_and_who_adds_make_no_difference(features, transposed):
    config = small_config(**features)
    expected, _ = hidden_of(small_model(config), 40)
    other = small_model(config, linear=partial(Linear, transposed=transposed), adds_in_product=True)
    torch.testing.assert_close(hidden_of(other, 40)[0], expected)


@pytest.mark.parametrize("qk_norm", ["none", "per_head"])
def test_attention_may_norm_and_rotate_by_itself(qk_norm):
    model = small_model(small_config(qk_norm=qk_norm, qkv_bias=True))
    expected, _ = hidden_of(model, 40)
    positions = torch.arange(40)
    _, inner = one_sequence(model.config, 40)
    step = PlainRotatingStep(model.config, model.rotaries[0], positions, inner)
    with torch.inference_mode():
        torch.testing.assert_close(model(positions * 7 % 320, positions, step), expected)


def test_angles_are_exact_in_float32_and_rounded_for_the_model():
    rotary = Rotary(RopeSettings("default", 10000.0), 16, 512, torch.bfloat16, CPU)
    exact = Rotary(RopeSettings("default", 10000.0), 16, 512, torch.float32, CPU)
    assert torch.equal(rotary.cos, exact.cos)
    assert torch.equal(rotary.sin, exact.sin)
    positions = torch.tensor([0, 7, 511])
    for rounded, table in zip(rotary.at(positions), (exact.cos, exact.sin), strict=True):
        assert torch.equal(rounded, table[positions].unsqueeze(1).bfloat16())


def test_dummy_weights_follow_from_seed_and_name():
    first = weights_of(seed=1)
    assert all(torch.equal(value, first[name]) for name, value in weights_of(seed=1).items())
    # Other layers, layouts and dtypes change nothing in those there are.
    shorter = weights_of(seed=1, layers=1)
    assert all(torch.equal(value, first[name]) for name, value in shorter.items())
    matrix = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(weights_of(seed=2)[matrix], first[matrix])
    assert not torch.equal(first["model.layers.1.mlp.up_proj.weight"], first[matrix])
    assert first[matrix].std() == pytest.approx(0.02, rel=0.05)
    assert (first["model.layers.0.self_attn.q_proj.bias"] == 0).all()
    assert (first["model.layers.0.input_layernorm.weight"] == 1).all()


def test_dummy_routers_prefer_some_experts():
    config = small_config(mlp=ExpertsConfig(count=64, chosen=4, width=16))
    model = DecoderModel(config, torch.float32, CPU, make_kernels(CPU, torch.float32))
    weights.load_dummy(model, seed=0)
    logits = torch.randn(4096, config.hidden_size, generator=torch.Generator().manual_seed(0)) @ (
        model.targets()["model.layers.0.mlp.gate.weight"].T
    )
    tokens = torch.bincount(logits.topk(4).indices.flatten(), minlength=64).float()
    assert tokens.max() > 2 * tokens.mean()
    assert tokens.min() < tokens.mean() / 4


def weights_of(seed: int, layers: int = 2) -> dict[str, torch.Tensor]:
    config = small_config(qkv_bias=True, layers=layers)
    model = DecoderModel(config, torch.float32, CPU, make_kernels(CPU, torch.float32))
    weights.load_dummy(model, seed)
    return model.targets()
