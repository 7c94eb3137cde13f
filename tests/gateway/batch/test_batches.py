"""``/v1/batches`` as the official SDK calls it, on one gateway."""

import contextlib
import json
import sqlite3

import httpx
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from tests.gateway.batch.requests import CHAT, COMPLETIONS, begin, ended, line, results, upload
from tests.gateway.deployment import Deployment, eventually


def test_a_batch_of_completions(sdk):
    batch = begin(sdk, [line(f"request-{n}", prompt=[20 + n] * 5) for n in range(200)], metadata={"run": "1"})
    assert (batch.object, batch.status, batch.endpoint) == ("batch", "validating", COMPLETIONS)
    assert batch.expires_at - batch.created_at == 24 * 3600
    done = ended(sdk, batch)
    assert done.status == "completed"
    assert done.in_progress_at <= done.finalizing_at <= done.completed_at
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (200, 200, 0)
    assert (done.errors, done.error_file_id, done.metadata) == (None, None, {"run": "1"})
    assert done.usage.output_tokens == 600
    assert done.model == "tokasaurus-builtin"
    lines = results(sdk, done.output_file_id)
    assert [line["custom_id"] for line in lines] == [f"request-{n}" for n in range(200)]
    answer = Completion.model_validate(lines[7]["response"]["body"])
    assert (answer.object, answer.usage.completion_tokens) == ("text_completion", 3)
    assert lines[7]["response"]["status_code"] == 200
    assert lines[7]["response"]["request_id"] == answer.id
    assert lines[7]["error"] is None
    file = sdk.files.retrieve(done.output_file_id)
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")


def test_an_answer_in_a_batch_is_the_answer_over_http(sdk):
    body = {"prompt": [20] * 9, "seed": 5, "temperature": 1.0, "n": 2, "logprobs": 1}
    done = ended(sdk, begin(sdk, [line("one", **body)]))
    [result] = results(sdk, done.output_file_id)
    alone = sdk.completions.create(model="tokasaurus-builtin", max_tokens=3, **body)
    assert result["response"]["body"]["choices"] == json.loads(alone.to_json())["choices"]


def test_a_batch_of_chats_whose_last_line_has_no_newline_and_others_are_empty(sdk):
    done = ended(sdk, begin(sdk, ["", line("a", CHAT), " ", line("b", CHAT), ""], CHAT))
    assert done.status == "completed"
    assert [line["custom_id"] for line in results(sdk, done.output_file_id)] == ["a", "b"]
    ChatCompletion.model_validate(results(sdk, done.output_file_id)[0]["response"]["body"])


def test_tokens_of_thoughts_are_counted(qwen):
    saying = [{"role": "user", "content": "<think>\nIs it cold?\n</think>\n\nIt is."}]
    with qwen.sdk() as sdk:
        name = sdk.models.list().data[0].id
        lines = [line(f"{n}", CHAT, model=name, messages=saying, max_tokens=None) for n in range(2)]
        done = ended(sdk, begin(sdk, lines, CHAT))
        told = [result["response"]["body"]["usage"] for result in results(sdk, done.output_file_id)]
    thoughts = [usage["completion_tokens_details"]["reasoning_tokens"] for usage in told]
    assert done.usage.output_tokens_details.reasoning_tokens == sum(thoughts) > 0


def test_a_bad_body_fails_alone(sdk):
    deep = line("deep", prompt=["PROMPT"]).replace('"PROMPT"', "[" * 300 + "]" * 300)
    lines = [
        line("good"),
        line("hot", temperature=-1),
        line("stream", stream=True),
        line("long", prompt="x " * 9999),
        deep,
    ]
    done = ended(sdk, begin(sdk, lines))
    assert done.status == "completed"
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 4)
    assert [line["custom_id"] for line in results(sdk, done.output_file_id)] == ["good"]
    failed = results(sdk, done.error_file_id)
    said = [
        (line["custom_id"], line["response"]["status_code"], line["response"]["body"]["error"]["param"])
        for line in failed
    ]
    assert said == [
        ("hot", 400, "temperature"),
        ("stream", 400, "stream"),
        ("long", 400, "prompt"),
        ("deep", 400, None),
    ]


