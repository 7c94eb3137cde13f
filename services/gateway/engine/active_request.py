"""The state of one HTTP request while it runs: its samples, their new tokens and their endings.

Everything here runs on the gateway's event loop. A session passes in events. After the loss of a scheduler,
``Failover`` replaces the scheduler requests. The HTTP handler waits for updates and always closes the request.
"""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import structlog

from services.common.boundaries import errors_to
from services.common.errors import Internal, TokaError, Unavailable
from services.gateway.engine.codec import PromptScores, SampleAction, SampleEnding, TokenLogprob
from services.gateway.engine.request import NO_TOKENS, PromptRequest, Settings, Submission
from services.gateway.engine.routed_experts import ReceivedExperts
from services.gateway.engine.spans import Spans, add_earlier_spans

log = structlog.get_logger(__name__)

_ENDED_PER_WAKEUP = 32  # samples: fewer wakeups, each of which costs the time of writing a few samples
_seeds = random.Random()  # seeded by the operating system


class ActiveSample:
    """A sample of an ``ActiveRequest``.

    ``new_ids`` holds the tokens since the last ``take``. ``ending`` is set after the last token. If the handler does
    not need tokens one by one, all tokens are set together with the ending, as an array.
    """

    __slots__ = (
        "earlier_ids", "earlier_spans", "ending", "experts", "failed_tokens", "failover_delay_s", "index", "is_updated",
        "losses", "new_ids", "new_logprobs", "prompt_index", "request", "sole_suspect_losses",
    )  # fmt: skip

    def __init__(self, request: "ActiveRequest", index: int, prompt_index: int) -> None:
        self.request = request
        self.index = index
        self.prompt_index = prompt_index
        self.new_ids: list[int] | np.ndarray = []  # array: uint32
        self.new_logprobs: list[TokenLogprob | None] = []  # beside new_ids if the request has logprobs
        self.ending: SampleEnding | None = None
        self.failed_tokens = 0  # tokens of the last scheduler before the sample failed
        self.is_updated = False
        self.experts: ReceivedExperts | None = None  # None: not wanted
        # Set by failover:
        self.earlier_ids: np.ndarray = NO_TOKENS  # uint32, tokens from previous schedulers
        self.earlier_spans: Spans = ()  # of earlier_ids
        self.failover_delay_s = 0.0  # from the first submission to the last one
        self.losses = 0  # times that its scheduler was lost, or gave it up, since its last token
        self.sole_suspect_losses = 0  # losses at which it was the only suspect

    @property
    def logprobs(self) -> list[TokenLogprob]:
        """Log-probabilities of the new tokens, without empty entries."""
        return [entry for entry in self.new_logprobs if entry is not None]

    @property
    def outcome(self) -> SampleEnding:
        """The ending of a sample that has ended."""
        if self.ending is None:
            raise RuntimeError(f"sample {self.index} has not ended")
        return self.ending

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or the stop token id of the request that ended the sample, or None for any other end.

        As in vLLM, the model's end-of-sequence token counts only if it is in the request's stop_token_ids.
        """
        ending, settings = self.outcome, self.request.settings
        if settings.discard_output or ending.reason != "stop":
            return None
        if ending.stop_string is not None:
            return settings.stop_strings[ending.stop_string]
        return ending.stop_token if ending.stop_token in settings.stop_token_ids else None

    def take(self) -> tuple[list[int] | np.ndarray, list[TokenLogprob | None]]:
        """Remove and return the new tokens and log-probabilities, without a final stop token."""
        ids, logprobs = self.new_ids, self.new_logprobs
        self.new_ids, self.new_logprobs = [], []
        if self.ending is not None and self.ending.at_stop_token and len(ids):
            ids, logprobs = ids[:-1], logprobs[:-1]
        return ids, logprobs


class Holder(Protocol):
    """The object that runs a scheduler request: a session, or ``Failover`` while the request is queued there."""

    def act_on(self, request: "SchedulerRequest", action: SampleAction) -> None:
        """Cancel, end or park the samples of ``request`` that still run."""

    def count_tokens(self, request: "SchedulerRequest") -> int:
        """Return the number of tokens that the running samples of ``request`` have received since they were sent."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class SchedulerRequest:
    """A request to one scheduler, for some samples of one prompt.

    An HTTP request may have thousands of them, so each uses little memory.
    """

    submission: Submission
    parent: "ActiveRequest"
    samples: Sequence[ActiveSample]  # without samples that moved to another scheduler request
    accepted: bool = False  # by any scheduler, once
    attempt: int = 0  # number of schedulers that were lost before this one
    holder: Holder | None = None  # set by the holder
    handle: int = 0  # set by a session: its sample i has ``handle + i``
    sent: Sequence[ActiveSample] = ()  # set by a session: its sample i is ``sent[i]``

    @property
    def due_action(self) -> SampleAction | None:
        """The action that its session must send because enough samples of the prompt have finished, or None.

        None for a request with all samples of the prompt: its scheduler counts them and acts.
        """
        return self.parent.straggler_action(self.samples[0].prompt_index) if self.submission.resumes else None


