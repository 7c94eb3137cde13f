"""Answers in a given form, asked for in every way there is, of the real worker."""

import io
import json
import re
from enum import StrEnum
from typing import Annotated

import pytest
from huggingface_hub import InferenceClient
from pydantic import BaseModel, Field

from tests.gateway.deployment import PATIENCE_S, eventually

SAY = [{"role": "user", "content": "Say something."}]
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}
PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 130}, "tall": {"type": "boolean"}},
    "required": ["age", "tall"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


class Mood(StrEnum):
    GOOD = "good"
    BAD = "bad"


class Report(BaseModel):
    """What a client wants to know."""

    mood: Mood
    score: Annotated[int, Field(ge=0, le=9)]
    tags: Annotated[list[Annotated[str, Field(max_length=4)]], Field(max_length=2)]
    note: Annotated[str, Field(max_length=5)] | None


class Verdict(BaseModel):
    """So short that every answer comes to its end."""

    mood: Mood


@pytest.fixture
def sdk(thinker):
    with thinker.sdk() as client:
        yield client


@pytest.fixture
def model(sdk):
    return sdk.models.list().data[0].id


@pytest.fixture
def shorter(no_blanks):
    """What makes answers of the built-in model end."""
    return {"logit_bias": no_blanks, "max_tokens": 200, "temperature": 1}


def whole(response) -> list[str]:
    """The texts of an answer whose choices all came to their end."""
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]


def is_person(text: str) -> bool:
    person = json.loads(text)
    return sorted(person) == ["age", "tall"] and 0 <= person["age"] <= 130 and type(person["tall"]) is bool


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": FORM},
        {"structured_outputs": {"json": PERSON}},
        {"structured_outputs": {"json": json.dumps(PERSON)}},
        {"guided_json": PERSON},
        {"guided_json": json.dumps(PERSON), "guided_decoding_backend": "guidance"},
        {"response_format": {"type": "json_object", "value": PERSON}},
        {"response_format": {"type": "json_object", "schema": PERSON}},
        {"response_format": {"type": "json_schema", "schema": PERSON, "strict": True}},
        {"response_format": {"type": "json", "value": json.dumps(PERSON)}},
        {"response_format": {"type": "json_schema", "value": {"name": "person", "schema": PERSON}}},
        {"json_schema": json.dumps(PERSON)},
    ],
)
def test_a_schema_holds_for_every_sample_of_chat_and_completions(thinker, shorter, body):
    for text in whole(thinker.chat(n=4, seed=3, **body, **shorter, **PLAIN)):
        assert is_person(text), text
    for text in whole(thinker.complete(prompt=["Who?", "And who?"], n=2, seed=3, **body, **shorter)):
        assert is_person(text), text


@pytest.mark.parametrize(
    "body", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_any_object(thinker, no_blanks, body):
    opening = '{"a": [1, true, "x"'
    response = thinker.complete(prompt="x", seed=5, max_tokens=60, logit_bias=no_blanks, n=8, **body)
    texts = [choice["text"] for choice in response.json()["choices"]]
    assert all(text.lstrip().startswith("{") for text in texts), (texts, opening)
    for choice in response.json()["choices"]:
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["text"]), dict)


@pytest.mark.parametrize(
    ("body", "pattern"),
    [
        ({"structured_outputs": {"regex": r"[ab]{2}/\d"}}, r"[ab]{2}/\d"),
        ({"guided_regex": r"(yes|no)!"}, r"(yes|no)!"),
        ({"structured_outputs": {"choice": ["red", 'dark "blue"', "grün\n"]}}, 'red|dark "blue"|grün\n'),
        ({"guided_choice": ["1", "2"]}, "[12]"),
        ({"response_format": {"type": "regex", "value": r"[ab]{2}"}}, "[ab]{2}"),
        ({"response_format": {"type": "regex", "pattern": r"[ab]{2}"}}, "[ab]{2}"),
        ({"regex": r"[ab]{2}"}, "[ab]{2}"),
        ({"ebnf": 'root ::= "x" | "y"'}, "[xy]"),
        ({"grammar": 'root ::= "x" | "y"'}, "[xy]"),
        ({"structured_outputs": {"grammar": 'start: "x" end\nend: "y" | /[0-9]{1,2}/'}}, "x(y|[0-9]{1,2})"),
        ({"guided_grammar": 'root ::= "x"{1,3} end\nend ::= "y" | "z" [0-9]{1,2}'}, "x{1,3}(y|z[0-9]{1,2})"),
        (
            {"guided_grammar": 'root ::= "\\u0041BC" [\\u00e9-\\u00ea] "\\\\u" "\\U0001F600\\u0022"'},
            '(?s)ABC[éê]\\\\u😀"',
        ),
    ],
)
def test_patterns_choices_and_grammars(thinker, body, pattern):
    for response in (
        thinker.complete(prompt="x", n=4, seed=1, max_tokens=100, **body),
        thinker.chat(n=4, seed=1, max_tokens=100, **body, **PLAIN),
    ):
        for text in whole(response):
            assert re.fullmatch(pattern, text), text


