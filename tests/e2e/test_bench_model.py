"""The model directory that benchmarks run with: it is what it says, and every server can read it."""

import json
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

import bench.model
from bench.model import SHAPES, VOCAB_SIZE, make_model
from bench.problems import read_problems
from services.cli.bench.problems import few_shot_prompts
from services.common.model.files import read_card
from services.common.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama-1b")


@pytest.fixture(scope="module")
def tokenizer(directory) -> Tokenizer:
    return Tokenizer.load(str(directory))


def test_a_text_comes_back_from_its_tokens(tokenizer):
    for text in (*few_shot_prompts(read_problems(), 8), "Zwölf naïve 今日は 🙂\n\n  x"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_few_shot_prompts_have_about_720_tokens(tokenizer):
    counts = [len(tokenizer.encode(prompt)) for prompt in few_shot_prompts(read_problems(), 32)]
    assert sum(counts) / 32 == pytest.approx(720, rel=0.05)


def test_every_token_has_a_text_of_its_own(tokenizer):
    vocabulary = tokenizer.vocabulary
    texts = [text for token, text in enumerate(vocabulary.token_bytes) if token not in vocabulary.special_ids]
    assert vocabulary.size == VOCAB_SIZE == 128256
    assert len(set(texts)) == len(texts) == VOCAB_SIZE - len(vocabulary.special_ids)
    assert all(len(text) == 4 for text in vocabulary.token_bytes[-100_000:])
    assert tokenizer.decode([VOCAB_SIZE - 1]) == vocabulary.token_bytes[-1].decode()


def test_the_tokens_that_end_an_answer_are_spread_and_never_in_a_prompt(directory, tokenizer):
    card = read_card(str(directory))
    ends = set(card.eos_token_ids)
    assert len(ends) == 855
    assert not ends & tokenizer.vocabulary.special_ids
    halves = sum(token < VOCAB_SIZE // 2 for token in ends)
    assert halves == pytest.approx(855 / 2, rel=0.05)
    assert not any(ends & set(tokenizer.encode(prompt)) for prompt in few_shot_prompts(read_problems(), 32))


def test_transformers_reads_it_as_the_model_it_stands_for(directory):
    config = transformers.AutoConfig.from_pretrained(directory)
    sizes = (config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads)
    assert sizes == (2048, 16, 32, 8)
    assert (config.head_dim, config.intermediate_size, config.vocab_size) == (64, 8192, 128256)
    assert config.rope_parameters["rope_type"] == "llama3"
    assert len(transformers.AutoTokenizer.from_pretrained(directory)) == VOCAB_SIZE
    assert len(transformers.GenerationConfig.from_pretrained(directory).eos_token_id) == 855


@pytest.mark.parametrize(("shape", "parameters"), [("qwen3-30b-a3b", 30.5e9), ("gpt-oss-20b", 20.9e9)])
def test_mixtures_of_experts_have_the_size_in_their_names(tmp_path, shape, parameters, monkeypatch):
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    monkeypatch.setattr(bench.model, "make_tokenizer", lambda size: made)
    config = transformers.AutoConfig.from_pretrained(make_model(tmp_path, shape))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(weight.numel() for weight in model.parameters()) == pytest.approx(parameters, rel=0.01)


def test_a_tokenizer_is_the_same_each_time(directory, tmp_path):
    bench.model.make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert (tmp_path / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("shape", SHAPES)
def test_equal_flags_give_equal_files(directory, tmp_path, shape, monkeypatch):
    """But for the tokenizer, which takes seconds to make and does not know the shape."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    monkeypatch.setattr(bench.model, "make_tokenizer", lambda size: made)
    first, second = (make_model(tmp_path / name, shape, 17) for name in ("a", "b"))
    assert {path.name for path in first.iterdir()} == {path.name for path in directory.iterdir()}
    assert {path.name: path.read_bytes() for path in first.iterdir()} == {
        path.name: path.read_bytes() for path in second.iterdir()
    }
    assert len(json.loads((first / "generation_config.json").read_text())["eos_token_id"]) == 17


def test_weights_can_be_loaded_and_are_random(tmp_path, monkeypatch):
    monkeypatch.setattr(bench.model, "_FILE_BYTES", 1 << 16)  # so that there are several files
    directory = make_model(tmp_path, "tiny")
    bench.model.write_weights(directory, "tiny")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    assert len(list(directory.glob("*.safetensors"))) > 2
    for name, tensor in model.state_dict().items():
        if tensor.ndim > 1:
            assert tensor.float().std().item() == pytest.approx(0.02, rel=0.05), name
        else:
            assert (tensor == 1).all(), name