def test_a_nul_in_the_first_model_fails_that_line_alone(sdk):
    done = ended(sdk, begin(sdk, [line("bad", model="m\0", temperature=-1), line("good", model="other")]))
    assert (done.status, done.model) == ("completed", "m")  # PostgreSQL keeps no NUL
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 1)


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        ("{", "invalid_json_line"),
        ("[1]", "invalid_json_line"),
        (line("a"), "duplicate_custom_id"),
        (line("b", CHAT), "mismatched_url"),
        (line("b").replace("POST", "GET"), "invalid_method"),
        ('{"custom_id": "b"}', "missing_required_parameter"),
        ('{"custom_id": 5, "method": "POST", "url": "/v1/completions", "body": {}}', "invalid_value"),
        (line(""), "invalid_value"),
    ],
)
def test_a_file_that_is_wrong_fails_as_a_whole_and_names_the_line(sdk, bad, code):
    done = ended(sdk, begin(sdk, [line("a"), bad]))
    assert (done.status, done.output_file_id, done.in_progress_at) == ("failed", None, None)
    assert done.failed_at is not None
    [error] = done.errors.data
    assert (error.code, error.line) == (code, 2)


def test_an_empty_file_is_wrong(sdk):
    assert ended(sdk, begin(sdk, ["", ""])).errors.data[0].code == "empty_file"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": "file-\0"}, "input_file_id"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
    ],
)
def test_a_wrong_request_names_its_parameter(sdk, wrong, param):
    request = {"input_file_id": upload(sdk, [line("a")]), "endpoint": COMPLETIONS, "completion_window": "24h"}
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.batches.create(**request | wrong)
    assert caught.value.param == param


def test_parameters_that_nobody_knows_are_told(sdk):
    request = {"input_file_id": upload(sdk, [line("a")]), "endpoint": COMPLETIONS, "completion_window": "24h"}
    create = sdk.batches.with_raw_response.create
    assert "x-toka-ignored-params" not in create(**request).headers
    expires = {"anchor": "created_at", "seconds": 3600, "hours": 1}
    told = create(**request, output_expires_after=expires, extra_body={"foo": 3})
    assert told.headers["x-toka-ignored-params"] == "foo,output_expires_after.hours"


