"""Runs a batch file against a server: the command ``toka-run-batch INPUT.jsonl OUTPUT.jsonl``.

Without a server's URL it starts one. It may be stopped at any time, and does not repeat lines with a result in the
output.
"""

import asyncio
import contextlib
import os
import random
import re
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import httpx
import orjson
from pydantic import Field
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from services.common.batch_line import InvalidLine, UsedIds, read_request
from services.common.config import DeploymentConfig, fail, from_command_line
from services.common.flags import Bool, Int, without_flags
from services.common.process.children import module_command, module_environment
from services.common.process.service import PARENT_PID
from services.launcher.ports import free_ports

_RETRIED = (429, 502, 503, 504)
_SECONDS = re.compile(r"[0-9]{1,9}")  # a Retry-After may also be a date
_PRINTED_ERRORS = 20
_LAST_PAUSE_S = 10.0
_START_S = 3600.0  # the model may have to be downloaded
_STOP_S = 30.0


class RunBatchConfig(DeploymentConfig):
    """Run a batch file against the server at ``url``. Without ``url``, start ``toka`` for it, with its flags."""

    positional: ClassVar[tuple[str, ...]] = ("input", "output")

    input: str = Field(description="JSON lines: custom_id, method, url and body of a request each")
    output: str = Field(description="JSON lines to which results are appended")
    url: str | None = Field(None, description="of a server that runs, such as http://127.0.0.1:10210")
    ca: str | None = Field(
        None, min_length=1, description="PEM of the authority that signed that server's certificate; with https:"
    )
    api_key: str = Field("none", description="sent to the server; better in the environment, as TOKA_API_KEY")
    concurrency: Int = Field(256, ge=1, le=65536, description="requests at once")
    retries: Int = Field(20, ge=0, description="times that a request is sent again when the server is busy or away")
    retry_failed: Bool = Field(False, description="run lines again whose result in the output is a failure")
    timeout_s: float = Field(3600.0, gt=0, description="for one request")


@dataclass
class BatchTally:
    """Result of a run."""

    failed: int = 0
    invalid: list[str] = field(default_factory=list)  # a message for each invalid line


