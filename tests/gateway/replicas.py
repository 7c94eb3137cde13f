"""Several schedulers, each with a fake worker, a gateway in front of them, and requests whose answers are known."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
from openai import AsyncOpenAI

from tests.gateway.deployment import BOOT_S, Deployment, Process, eventually_async, free_port
from tokasaurus.scheduler.v1 import observe_pb2, scheduler_pb2_grpc

# A connection of its own, and tried more often than once in seconds.
_EAGER = [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 100),
          ("grpc.min_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 100)]  # fmt: skip


class Engines:
    """Schedulers, each run by ``program``, with a worker each. ``flags``: of every scheduler."""

    def __init__(
        self, directory: Path, count: int, *, program: str = "services.scheduler", worker: dict | None = None, **flags
    ) -> None:
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(count)]
        self.workers, self.schedulers = [], []
        for number, address in enumerate(self.addresses):
            listen = f"127.0.0.1:{free_port()}"
            log = directory / f"engine{number}.log"
            self.workers.append(Process(log, "tests.fakes.worker", listen=listen, **worker or {}))
            self.schedulers.append(Process(log, program, scheduler_listen=address, worker_addresses=listen, **flags))

    def load(self, number: int = 0) -> observe_pb2.Load:
        """What a scheduler says of itself; blocks until it is there to ask."""
        with grpc.insecure_channel(self.addresses[number], _EAGER) as channel:
            ask = scheduler_pb2_grpc.SchedulerServiceStub(channel).GetLoad
            return ask(observe_pb2.GetLoadRequest(), timeout=BOOT_S, wait_for_ready=True).load

    def stop(self) -> None:
        for process in (*self.schedulers, *self.workers):
            process.kill()


class Replicas:
    """``count`` schedulers behind a gateway, which is the deployment's."""

    def __init__(
        self, directory: Path, count: int, *, worker: dict, scheduler: dict | None = None, gateway: dict | None = None
    ) -> None:
        others = Engines(directory, count - 1, worker=worker, **scheduler or {})
        self.deployment = Deployment(
            directory,
            worker=worker,
            scheduler=scheduler,
            gateway=gateway,
            other_schedulers=tuple(others.addresses),
        )
        self.addresses = [self.deployment.scheduler_address, *others.addresses]
        self.schedulers = [self.deployment.scheduler, *others.schedulers]
        self.workers = [self.deployment.worker, *others.workers]

    @classmethod
    @asynccontextmanager
    async def running(cls, directory: Path, count: int, **flags: dict) -> AsyncIterator["Replicas"]:
        """All of them are ready, and end with the block."""
        made = cls(directory, count, **flags)
        try:
            await asyncio.to_thread(made.deployment.wait_ready)
            await eventually_async(lambda: made.ready == count)
            yield made
        finally:
            made.stop()

    @property
    def ready(self) -> int:
        """Schedulers that the gateway finds ready."""
        return int(self.deployment.metric("toka_replica_ready"))

    def stop(self) -> None:
        for process in (self.deployment.gateway, *self.schedulers, *self.workers):
            process.kill()


class Asked:
    """One request on its way, and what has come of it: of each sample its text, its log-probabilities and its end."""

    def __init__(self, sdk: AsyncOpenAI, *, stream: bool, **body) -> None:
        self.begun = asyncio.Event()  # a first piece has come; only of a stream
        self.text: dict[int, str] = {}
        self.logprobs: dict[int, list] = {}
        self.finish: dict[int, str] = {}
        self.usage: tuple[int, int] | None = None
        body = {"model": "tokasaurus-builtin"} | body
        if stream:
            body["stream_options"] = {"include_usage": True}
        self.task = asyncio.create_task(self._stream(sdk, body) if stream else self._whole(sdk, body))

    @property
    def answer(self) -> tuple:
        """All that a client can compare."""
        return self.text, self.logprobs, self.finish, self.usage

    async def _whole(self, sdk: AsyncOpenAI, body: dict) -> None:
        self._note(await sdk.completions.create(**body))

    async def _stream(self, sdk: AsyncOpenAI, body: dict) -> None:
        async for chunk in await sdk.completions.create(stream=True, **body):
            self._note(chunk)
            if self.text:
                self.begun.set()

    def _note(self, piece) -> None:
        for choice in piece.choices:
            self.text[choice.index] = self.text.get(choice.index, "") + choice.text
            if (told := choice.logprobs) is not None:
                entries = zip(told.tokens, told.token_logprobs, told.top_logprobs or [], strict=True)
                self.logprobs.setdefault(choice.index, []).extend(entries)
            if choice.finish_reason is not None:
                assert choice.index not in self.finish, "two ends of one sample"
                self.finish[choice.index] = choice.finish_reason
        if piece.usage is not None:
            self.usage = piece.usage.prompt_tokens, piece.usage.completion_tokens


async def answers(asked: list[Asked]) -> list[tuple]:
    """What came of them in the end."""
    await asyncio.gather(*(each.task for each in asked))
    return [each.answer for each in asked]
