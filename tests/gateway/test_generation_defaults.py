"""Answers of a chat that names no limit are as long as the model's ``generation_config.json`` says."""

import json
import shutil

import pytest

from services.common.model.files import BUILTIN
from tests.gateway.deployment import Deployment

GENERATION = {"eos_token_id": [0, 1], "max_new_tokens": 5, "no_repeat_ngram_size": 3, "num_beams": 1}


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    directory = tmp_path_factory.mktemp("defaults")
    model = shutil.copytree(BUILTIN, directory / "model")
    (model / "generation_config.json").write_text(json.dumps(GENERATION))
    started = Deployment(directory, scheduler={"model": model}, gateway={"model": model, "max_output_tokens": 9})
    started.wait_ready()
    yield started
    started.stop()


@pytest.mark.parametrize(
    ("asked", "tokens"),
    [({}, 5), ({"max_tokens": 7}, 7), ({"max_completion_tokens": 2}, 2), ({"min_tokens": 6}, 6)],
)
def test_the_models_limit_counts_where_a_chat_names_none(running, asked, tokens):
    body = {"model": "model", "messages": [{"role": "user", "content": "Hi"}], **asked}
    assert running.post("/v1/chat/completions", body).json()["usage"]["completion_tokens"] == tokens


def test_completions_keep_the_limit_of_openai(running):
    answer = running.post("/v1/completions", {"model": "model", "prompt": "Hi"})
    assert answer.json()["usage"]["completion_tokens"] == 9  # 16, or what the operator allows


@pytest.mark.parametrize(("asked", "tokens"), [({}, 9), ({"max_new_tokens": None}, 9), ({"max_new_tokens": 7}, 7)])
def test_rollouts_without_a_limit_have_the_largest_that_is_allowed(running, asked, tokens):
    params = asked | {"ignore_eos": True}
    ids = running.post("/inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": params})
    assert ids.json()["usage"]["completion_tokens"] == tokens
    generated = running.post("/generate", {"input_ids": [5, 6, 7], "sampling_params": params})
    assert generated.json()["meta_info"]["completion_tokens"] == tokens


def test_settings_that_are_not_followed_are_named_in_one_line_at_the_start(running):
    [line] = [line for line in running.scheduler.log.read_text().splitlines() if "not supported" in line]
    assert "no_repeat_ngram_size=3" in line
    assert "num_beams" not in line