def test_the_same_seed_gives_the_same_answer_streamed_or_not_with_logprobs_or_without(thinker, sdk, model, shorter):
    asked = {"model": model, "messages": SAY, "response_format": FORM, "seed": 11, "extra_body": PLAIN} | shorter
    told = sdk.chat.completions.create(**asked).choices[0].message.content
    assert is_person(told)
    with_logprobs = sdk.chat.completions.create(**asked, logprobs=True, top_logprobs=3).choices[0]
    assert with_logprobs.message.content == told
    assert "".join(entry.token for entry in with_logprobs.logprobs.content) == told
    stream = sdk.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == told


def test_a_stop_string_or_a_limit_may_cut_an_answer_short(thinker, shorter):
    [choice] = thinker.complete(prompt="x", response_format=FORM, stop="age", **shorter).json()["choices"]
    assert (choice["finish_reason"], choice["text"].strip()) == ("stop", '{"')
    limited = thinker.complete(prompt="x", response_format=FORM, **shorter | {"max_tokens": 2}).json()["choices"]
    assert limited[0]["finish_reason"] == "length"


def test_a_model_that_thinks_first_answers_in_its_form_behind_its_thoughts(thinker, tokenizer, shorter):
    marks = {str(token): -100 for token, piece in enumerate(tokenizer.vocabulary.token_bytes) if piece[:1] == b"<"}
    thoughtless = shorter | {"logit_bias": marks | shorter["logit_bias"]}
    for text in whole(thinker.chat(response_format=FORM, n=4, seed=7, **thoughtless)):
        assert is_person(text), text  # it might have thought
    opened = {"chat_template_kwargs": {"open_thoughts": True}}
    [choice] = thinker.chat(response_format=FORM, seed=7, max_tokens=30, **opened).json()["choices"]
    assert choice["finish_reason"] == "length"  # the built-in model never comes to an end of its thoughts
    assert choice["message"]["reasoning_content"]
    assert not choice["message"]["content"]


def test_a_turn_that_is_gone_on_with_matches_from_there(thinker):
    messages = [*SAY, {"role": "assistant", "content": "<think>hm</think>My answer: "}]
    body = {"add_generation_prompt": False, "continue_final_message": True, "guided_choice": ["yes", "no"]}
    [text] = whole(thinker.chat(messages=messages, **body))
    assert text in ("yes", "no")


def test_the_sdk_parses_pydantic_models(sdk, model, shorter):
    told = sdk.chat.completions.parse(
        model=model, messages=SAY, response_format=Report, seed=2, extra_body=PLAIN, **shorter
    )
    assert isinstance(told.choices[0].message.parsed, Report)
    answer = sdk.responses.parse(model=model, input="Well?", text_format=Verdict, reasoning={"effort": "none"})
    assert isinstance(answer.output_parsed, Verdict)
    assert answer.text.format.schema_["properties"].keys() == {"mood"}


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object", "value": PERSON},
        {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
    ],
)
def test_the_hubs_client_holds_answers_to_a_schema(thinker, shorter, form):
    client = InferenceClient(base_url=thinker.url + "/v1", api_key="none", timeout=PATIENCE_S)
    extra = PLAIN | {"logit_bias": shorter["logit_bias"]}
    answer = client.chat_completion(SAY, response_format=form, seed=3, max_tokens=200, extra_body=extra)
    assert is_person(answer.choices[0].message.content)


def test_responses_have_text_in_a_form(thinker):
    form = {"type": "json_schema", "name": "n", "schema": {"enum": ["one", "two"]}}
    brief = {"store": False, "reasoning": {"effort": "none"}}
    response = thinker.post("/v1/responses", {"input": "x", "text": {"format": form}} | brief)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["text"]["format"] == form
    assert answer["output"][-1]["content"][0]["text"] in ('"one"', '"two"')
    with thinker.sdk() as client:
        stream = client.responses.create(input="x", text={"format": form}, stream=True, **brief)
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert json.loads(text) in ("one", "two")


