"""Models that transformers computes (``model_impl=transformers``)."""

import importlib.util
import json
from functools import cache

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from services.common.config import WorkerConfig
from services.common.errors import InvalidRequest
from services.common.model.json_object import read_json
from services.worker.boot import compilation
from services.worker.boot.common import boot
from services.worker.described.foreign import choose_implementation
from services.worker.models.foreign.skeleton import make_skeleton
from services.worker.runner.shards import ShardThreads
from tests.foreign_models import ARCHITECTURES, make_foreign_checkpoint, make_foreign_config
from tests.worker.driver import Driver, admission, batch

PAGE, TOKENS = 16, 12
# These run with each change, the others in ``make test-all``.
FEW = ("cohere2", "gpt2", "mimo_v2_flash")
EACH = [each if each in FEW else pytest.param(each, marks=pytest.mark.slow) for each in ARCHITECTURES]
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
# Configurations of these architectures that take another way through their code, or through the worker's.
VARIANTS = [
    ("arcee", {"rope_parameters": DYNAMIC, "max_position_embeddings": 56}),
    ("bloom", {"slow_but_exact": True, "pretraining_tp": 2}),
    ("diffllama", {"num_key_value_heads": 4}),
    ("falcon", {"new_decoder_architecture": False}),
    ("falcon", {"new_decoder_architecture": False, "multi_query": False, "parallel_attn": False, "num_kv_heads": 4}),
    ("falcon", {"rope_parameters": DYNAMIC, "max_position_embeddings": 56}),
    ("gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("gpt_bigcode", {"multi_query": False}),
    ("gpt_neo", {"attention_types": [[["global"], 3]]}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("llama4_text", {"attention_chunk_size": 5}),
    ("llama4_text", {"attention_chunk_size": 512}),
    ("mpt", {"n_heads": 6, "d_model": 96, "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3}}),
    ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    ("phi", {"qk_layernorm": True, "num_key_value_heads": 1}),
    ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True}),
]
FLAGS = {
    **{"device": "cpu", "page_size": PAGE, "kv_cache_num_tokens": PAGE * 128, "torch_num_threads": 2},
    **{"max_tokens_per_forward": 64, "max_seqs_per_forward": 16},
}
LLAMA = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 400, "hidden_size": 64},
    **{"intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 256},
}
OTHER = LLAMA | {"architectures": ["ArceeForCausalLM"], "model_type": "arcee", "hidden_act": "relu2"}


@pytest.fixture(scope="session")
def foreign(tmp_path_factory):
    """``foreign("gpt2", key=value, ...)``: the directory of a checkpoint, made once for each set of arguments."""

    @cache
    def make(architecture: str, changes: tuple):
        directory = tmp_path_factory.mktemp("foreign") / architecture
        return make_foreign_checkpoint(directory, architecture, **dict(changes))

    return lambda architecture, **changes: make(architecture, tuple(sorted(changes.items())))


def prompt_of(tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(6, 400, tokens).tolist()


def started(directory, **flags) -> Driver:
    return Driver(boot(WorkerConfig(model=str(directory), **FLAGS | flags)).runner)


def choices(model, prompt: list[int], answer: list[int]) -> list[int]:
    """The likeliest token behind each token of a sequence, from the end of ``prompt`` on."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return logits.argmax(-1).tolist()


def check_tokens(directory, model) -> None:
    """Compare greedy tokens with those of transformers' ``model``.

    Prompts are in chunks, and several sequences are computed at once. They are longer than a page, one has a cached
    prefix, and one is computed again.
    """
    driver = started(directory)
    prompts = [prompt_of(length, seed) for seed, length in enumerate((50, 7, PAGE + 1, 33, 1))]
    answers = driver.generate(prompts, TOKENS, chunk=17)
    for prompt, tokens in zip(prompts, answers, strict=True):
        generated = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=TOKENS,
            eos_token_id=-1,
            forced_eos_token_id=None,
        )
        assert generated[0, len(prompt) :].tolist() == tokens
    assert len({token for tokens in answers for token in tokens}) > 3
    # The pages of slot 0 have the first 48 tokens of its prompt.
    driver.run(admissions=(admission(6, prompts[0], [0, 1, 2, 100, 101], cached_tokens=48),), batch=batch([6], [2]))
    while len(driver.tokens[6]) < TOKENS:
        driver.run(batch=batch([6], [1]))
    assert driver.tokens[6] == answers[0]
    driver.reset()
    assert driver.generate(prompts[:1], TOKENS) == answers[:1]
    driver.runner.close()


@pytest.mark.parametrize("architecture", EACH)
def test_greedy_tokens_are_those_of_transformers(architecture, foreign, reference):
    directory = foreign(architecture)
    check_tokens(directory, reference(directory))


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "changes"), VARIANTS)
def test_configurations_give_the_tokens_of_transformers(architecture, changes, tmp_path):
    directory = make_foreign_checkpoint(tmp_path, architecture, **changes)
    check_tokens(directory, transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval())


def test_each_position_has_the_dynamic_rotation_of_its_own_length(tmp_path, reference):
    """The answer is that of transformers, also where it grows beyond the original context."""
    directory = make_foreign_checkpoint(tmp_path, "arcee", rope_parameters=DYNAMIC, max_position_embeddings=24)
    prompt = prompt_of(20)
    (tokens,) = started(directory).generate([prompt], TOKENS)
    inputs = torch.tensor([prompt])
    generated = reference(directory).generate(
        inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=TOKENS, eos_token_id=-1
    )
    assert generated[0, len(prompt) :].tolist() == tokens


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
@pytest.mark.parametrize("architecture", ["cohere2", "qwen2_moe"])
def test_a_compiled_model_gives_the_tokens_of_transformers(architecture, foreign, reference):
    driver, prompts = started(foreign(architecture), torch_compile=True), [prompt_of(50), prompt_of(3, 1)]
    answers = driver.generate(prompts, TOKENS, chunk=17)
    assert answers == [choices(reference(foreign(architecture)), *each) for each in zip(prompts, answers, strict=True)]
    assert compilation.recompilations() == 0


@pytest.mark.parametrize("architecture", ["cohere2", "gpt2"])
def test_a_preempted_sequence_continues_with_the_same_tokens(architecture, foreign):
    driver, prompt = started(foreign(architecture)), prompt_of(20)
    (expected,) = driver.generate([prompt], TOKENS)
    driver.reset()
    (before,) = driver.generate([prompt], 5)
    driver.reset()
    (after,) = driver.generate([prompt + before], TOKENS - 5, chunk=9)
    assert before + after == expected


def test_a_native_architecture_gives_the_same_tokens_either_way(checkpoint, reference):
    directory, prompts = checkpoint("gpt_oss"), [prompt_of(60), prompt_of(5, 1)]
    answers = [started(directory, model_impl=each).generate(prompts, TOKENS) for each in ("native", "transformers")]
    assert (
        answers[0]
        == answers[1]
        == [choices(reference(directory), *each) for each in zip(prompts, answers[0], strict=True)]
    )


def test_random_weights_need_no_files(foreign, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((foreign("olmoe") / name).read_bytes())
    first, second = (started(tmp_path, load_format="dummy").generate([prompt_of(9)], 4) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["T5ForConditionalGeneration"]}, "T5ForConditionalGeneration .* ends with ForCausalLM"),
        ({"architectures": ["BartForCausalLM"], "is_encoder_decoder": True}, "BartForCausalLM .* has an encoder"),
        ({"architectures": ["MllamaForCausalLM"], "vision_config": {}}, r"MllamaForCausalLM .*\(vision_config\)"),
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM .* state-space"),
        ({"architectures": ["JambaForCausalLM"]}, "JambaForCausalLM .* state-space"),
        ({"architectures": ["Lfm2ForCausalLM"]}, "Lfm2ForCausalLM .* convolution"),
        ({"architectures": ["Qwen3NextForCausalLM"]}, "Qwen3NextForCausalLM .* linear-attention"),
        ({"architectures": ["XLNetLMHeadModel"]}, "XLNetLMHeadModel .* not a softmax of the products"),
        ({"alibi": True}, r"ArceeForCausalLM .*\(ALiBi\)"),
        ({"layer_types": ["full_attention", "indexed_attention"]}, "layer_types contain 'indexed_attention'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"auto_map": {"AutoModel": "code.Model"}}, "auto_map asks for code from the model's directory"),
        ({"architectures": []}, "architectures is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"hidden_size": "wide"}, "hidden_size='wide'"),
    ],
)
def test_models_that_cannot_run_are_refused_by_name(changes, named):
    with pytest.raises(InvalidRequest, match=named) as caught:
        choose_implementation(OTHER | changes, WorkerConfig())
    assert caught.value.field == "model"


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("Doge", {}, "DogeForCausalLM .* mask"),
        ("Bert", {}, "BertLMHeadModel .* later tokens"),
        ("Lara", None, "LaraForCausalLM.* not a language model that transformers"),
        (
            "Dory",
            {"n_input_layers": 0, "n_recurrent_layers": 4, "n_output_layers": 0, "recurrent_kv_cache_mode": "last_loop"}
            | {"layer_types": ["sliding_attention", "mlp"] * 2},
            "DoryForCausalLM .* runs several times .* share the keys",
        ),
        (
            "Dory",
            {"n_input_layers": 0, "n_recurrent_layers": 4, "n_output_layers": 0, "recurrent_kv_cache_mode": "per_loop"}
            | {"layer_types": ["sliding_attention", "mlp"] * 2},
            "DoryForCausalLM .* answers would differ",
        ),
        ("Moshi", {"sliding_window": 9}, r"MoshiForCausalLM .* cache keeps 9 tokens \(sliding_window\)"),
        ("RoFormer", {"is_decoder": True}, "RoFormerForCausalLM .* numbers tokens itself"),
        ("Whisper", {}, "WhisperForCausalLM .* takes no position_ids|WhisperForCausalLM .* has an encoder"),
        ("Persimmon", {"hidden_act": "no such thing"}, "transformers .* makes no PersimmonForCausalLM"),
        ("Helium", {"architectures": ["HeliumMaskedForCausalLM"]}, "not a language model that transformers"),
    ],
)
def test_code_of_transformers_that_cannot_run_is_refused_before_weights_are_read(kind, changes, named, tmp_path):
    settings = OTHER | {"architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower()}
    if changes is not None:
        sizes = {"vocab_size": 400, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
        made = getattr(transformers, f"{kind}Config")(
            **sizes | {"num_hidden_layers": 2, "max_position_embeddings": 256}
        )
        known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        settings = made.to_dict() | {"architectures": [known[made.model_type]], "layer_types": None} | changes
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "model.safetensors").write_bytes(b"is not read")
    with pytest.raises(InvalidRequest, match=named):
        started(tmp_path, model_impl="transformers")


@pytest.mark.parametrize(
    ("flag", "value"), [("tp_size", 2), ("pp_size", 2), ("quantization", "fp8"), ("quantization", "checkpoint")]
)
def test_flags_that_it_does_not_support_are_refused(flag, value):
    with pytest.raises(InvalidRequest, match=f"flag {flag}=.*ArceeForCausalLM runs through transformers") as caught:
        choose_implementation(OTHER, WorkerConfig(**{flag: value}))
    assert caught.value.field == flag
    choose_implementation(LLAMA, WorkerConfig(**{flag: value}))


def test_the_first_step_has_one_thread(foreign, monkeypatch):
    """BigBird replaces modules in its first step. A second thread then ran a model that was replaced in part."""
    threads, run = [], ShardThreads.run

    def counted(self, jobs, barrier=None):
        threads.append(len(jobs))
        return run(self, jobs, barrier)

    monkeypatch.setattr(ShardThreads, "run", counted)
    started(foreign("gpt2")).runner.close()
    assert threads[0] == 1
    assert max(threads) == 2


@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_weights_in_dtype_are_supported(quantization):
    described, _ = choose_implementation(OTHER, WorkerConfig(quantization=quantization))
    assert described.foreign == "ArceeForCausalLM"


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("arcee", {"rope_parameters": DYNAMIC}, "rope_type 'dynamic'"),
        ("bart", {}, "counts positions itself"),
        ("bloom", {}, "attention in code of its own"),
        ("diffllama", {}, "attention several times in a layer"),
        ("llama4_text", {"attn_temperature_tuning": False}, "attention by chunks"),
    ],
)
def test_models_that_cannot_be_compiled_are_refused(architecture, changes, reason, foreign, tmp_path):
    directory = make_foreign_checkpoint(tmp_path, architecture, **changes) if changes else foreign(architecture)
    with pytest.raises(InvalidRequest, match=f"{reason}, which cannot be compiled") as caught:
        started(directory, torch_compile=True)
    assert caught.value.field == "torch_compile"


def test_auto_prefers_the_native_implementation():
    described, reason = choose_implementation(LLAMA, WorkerConfig())
    assert described.foreign is None
    assert reason == "LlamaForCausalLM has a native implementation"
    described, reason = choose_implementation(OTHER, WorkerConfig())
    assert described.foreign == "ArceeForCausalLM"
    assert reason == "ArceeForCausalLM has no native implementation"


def test_auto_uses_transformers_for_a_setting_that_the_native_implementation_lacks():
    described, reason = choose_implementation(LLAMA | {"hidden_act": "quick_gelu"}, WorkerConfig())
    assert described.foreign == "LlamaForCausalLM"
    assert "the native implementation of LlamaForCausalLM declines: config.json: hidden_act='quick_gelu'" in reason
    with pytest.raises(InvalidRequest, match="hidden_act='quick_gelu' is not supported"):
        choose_implementation(LLAMA | {"hidden_act": "quick_gelu"}, WorkerConfig(model_impl="native"))


def test_auto_names_the_native_reason_if_transformers_cannot_run_the_model_either():
    with pytest.raises(InvalidRequest, match="hidden_act='quick_gelu' is not supported"):
        choose_implementation(LLAMA | {"hidden_act": "quick_gelu", "alibi": True}, WorkerConfig())


def test_native_refuses_other_architectures():
    with pytest.raises(InvalidRequest, match=r"ArceeForCausalLM.* is not supported; choose a model of"):
        choose_implementation(OTHER, WorkerConfig(model_impl="native"))


def test_a_missing_library_is_named(foreign, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidRequest, match=r"GPT2LMHeadModel .* pip install 'tokasaurus\[worker-transformers\]'"):
        started(foreign("gpt2"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda tensors: tensors.pop("transformer.h.1.ln_1.weight"), "missing, e.g. transformer.h.1.ln_1.weight"),
        (
            lambda tensors: tensors.update({"transformer.wpe.weight": torch.zeros(9, 64)}),
            r"transformer.wpe.weight has shape \[9, 64\], config.json asks for \[256, 64\]",
        ),
        (
            lambda tensors: tensors.update({"transformer.wpe.weight": torch.zeros(256, 64, dtype=torch.int8)}),
            "transformer.wpe.weight has dtype I8",
        ),
        (lambda tensors: tensors.update({"another": torch.zeros(2)}), "no place in this architecture, e.g. another"),
    ],
)
def test_weights_that_do_not_fit_are_refused(changes, message, foreign, tmp_path):
    source = foreign("gpt2")
    tensors = load_file(source / "model.safetensors")
    changes(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(InvalidRequest, match=message):
        started(tmp_path)


def test_long_factors_serve_contexts_beyond_the_original_one(foreign, tmp_path, reference):
    """As transformers computes a prompt that is longer than the original context."""
    half = 8  # pairs of a head
    scaling = {
        **{"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0},
        **{"short_factor": [1.0] * half, "long_factor": [1.5 + pair / 4 for pair in range(half)]},
    }
    directory = make_foreign_checkpoint(tmp_path, "arcee", rope_parameters=scaling)
    prompt = prompt_of(80)
    (tokens,) = started(directory).generate([prompt], TOKENS)
    assert choices(reference(directory), prompt, tokens) == tokens
    prompt = prompt_of(30)
    (tokens,) = started(directory, max_context_tokens=64).generate([prompt], TOKENS)
    assert choices(reference(directory), prompt, tokens) == tokens


def test_the_context_of_an_older_config_is_found(foreign):
    described, _ = choose_implementation(read_json(foreign("gpt2") / "config.json"), WorkerConfig())
    assert described.max_context_tokens == 256
    assert (len(described.layers), described.heads, described.hidden_size) == (3, 4, 64)


def test_padding_is_not_searched_for():
    """The host would wait for the device, so there could be no CUDA graphs."""
    config = make_foreign_config("gpt2", pad_token_id=1)
    skeleton = make_skeleton(config.to_dict(), "GPT2LMHeadModel", torch.float32)
    values_unknown = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    skeleton.transformer.warn_if_padding_and_no_attention_mask(values_unknown, None)
