"""What a request tells the chat template, and ``/tokenize``, ``/detokenize``, ``/version``, ``/v1/embeddings``."""

import json
import threading
from types import SimpleNamespace

import httpx
import openai
import pytest
from fastapi import FastAPI

from services.common.errors import InvalidRequest
from services.common.text.chat_template import ChatTemplate
from services.common.text.encoder import MAX_TEXT_BYTES
from services.common.text.tokenizer import Tokenizer
from services.gateway.engine.text import TextEngine
from services.gateway.openai import tokens
from services.gateway.openai.conversation import render
from services.gateway.openai.schemas import ChatBody
from tests.gateway.parrot import QWEN, make_model
from tests.gateway.test_errors import error_of
from tests.gateway.test_streaming import events

HI = [{"role": "user", "content": "Hi"}]


def tokenized(deployment, **body) -> dict:
    response = deployment.post("/tokenize", body)
    assert response.status_code == 200, response.text
    return response.json()


def rendered(deployment, **body) -> str:
    tokens = tokenized(deployment, **{"messages": HI} | body)["tokens"]
    return deployment.post("/detokenize", {"tokens": tokens}).json()["prompt"]


def test_a_text_and_its_tokens(deployment, tokenizer):
    ids = tokenizer.encode("Zwölf 🙂 apples")
    answer = tokenized(deployment, prompt="Zwölf 🙂 apples")
    assert answer == {"tokens": ids, "count": len(ids), "max_model_len": 2048, "token_strs": None}
    assert deployment.post("/detokenize", {"tokens": ids}).json() == {"prompt": "Zwölf 🙂 apples"}
    strings = tokenized(deployment, prompt="two apples", return_token_strs=True)["token_strs"]
    assert "".join(strings) == "two apples"


def test_a_conversation_and_its_tokens(deployment, tokenizer):
    assert tokenized(deployment, messages=HI)["tokens"] == tokenizer.encode_chat(HI)
    assert tokenized(deployment, messages=HI, add_generation_prompt=False)["tokens"] == tokenizer.encode_chat(HI, False)
    assert rendered(deployment) == "<|user|>Hi<|end|><|assistant|>"


def test_a_text_longer_than_the_context_has_tokens(deployment):
    assert tokenized(deployment, prompt="word " * 20_000)["count"] >= 20_000
    assert tokenized(deployment, messages=[{"role": "user", "content": "word " * 20_000}])["count"] >= 20_000


def test_a_long_answer_is_what_a_short_one_is(deployment, tokenizer):
    prompt = "ab " * 30_000
    answer = tokenized(deployment, prompt=prompt, return_token_strs=True)
    assert answer["tokens"] == tokenizer.encode(prompt)
    assert len(answer["token_strs"]) == answer["count"] > 20_000
    assert "".join(answer["token_strs"]) == prompt


async def test_a_long_answer_is_made_beside_the_event_loop(tokenizer):
    makers = set()
    engine = TextEngine(tokenizer)
    text_of = engine.token_text
    engine.token_text = lambda token: makers.add(threading.current_thread()) or text_of(token)

    async def model(_):
        return SimpleNamespace(max_context_tokens=2048)

    app = FastAPI()
    app.include_router(tokens.router)
    app.state.gateway = SimpleNamespace(
        text=engine, fleet=SimpleNamespace(model=model), config=SimpleNamespace(max_body_bytes=2**20)
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        body = {"prompt": "ab " * 30_000, "return_token_strs": True}
        assert (await client.post("/tokenize", json=body)).json()["count"] > 20_000
    assert makers
    assert threading.current_thread() not in makers
    engine.stop()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": "x" * (MAX_TEXT_BYTES + 1)}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * MAX_TEXT_BYTES}]}, "messages"),
        ("/v1/completions", {"prompt": "x" * (MAX_TEXT_BYTES + 1), "truncate_prompt_tokens": 5}, "prompt"),
        ("/detokenize", {"tokens": [7] * (MAX_TEXT_BYTES + 1)}, "tokens"),
    ],
    ids=["prompt", "messages", "truncated", "tokens"],
)
def test_what_may_be_longer_than_the_context_is_bounded_all_the_same(deployment, path, body, param):
    response = deployment.post(path, body)
    assert error_of(response, 400)["param"] == param
    assert str(MAX_TEXT_BYTES) in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/tokenize", {"prompt": "x", "continue_final_message": 1}, "continue_final_message"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1, True]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1, 2048]}, "tokens[1]"),
    ],
)
def test_what_has_no_tokens_or_no_text_is_named(deployment, path, body, param):
    assert error_of(deployment.post(path, body), 400)["param"] == param


def test_the_version_is_the_packages(deployment):
    assert httpx.get(deployment.url + "/version").json() == {"version": "0.1.0"}


def test_there_are_no_embeddings_and_the_sdk_hears_why(sdk, model):
    with pytest.raises(openai.NotFoundError, match="makes no embeddings"):
        sdk.embeddings.create(model=model, input="x")


def test_variables_reach_the_template_and_others_are_listed(qwen):
    assert rendered(qwen, chat_template_kwargs={"enable_thinking": False}).endswith("<think>\n\n</think>\n\n")
    answer = qwen.chat(max_tokens=2, chat_template_kwargs={"enable_thinking": True, "mood": "good"})
    assert answer.status_code == 200
    assert answer.headers["x-toka-ignored-params"] == "chat_template_kwargs.mood"


