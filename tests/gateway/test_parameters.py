"""Parameters of completions and chat that have shapes or effects of their own, streamed and not."""

import pytest

from tests.fakes.model import FakeShape, chosen_logprob, continuation
from tests.gateway.deployment import PATIENCE_S, Deployment
from tests.gateway.test_streaming import events

SPEECH = "one two three. four five six. "
CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def speaker(tmp_path_factory, tokenizer):
    """Every answer is ``SPEECH`` and the end of sequence, over and over."""
    ids = ",".join(map(str, [*tokenizer.encode(SPEECH, add_special_tokens=False), 0]))
    running = Deployment(tmp_path_factory.mktemp("speaker"), worker={"reply_ids": ids}).wait_ready()
    yield running
    running.stop()


def streamed(deployment, path="/v1/completions", **body) -> tuple[list[dict], str]:
    """The chunks of choice 0, and its text put together."""
    chunks = events(deployment, path, **body)
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    texts = [choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices]
    return chunks, "".join(texts)


# -- where answers end


@pytest.mark.parametrize(("stop", "text"), [("three.", "one two three."), (["nope", "two"], "one two")])
def test_an_answer_may_have_its_stop_string_in_it(speaker, stop, text):
    body = {"prompt": "x", "max_tokens": 50, "stop": stop, "include_stop_str_in_output": True}
    choice = speaker.complete(**body).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    assert streamed(speaker, **body)[1] == text
    assert speaker.complete(**body | {"logprobs": 0}).json()["choices"][0]["text"] == text
    del body["prompt"]
    assert speaker.chat(**body).json()["choices"][0]["message"]["content"] == text
    assert streamed(speaker, "/v1/chat/completions", messages=CHAT, **body)[1] == text


def test_an_answer_may_have_its_stop_token_in_it(speaker, tokenizer):
    stop_id = tokenizer.encode(SPEECH, add_special_tokens=False)[4]
    body = {"prompt": "x", "max_tokens": 50, "stop_token_ids": [stop_id], "logprobs": 0}
    without = speaker.complete(**body).json()["choices"][0]
    body["include_stop_str_in_output"] = True
    choice = speaker.complete(**body).json()["choices"][0]
    assert choice["text"] == without["text"] + tokenizer.vocabulary.token_bytes[stop_id].decode()
    assert len(choice["logprobs"]["tokens"]) == len(without["logprobs"]["tokens"]) + 1
    assert streamed(speaker, **body)[1] == choice["text"]


def test_special_tokens_may_have_text(speaker, tokenizer):
    name = tokenizer.decode([0], skip_special_tokens=False)
    body = {"prompt": "x", "max_tokens": 100, "include_stop_str_in_output": True, "skip_special_tokens": False}
    assert speaker.complete(**body).json()["choices"][0]["text"] == SPEECH + name
    assert streamed(speaker, **body)[1] == SPEECH + name
    body["skip_special_tokens"] = True
    assert speaker.complete(**body).json()["choices"][0]["text"] == SPEECH


# -- what ended an answer


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"stop": ["nope", "three."]}, "three."),
        ({"stop": ["two"], "include_stop_str_in_output": True}, "two"),
        ({"max_tokens": 2}, None),
        ({}, None),  # the model's own end
        ({"stop_token_ids": [0]}, 0),
    ],
)
def test_an_answer_says_which_stop_string_or_token_ended_it(speaker, body, reason):
    for path in ("/v1/completions", "/v1/chat/completions"):
        asked = {"prompt": "x", "messages": CHAT, "max_tokens": 50} | body
        [choice] = speaker.post(path, asked).json()["choices"]
        assert choice["stop_reason"] == reason
        *chunks, last = [chunk["choices"][0] for chunk in events(speaker, path, **asked)]
        assert (last["stop_reason"], last["finish_reason"]) == (reason, choice["finish_reason"])
        assert all("stop_reason" not in chunk for chunk in chunks)
    [listed] = speaker.post("/v1/chat/completions/batch", [{"messages": CHAT, "max_tokens": 50} | body]).json()
    assert listed["choices"][0]["stop_reason"] == reason


def test_a_stop_token_of_the_request_is_named(speaker, tokenizer):
    stop_id = tokenizer.encode(SPEECH, add_special_tokens=False)[4]
    for extra in ({}, {"include_stop_str_in_output": True}, {"logprobs": 1}):
        choice = speaker.complete(prompt="x", max_tokens=50, stop_token_ids=[stop_id], **extra).json()["choices"][0]
        assert choice["stop_reason"] == stop_id


# -- token ids


