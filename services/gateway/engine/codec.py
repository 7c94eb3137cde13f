"""Conversion between messages of the scheduler's contract and the gateway's own types."""

import time
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, get_args

import numpy as np

from services.common import errors
from services.common.packed import fill, read_fixed32, read_float
from services.common.plan.routed_experts import RoutedExperts, RoutedExpertsLayout
from services.common.rpc.status import from_status
from services.gateway.engine.request import Grammar, RequestPriority, Submission
from tokasaurus.common.v1 import routed_experts_pb2, sampling_pb2
from tokasaurus.scheduler.v1 import generate_pb2, observe_pb2, session_pb2

CONTRACT_MAJOR, RESUME_MINOR, SUBMITS_MINOR, STRAGGLERS_MINOR = "1", 5, 11, 13
MESSAGES_LOST = "MESSAGES_LOST"  # error reason: messages of the session are missing

SampleAction = Literal["cancel", "end", "park"]  # what a message of a session does to running samples
FinishReason = Literal["stop", "length", "abort", "error"]
FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)

_PRIORITIES = {
    RequestPriority.HIGH: generate_pb2.PRIORITY_CLASS_HIGH,
    RequestPriority.NORMAL: generate_pb2.PRIORITY_CLASS_NORMAL,
    RequestPriority.LOW: generate_pb2.PRIORITY_CLASS_LOW,
}
_LOGPROBS_MODES = {
    False: generate_pb2.LOGPROBS_MODE_RAW,
    True: generate_pb2.LOGPROBS_MODE_PROCESSED,
}
_REASONS: dict[int, FinishReason] = {
    generate_pb2.FINISH_REASON_STOP: "stop",
    generate_pb2.FINISH_REASON_LENGTH: "length",
    generate_pb2.FINISH_REASON_ABORTED: "abort",
}


@dataclass(frozen=True)
class ModelFacts:
    """Facts that a scheduler reports about the model it serves."""

    id: str
    created_unix_s: int
    max_context_tokens: int
    vocab_size: int
    has_chat_template: bool
    max_top_logprobs: int
    tokenizer_fingerprint: str
    contract_version: str
    prompt_logprobs: bool = False  # log-probabilities of prompts are available
    grammars: bool = False  # constrained generation is available
    aliases: tuple[str, ...] = ()  # other names of the model
    root: str = ""  # hub id or path that it was loaded from; empty if the scheduler does not report it
    default_max_tokens: int | None = None  # limit of an answer for which the client gave none; None = no limit
    logprobs_modes: bool = False  # requests can choose a logprobs_mode
    thinking_budgets: bool = False
    routed_experts: RoutedExpertsLayout | None = None  # layout of a token's experts; None: not available

    @property
    def can_resume(self) -> bool:
        """True if the scheduler supports ``Resume``. An older one would treat the generated tokens as prompt."""
        return self._minor >= RESUME_MINOR

    @property
    def takes_submits(self) -> bool:
        """True if the scheduler accepts several requests in one message."""
        return self._minor >= SUBMITS_MINOR

    @property
    def stragglers(self) -> bool:
        """True if the scheduler can end and park samples of a group."""
        return self._minor >= STRAGGLERS_MINOR

    @property
    def _minor(self) -> int:
        minor = self.contract_version.split(".")[1:2]
        return int(minor[0]) if minor and minor[0].isdecimal() else 0


