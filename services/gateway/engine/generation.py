"""What one HTTP request has running: its choices, where their tokens come in, and how it all ends.

Everything here lives on the gateway's event loop. A session feeds it (``accepted``, ``feed``, ``finish``, ``fail``),
``Failover`` asks it what is left when a scheduler was lost; the HTTP handler waits on it and, whatever happens, closes
it.
"""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import structlog

from services.common.errors import Internal, TokaError
from services.gateway.engine.codec import Ending, PromptScores, TokenLogprob
from services.gateway.engine.job import NO_TOKENS, Job, Part, Settings

log = structlog.get_logger(__name__)

_ENDED_AT_ONCE = 32  # choices: waking the handler costs as much as writing a few of them
_seeds = random.Random()  # begun by the system's


class Choice:
    """One sample: ``new_ids`` are the tokens nobody has taken yet, ``ending`` is set after the last of them.

    Where nobody waits for single tokens they come with the ending, as an array.
    """

    __slots__ = (
        "broken_off", "ending", "generation", "held", "index", "late_s", "new_ids", "new_logprobs", "noticed",
        "prompt_index", "setbacks", "strikes",
    )  # fmt: skip

    def __init__(self, generation: "Generation", index: int, prompt_index: int) -> None:
        self.generation = generation
        self.index = index
        self.prompt_index = prompt_index
        self.new_ids: list[int] | np.ndarray = []  # array: uint32
        self.new_logprobs: list[TokenLogprob | None] = []  # beside new_ids when logprobs were asked for
        self.ending: Ending | None = None
        self.broken_off = 0  # tokens that came of it before it ended with an error
        self.noticed = False
        # Of a choice whose scheduler was lost:
        self.held: np.ndarray = NO_TOKENS  # uint32, its tokens when it was sent last
        self.late_s = 0.0  # from when it was sent first to when it was sent last
        self.setbacks = 0  # schedulers lost, or left, since its last token
        self.strikes = 0  # lost ones among them at which it was under suspicion alone

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """Of its new tokens: each has one, where they were asked for."""
        return [entry for entry in self.new_logprobs if entry is not None]

    @property
    def outcome(self) -> Ending:
        """Its ``ending``, for those who know that it has come."""
        if self.ending is None:
            raise RuntimeError(f"choice {self.index} has not ended")
        return self.ending

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or the stop token id of the request that ended it. None for any other end.

        The model's own end of sequence is such another end, as in vLLM, unless the request has it in stop_token_ids.
        """
        ending, settings = self.outcome, self.generation.settings
        if settings.silent or ending.reason != "stop":
            return None
        if ending.stop_string is not None:
            return settings.stop_strings[ending.stop_string]
        return ending.stop_token if ending.stop_token in settings.stop_token_ids else None

    def take(self) -> tuple[list[int] | np.ndarray, list[TokenLogprob | None]]:
        """The new tokens, less a stop token at the very end: its text is not part of the answer."""
        ids, logprobs = self.new_ids, self.new_logprobs
        self.new_ids, self.new_logprobs = [], []
        if self.ending is not None and self.ending.at_stop_token and len(ids):
            ids, logprobs = ids[:-1], logprobs[:-1]
        return ids, logprobs


class Holder(Protocol):
    """The object that runs a call: a session, or ``Failover`` while the call is queued there."""

    def cancel(self, call: "Call") -> None:
        """End the choices of ``call`` that still run."""

    def count_tokens(self, call: "Call") -> int:
        """Return the number of tokens that the running choices of ``call`` have received since they were sent."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Call:
    """A part of a job at one scheduler.

    A request may have thousands of calls, so a call uses little memory.
    """

    part: Part
    generation: "Generation"
    choices: Sequence[Choice]  # without those that moved to another call
    accepted: bool = False  # by a scheduler, once
    attempt: int = 0  # schedulers that were lost with it
    holder: Holder | None = None  # set by the holder itself
    handle: int = 0  # set by a session: its sample i has ``handle + i``
    sent: Sequence[Choice] = ()  # set by a session: its sample i is ``sent[i]``


