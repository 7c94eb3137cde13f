"""The gRPC interface of a scheduler, with valid and invalid calls and sessions."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
from google.protobuf.message import Message

from bench.fuzz.calls import Call, Calls
from bench.fuzz.canary import marks, random_of
from bench.fuzz.config import FuzzConfig
from bench.fuzz.expected import Expected
from bench.fuzz.findings import Findings, Wrong
from bench.fuzz.statuses import NEVER, is_ours
from bench.fuzz.target import Target
from tokasaurus.scheduler.v1 import generate_pb2, observe_pb2, session_pb2

_SERVICE = "/tokasaurus.scheduler.v1.SchedulerService/"
_ANSWERS: dict[str, type[Message]] = {
    "Generate": generate_pb2.GenerateResponse,
    "Session": session_pb2.SessionResponse,
    "GetModel": observe_pb2.GetModelResponse,
    "GetLoad": observe_pb2.GetLoadResponse,
    "Forecast": observe_pb2.ForecastResponse,
    "WatchPlans": observe_pb2.WatchPlansResponse,
    "Tokenize": observe_pb2.TokenizeResponse,
    "Detokenize": observe_pb2.DetokenizeResponse,
}
_WATCHED_S = 0.3
_WATCHED_PLANS = 3
_CHANNELS = 4
# This program causes the last two itself, when it cancels a call or sets a deadline.
_WITHOUT_KEY = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    }
)


class SchedulerFuzzer:
    """A fuzzer of one scheduler."""

    def __init__(
        self, config: FuzzConfig, target: Target, findings: Findings, expected: Expected | None = None
    ) -> None:
        self._config, self._target, self._findings = config, target, findings
        self._calls, self._expected = Calls(config.seed), expected or Expected()
        self._statuses: Counter[str] = Counter()
        self._kinds: Counter[str] = Counter()
        self._messages = 0
        self._slowest = 0.0

    async def run(self, count: int) -> dict[str, Any]:
        """Make calls until ``count`` messages are sent. Return the number of calls by status."""
        began = time.monotonic()
        first = self._config.first
        numbers = iter(range(first, first + count))
        async with contextlib.AsyncExitStack() as opened:
            channels = [
                await opened.enter_async_context(
                    grpc.aio.insecure_channel(self._target.scheduler, options=(("grpc.use_local_subchannel_pool", 1),))
                )
                for _ in range(_CHANNELS)
            ]
            async with asyncio.TaskGroup() as clients:
                for client in range(min(count, self._config.concurrency)):
                    clients.create_task(self._client(channels[client % _CHANNELS], numbers, count))
        seconds = time.monotonic() - began
        return {
            "requests": self._messages,
            "calls": self._kinds.total(),
            "seconds": round(seconds, 1),
            "requests_per_second": round(self._messages / seconds),
            "slowest_seconds": round(self._slowest, 2),
            "kinds": dict(sorted(self._kinds.items())),
            "statuses": dict(sorted(self._statuses.items())),
        }

    async def _client(self, channel: grpc.aio.Channel, numbers: Iterator[int], most: int) -> None:
        while self._messages < most and (number := next(numbers, None)) is not None:
            call = self._calls.make(number)
            self._messages += len(call.data)
            self._kinds[call.kind] += 1
            await self._ask(channel, call)

    async def _ask(self, channel: grpc.aio.Channel, call: Call) -> None:
        began, answers = time.monotonic(), list[Message]()
        owner, authorization = self._target.credentials.choose(random_of(call.number, "key", 0), right=bool(call.right))
        # Only gateways may open sessions.
        if call.method == "Session" and owner:
            authorization = self._target.credentials.gateway
        metadata = (("authorization", authorization),) if authorization.isascii() and authorization else ()
        try:
            status, details = await self._exchange(channel, call, metadata, answers)
            self._statuses[status.name] += 1
            if call.kind not in ("session",) and call.method != "WatchPlans":
                self._slowest = max(self._slowest, time.monotonic() - began)
            self._check(call, owner, status, details, answers)
        except TimeoutError:
            self._add(call, Wrong("late", "no answer in time"), answers)
        except Wrong as wrong:
            self._add(call, wrong, answers)

    async def _exchange(
        self, channel: grpc.aio.Channel, call: Call, metadata: tuple, answers: list[Message]
    ) -> tuple[grpc.StatusCode, str]:
        """Send ``call``, append its answers to ``answers``, and return its status and details."""
        kind, path = _ANSWERS.get(call.method, observe_pb2.GetLoadResponse), _SERVICE + call.method
        settings = {"metadata": metadata, "timeout": call.timeout_s}
        if call.method == "Session":
            method = channel.stream_stream(path, None, kind.FromString)
            left = asyncio.Event()
            running = method(_sent(call, left), **settings)
        elif call.method in ("Generate", "WatchPlans"):
            running = channel.unary_stream(path, None, kind.FromString)(call.data[0], **settings)
        else:
            running = channel.unary_unary(path, None, kind.FromString)(call.data[0], **settings)
        try:
            async with asyncio.timeout(self._config.answer_seconds):
                if isinstance(running, grpc.aio.UnaryUnaryCall):
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        answers.append(await running)
                elif call.method == "WatchPlans" or call.ends == "left":
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_WATCHED_S):
                            await _take(running, answers, _WATCHED_PLANS)
                    running.cancel()
                elif call.ends == "cancelled":
                    await _take(running, answers, 2)
                    running.cancel()
                else:
                    await _take(running, answers)
                return await running.code(), await running.details()
        finally:
            running.cancel()
            if call.method == "Session":
                left.set()

    def _check(
        self, call: Call, owner: str | None, status: grpc.StatusCode, details: str, answers: list[Message]
    ) -> None:
        if status in NEVER and not is_ours(details):
            raise Wrong("status", f"{call.method}: {status.name}: {details}")
        if owner is None and (answers or not (status in _WITHOUT_KEY or is_ours(details))):
            raise Wrong("let in", f"{call.method} without a right key: {status.name}")
        received = b"".join(answer.SerializeToString() for answer in answers) + (details or "").encode()
        of_others = marks(received) - marks(b"".join(call.data)) - {call.mark.encode()[3:]}
        if of_others and call.method != "WatchPlans":
            raise Wrong("leak", f"marks of others: {sorted(of_others)[:5]}")
        for answer in answers:
            for status_given in _rejections(answer):
                if status_given in NEVER:
                    raise Wrong("status", f"a rejection with {status_given.name}: {answer}")
        if call.right:
            if status is not grpc.StatusCode.OK:
                raise Wrong("refused", f"a right {call.method}: {status.name}: {details}")
            self._check_tokens(call, answers)

    def _check_tokens(self, call: Call, answers: list[Message]) -> None:
        said = _of_generate(answers) if call.method == "Generate" else _of_session(call, answers)
        for place, request in enumerate(call.right):
            for index in range(request.n):
                sampling, prompt = request.sampling, list(request.tokens.token_ids)
                right = self._expected.tokens(
                    prompt, request.stopping.max_tokens, seed=sampling.seed, sample_index=index,
                    temperature=sampling.temperature,
                )  # fmt: skip
                if said.pop((place, index), None) != right:
                    raise Wrong("other text", f"request {place}, sample {index}: expected {right}")
        if said:
            raise Wrong("other text", f"samples that nobody asked for: {said}")

    def _add(self, call: Call, wrong: Wrong, answers: list[Message]) -> None:
        received = "\n---\n".join(map(str, answers)).encode()
        request = b"".join(len(data).to_bytes(4, "big") + data for data in call.data)
        self._findings.add("grpc", call.number, wrong.kind, f"{call.kind}: {wrong}", request, received)


async def _sent(call: Call, left: asyncio.Event) -> AsyncIterator[bytes]:
    for data in call.data:
        yield data
    if call.ends != "closed":
        await left.wait()


async def _take(running: Any, answers: list[Message], most: int = 1 << 30) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        async for answer in running:
            answers.append(answer)
            if len(answers) == most:
                return


def _rejections(answer: Message) -> Iterator[grpc.StatusCode]:
    """Yield the statuses of rejected and failed requests."""
    codes = {code.value[0]: code for code in grpc.StatusCode}
    if isinstance(answer, session_pb2.SessionResponse):
        if answer.HasField("rejection"):
            yield codes[answer.rejection.status.code]
        for finished in answer.outputs.finished:
            if _failed(finished.finish):
                yield codes[finished.finish.error.code]
    elif isinstance(answer, generate_pb2.GenerateResponse):
        for sample in answer.outputs.samples:
            if _failed(sample.finish):
                yield codes[sample.finish.error.code]


def _failed(finish: generate_pb2.Finish) -> bool:
    """Return whether a sample failed, except for a resumed sample whose tokens its grammar forbids.

    Only the worker can detect this exception.
    """
    return finish.HasField("error") and "satisfy the grammar" not in finish.error.message


def _of_generate(answers: list[Message]) -> dict[tuple[int, int], list[int]]:
    said: dict[tuple[int, int], list[int]] = {}
    for answer in answers:
        for sample in answer.outputs.samples:
            said.setdefault((0, sample.sample_index), []).extend(sample.token_ids)
    return said


def _of_session(call: Call, answers: list[Message]) -> dict[tuple[int, int], list[int]]:
    """Return tokens by the index of the request and of the sample."""
    names: dict[int, tuple[int, int]] = {}
    messages = [session_pb2.SessionRequest.FromString(data) for data in call.data[1:]]
    submits = [each for message in messages for each in (message.submits.submits or [message.submit])]
    for place, submit in enumerate(submits):
        names |= {submit.handle + index: (place, index) for index in range(submit.request.n)}
    said: dict[tuple[int, int], list[int]] = {}
    for answer in answers:
        outputs, at = answer.outputs, 0
        for handle, count in zip(outputs.handles, outputs.token_counts or [1] * len(outputs.handles), strict=True):
            said.setdefault(names.get(handle, (-1, handle)), []).extend(outputs.token_ids[at : at + count])
            at += count
    return said
