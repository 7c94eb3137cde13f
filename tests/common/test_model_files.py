import json

import pytest

from services.common.errors import InvalidRequest
from services.common.model.files import BUILTIN_MODELS, names_of, read_card, resolve, tokenizer_fingerprint
from services.common.model.generation_config import GenerationDefaults

NO_FILE = GenerationDefaults().sampling


def write_model(directory, config, generation=None):
    (directory / "config.json").write_text(json.dumps({"vocab_size": 100} | config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return str(directory)


@pytest.mark.parametrize("name", BUILTIN_MODELS)
def test_a_builtin_model_has_a_card(name):
    card = read_card(name)
    assert (card.name, card.aliases) == (f"tokasaurus-{name}", (name,))
    assert card.vocab_size > 0
    assert card.eos_token_ids
    assert (resolve(name, weights=True) / "model.safetensors").is_file()


def test_the_builtin_models_have_one_tokenizer():
    assert len({tokenizer_fingerprint(directory) for directory in BUILTIN_MODELS.values()}) == 1


def test_a_wrong_path_names_the_builtin_models():
    with pytest.raises(InvalidRequest, match="a GGUF file, a hub id, builtin, builtin-moe or smollm2"):
        resolve("./builtin-mo", weights=False)


def test_the_end_of_sequence_set_comes_from_the_generation_config(tmp_path):
    model = write_model(tmp_path, {"eos_token_id": 1}, {"eos_token_id": [7, 3, 7]})
    assert read_card(model).eos_token_ids == (3, 7)


def test_the_end_of_sequence_set_may_be_one_token_or_none(tmp_path):
    assert read_card(write_model(tmp_path, {"eos_token_id": 1})).eos_token_ids == (1,)
    assert read_card(write_model(tmp_path, {"eos_token_id": None})).eos_token_ids == ()


def test_sampling_defaults_come_from_the_generation_config(tmp_path):
    assert read_card(write_model(tmp_path, {})).defaults == GenerationDefaults()
    content = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
    sampling, content = content, content | {"max_new_tokens": 2048}
    for do_sample in ({}, {"do_sample": True}, {"do_sample": None}):
        card = read_card(write_model(tmp_path, {}, content | do_sample))
        assert card.defaults == GenerationDefaults(sampling, 2048)


def test_a_model_that_does_not_sample_is_greedy_by_default(tmp_path):
    card = read_card(write_model(tmp_path, {}, {"do_sample": False, "temperature": 0.6, "top_p": 0.9}))
    assert card.defaults == GenerationDefaults(NO_FILE | {"temperature": 0.0, "top_p": 0.9})


@pytest.mark.parametrize(
    ("content", "ignored"),
    [
        ({"no_repeat_ngram_size": 3, "suppress_tokens": [1, 2]}, ("no_repeat_ngram_size=3", "suppress_tokens=[1, 2]")),
        ({"num_beams": 4, "top_p": 0.5}, ("num_beams=4",)),
        ({"temperature": -1, "top_k": True, "min_p": "0.1"}, ("temperature=-1", "top_k=True", "min_p=0.1")),
        ({"top_p": 0, "max_new_tokens": 0}, ("top_p=0", "max_new_tokens=0")),
        ({"bad_words_ids": [list(range(50))]}, ("bad_words_ids=[[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...",)),
        ({"a_setting_of_tomorrow": 1}, ("a_setting_of_tomorrow=1",)),
    ],
)
def test_settings_that_are_not_followed_are_named(tmp_path, content, ignored):
    assert read_card(write_model(tmp_path, {}, content)).defaults.ignored == ignored


def test_what_transformers_writes_by_default_is_followed(tmp_path):
    """Also in the form of older versions, which wrote every setting."""
    import transformers

    content = transformers.GenerationConfig().to_dict() | {"length_penalty": 1.0, "num_beams": 1, "max_length": 20}
    content |= {"pad_token_id": 0, "eos_token_id": [1], "transformers_version": "4.38.0", "_from_model_config": True}
    content |= {"top_k": 50, "do_sample": True, "typical_p": 1.0, "no_repeat_ngram_size": 0, "early_stopping": False}
    assert read_card(write_model(tmp_path, {}, content)).defaults == GenerationDefaults(NO_FILE | {"top_k": 50})


def test_a_model_is_named_after_its_directory_unless_told_otherwise(tmp_path):
    model = write_model(tmp_path, {})
    assert read_card(model + "/").name == tmp_path.name
    card = read_card(model, ("served", "also"))
    assert (card.name, card.aliases, card.root) == ("served", ("also", tmp_path.name, model), model)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("meta-llama/Llama-3.2-1B", ("Llama-3.2-1B", "meta-llama/Llama-3.2-1B")),
        ("/models/Llama/", ("Llama", "/models/Llama", "/models/Llama/")),
        ("builtin", ("tokasaurus-builtin", "builtin")),
        ("builtin-moe", ("tokasaurus-builtin-moe", "builtin-moe")),
    ],
)
def test_a_model_has_its_last_part_and_itself_as_names(model, names):
    assert names_of(model) == names


@pytest.mark.parametrize("model", ["/no/such/directory", "./nowhere"])
def test_a_path_that_does_not_exist_is_no_hub_id(model):
    with pytest.raises(InvalidRequest, match="is not a directory") as caught:
        resolve(model, weights=True)
    assert caught.value.field == "model"


def test_a_directory_without_a_config_is_no_model(tmp_path):
    with pytest.raises(InvalidRequest, match="must be a Hugging Face model directory"):
        read_card(str(tmp_path))


def test_a_config_of_something_else_is_no_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="has no vocab_size"):
        read_card(str(tmp_path))


def test_broken_json_names_the_file(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidRequest, match=r"config\.json is not valid JSON"):
        read_card(str(tmp_path))


def test_the_fingerprint_follows_the_tokenizer_files(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    before = tokenizer_fingerprint(tmp_path)
    (tmp_path / "model.safetensors").write_text("weights")
    assert tokenizer_fingerprint(tmp_path) == before
    (tmp_path / "tokenizer.json").write_text("{ }")
    assert tokenizer_fingerprint(tmp_path) != before