class ActiveRequest:
    """A running HTTP request and its samples. Sample ``s`` of prompt ``p`` has index ``p * n + s``.

    If ``streaming``, the handler is woken at every token, else when a number of samples have ended.
    """

    def __init__(self, prompts: Sequence[PromptRequest], *, streaming: bool) -> None:
        self.samples: list[ActiveSample] = []
        self.scheduler_requests: list[SchedulerRequest] = []
        for prompt_index, prompt in enumerate(prompts):
            first = len(self.samples)
            self.samples += [ActiveSample(self, first + i, prompt_index) for i in range(prompt.settings.n)]
            for sample in self.samples[first:]:
                sample.experts = ReceivedExperts.of(prompt.settings)
            seed = _seeds.getrandbits(64) if prompt.seed is None else prompt.seed
            submission = Submission(prompt, seed, prompt.request_id, 0, prompt.settings.n)
            self.scheduler_requests.append(SchedulerRequest(submission, self, self.samples[first:]))
        self.request_id = prompts[0].request_id if prompts else ""
        self.prompt_scores: list[list[PromptScores]] = [[] for _ in prompts]  # by prompt, in order of positions
        self.failover_replicas: dict[int, str] = {}  # addresses that failover chose, by prompt
        self._finished = [0] * len(prompts)  # finished samples by prompt, without samples that were ended early
        self.began_at = time.perf_counter()
        self.first_token_at: float | None = None
        self._streaming = streaming
        self.settings = prompts[0].settings if prompts else Settings()
        self._first_scored = max(1, self.settings.prompt_logprobs_start)
        self.logprobs = any(prompt.settings.logprobs for prompt in prompts)
        self.per_token = streaming or self.logprobs  # the session calls ``add_tokens``; else tokens come with endings
        self._is_split = False  # failover has divided the samples of a prompt among several requests
        self._unaccepted = len(self.scheduler_requests)
        self._unfinished = len(self.samples)
        self._updated: list[ActiveSample] = []
        self._error: TokaError | None = None
        self._wakeup: asyncio.Future[None] | None = None  # the handler waits for it

    @property
    def generated_tokens(self) -> int:
        """Number of tokens generated so far, taken by the handler or not. Valid until ``close``."""
        running = sum(each.holder.count_tokens(each) for each in self.scheduler_requests if each.holder is not None)
        return running + sum(
            len(sample.earlier_ids) + sample.failed_tokens if sample.ending is None else sample.ending.completion_tokens
            for sample in self.samples
        )

    # Called by the session.

    def on_accepted(self) -> None:
        """Record that a scheduler queued one of the scheduler requests."""
        self._unaccepted -= 1
        if self._unaccepted == 0 and self._streaming:
            self._wake()

    def add_prompt_scores(self, prompt_index: int, scores: PromptScores) -> None:
        """Append log-probabilities of a prompt. They arrive before the first token of its samples.

        Scores before the next expected position are dropped: a scheduler that does not support prompt_logprobs_start
        sends them. Scores after it are dropped too: they belong to a lost submission and are sent again.
        """
        received = self.prompt_scores[prompt_index]
        known = self.scored_end(prompt_index) - scores.start
        if 0 <= known < len(scores.logprobs):
            received.append(scores.behind(known) if known else scores)

    def scored_end(self, prompt_index: int) -> int:
        """Return the position after the last scored token of a prompt. An abort may leave a prompt without scores."""
        return self._first_scored + sum(len(scores.logprobs) for scores in self.prompt_scores[prompt_index])

    def add_tokens(
        self, sample: ActiveSample, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None] | None
    ) -> None:
        """Append new tokens to ``sample``."""
        if not self.settings.discard_output:
            sample.new_ids += token_ids  # type: ignore[operator]  # a list if ``per_token``
            if self.logprobs:  # the message may have entries for other requests, even if this one has no logprobs
                sample.new_logprobs += [None] * len(token_ids) if logprobs is None else logprobs
        if self._streaming and not sample.is_updated:
            sample.is_updated = True
            self._updated.append(sample)
            self._wake()

    def finish(self, sample: ActiveSample, ending: SampleEnding) -> None:
        """Record the end of ``sample``."""
        if ending.error is not None:
            sample.failed_tokens = max(0, ending.completion_tokens - len(sample.earlier_ids))
            self.fail(ending.error)
            return
        if sample.experts is not None and (missing := sample.experts.missing(ending)):
            self.fail(
                Unavailable(f"the experts of {missing} tokens were lost with a scheduler; send the request again")
            )
            return
        if sample.failover_delay_s:
            ending = add_earlier_spans(_add_failover_delay(ending, sample), sample.earlier_spans)
        if ending.reason != "abort":
            self._count_finished(sample.prompt_index)
        sample.ending = self._apply_settings(ending)
        if self.settings.discard_output:
            sample.new_ids = []
        self._unfinished -= 1
        if self._streaming:
            self.add_tokens(sample, (), None)
            return
        self._updated.append(sample)
        if self._unfinished == 0 or len(self._updated) >= _ENDED_PER_WAKEUP:
            self._wake()

    def _count_finished(self, prompt_index: int) -> None:
        """Count a finished sample. If enough have finished, end or park the others at all their schedulers."""
        self._finished[prompt_index] += 1
        if self._finished[prompt_index] not in (self.settings.end_after, self.settings.park_after):
            return
        for request in self.scheduler_requests if self._is_split else ():
            action = self.straggler_action(prompt_index)
            if request.samples[0].prompt_index == prompt_index and request.holder is not None and action is not None:
                request.holder.act_on(request, action)

    def straggler_action(self, prompt_index: int) -> SampleAction | None:
        """Return the action that the settings ask for, for the unfinished samples of a prompt, or None."""
        finished, settings = self._finished[prompt_index], self.settings
        if settings.end_after is not None and finished >= settings.end_after:
            return "end"
        return "park" if settings.park_after is not None and finished >= settings.park_after else None

    def _apply_settings(self, ending: SampleEnding) -> SampleEnding:
        """Apply ``discard_output`` and ``include_stop``, which are not sent to the scheduler."""
        settings = self.settings
        if settings.discard_output:
            if ending.reason != "abort":
                ending = replace(ending, reason="length")
            return replace(ending, at_stop_token=False, trailing_bytes=0, completion_tokens=0, weights=())
        if not settings.include_stop:
            return ending
        stop = b"" if ending.stop_string is None else settings.stop_strings[ending.stop_string].encode()
        return replace(ending, at_stop_token=False, trailing_bytes=ending.trailing_bytes - len(stop))

    def fail(self, error: TokaError) -> None:
        """End the request with ``error``, unless it has failed before."""
        if self._error is None:
            self._error = error
            self._wake()

    def failing_on_errors(self, what: str) -> errors_to:
        """Return a context manager that ends the request with an internal error if its block raises.

        An error of one request must not affect the others of a session.
        """
        return errors_to(partial(self.fail_internal, what))

    def fail_internal(self, what: str, error: Exception) -> None:
        """End the request with an internal error. Log ``error`` with ``what`` as the message."""
        log.error(what, request_id=self.request_id, exc_info=error)
        self.fail(Internal.logged())

    # Called by ``Failover``.

    def replace_lost(self, tokens: Mapping[ActiveSample, np.ndarray]) -> list[SchedulerRequest]:
        """Return new scheduler requests for the samples in ``tokens``, whose scheduler was lost.

        The values are the tokens (uint32) that the samples received since they were sent. The new scheduler requests
        replace those of the lost scheduler.
        """
        if self._error is not None:
            return []
        kept, made = [], []
        for request in self.scheduler_requests:
            lost = [sample for sample in request.samples if sample in tokens]
            if not lost:
                kept.append(request)
                continue
            made += self._resubmit(request, lost, tokens)
            if stay := [sample for sample in request.samples if sample not in tokens and sample.ending is None]:
                request.samples = stay
                kept.append(request)
        self.scheduler_requests = kept + made
        self._is_split = True
        return made

    def _resubmit(
        self, request: SchedulerRequest, lost: list[ActiveSample], tokens: Mapping[ActiveSample, np.ndarray]
    ) -> list[SchedulerRequest]:
        """Return scheduler requests for ``lost`` samples of ``request``.

        Consecutive samples without tokens share a scheduler request. Every other sample has its own.
        """
        submission, prompt, attempt = request.submission, request.submission.prompt, request.attempt + 1
        runs: list[list[ActiveSample]] = []
        for sample in lost:
            if len(tokens[sample]):
                sample.earlier_ids = np.concatenate((sample.earlier_ids, tokens[sample]))
            if not len(sample.earlier_ids):  # the next scheduler sends them again: samples may share a request
                sample.experts = ReceivedExperts.of(prompt.settings)
            before = runs[-1][-1] if runs else None
            if before is None or len(sample.earlier_ids) or len(before.earlier_ids) or before.index + 1 != sample.index:
                runs.append([])
            runs[-1].append(sample)
        scores, prompt_index = submission.scores, lost[0].prompt_index
        if scores and self.scored_end(prompt_index) >= len(prompt.prompt_ids):
            scores = False
        elif scores:
            self.prompt_scores[prompt_index].clear()  # the next scheduler sends them again
        requests = []
        for run in runs:
            first = run[0].index - run[0].prompt_index * prompt.settings.n
            routed = 0 if run[0].experts is None else run[0].experts.tokens
            name = f"{prompt.request_id}+{attempt}.{first}"
            rest = Submission(prompt, submission.seed, name, first, len(run), run[0].earlier_ids, scores, routed)
            requests.append(SchedulerRequest(rest, self, run, accepted=request.accepted, attempt=attempt))
            scores = False
        return requests

    # Called by the HTTP handler.

    def check(self) -> None:
        """Raise the error with which the request failed, if it did."""
        if self._error is not None:
            raise self._error

    async def wait_accepted(self) -> None:
        """Wait until every prompt is accepted. Raises the error of a rejection. For streams only."""
        while self._unaccepted:
            await self._wait()

    async def wait_ended(self) -> list[ActiveSample]:
        """Wait for samples that have ended, several at once. Return none when all were returned. Not for streams.

        Raises the error with which the request failed.
        """
        while self._unfinished and len(self._updated) < _ENDED_PER_WAKEUP:
            await self._wait()
        ended, self._updated = self._updated, []
        return ended

    async def wait_updated(self) -> list[ActiveSample]:
        """Wait for samples with new tokens or an ending. Return none when all have ended. For streams only."""
        while not self._updated:
            if not self._unfinished:
                return []
            await self._wait()
        updated, self._updated = self._updated, []
        for sample in updated:
            sample.is_updated = False
        return updated

    def close(self) -> None:
        """Cancel the running samples. The creator of the request must always call this.

        Samples and scheduler requests refer to this object. Its references to them are removed here, so that their
        memory is freed without a search for cycles.
        """
        if self._unfinished:
            for request in self.scheduler_requests:
                if request.holder is not None:
                    request.holder.act_on(request, "cancel")
        self.scheduler_requests, self.samples, self._updated = [], [], []

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    async def _wait(self) -> None:
        """Wait for the next ``_wake``. Raises the error with which the request failed."""
        if self._error is None:
            self._wakeup = asyncio.get_running_loop().create_future()
            await self._wakeup
        self.check()


def _add_failover_delay(ending: SampleEnding, sample: ActiveSample) -> SampleEnding:
    """Add the time before the last submission, which that scheduler did not measure."""
    if len(sample.earlier_ids):
        return replace(ending, decode_s=ending.decode_s + sample.failover_delay_s)
    return replace(ending, queued_s=ending.queued_s + sample.failover_delay_s)
