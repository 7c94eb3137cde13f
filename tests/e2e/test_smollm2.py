"""``toka model=smollm2`` over HTTP: a real chat model, from the GGUF file of a package."""

import json
import shutil

import openai
import pytest
import torch

from bench.server import Server, serve
from tests import real_model
from tests.e2e.test_toka import client_of
from tests.real_model import needs_real_model

pytestmark = [needs_real_model, pytest.mark.slow]
PARIS = [{"role": "user", "content": "What is the capital of France?"}]
TOKENS = 24
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server() -> Server:
    with serve(model="smollm2", device="cpu", dtype="float32", max_context_tokens=1024) as running:
        yield running


def chat(server: Server, messages: list[dict] = PARIS, **settings):
    with client_of(server) as client:
        return client.chat.completions.create(
            model=server.model, messages=messages, **{"max_tokens": TOKENS, "temperature": 0} | settings
        )


def expected_text(messages: list[dict]) -> str:
    """Return the greedy answer of transformers."""
    tokenizer = real_model.reference_tokenizer()
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, return_tensors="pt").input_ids
    with torch.inference_mode():
        answer = real_model.reference_model().generate(
            prompt, do_sample=False, max_new_tokens=TOKENS, eos_token_id=[0, 2], pad_token_id=2
        )
    return tokenizer.decode(answer[0, prompt.shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize(
    "messages",
    [
        PARIS,
        [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "Is water wet?"}],
        [*PARIS, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "And of Italy?"}],
    ],
)
def test_a_greedy_chat_has_the_text_of_transformers(server, messages):
    assert chat(server, messages).choices[0].message.content == expected_text(messages)


def test_a_streamed_chat_has_the_same_text(server):
    with client_of(server) as client:
        chunks = client.chat.completions.create(
            model="smollm2", messages=PARIS, max_tokens=TOKENS, temperature=0, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == chat(server).choices[0].message.content


def test_an_answer_follows_a_schema(server):
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = chat(server, [{"role": "user", "content": "Invent a person."}], max_tokens=100, response_format=schema)
    found = json.loads(answer.choices[0].message.content)
    assert set(found) == {"name", "age"}
    assert 0 <= found["age"] <= 9


def test_tools_are_refused_because_the_template_of_the_file_does_not_show_them(server):
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    with pytest.raises(openai.BadRequestError, match="tools"):
        chat(server, tools=[tool])


def test_a_file_is_served_by_its_path(tmp_path):
    path = tmp_path / "Tiny-Chat.Q4_1.GGUF"
    shutil.copyfile(real_model.PATH, path)
    with serve(model=path, device="cpu", dtype="float32", max_context_tokens=1024) as server:
        assert server.model == "Tiny-Chat.Q4_1"
        assert "Paris" in chat(server).choices[0].message.content
