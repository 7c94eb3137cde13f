"""Clients that send one question after the other and compare each answer with the expected one.

A client that loses its gateway retries at another one, like a client of a load balancer.
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import httpx

from bench.chaos.answer import Answer, Defect, Departed, Stream, check, check_beginning
from bench.chaos.exchange import ask_stream, ask_whole, http_client
from bench.chaos.questions import Question
from bench.chaos.recovery import Ask, Recoveries
from bench.chaos.tally import Story, Tally
from bench.chaos.weather import Weather

_RETRY_AFTER_S = 0.2
# Share of questions that go to the replica with the least work instead of the one with a cached prefix, so that a
# replica that has restarted receives work.
_SALTED = 0.3


@dataclass
class Attempt:
    """An attempt at one gateway."""

    gateway: str
    begin: float
    got: Answer | None = None
    trouble: str = ""


@dataclass
class _Asked:
    """A question of a client with all attempts."""

    number: str
    question: Question
    begin: float
    attempts: list[Attempt] = field(default_factory=list)


class Clients:
    """``count`` clients on the program's event loop.

    ``gateways``: base URLs by name. ``streamed``: share of requests that are streamed.
    """

    def __init__(
        self,
        count: int,
        gateways: Mapping[str, str],
        questions: Sequence[Question],
        *,
        weather: Weather,
        recoveries: Recoveries,
        tally: Tally,
        hang_s: float,
        seed: int,
        streamed: float = 0.7,
    ) -> None:
        self._gateways = dict(gateways)
        self._questions = questions
        self._weather, self._recoveries, self._tally = weather, recoveries, tally
        self._hang_s = hang_s
        self._streamed = streamed
        self._chances = [random.Random(f"{seed} {number}") for number in range(count)]

    async def run(self, over: Callable[[], bool]) -> None:
        """Run until ``over`` is true and all questions are answered."""
        async with http_client(2 * len(self._chances) + 10) as http:
            await asyncio.gather(*(self._client(http, number, over) for number in range(len(self._chances))))

    async def _client(self, http: httpx.AsyncClient, number: int, over: Callable[[], bool]) -> None:
        chance, count = self._chances[number], 0
        while not over():
            count += 1
            question = chance.choice(self._questions)
            if chance.random() < _SALTED:
                question = replace(question, body=question.body | {"cache_salt": f"{number}-{count}"})
            asked = _Asked(f"{number}-{count}", question, time.monotonic())
            streamed, gateway = chance.random() < self._streamed, chance.choice(list(self._gateways))
            ask = Ask()
            if streamed:
                self._recoveries.open.add(ask)
            try:
                answer = await self._ask(http, asked, gateway, streamed, ask)
            except Defect as defect:
                self._tally.defect(defect.kind, self._story(asked, streamed, defect))
            else:
                self._tally.answered(answer)
            finally:
                self._recoveries.open.discard(ask)
                ask.progress()

    async def _ask(self, http: httpx.AsyncClient, asked: _Asked, gateway: str, streamed: bool, ask: Ask) -> Answer:
        """Return the right answer, after any number of retries at lost gateways. Raises ``Defect``."""
        question = asked.question
        try:
            async with asyncio.timeout(self._hang_s) as limit:

                def progress() -> None:
                    limit.reschedule(asyncio.get_running_loop().time() + self._hang_s)
                    ask.progress()

                while True:
                    ask.gateway = gateway
                    attempt = Attempt(gateway, time.monotonic())
                    asked.attempts.append(attempt)
                    try:
                        await self._try(http, question, attempt, progress if streamed else None)
                        check(question.right, attempt.got)
                        return attempt.got
                    except (httpx.TransportError, Departed) as error:
                        attempt.trouble = f"{error!r} after {time.monotonic() - attempt.begin:.1f} s"
                        if not self._weather.excuses(gateway, attempt.begin):
                            raise Defect("lost", f"{gateway} broke the connection without a fault") from error
                        if attempt.got is not None:
                            check_beginning(question.right, attempt.got)
                    self._tally.retries += 1
                    await asyncio.sleep(_RETRY_AFTER_S)
                    others = [name for name in self._gateways if name != gateway]
                    gateway = others[len(asked.attempts) % len(others)] if others else gateway
        except TimeoutError:
            raise Defect("hang", f"no progress for {self._hang_s:.0f} s") from None

    async def _try(
        self, http: httpx.AsyncClient, question: Question, attempt: Attempt, progress: Callable[[], None] | None
    ) -> None:
        """Send ``question`` to a gateway. ``progress`` is called for events of a stream; None = do not stream."""
        url = self._gateways[attempt.gateway]
        if progress is None:
            attempt.got = await ask_whole(http, url, question)
        else:
            stream = Stream()
            attempt.got = stream.answer
            await ask_stream(http, url, question, stream, progress)

    def _story(self, asked: _Asked, streamed: bool, defect: Defect) -> Story:
        began, now = self._weather.began, time.monotonic()
        return Story(
            ask=asked.number,
            verdict=str(defect),
            request={"path": asked.question.path, "streamed": streamed, **asked.question.body},
            right=asked.question.right,
            got=asked.attempts[-1].got,
            attempts=[
                f"{attempt.begin - began:.1f} s at {attempt.gateway}: {attempt.trouble or 'the last'}"
                for attempt in asked.attempts
            ],
            ended_at=round(now - began, 1),
            faults=self._weather.near(asked.begin, now),
        )


async def learn_answers(gateways: Mapping[str, str], questions: Sequence[Question]) -> list[Question]:
    """Return the questions with the right answers, which a deployment without faults gives whole and streamed.

    Raises ``RuntimeError`` if the two answers differ.
    """
    urls = list(gateways.values())
    room = asyncio.Semaphore(8)

    async with http_client(16) as http:

        async def learn(question: Question) -> Question:
            async with room:
                right = await ask_whole(http, urls[question.number % len(urls)], question)
                url = urls[(question.number + 1) % len(urls)]
                again = await ask_stream(http, url, question, Stream(), lambda: None)
            try:
                check(right, again)
            except Defect as defect:
                raise RuntimeError(f"without faults, two answers to {question.body} differ: {defect}") from defect
            return replace(question, right=right)

        return await asyncio.gather(*map(learn, questions))