@dataclass(frozen=True, slots=True)
class SampleEnding:
    """The end of one sample. ``error`` is set if the sample failed."""

    reason: FinishReason
    at_stop_token: bool  # the last token is not part of the answer
    trailing_bytes: int  # at the end of the text, not part of the answer
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queued_s: float
    prefill_s: float
    decode_s: float
    error: errors.TokaError | None
    stop_string: int | None = None  # index of the request's stop string that ended it
    stop_token: int | None = None  # id of the token that ended it
    preemptions: int = 0  # times that the scheduler preempted the sample
    # (version, tokens) of the weights that generated its tokens. Empty if they were never replaced.
    weights: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of one generated token, and the most likely tokens at its position."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of consecutive prompt tokens."""

    start: int  # position of the first token in the prompt
    logprobs: np.ndarray  # float32 [tokens]
    ranks: np.ndarray  # uint32, beside logprobs; 1 = most likely
    top_ids: np.ndarray  # uint32 [tokens, top], most likely first
    top_logprobs: np.ndarray  # float32, beside top_ids

    def behind(self, tokens: int) -> "PromptScores":
        """Return the scores without those of the first ``tokens`` tokens."""
        rest = self.logprobs[tokens:], self.ranks[tokens:], self.top_ids[tokens:], self.top_logprobs[tokens:]
        return PromptScores(self.start + tokens, *rest)


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of one step. ``counts[i]`` of ``token_ids`` belong to ``handles[i]``, in order. Arrays are uint32."""

    handles: np.ndarray
    counts: np.ndarray | None  # None: one token per handle
    token_ids: np.ndarray
    logprobs: list[TokenLogprob | None] | None  # beside token_ids; None for a sample without logprobs
    endings: list[tuple[int, SampleEnding]]  # (handle, ending), after the tokens
    prompts: list[tuple[int, PromptScores]] = field(default_factory=list)  # (handle, scores), before the tokens
    # (handle, position of the first token, uint8 [tokens, token_bytes]), before the endings
    routed: list[tuple[int, int, np.ndarray]] = field(default_factory=list)
    # Of the weights that generated the tokens. Empty: those of the workers' start. None: an old scheduler sends none.
    weights_version: str | None = None


def encode_open(client_id: str) -> session_pb2.SessionRequest:
    """Return the first message of a session."""
    return session_pb2.SessionRequest(open=session_pb2.SessionOpen(client_id=client_id))


def encode_heartbeat(nonce: int) -> session_pb2.SessionRequest:
    """Return a message that the scheduler's step loop answers."""
    return session_pb2.SessionRequest(heartbeat=session_pb2.Heartbeat(nonce=nonce))


def check_count(heartbeat: session_pb2.Heartbeat, received: int) -> None:
    """Raise ``Unavailable`` if the number of messages ``received`` before ``heartbeat`` is wrong."""
    if heartbeat.messages_before not in (0, received):
        raise errors.Unavailable(
            f"{heartbeat.messages_before} messages were sent on the session and {received} were received",
            reason=MESSAGES_LOST,
        )


def encode_action(action: SampleAction, handles: list[int]) -> session_pb2.SessionRequest:
    """Return a message that cancels, ends or parks samples."""
    message = session_pb2.SessionRequest()
    fill(getattr(message, action), "handles", np.array(handles, dtype=np.uint32))
    return message