@pytest.mark.parametrize("logprobs", [None, 1])
def test_token_ids_of_prompt_and_answer(deployment, tokenizer, logprobs):
    prompt = tokenizer.encode("Tom has 3 apples")
    body = {"prompt": ["Tom has 3 apples", "x"], "n": 2, "seed": 9, "max_tokens": 12, "logprobs": logprobs}
    body["return_token_ids"] = True
    choices = deployment.complete(**body).json()["choices"]
    for index in (0, 1):
        expected = continuation(FakeShape(), prompt, 12, seed=9, sample_index=index)
        assert (choices[index]["prompt_token_ids"], choices[index]["token_ids"]) == (prompt, expected)
    assert choices[2]["prompt_token_ids"] == tokenizer.encode("x")
    told: dict[int, list[int]] = {}
    for chunk in events(deployment, "/v1/completions", **body):
        choice = chunk["choices"][0]
        first = choice["index"] not in told
        assert choice.get("prompt_token_ids") == (choices[choice["index"]]["prompt_token_ids"] if first else None)
        told.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert told == {choice["index"]: choice["token_ids"] for choice in choices}


def test_token_ids_of_a_chat(deployment, tokenizer):
    prompt = tokenizer.encode_chat(CHAT)
    answer = deployment.chat(max_tokens=9, seed=3, return_token_ids=True).json()
    assert answer["prompt_token_ids"] == prompt
    assert answer["choices"][0]["token_ids"] == continuation(FakeShape(), prompt, 9, seed=3)
    body = {"messages": CHAT, "max_tokens": 9, "seed": 3, "return_token_ids": True}
    first, *rest = events(deployment, "/v1/chat/completions", **body)
    assert first["prompt_token_ids"] == prompt
    assert all("prompt_token_ids" not in chunk for chunk in rest)
    told = [token for chunk in rest for token in chunk["choices"][0]["token_ids"]]
    assert told == answer["choices"][0]["token_ids"]


def test_token_ids_have_the_stop_token_that_is_no_part_of_the_text(speaker, tokenizer):
    choice = speaker.complete(prompt="x", max_tokens=50, return_token_ids=True).json()["choices"][0]
    assert choice["text"] == SPEECH
    assert choice["token_ids"] == [*tokenizer.encode(SPEECH, add_special_tokens=False), 0]
    assert "token_ids" not in speaker.complete(prompt="x", max_tokens=50).json()["choices"][0]