def test_what_is_not_there_is_not_found(sdk):
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.batches.create(input_file_id="file-none", endpoint=COMPLETIONS, completion_window="24h")
    assert (caught.value.code, caught.value.param) == ("file_not_found", "input_file_id")
    for ask in (sdk.batches.retrieve, sdk.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            ask("batch_none")


def test_only_files_for_batches_are_taken(sdk):
    file = sdk.files.create(file=b"x", purpose="user_data")
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
    assert caught.value.param == "input_file_id"


def test_batches_are_listed_newest_first(sdk):
    made = [begin(sdk, [line("a")]).id for _ in range(3)]
    first = sdk.batches.list(limit=2)
    assert [batch.id for batch in first.data] == [made[2], made[1]]
    assert first.has_more
    assert sdk.batches.list(limit=1, after=made[1]).data[0].id == made[0]


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """Steps of 5 ms, so that a batch can be met in its middle."""
    running = Deployment(
        tmp_path_factory.mktemp("slow"), worker={"step_ms": 5}, gateway={"batch_concurrency": 100}
    ).wait_ready()
    yield running
    running.stop()


def test_a_cancelled_batch_keeps_what_is_done_and_ends_what_runs(slow):
    with slow.sdk() as sdk:
        quick = [line(f"quick-{n}", prompt=[20] * 3) for n in range(64)]
        batch = begin(sdk, [*quick, *(line(f"slow-{n}", prompt=[90] * 3, max_tokens=2000) for n in range(200))])
        eventually(lambda: sdk.batches.retrieve(batch.id).request_counts.completed == 64)
        with pytest.raises(openai.ConflictError):
            sdk.files.delete(batch.input_file_id)
        cancelled = sdk.batches.cancel(batch.id)
        assert (cancelled.status, cancelled.cancelling_at is None) == ("cancelling", False)
        done = ended(sdk, batch)
        assert (done.status, done.request_counts.completed, done.request_counts.total) == ("cancelled", 64, 264)
        eventually(lambda: slow.metric("toka_kv_pages_in_use") == 0)
        assert {line["custom_id"] for line in results(sdk, done.output_file_id)} == {f"quick-{n}" for n in range(64)}
        rest = results(sdk, done.error_file_id)
        assert [line["custom_id"] for line in rest] == [f"slow-{n}" for n in range(200)]
        assert {(line["response"], line["error"]["code"]) for line in rest} == {(None, "batch_cancelled")}
        with pytest.raises(openai.ConflictError):
            sdk.batches.cancel(batch.id)
        assert sdk.files.delete(batch.input_file_id).deleted


def test_a_batch_that_is_not_done_in_time_expires_with_what_is_done(slow):
    with slow.sdk() as sdk:
        lines = [
            line("quick", prompt=[20] * 3),
            *(line(f"slow-{n}", prompt=[90] * 3, max_tokens=2000) for n in range(150)),
        ]
        batch = begin(sdk, lines, output_expires_after={"anchor": "created_at", "seconds": 3600})
        eventually(lambda: sdk.batches.retrieve(batch.id).request_counts.completed == 1)
        with contextlib.closing(sqlite3.connect(slow.directory / "store" / "batches.db", timeout=60)) as store, store:
            store.execute("UPDATE toka_batches SET expires_at = 1 WHERE id = ?", [batch.id])
        done = ended(sdk, batch)
        assert (done.status, done.request_counts.completed, done.expired_at is None) == ("expired", 1, False)
        [quick] = results(sdk, done.output_file_id)
        assert quick["custom_id"] == "quick"
        rest = results(sdk, done.error_file_id)
        assert [line["custom_id"] for line in rest] == [f"slow-{n}" for n in range(150)]
        assert {line["error"]["code"] for line in rest} == {"batch_expired"}
        file = sdk.files.retrieve(done.error_file_id)
        assert file.expires_at - file.created_at == 3600
        eventually(lambda: slow.metric("toka_kv_pages_in_use") == 0)


def test_a_batch_in_progress_forecasts_its_end(slow):
    with slow.sdk() as sdk:
        batch = begin(sdk, [line(f"{n}", max_tokens=20) for n in range(2000)])
        seen = []

        def forecast_seen() -> bool:
            seen.append(sdk.batches.retrieve(batch.id))
            return seen[-1].forecast is not None

        eventually(forecast_seen)
        assert seen[-1].forecast["finish_at"] >= seen[-1].in_progress_at
        assert seen[-1].forecast["lines_per_second"] > 0
        sdk.batches.cancel(batch.id)
        assert ended(sdk, batch).forecast is None


def test_a_gateway_that_is_stopped_leaves_the_rest_to_the_next(slow):
    with slow.sdk() as sdk:
        batch = begin(sdk, [line(f"{n}", max_tokens=20) for n in range(500)])
        eventually(lambda: sdk.batches.retrieve(batch.id).request_counts.completed > 0)
        slow.gateway.stop()
        slow.gateway.start()
        slow.wait_ready()
        done = ended(sdk, batch)
        assert done.request_counts.completed == 500
        assert [line["custom_id"] for line in results(sdk, done.output_file_id)] == [f"{n}" for n in range(500)]


def test_many_conversations_in_one_request(deployment):
    bodies = [{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": n} for n in (1, 2, 0, 3)]
    answers = deployment.post("/v1/chat/completions/batch", [*bodies, 5, {**bodies[0], "stream": True}]).json()
    tokens = [
        answer["usage"]["completion_tokens"] if "usage" in answer else answer["error"]["param"] for answer in answers
    ]
    assert tokens == [1, 2, "max_tokens", 3, None, "stream"]


def test_parameters_that_nobody_knows_are_told_of_lines_and_of_conversations_of_a_list(sdk, deployment):
    done = ended(sdk, begin(sdk, [line("good"), line("odd", max_token=5, **{"größe": 1})]))
    told = [result["response"].get("ignored_params") for result in results(sdk, done.output_file_id)]
    assert told == [None, ["max_token", "gr%C3%B6%C3%9Fe"]]
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    many = [body, body | {"max_token": 3}, {"messages": []}, body | {"mood": 1, "max_token": 3}]
    answer = deployment.post("/v1/chat/completions/batch", many)
    assert answer.headers["x-toka-ignored-params"] == "[1].max_token,[3].mood,[3].max_token"
    assert "x-toka-ignored-params" not in deployment.post("/v1/chat/completions/batch", [body]).headers


def test_a_conversation_of_a_list_that_is_nested_too_deeply_fails_alone(deployment):
    deep = b'{"messages": %b%b}' % (b"[" * 300, b"]" * 300)
    good = b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}'
    answers = deployment.post("/v1/chat/completions/batch", b"[%b, %b]" % (deep, good)).json()
    assert answers[0]["error"]["code"] == "invalid_json"
    assert answers[1]["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("body", [b"{}", b"[]", b"[", b"5"])
def test_a_list_that_is_none_is_refused(deployment, body):
    assert deployment.post("/v1/chat/completions/batch", body).status_code == 400


def check_that_only_the_store_is_missing(running: Deployment, status: int, word: str) -> None:
    refused = httpx.get(running.url + "/v1/files", timeout=60)
    assert (refused.status_code, word in refused.json()["error"]["message"]) == (status, True), refused.text
    assert running.complete(prompt="x", max_tokens=2).status_code == 200


def test_without_a_store_the_rest_is_served(bare):
    check_that_only_the_store_is_missing(bare, 404, "store_url")


@pytest.mark.slow
def test_with_a_store_that_cannot_be_written_the_rest_is_served(tmp_path):
    running = Deployment(tmp_path, gateway={"store_dir": "/proc/nowhere"}).wait_ready()
    try:
        check_that_only_the_store_is_missing(running, 503, "store_dir")
    finally:
        running.stop()