def encode_submit(submission: Submission) -> session_pb2.SessionRequest:
    """Return the message for ``submission``, without its handle."""
    message, prompt = session_pb2.SessionRequest(), submission.prompt
    request, settings = message.submit.request, prompt.settings
    request.request_id, request.model, request.n = submission.request_id, prompt.model, submission.n
    request.priority = _PRIORITIES[settings.priority]
    request.cache_salt, request.traceparent = settings.cache_salt, settings.traceparent
    request.fairness_key = settings.fairness_key
    if settings.deadline_ms is not None:
        request.deadline_in_ms = max(0, settings.deadline_ms - int(time.monotonic() * 1000))
        # For schedulers that do not support deadline_in_ms.
        request.deadline_unix_ms = int(time.time() * 1000) + request.deadline_in_ms
    if submission.resumes:  # the gateway counts the finished samples, because other schedulers have had some
        request.resume.generated_tokens, request.resume.sample_index = len(submission.generated_ids), submission.first
    else:
        if settings.end_after is not None:
            request.stragglers.end_after = settings.end_after
        if settings.park_after is not None:
            request.stragglers.park_after = settings.park_after
    tokens = (
        np.concatenate((prompt.prompt_ids, submission.generated_ids))
        if len(submission.generated_ids)
        else prompt.prompt_ids
    )
    fill(request.tokens, "token_ids", tokens)

    request.sampling.CopyFrom(settings.sampling)
    request.sampling.seed = submission.seed
    if settings.grammar is not None:
        request.sampling.grammar.MergeFromString(_encode_grammar(settings.grammar))

    stopping = request.stopping
    stopping.max_tokens, stopping.ignore_eos = prompt.max_tokens, settings.ignore_eos
    if settings.min_tokens:
        stopping.min_tokens = settings.min_tokens
    stopping.strings.extend(settings.stop_strings)
    stopping.token_ids.extend(settings.stop_token_ids)

    request.output.logprobs = settings.logprobs
    if settings.prompt_logprobs is not None and submission.scores:
        request.output.prompt_logprobs = settings.prompt_logprobs
        if settings.prompt_logprobs_start:
            request.output.prompt_logprobs_start = settings.prompt_logprobs_start
    if settings.routed_experts is not None:
        request.output.routed_experts = True
        request.output.routed_experts_start = settings.routed_experts_start + submission.routed
    if settings.processed_logprobs is not None:
        request.output.logprobs_mode = _LOGPROBS_MODES[settings.processed_logprobs]
    if settings.top_logprobs:
        request.output.top_logprobs = settings.top_logprobs
    return message


def join_submits(messages: list[session_pb2.SessionRequest]) -> session_pb2.SessionRequest:
    """Merge ``messages``, each with one request, into one message."""
    if len(messages) == 1:
        return messages[0]
    return session_pb2.SessionRequest(submits=session_pb2.Submits(submits=[message.submit for message in messages]))


@lru_cache(maxsize=16)
def _encode_grammar(grammar: Grammar) -> bytes:
    """Return ``grammar`` as bytes. Cached, since all prompts of a request have the same grammar."""
    if grammar.kind == "choices":
        return sampling_pb2.Grammar(choices=sampling_pb2.Choices(texts=grammar.value)).SerializeToString()
    message = sampling_pb2.Grammar()
    setattr(message, grammar.kind, grammar.value)
    return message.SerializeToString()


def decode_model(model: observe_pb2.Model) -> ModelFacts:
    """Return the facts in ``SessionOpened.model``."""
    return ModelFacts(
        id=model.id,
        created_unix_s=model.created_unix_s,
        max_context_tokens=model.max_context_tokens,
        vocab_size=model.vocab_size,
        has_chat_template=model.has_chat_template,
        max_top_logprobs=model.max_top_logprobs,
        tokenizer_fingerprint=model.tokenizer_fingerprint,
        contract_version=model.contract_version,
        prompt_logprobs=model.prompt_logprobs,
        grammars=model.grammars,
        aliases=tuple(model.aliases),
        root=model.root,
        default_max_tokens=model.default_max_tokens if model.HasField("default_max_tokens") else None,
        logprobs_modes=model.logprobs_mode != generate_pb2.LOGPROBS_MODE_UNSPECIFIED,
        thinking_budgets=model.thinking_budgets,
        routed_experts=_decode_layout(model.routed_experts) if model.HasField("routed_experts") else None,
    )


def _decode_layout(layout: routed_experts_pb2.RoutedExpertsLayout) -> RoutedExpertsLayout:
    return RoutedExpertsLayout(layout.layers, layout.experts_per_token, layout.bytes_per_expert)