def test_every_chunk_but_the_last_has_no_usage(deployment):
    body = {"messages": CHAT, "max_tokens": 3, "return_token_ids": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(deployment, "/v1/chat/completions", **body)
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert last["usage"]["completion_tokens"] == 3


# -- usage


def test_usage_tells_where_the_time_went(speaker, sdk, model):
    timing = sdk.completions.create(model=model, prompt="x", n=3, max_tokens=30).usage.timing
    assert set(timing) == {"queue_ms", "prefill_ms", "decode_ms"}
    assert all(isinstance(value, int) and 0 <= value < 1000 * PATIENCE_S for value in timing.values())
    chunks = events(speaker, "/v1/completions", prompt="x", max_tokens=5, stream_options={"include_usage": True})
    assert set(chunks[-1]["usage"]["timing"]) == set(timing)


@pytest.mark.slow
def test_decoding_takes_as_long_as_the_steps_do(tmp_path):
    slow = Deployment(tmp_path, worker={"step_ms": 20}).wait_ready()
    try:
        timing = slow.complete(prompt="x", max_tokens=11).json()["usage"]["timing"]
        assert 200 <= timing["decode_ms"] < 10_000
        assert timing["prefill_ms"] >= 20
    finally:
        slow.stop()


# -- completions alone


@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_puts_the_prompt_in_front(deployment, tokenizer, as_ids):
    texts = ["Tom has 3 apples", "naïve 🙂"]
    prompts = [tokenizer.encode(text) for text in texts] if as_ids else texts
    body = {"prompt": prompts, "n": 2, "seed": 1, "max_tokens": 8}
    plain = [choice["text"] for choice in deployment.complete(**body).json()["choices"]]
    body["echo"] = True
    choices = deployment.complete(**body).json()["choices"]
    assert [choice["text"] for choice in choices] == [texts[i // 2] + text for i, text in enumerate(plain)]
    told = dict.fromkeys(range(4), "")
    for chunk in events(deployment, "/v1/completions", **body):
        told[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert list(told.values()) == [choice["text"] for choice in choices]


@pytest.mark.parametrize("more", [{}, {"return_token_ids": True}])
def test_echo_without_an_answer(deployment, more):
    body = {"prompt": "Tom has 3 apples", "max_tokens": 0, "echo": True} | more
    answer = deployment.complete(**body).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Tom has 3 apples", "length")
    assert answer["usage"]["completion_tokens"] == 0
    assert choice.get("token_ids", []) == []
    chunks, text = streamed(deployment, **body)
    assert text == "Tom has 3 apples"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_the_best_of_many_are_the_likeliest(deployment, tokenizer):
    prompt = tokenizer.encode("x")
    samples = [continuation(FakeShape(), prompt, 6, seed=5, sample_index=index) for index in range(10)]
    ranked = sorted(samples, key=lambda ids: chosen_logprob(ids).mean(), reverse=True)
    body = {"prompt": "x", "seed": 5, "max_tokens": 6, "best_of": 10}
    answer = deployment.complete(**body, n=3, return_token_ids=True).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["token_ids"] for choice in answer["choices"]] == ranked[:3]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 60
    both = deployment.complete(**body | {"prompt": ["x", "y"]}, logprobs=1, return_token_ids=True).json()["choices"]
    assert [choice["index"] for choice in both] == [0, 1]
    assert both[0]["token_ids"] == ranked[0]
    assert both[1]["prompt_token_ids"] == tokenizer.encode("y")
    assert len(both[0]["logprobs"]["tokens"]) == 6


def test_best_of_as_many_as_are_told_may_stream(deployment):
    body = {"prompt": "x", "n": 2, "best_of": 2, "max_tokens": 3}
    assert len(deployment.complete(**body).json()["choices"]) == 2
    assert streamed(deployment, **body)[0]


def test_the_beginning_of_a_prompt_may_be_cut_off(deployment, tokenizer):
    text = " ".join(str(number) for number in range(5000))
    body = {"prompt": text, "max_tokens": 4, "seed": 2, "return_token_ids": True, "truncate_prompt_tokens": 20}
    choice = deployment.complete(**body, echo=True).json()["choices"][0]
    assert choice["prompt_token_ids"] == tokenizer.encode(text)[-20:]
    assert choice["token_ids"] == continuation(FakeShape(), choice["prompt_token_ids"], 4, seed=2)
    assert text.endswith(choice["text"].encode()[: -len(tokenizer.vocabulary.text_bytes(choice["token_ids"]))].decode())
    short = deployment.complete(**body | {"prompt": [[50, 51], list(range(40, 80))]}).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in short] == [[50, 51], list(range(60, 80))]


def test_the_beginning_of_a_conversation_may_be_cut_off(deployment, tokenizer):
    long = [{"role": "user", "content": " ".join(map(str, range(5000)))}]
    body = {"messages": long, "max_tokens": 4, "seed": 2, "return_token_ids": True, "truncate_prompt_tokens": 20}
    answer = deployment.chat(**body).json()
    assert answer["prompt_token_ids"] == tokenizer.encode_chat(long)[-20:]
    assert answer["choices"][0]["token_ids"] == continuation(FakeShape(), answer["prompt_token_ids"], 4, seed=2)
    short = deployment.chat(**body | {"messages": CHAT, "truncate_prompt_tokens": 1000}).json()
    assert short["prompt_token_ids"] == tokenizer.encode_chat(CHAT)


@pytest.mark.parametrize(("limits", "kept"), [({"max_tokens": 40}, 2008), ({}, 2032), ({"min_tokens": 9}, 2032)])
def test_as_much_of_a_prompt_may_count_as_there_is_room_for(deployment, tokenizer, limits, kept):
    text = " ".join(str(number) for number in range(2000))
    body = {"prompt": text, "messages": [{"role": "user", "content": text}], "truncate_prompt_tokens": -1} | limits
    prompts = {
        "/v1/completions": tokenizer.encode(text),
        "/v1/chat/completions": tokenizer.encode_chat(body["messages"]),
    }
    for path, prompt in prompts.items():
        answer = deployment.post(path, body | {"return_token_ids": True}).json()
        told = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
        assert told == prompt[-kept:]
        assert answer["usage"]["total_tokens"] == 2048
    whole = deployment.complete(prompt="x", truncate_prompt_tokens=-1, max_tokens=2).json()
    assert whole["usage"]["prompt_tokens"] == len(tokenizer.encode("x"))
    error = deployment.complete(prompt="x", truncate_prompt_tokens=-1, max_tokens=2048).json()["error"]
    assert (error["param"], error["code"]) == ("truncate_prompt_tokens", "context_length_exceeded")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_cut_prompt_must_leave_room_for_an_answer(deployment, path):
    body = {"prompt": "x"} if path == "/v1/completions" else {"messages": CHAT}
    error = deployment.post(path, body | {"truncate_prompt_tokens": 2048}).json()["error"]
    assert (error["param"], error["code"]) == ("truncate_prompt_tokens", "context_length_exceeded")


def test_a_prompt_may_come_without_special_tokens(deployment, tokenizer):
    for wanted in (True, False, None):
        body = {"prompt": "Hello", "max_tokens": 1, "return_token_ids": True, "add_special_tokens": wanted}
        choice = deployment.complete(**body).json()["choices"][0]
        assert choice["prompt_token_ids"] == tokenizer.encode("Hello", add_special_tokens=wanted is not False)


@pytest.mark.parametrize("extra", [{"user": "me"}, {"metadata": {"a": "b"}}, {"store": True}, {"store": False}])
def test_bookkeeping_changes_nothing(deployment, extra):
    for post, body in ((deployment.complete, {"prompt": "x"}), (deployment.chat, {})):
        response = post(**body, **extra, max_tokens=2)
        assert response.status_code == 200
        assert "x-toka-ignored-params" not in response.headers