def test_lines_of_a_batch_have_forms_of_their_own(sdk, model, shorter):
    bodies = [
        {"response_format": FORM},
        {"guided_choice": ["left", "right"]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
    ]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions",
         "body": {"model": model, "messages": SAY, "seed": 4} | shorter | PLAIN | body}
        for number, body in enumerate(bodies)
    ]  # fmt: skip
    data = io.BytesIO("\n".join(map(json.dumps, lines)).encode())
    file = sdk.files.create(file=("lines.jsonl", data), purpose="batch")
    batch = sdk.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    eventually(lambda: sdk.batches.retrieve(batch.id).status == "completed")
    done = sdk.batches.retrieve(batch.id)
    told = {}
    for line in map(json.loads, sdk.files.content(done.output_file_id).text.splitlines()):
        told[line["custom_id"]] = line["response"]["body"]["choices"][0]["message"]["content"]
    assert is_person(told["0"])
    assert told["1"] in ("left", "right")
    [failed] = map(json.loads, sdk.files.content(done.error_file_id).text.splitlines())
    assert failed["custom_id"] == "2"
    assert failed["response"]["body"]["error"]["param"] == "response_format"


BAD = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "needs 'json_schema'"),
    ({"response_format": {"type": "regex"}}, "response_format", "needs 'value'"),
    ({"response_format": {"type": "regex", "value": {}}}, "response_format", "send it as a string"),
    ({"response_format": {"type": "regex", "value": "("}}, "response_format", "unclosed group"),
    ({"response_format": {"type": "text", "value": {}}}, "response_format", "no meaning with type 'text'"),
    ({"response_format": {"type": "json", "value": {}, "schema": {}}}, "response_format", "does not go with"),
    ({"response_format": {"type": "json_object", "shape": {}}}, "response_format", "'shape' is not supported"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "shape": 1}}},
     "response_format.json_schema", "'shape' is not supported"),
    ({"structured_outputs": {"regex": "x", "shape": 1}}, "structured_outputs", "'shape' is not supported"),
    ({"regex": "("}, "regex", "unclosed group"),
    ({"regex": 3}, "regex", "string"),
    ({"ebnf": "root ::= (x"}, "ebnf", "GBNF cannot be read"),
    ({"regex": "x", "guided_regex": "y"}, "regex", "another name of 'guided_regex'"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
     "response_format.json_schema.schema", "missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
     "response_format.json_schema.name", "pattern"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
     "response_format", 'the JSON schema cannot be followed: Unimplemented keys: ["not"]'),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
    ({"structured_outputs": {"json": {}, "regex": "x"}}, "structured_outputs", "exactly one of"),
    ({"structured_outputs": {"json": {}, "structural_tag": "x"}}, "structured_outputs", "'structural_tag'"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1"),
    ({"structured_outputs": {"grammar": "root ::= (x"}}, "structured_outputs", "GBNF cannot be read: Expected ')'"),
    ({"structured_outputs": {"grammar": "root ::= " + "(" * 5000}}, "structured_outputs", "nested too deeply"),
    ({"structured_outputs": {"grammar": 'root ::= "\\ud83d"'}}, "structured_outputs", "no character"),
    ({"structured_outputs": {"grammar": 'start: "a'}}, "structured_outputs", "the grammar cannot be followed"),
    ({"guided_json": 3}, "guided_json", "expected an object or a string (got 3)"),
    ({"guided_json": "{"}, "guided_json", "cannot be read as JSON"),
    ({"guided_regex": "x" * 300_000}, "guided_regex", "262144"),
    ({"guided_regex": "x", "guided_choice": ["y"]}, "guided_choice", "not with guided_regex"),
    ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json", "not with response_format"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "not supported"),
    ({"guided_regex": "x", "ignore_eos": True}, "ignore_eos", "not with guided_regex"),
    ({"guided_regex": "x", "min_tokens": 2}, "min_tokens", "not with guided_regex"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "part"), BAD)
def test_what_cannot_be_followed_is_named(deployment, body, param, part):
    for response in (deployment.complete(prompt="x", **body), deployment.chat(**body)):
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["param"], part in error["message"]) == (param, True), error
        assert error["code"] == "invalid_grammar" or "cannot be" not in part, error


def test_a_stream_is_refused_before_it_begins(deployment):
    response = deployment.complete(prompt="x", guided_regex="(", stream=True)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "guided_regex"


def test_the_plain_form_is_none(deployment):
    text = {"type": "text"}
    assert deployment.chat(response_format=text, max_tokens=3, ignore_eos=True).status_code == 200
    assert deployment.complete(prompt="x", response_format=text, guided_choice=["x"], max_tokens=3).status_code == 200
    assert "x-toka-ignored-params" not in deployment.chat(response_format=text, max_tokens=3).headers
    unknown = deployment.chat(response_format=text | {"taste": "sweet"}, max_tokens=3)
    assert unknown.headers["x-toka-ignored-params"] == "response_format.taste"