def main() -> None:
    """Run the ``toka-run-batch`` command. Exit status: 0 if every line succeeded, 1 if not, 2 for a wrong flag."""
    config = from_command_line(RunBatchConfig)
    own = RunBatchConfig.model_fields.keys() - DeploymentConfig.model_fields.keys()
    theirs = without_flags(RunBatchConfig, sys.argv[1:], own)
    if config.url is not None and theirs:
        name = min(theirs).partition("=")[0]
        fail(f"flag {name}: the server at url={config.url} has its own flags; omit one of them", status=2)
    if config.ca is not None and not (config.url or "").startswith("https:"):
        fail(f"flag ca={config.ca}: has no effect without url=https://...; leave it out, or set both", status=2)
    if config.url is None and config.http_cert is not None:
        fail(f"flag http_cert={config.http_cert}: only this program calls the server that it starts; omit it", status=2)
    try:
        with contextlib.nullcontext(config.url) if config.url is not None else _own_server(config, theirs) as url:
            run = _Run(config, url.rstrip("/").removesuffix("/v1"))
            done = run.read_output()
            with open(config.output, "ab") as output:
                tally = asyncio.run(run.all_lines(done, output))
    except (OSError, RuntimeError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail(f"stopped; the same command continues with the lines that are not in {config.output}", status=130)
    for message in tally.invalid[:_PRINTED_ERRORS]:
        print(f"toka-run-batch: {message}", file=sys.stderr)
    if (more := len(tally.invalid) - _PRINTED_ERRORS) > 0:
        print(f"toka-run-batch: {more} more lines are not requests", file=sys.stderr)
    if tally.failed:
        fail(f"{tally.failed} lines failed; see {config.output}")


class _Run:
    """Run of one input file."""

    def __init__(self, config: RunBatchConfig, url: str) -> None:
        self._config = config
        self._url = url
        self._tally = BatchTally()
        self._slots = asyncio.Semaphore(config.concurrency)

    async def all_lines(self, done: set[str], output: BinaryIO) -> BatchTally:
        """Send all lines whose custom_id is not in ``done``. Raises ``OSError`` if the input cannot be read."""
        config, used = self._config, UsedIds()
        total = _count_lines(config.input)
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        failures = TextColumn("{task.fields[failed]} failed")
        with Progress(*columns, failures, console=Console(stderr=True)) as progress:
            bar = progress.add_task("", total=total, failed=self._tally.failed)
            limits = httpx.Limits(max_connections=config.concurrency, max_keepalive_connections=config.concurrency)
            headers = {"authorization": f"Bearer {config.api_key}"}
            verify = ssl.create_default_context(cafile=config.ca)
            connections = httpx.AsyncClient(
                timeout=config.timeout_s, limits=limits, headers=headers, verify=verify, trust_env=False
            )
            async with connections as client, asyncio.TaskGroup() as group:

                def advance() -> None:
                    progress.update(bar, advance=1, failed=self._tally.failed)

                for number, text in _lines(config.input):
                    request = self._parse(number, text, used)
                    if request is None or request["custom_id"] in done:
                        advance()
                        continue
                    await self._slots.acquire()
                    group.create_task(self._process(client, request, output, advance))
        return self._tally

    def read_output(self) -> set[str]:
        """Return the custom_ids in the output. Remove an incomplete last line, and failures with ``retry_failed``."""
        path, known = Path(self._config.output), set[str]()
        if not path.exists():
            return known
        kept = path.with_name(path.name + ".kept")
        with path.open("rb") as lines, kept.open("wb") as copy:
            for text in lines:
                try:
                    result = orjson.loads(text)
                    custom_id, ok = result["custom_id"], (result.get("response") or {}).get("status_code") == 200
                except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
                    continue
                has_id = isinstance(custom_id, str)  # otherwise it belongs to no line of an input, and is kept
                if ok or not (has_id and self._config.retry_failed):
                    if has_id:
                        known.add(custom_id)
                        self._tally.failed += not ok
                    copy.write(text if text.endswith(b"\n") else text + b"\n")
        os.replace(kept, path)
        return known

    def _parse(self, number: int, text: bytes, used: UsedIds) -> dict[str, Any] | None:
        """Return the request of a line, or None and record an error if it is invalid.

        Adds its custom_id to ``used``.
        """
        try:
            request = read_request(text)
            if not request["url"].startswith("/"):
                raise InvalidLine("invalid_value", "url must be a path such as /v1/chat/completions", "url")
            used.add(request["custom_id"])
        except InvalidLine as error:
            self._tally.invalid.append(f"line {number} is not a request: {error}")
            self._tally.failed += 1
            return None
        return request

    async def _process(
        self, client: httpx.AsyncClient, request: dict[str, Any], output: BinaryIO, advance: Callable[[], None]
    ) -> None:
        result: dict[str, Any] = {"id": f"batch_req_{os.urandom(16).hex()}", "custom_id": request["custom_id"]}
        try:
            answer = await self._send(client, request["url"], _content(request["body"]))
            try:
                body = orjson.loads(answer.content)
            except orjson.JSONDecodeError:
                body = answer.text
            response = {
                "status_code": answer.status_code,
                "request_id": answer.headers.get("x-request-id", ""),
                "body": body,
            }
            result |= {"response": response, "error": None}
            self._tally.failed += answer.status_code != 200
        except InvalidLine as error:
            result |= {"response": None, "error": {"code": error.code, "message": str(error)}}
            self._tally.failed += 1
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            message = f"{type(error).__name__}: {error}"
            result |= {"response": None, "error": {"code": "no_answer", "message": message}}
            self._tally.failed += 1
        finally:
            self._slots.release()
        output.write(orjson.dumps(result) + b"\n")
        output.flush()
        advance()

    async def _send(self, client: httpx.AsyncClient, path: str, content: bytes) -> httpx.Response:
        pause, headers = 0.25, {"content-type": "application/json"}
        for attempt in range(self._config.retries + 1):
            last, asked = attempt == self._config.retries, 0.0
            try:
                answer = await client.post(self._url + path, content=content, headers=headers)
                again_in = wait_before_retry(answer)
                if last or again_in is None:
                    return answer
                asked = min(again_in, self._config.timeout_s)
            except httpx.TransportError:
                if last:
                    raise
            # A random factor spreads requests that got the same Retry-After. None is sent too early.
            await asyncio.sleep(max(asked * random.uniform(1.0, 1.25), pause * random.uniform(0.5, 1.0)))
            pause = min(2 * pause, _LAST_PAUSE_S)
        raise AssertionError


def wait_before_retry(answer: httpx.Response) -> float | None:
    """Return the least seconds before a request with this response is retried, or None if it must not be."""
    wanted = {"true": answer.is_error, "false": False}
    if not wanted.get(answer.headers.get("x-should-retry", ""), answer.status_code in _RETRIED):
        return None
    asked = answer.headers.get("retry-after", "")
    return float(asked) if _SECONDS.fullmatch(asked) else 0.0


def _content(body: dict[str, Any]) -> bytes:
    """Return the bytes of ``body``. Raises ``InvalidLine`` for a body that a batch does not support."""
    if body.get("stream"):
        raise InvalidLine("invalid_value", "stream is not supported in a batch; omit it", "stream")
    try:
        return orjson.dumps(body)
    except TypeError:
        raise InvalidLine("invalid_value", "the body is nested too deeply; use fewer levels", "body") from None


@contextlib.contextmanager
def _own_server(config: RunBatchConfig, flags: list[str]) -> Iterator[str]:
    """Start ``toka`` with ``flags``. Yield its URL when it is ready."""
    named = {flag.partition("=")[0] for flag in flags}
    port = config.port if "port" in named else free_ports()
    more = {"port": port, "grpc_port": 0, "store_url": "none"}
    given = [*flags, *(f"{name}={value}" for name, value in more.items() if name not in named)]
    command = module_command("services.launcher.toka", *given)
    environment = module_environment(os.environ) | {PARENT_PID: str(os.getpid())}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        give_up_at = time.monotonic() + _START_S
        while not _ready(url):
            if process.poll() is not None:
                raise RuntimeError(f"toka exited with status {process.returncode} before it was ready")
            if time.monotonic() > give_up_at:
                raise RuntimeError(f"toka was not ready within {_START_S:.0f} s")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _ready(url: str) -> bool:
    try:
        return httpx.get(url + "/ready", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    with open(path, "rb") as lines:
        for number, text in enumerate(lines, 1):
            if text.strip():
                yield number, text


def _count_lines(path: str) -> int:
    return sum(1 for _ in _lines(path))


if __name__ == "__main__":
    main()