def test_an_answer_goes_on_with_the_last_message(qwen):
    messages = [{"role": "user", "content": "One, two, three."}, {"role": "assistant", "content": "One, two"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert qwen.chat(**body).json()["choices"][0]["message"]["content"] == ", three."
    assert rendered(qwen, **body).endswith("<|assistant|>One, two")
    del body["add_generation_prompt"]
    assert qwen.chat(**body).json()["choices"][0]["message"]["content"] == ", three."
    assert rendered(qwen, **body).endswith("<|assistant|>One, two")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"continue_final_message": True}, "continue_final_message"),  # behind a user's message
        ({"continue_final_message": True, "add_generation_prompt": False}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"documents": ["x"]}, "documents[0]"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
    ],
)
def test_what_the_template_cannot_be_told_is_refused(qwen, body, param):
    assert error_of(qwen.chat(**body), 400)["param"] == param


def test_a_template_of_a_request_is_code_and_refused_for_that(deployment):
    assert "code" in error_of(deployment.chat(chat_template="x"), 400)["message"]


def test_documents_and_effort_reach_a_template_that_knows_them(llama):
    assert '<|system|>[{"text": "facts"}]<|end|>' in rendered(llama, documents=[{"text": "facts"}])
    with llama.sdk() as client:
        model = client.models.list().data[0].id
        plain = client.chat.completions.create(model=model, messages=HI)
        effort = client.chat.completions.create(model=model, messages=HI, reasoning_effort="high")
    assert effort.usage.prompt_tokens > plain.usage.prompt_tokens


def test_no_effort_turns_thinking_off(qwen):
    messages = [{"role": "user", "content": "<think>\n\n</think>\n\nYes."}]
    message = qwen.chat(messages=messages, reasoning_effort="none").json()["choices"][0]["message"]
    assert message["content"] == "Yes."
    assert "reasoning_content" not in message


@pytest.mark.parametrize(
    ("effort", "given", "text"),
    [
        *((effort, {}, "True") for effort in ("minimal", "low", "medium", "high", "xhigh", "max")),
        ("none", {}, "False"),
        (None, {}, "unset"),
        ("high", {"enable_thinking": False}, "False"),
    ],
)
async def test_an_effort_means_to_think_where_the_template_has_a_switch(tmp_path, effort, given, text):
    template = "{{ enable_thinking if enable_thinking is defined else 'unset' }}"
    engine = TextEngine(Tokenizer.load(str(make_model(tmp_path / "m", template))))
    body = ChatBody(messages=HI, chat_template_kwargs=given, reasoning_effort=effort)
    assert (await render(engine, body, max_tokens=None)).text == text
    engine.stop()


def test_the_originals_name_of_template_variables(qwen):
    hidden = "<think>\n\n</think>\n\n"
    for name in ("chat_template_kwargs", "apply_chat_template_overrides"):
        assert text_of(qwen, **{name: {"enable_thinking": False}}).endswith(hidden)
    assert not text_of(qwen).endswith(hidden)


# -- messages as answers have them


def text_of(deployment, *messages, **body) -> str:
    """The prompt of a conversation, by the ids that its answer tells."""
    body |= {"messages": [*HI, *messages], "max_tokens": 1, "return_token_ids": True}
    response = deployment.chat(**body)
    assert response.status_code == 200, response.text
    return Tokenizer.load("builtin").decode(response.json()["prompt_token_ids"], skip_special_tokens=False)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": None}, ""),
        ({"content": None, "refusal": None}, ""),
        ({"content": None, "refusal": "I will not."}, "I will not."),
        ({"refusal": "I will not."}, "I will not."),
        ({"content": [{"type": "refusal", "refusal": "I will not."}]}, "I will not."),
        ({"content": "Yes.", "refusal": None, "reasoning": None}, "Yes."),
        ({"content": "Yes.", "reasoning": "Hm."}, "<think>Hm.</think>Yes."),
        ({"content": "Yes.", "reasoning": "Hm.", "reasoning_content": "Hm."}, "<think>Hm.</think>Yes."),
    ],
)
def test_an_assistants_message_is_taken_as_answers_have_it(qwen, message, text):
    assert f"<|assistant|>{text}<|end|>" in text_of(qwen, {"role": "assistant", **message}, *HI)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": "x", "refusal": "no"}, "messages[0]"),
        ({"role": "assistant", "content": "x", "refusal": "no"}, "messages[0]"),
        ({"role": "assistant", "refusal": 5}, "messages[0]"),
    ],
)
def test_a_message_without_words_is_refused(qwen, message, param):
    assert error_of(qwen.chat(messages=[message]), 400)["param"] == param


def test_thoughts_have_both_names(qwen):
    messages = [{"role": "user", "content": "<think>Hm.</think>Yes."}]
    message = qwen.chat(messages=messages).json()["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("Hm.", "Hm.", "Yes.")
    deltas = [chunk["choices"][0]["delta"] for chunk in events(qwen, "/v1/chat/completions", messages=messages)]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == "Hm."


def test_a_template_for_tools_is_used_with_tools_only(tmp_path):
    directory = make_model(tmp_path / "m", QWEN)
    (directory / "chat_template.jinja").unlink()
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools }}"}]
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    tokenizer = Tokenizer.load(str(directory))
    assert tokenizer.render_chat(HI) == "plain"
    assert tokenizer.render_chat(HI, variables={"tools": [1]}) == "[1]"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}[{{ m.content }}]{% endfor %}", "[Hi][So "),
        ("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}", "[Hi][So"),
    ],
)
def test_a_continued_message_keeps_its_last_space_unless_the_template_trims(source, text):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So "}]
    cut = ChatTemplate(source, {}).render(messages, False, continue_final_message=True)
    assert cut == text


def test_a_template_that_hides_the_last_message_cannot_continue_it():
    with pytest.raises(InvalidRequest, match="continue_final_message"):
        ChatTemplate("{{ messages[0].content }}", {}).render(HI * 2, False, continue_final_message=True)