def decode_outputs(outputs: session_pb2.StepOutputs) -> StepTokens:
    """Return the tokens of one step."""
    return StepTokens(
        handles=read_fixed32(outputs.handles),
        counts=read_fixed32(outputs.token_counts) if outputs.token_counts else None,
        token_ids=read_fixed32(outputs.token_ids),
        logprobs=_decode_logprobs(outputs.logprobs) if outputs.HasField("logprobs") else None,
        endings=[(finished.handle, _decode_ending(finished.finish)) for finished in outputs.finished],
        prompts=[(prompt.handle, _decode_scores(prompt.logprobs)) for prompt in outputs.prompts],
        routed=[piece for experts in outputs.routed_experts for piece in _decode_routed(experts)],
        weights_version=outputs.weights_version if outputs.HasField("weights_version") else None,
    )


def _decode_routed(message: session_pb2.StepRoutedExperts) -> list[tuple[int, int, np.ndarray]]:
    """Return (handle, first position, experts) of each piece. Raises ``Unavailable`` if lengths do not agree."""
    fields = message.handles, message.starts, message.token_counts
    handles, starts, counts = (read_fixed32(each).astype(np.int64) for each in fields)
    routed = RoutedExperts.read(handles, starts, counts, message.experts)
    if not routed.is_consistent:
        raise errors.Unavailable("the scheduler sent experts of tokens that do not fit each other")
    return routed.pieces()


def _decode_scores(scores: generate_pb2.PromptLogprobs) -> PromptScores:
    logprobs = read_float(scores.logprobs.chosen)
    shape = len(logprobs), -1 if len(scores.logprobs.top_token_ids) else 0
    return PromptScores(
        scores.start,
        logprobs,
        read_fixed32(scores.ranks),
        read_fixed32(scores.logprobs.top_token_ids).reshape(shape),
        read_float(scores.logprobs.top_logprobs).reshape(shape),
    )


def _decode_logprobs(logprobs: generate_pb2.Logprobs) -> list[TokenLogprob | None] | None:
    chosen = read_float(logprobs.chosen)
    if not len(chosen):
        return None
    counts = read_fixed32(logprobs.top_counts)
    if not len(counts):
        counts = np.zeros(len(chosen), dtype=np.uint32)
    ends = np.cumsum(counts).tolist()
    top_ids = read_fixed32(logprobs.top_token_ids).tolist()
    top_values = read_float(logprobs.top_logprobs).tolist()
    asked = (~np.isnan(chosen)).tolist()
    entries: list[TokenLogprob | None] = []
    start = 0
    for value, end, wanted in zip(chosen.tolist(), ends, asked, strict=True):
        entries.append(TokenLogprob(value, top_ids[start:end], top_values[start:end]) if wanted else None)
        start = end
    return entries


def _decode_ending(finish: generate_pb2.Finish) -> SampleEnding:
    usage, timing = finish.usage, finish.timing
    reason = _REASONS.get(finish.reason, "error")
    return SampleEnding(
        reason=reason,
        at_stop_token=finish.HasField("stop_token_id"),
        trailing_bytes=finish.stop_string.trailing_bytes,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_prompt_tokens,
        queued_s=timing.queued_ns * 1e-9,
        prefill_s=timing.prefill_ns * 1e-9,
        decode_s=timing.decode_ns * 1e-9,
        error=_ending_error(finish) if reason == "error" else None,
        stop_string=finish.stop_string.index if finish.HasField("stop_string") else None,
        stop_token=finish.stop_token_id if finish.HasField("stop_token_id") else None,
        preemptions=timing.preemptions,
        weights=tuple((span.version, span.tokens) for span in finish.weights),
    )


def _ending_error(finish: generate_pb2.Finish) -> errors.TokaError:
    if finish.HasField("error"):
        return from_status(finish.error)
    if finish.reason == generate_pb2.FINISH_REASON_DEADLINE:
        return errors.DeadlineExceeded("the request's deadline passed before it was done")
    if finish.reason == generate_pb2.FINISH_REASON_CANCELLED:
        return errors.Unavailable("the scheduler ended the request before it was done; send it again")
    return errors.Internal("the scheduler could not finish the request")
