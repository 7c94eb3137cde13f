"""``toka-run-batch`` as its user runs it."""

import asyncio
import json
import subprocess
import sys

import pytest

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


def told(tmp_path) -> dict[str, int]:
    """Status by custom_id of what is in the output."""
    results = [json.loads(text) for text in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    statuses = {result["custom_id"]: result["response"]["status_code"] for result in results}
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


def test_lines_that_fail_are_told_and_may_be_tried_again(tmp_path, run):
    lines = [line("good"), line("bad", temperature=-1), "nonsense"]
    status, stderr = run(lines=lines)
    assert (status, "line 3" in stderr, "2 lines failed" in stderr) == (1, True, True)
    assert told(tmp_path) == {"good": 200, "bad": 400}
    assert run(lines=lines[:2])[0] == 1
    assert run("retry_failed=T", lines=[line("good"), line("bad", temperature=1)])[0] == 0
    assert told(tmp_path) == {"good": 200, "bad": 200}


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
