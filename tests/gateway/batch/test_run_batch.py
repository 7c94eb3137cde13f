"""``toka-run-batch`` as its user runs it."""

import asyncio
import json
import subprocess
import sys

import httpx
import pytest

from services.launcher.run_batch import wait_before_retry
from tests.common.rpc.authority import Authority
from tests.gateway.access.http_server import answer, serving
from tests.gateway.batch.requests import CHAT, line


@pytest.fixture
def run(tmp_path, deployment):
    """Runs the command over ``in.jsonl``, and gives its exit status and what it wrote to stderr."""

    def run(*flags: str, lines: list[str] | None = None) -> tuple[int, str]:
        if lines is not None:
            (tmp_path / "in.jsonl").write_text("\n".join(lines))
        command = [sys.executable, "-m", "services.launcher.run_batch", str(tmp_path / "in.jsonl")]
        command += [str(tmp_path / "out.jsonl"), f"url={deployment.url}", *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        return done.returncode, done.stderr

    return run


def told(tmp_path) -> dict[str, int | str]:
    """Status, or the code of what kept it from being sent, by custom_id of what is in the output."""
    results = [json.loads(text) for text in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    statuses = {
        result["custom_id"]: result["response"]["status_code"] if result["response"] else result["error"]["code"]
        for result in results
    }
    assert len(statuses) == len(results)
    return statuses


def test_every_line_is_answered(tmp_path, run):
    status, _ = run(lines=[line(f"c{n}", prompt=[20 + n]) for n in range(50)] + [line("chat", CHAT)])
    assert status == 0
    assert told(tmp_path) == {f"c{n}": 200 for n in range(50)} | {"chat": 200}


def test_what_is_in_the_output_is_not_run_again_and_a_torn_line_is(tmp_path, run):
    lines = [line(f"c{n}") for n in range(4)]
    run(lines=lines[:2])
    before = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl").write_bytes(before + b'{"id": "torn", "custom_id": "c2"'[:20])
    assert run(lines=lines)[0] == 0
    assert (tmp_path / "out.jsonl").read_bytes().startswith(before)
    assert told(tmp_path) == {f"c{n}": 200 for n in range(4)}


def test_results_whose_id_no_line_can_have_are_kept(tmp_path, run):
    """An earlier version took numbers."""
    before = b"".join(
        b'{"custom_id": %s, "response": {"status_code": 200}}\n' % custom_id for custom_id in (b"7", b'["a"]')
    )
    (tmp_path / "out.jsonl").write_bytes(before)
    assert run(lines=[line("a")])[0] == 0
    after = (tmp_path / "out.jsonl").read_bytes()
    assert after.startswith(before)
    assert json.loads(after[len(before) :])["custom_id"] == "a"


def test_lines_that_fail_are_told_and_may_be_tried_again(tmp_path, run):
    lines = [line("good"), line("bad", temperature=-1), "nonsense"]
    status, stderr = run(lines=lines)
    assert (status, "line 3" in stderr, "2 lines failed" in stderr) == (1, True, True)
    assert told(tmp_path) == {"good": 200, "bad": 400}
    assert run(lines=lines[:2])[0] == 1
    assert run("retry_failed=T", lines=[line("good"), line("bad", temperature=1)])[0] == 0
    assert told(tmp_path) == {"good": 200, "bad": 200}


def test_lines_that_are_no_requests_are_named_each_time_and_the_others_run(tmp_path, run):
    numbered = line("x").replace('"x"', "5", 1)
    listed = line("x").replace('"x"', '["a"]', 1)
    lines = ["\ufeff" + line("a"), line("a", prompt=[30]), listed, numbered, "[1]", line("b")]
    for _ in range(2):
        status, stderr = run(lines=lines)
        assert status == 1
        assert "line 2 is not a request: the custom_id 'a' is used by an earlier line" in stderr
        assert "line 3 is not a request: custom_id must be a string" in stderr
        assert "line 4 is not a request: custom_id must be a string" in stderr
        assert "line 5 is not a request: this line is not a JSON object" in stderr
        assert "4 lines failed" in stderr
        assert told(tmp_path) == {"a": 200, "b": 200}


def test_a_line_that_cannot_be_sent_fails_alone(tmp_path, run):
    deep = line("deep", prompt=["PROMPT"]).replace('"PROMPT"', "[" * 900 + "]" * 900)
    bad_url = line("url").replace("/v1/completions", "/v1/\\u0001")
    assert run(lines=[line("stream", stream=True), deep, bad_url, line("good", stream=False)])[0] == 1
    expected = {"stream": "invalid_value", "deep": "invalid_value", "url": "no_answer", "good": 200}
    assert told(tmp_path) == expected


async def test_what_the_server_says_not_to_send_again_is_not(tmp_path):
    asked = []

    async def too_late(scope, receive, send) -> None:
        asked.append(scope["path"])
        headers = [(b"content-length", b"2"), (b"x-should-retry", b"false")]
        await send({"type": "http.response.start", "status": 504, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})

    (tmp_path / "in.jsonl").write_text(line("a", timeout=0.001))
    files = (str(tmp_path / name) for name in ("in.jsonl", "out.jsonl"))
    async with serving(too_late) as server:
        command = (sys.executable, "-m", "services.launcher.run_batch", *files, f"url=http://127.0.0.1:{server.port}")
        assert await (await asyncio.create_subprocess_exec(*command, "retries=2")).wait() == 1
    assert (asked, told(tmp_path)) == (["/v1/completions"], {"a": 504})


@pytest.mark.parametrize(
    ("status", "headers", "seconds"),
    [
        (429, {"retry-after": "7"}, 7),
        (503, {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, 0),
        (504, {}, 0),
        (504, {"x-should-retry": "false", "retry-after": "7"}, None),
        (500, {}, None),
        (500, {"x-should-retry": "true"}, 0),
        (200, {"x-should-retry": "true"}, None),
    ],
)
def test_a_request_is_sent_again_when_the_server_says_so(status, headers, seconds):
    assert wait_before_retry(httpx.Response(status, headers=headers)) == seconds


@pytest.mark.parametrize("flag", ["dp_size=2", "modle=x"])
def test_a_wrong_flag_ends_it_before_it_begins(run, flag):
    assert run(flag, lines=[])[0] == 2


def test_a_missing_input_is_named(run):
    status, stderr = run()
    assert status == 1
    assert "in.jsonl" in stderr


async def test_a_server_with_https_is_asked_and_verified(tmp_path):
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    (tmp_path / "in.jsonl").write_text(line("a"))
    async with serving(answer, http_cert=str(pair.cert), http_key=str(pair.key)) as server:

        async def status(*flags: str) -> int:
            files = (str(tmp_path / name) for name in ("in.jsonl", "out.jsonl"))
            command = (sys.executable, "-m", "services.launcher.run_batch", *files, *flags)
            url = f"url=https://localhost:{server.port}"
            return await (await asyncio.create_subprocess_exec(*command, url, "retries=0")).wait()

        assert await status() == 1
        (tmp_path / "out.jsonl").unlink()
        assert await status(f"ca={authority.cert}") == 0
    assert told(tmp_path) == {"a": 200}


@pytest.mark.parametrize("flags", [("ca=ca.pem", "url=http://127.0.0.1:1"), ("http_cert=a.pem", "http_key=a.key")])
def test_flags_of_https_that_mean_nothing_are_refused(tmp_path, flags):
    command = [sys.executable, "-m", "services.launcher.run_batch", "in.jsonl", str(tmp_path / "out.jsonl"), *flags]
    assert subprocess.run(command, check=False, timeout=100).returncode == 2