class Generation:
    """The choices of one HTTP request, prompt by prompt: choice ``prompt_index * n + sample``.

    ``streaming`` decides when the handler is woken: at every token, or when a number of choices have ended.
    """

    def __init__(self, jobs: Sequence[Job], *, streaming: bool) -> None:
        self.choices: list[Choice] = []
        self.calls: list[Call] = []
        for prompt_index, job in enumerate(jobs):
            first = len(self.choices)
            self.choices += [Choice(self, first + i, prompt_index) for i in range(job.settings.n)]
            seed = _seeds.getrandbits(64) if job.seed is None else job.seed
            part = Part(job, seed, job.request_id, 0, job.settings.n)
            self.calls.append(Call(part, self, self.choices[first:]))
        self.request_id = jobs[0].request_id if jobs else ""
        self.prompt_scores: list[list[PromptScores]] = [[] for _ in jobs]  # of each prompt, in order; where asked for
        self.began_at = time.perf_counter()
        self.first_token_at: float | None = None
        self._streaming = streaming
        self.settings = jobs[0].settings if jobs else Settings()
        self._first_scored = max(1, self.settings.prompt_logprobs_start)
        self.logprobs = any(job.settings.logprobs for job in jobs)
        self.fed = streaming or self.logprobs  # token by token, by ``feed``; else all come at the end
        self._unaccepted = len(self.calls)
        self._unfinished = len(self.choices)
        self._news: list[Choice] = []
        self._error: TokaError | None = None
        self._waiter: asyncio.Future[None] | None = None  # of the handler

    @property
    def made_tokens(self) -> int:
        """Number of tokens generated so far, whether the handler took them or not. Valid until ``close``."""
        running = sum(call.holder.count_tokens(call) for call in self.calls if call.holder is not None)
        return running + sum(
            len(choice.held) + choice.broken_off if choice.ending is None else choice.ending.completion_tokens
            for choice in self.choices
        )

    # From the session.

    def accepted(self) -> None:
        """One of the calls is in a scheduler's queue."""
        self._unaccepted -= 1
        if self._unaccepted == 0 and self._streaming:
            self._wake()

    def score(self, prompt_index: int, scores: PromptScores) -> None:
        """Append log-probabilities of a prompt, which come before the first token behind it.

        Scores before the next position to append are dropped: a scheduler that does not know prompt_logprobs_start
        sends them. Scores after it were asked for before a loss, and come again.
        """
        told = self.prompt_scores[prompt_index]
        known = self._first_scored + _scored(told) - scores.start
        if 0 <= known < len(scores.logprobs):
            told.append(scores.behind(known) if known else scores)

    def feed(self, choice: Choice, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None] | None) -> None:
        """New tokens of one choice."""
        if not self.settings.silent:
            choice.new_ids += token_ids  # type: ignore[operator]  # who is fed has a list
            if self.logprobs:  # a message that other requests share may have entries for those who did not ask
                choice.new_logprobs += [None] * len(token_ids) if logprobs is None else logprobs
        if self._streaming and not choice.noticed:
            choice.noticed = True
            self._news.append(choice)
            self._wake()

    def finish(self, choice: Choice, ending: Ending) -> None:
        """The end of one choice."""
        if ending.error is not None:
            choice.broken_off = max(0, ending.completion_tokens - len(choice.held))
            self.fail(ending.error)
            return
        if choice.late_s:
            ending = _with_what_was_before(ending, choice)
        choice.ending = self._as_asked(ending)
        if self.settings.silent:
            choice.new_ids = []
        self._unfinished -= 1
        if self._streaming:
            self.feed(choice, (), None)
            return
        self._news.append(choice)
        if self._unfinished == 0 or len(self._news) >= _ENDED_AT_ONCE:
            self._wake()

    def _as_asked(self, ending: Ending) -> Ending:
        """Whether the answer has its stop in it, and whether there is one, is between the client and the gateway."""
        settings = self.settings
        if settings.silent:
            return replace(ending, reason="length", at_stop_token=False, trailing_bytes=0, completion_tokens=0)
        if not settings.include_stop:
            return ending
        stop = b"" if ending.stop_string is None else settings.stop_strings[ending.stop_string].encode()
        return replace(ending, at_stop_token=False, trailing_bytes=ending.trailing_bytes - len(stop))

    def fail(self, error: TokaError) -> None:
        """The request cannot be completed. The first error counts."""
        if self._error is None:
            self._error = error
            self._wake()

    def break_off(self, what: str, error: Exception) -> None:
        """Something that nobody foresaw went wrong with it, ``what`` in the log's words: it ends, and no other does."""
        log.error(what, request_id=self.request_id, exc_info=error)
        self.fail(Internal.logged())

    # From ``Failover``.

    def lost(self, tokens: Mapping[Choice, np.ndarray]) -> list[Call]:
        """The choices in ``tokens`` are at no scheduler any more; the values, uint32, are what came of them since they
        were sent. Returns calls for what is left to do, which take the place of those that had them."""
        if self._error is not None:
            return []
        kept, made = [], []
        for call in self.calls:
            left = [choice for choice in call.choices if choice in tokens]
            if not left:
                kept.append(call)
                continue
            made += self._rest_of(call, left, tokens)
            if stay := [choice for choice in call.choices if choice not in tokens and choice.ending is None]:
                call.choices = stay
                kept.append(call)
        self.calls = kept + made
        return made

    def _rest_of(self, call: Call, left: list[Choice], tokens: Mapping[Choice, np.ndarray]) -> list[Call]:
        """Choices without a token go together, as far as they are neighbours; every other one alone."""
        part, job, attempt = call.part, call.part.job, call.attempt + 1
        runs: list[list[Choice]] = []
        for choice in left:
            if len(tokens[choice]):
                choice.held = np.concatenate((choice.held, tokens[choice]))
            before = runs[-1][-1] if runs else None
            if before is None or len(choice.held) or len(before.held) or before.index + 1 != choice.index:
                runs.append([])
            runs[-1].append(choice)
        scores, told = part.scores, self.prompt_scores[left[0].prompt_index]
        if scores and _scored(told) >= len(job.prompt_ids) - self._first_scored:
            scores = False
        elif scores:
            told.clear()  # they come again
        calls = []
        for run in runs:
            first = run[0].index - run[0].prompt_index * job.settings.n
            name = f"{job.request_id}+{attempt}.{first}"
            rest = Part(job, part.seed, name, first, len(run), run[0].held, scores)
            calls.append(Call(rest, self, run, accepted=call.accepted, attempt=attempt))
            scores = False
        return calls

    # From the HTTP handler.

    def check(self) -> None:
        """Raise the error with which the request failed, if it did."""
        if self._error is not None:
            raise self._error

    async def wait_accepted(self) -> None:
        """Until every prompt is accepted. Raises why one was not. Streams only: others hear with their answers."""
        while self._unaccepted:
            await self._woken()

    async def ended(self) -> list[Choice]:
        """Choices that have ended and were not told yet, a number of them at once; empty when all is told. Raises what
        prevented it. Not for streams."""
        while self._unfinished and len(self._news) < _ENDED_AT_ONCE:
            await self._woken()
        news, self._news = self._news, []
        return news

    async def news(self) -> list[Choice]:
        """Wait for choices with new tokens or an ending. Return none when all have ended. For streams only."""
        while not self._news:
            if not self._unfinished:
                return []
            await self._woken()
        news, self._news = self._news, []
        for choice in news:
            choice.noticed = False
        return news

    def close(self) -> None:
        """End the running choices. The creator of the generation must call this in any case.

        Choices and calls refer to their generation. Its references to them are removed here, so that their memory is
        freed without a search for cycles.
        """
        if self._unfinished:
            for call in self.calls:
                if call.holder is not None:
                    call.holder.cancel(call)
        self.calls, self.choices, self._news = [], [], []

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _woken(self) -> None:
        """Until there may be something new. Whoever waits has looked before, so nothing is missed."""
        if self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self.check()


def _scored(told: Sequence[PromptScores]) -> int:
    return sum(len(some.logprobs) for some in told)


def _with_what_was_before(ending: Ending, choice: Choice) -> Ending:
    """A scheduler knows the times of its own part only."""
    if len(choice.held):
        return replace(ending, decode_s=ending.decode_s + choice.late_s)
    return replace(ending, queued_s=ending.queued_s + choice.late_s)
