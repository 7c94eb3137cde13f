"""Converts a GenerateRequest to the core's Request: checks every field and fills in the defaults."""

import random
import time

import numpy as np

from services.common.errors import InvalidRequest
from services.common.model.generation_config import GenerationDefaults
from services.common.packed import read_fixed32, read_float
from services.common.plan.types import SamplingSettings
from services.common.request_bounds import MAX_BIAS_COPIES, MAX_BIASES, MAX_STOP_TOKENS
from services.common.sampling import out_of_range
from services.scheduler.api.encoding import PRIORITIES
from services.scheduler.api.model import ServedModel
from services.scheduler.api.prompt import check_tokens, read_prompt
from services.scheduler.api.resume import read_resume
from services.scheduler.api.thinking import complete_thinking
from services.scheduler.core.request import AdmissionMode, Priority, Request
from services.scheduler.grammar.message import FIELD, cache_long_text, grammar_text
from tokasaurus.common.v1.sampling_pb2 import Sampling
from tokasaurus.scheduler.v1 import generate_pb2

_MOST_STOP_STRINGS = 16
_LONGEST_STOP_BYTES = 4096
_MOST_TOP_LOGPROBS = 20
_MOST_ROUTED_BYTES = 48 * 1024 * 1024  # of a prompt's experts, which may come in one message of at most 64 MiB
_LONGEST = {"request_id": 256, "length_class": 64, "fairness_key": 256}  # characters
_PRIORITIES = {encoded: each for each, encoded in PRIORITIES.items()}
_PRIORITIES[generate_pb2.PRIORITY_CLASS_UNSPECIFIED] = Priority.NORMAL
_random = random.Random()  # seeded once; the system's generator would take more time than all other fields
_PROCESSED = {
    generate_pb2.LOGPROBS_MODE_UNSPECIFIED: None,
    generate_pb2.LOGPROBS_MODE_RAW: False,
    generate_pb2.LOGPROBS_MODE_PROCESSED: True,
}
_MODES = {generate_pb2.ADMISSION_MODE_UNSPECIFIED: None} | {int(mode): mode for mode in AdmissionMode}


async def read_message(
    message: generate_pb2.GenerateRequest, model: ServedModel, *, sink: int = 0, handle: int = 0
) -> Request:
    """Return the request, with its prompt as tokens. Raises as ``read_prompt`` and ``read_request`` do."""
    model.check_name(message.model)
    model.shape  # noqa: B018 (raises Unavailable first)
    tokens = await read_prompt(message, model)
    await cache_long_text(message.sampling)
    return read_request(message, tokens, model, sink=sink, handle=handle)


def read_request(
    message: generate_pb2.GenerateRequest, tokens: np.ndarray, model: ServedModel, *, sink: int, handle: int
) -> Request:
    """Return the request. ``tokens`` is the result of ``read_prompt``.

    Raises ``InvalidRequest`` naming the field.
    """
    for name, most in _LONGEST.items():
        if (given := len(getattr(message, name))) > most:
            raise InvalidRequest(f"{name} has {given} characters: expected at most {most}", field=name)
    if message.priority not in _PRIORITIES:
        raise InvalidRequest(f"priority {message.priority} is not a PriorityClass", field="priority")
    if message.admission not in _MODES:
        raise InvalidRequest(f"admission {message.admission} is not an AdmissionMode", field="admission")
    n = message.n if message.HasField("n") else 1
    if not 1 <= n <= model.max_samples:
        raise InvalidRequest(f"n is {n}: expected 1 to {model.max_samples} (max_samples_per_request)", field="n")
    if handle + n > 2**32:
        raise InvalidRequest(f"handle {handle} + n={n} is beyond 32 bits: choose a smaller handle", field="handle")
    stopping = message.stopping
    strings = _stop_strings(stopping)
    if strings and message.output.special_tokens:
        raise InvalidRequest(
            "special_tokens cannot be combined with stop strings, which match text without them: leave one out",
            field="output.special_tokens",
        )
    request = Request(
        request_id=message.request_id or f"req-{_random.getrandbits(128):032x}",
        tokens=tokens,
        sampling=_sampling(message, tokens, model, n),
        max_tokens=_max_tokens(stopping, model.card.defaults),
        min_tokens=_min_tokens(stopping),
        stop_token_ids=_stop_tokens(stopping, model),
        automaton=model.automaton(strings) if strings else None,
        n=n,
        priority=_PRIORITIES[message.priority],
        deadline_ms=_deadline_ms(message),
        mode=_MODES[message.admission],
        length_class=message.length_class,
        fairness_key=message.fairness_key,
        cache_salt=message.cache_salt,
        traceparent=message.traceparent,
        sink=sink,
        handle=handle,
    )
    request.routed_start = _routed_start(message, len(tokens), model)
    request.end_after, request.park_after = _stragglers(message.stragglers, n)
    if message.HasField("resume"):
        read_resume(request, message, model)
    start = request.sampling.prompt_logprobs_start
    if start >= request.prompt_tokens:
        raise InvalidRequest(
            f"prompt_logprobs_start is {start}: expected less than the {request.prompt_tokens} tokens of the prompt",
            field="output.prompt_logprobs_start",
        )
    return request


def _sampling(
    message: generate_pb2.GenerateRequest, tokens: np.ndarray, model: ServedModel, n: int
) -> SamplingSettings:
    parameters = Sampling()
    parameters.CopyFrom(model.default_sampling)
    parameters.MergeFrom(message.sampling)
    if found := out_of_range(parameters):
        name, text = found
        raise InvalidRequest(text, field=f"sampling.{name}")
    _check_logit_bias(parameters, model, n)
    logprobs, top = message.output.logprobs, message.output.top_logprobs
    most = min(_MOST_TOP_LOGPROBS, model.shape.max_top_logprobs)
    if top > most:
        raise InvalidRequest(f"top_logprobs is {top}: expected 0 to {most}", field="output.top_logprobs")
    if top and not logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: set output.logprobs", field="output.top_logprobs")
    scored = message.output.prompt_logprobs if message.output.HasField("prompt_logprobs") else None
    if scored is not None and not model.shape.prompt_logprobs:
        raise InvalidRequest(
            "the worker computes no log-probabilities of prompt tokens: leave prompt_logprobs out, or serve the model"
            " with a worker whose WorkerInfo.prompt_logprobs is true",
            field="output.prompt_logprobs",
        )
    if scored is not None and scored > most:
        raise InvalidRequest(f"prompt_logprobs is {scored}: expected 0 to {most}", field="output.prompt_logprobs")
    start = message.output.prompt_logprobs_start
    if start and scored is None:
        raise InvalidRequest(
            "prompt_logprobs_start needs prompt_logprobs: set output.prompt_logprobs, or leave it out",
            field="output.prompt_logprobs_start",
        )
    if parameters.HasField("thinking"):
        prompt = tokens[: len(tokens) - message.resume.generated_tokens]
        complete_thinking(parameters.thinking, prompt, model)
    if not parameters.HasField("seed"):
        parameters.seed = _random.getrandbits(64)
    grammar = ""
    if parameters.HasField("grammar"):
        grammar = _grammar(message, model)
        parameters.ClearField("grammar")
        parameters = Sampling.FromString(parameters.SerializeToString())  # a cleared field keeps its memory
    return SamplingSettings(
        parameters,
        logprobs=logprobs,
        top_logprobs=top,
        prompt_logprobs=scored,
        grammar=grammar,
        processed_logprobs=_processed_logprobs(message.output, model),
        prompt_logprobs_start=start,
    )


def _grammar(message: generate_pb2.GenerateRequest, model: ServedModel) -> str:
    """Return the text of the request's grammar, which has not been checked yet."""
    if not model.shape.grammars:
        raise InvalidRequest("the worker does not support grammars: leave it out, or use a newer worker", field=FIELD)
    if message.stopping.ignore_eos:
        raise InvalidRequest(
            "ignore_eos cannot be combined with a grammar, since no token can follow its end: leave one out",
            field="stopping.ignore_eos",
        )
    if message.stopping.min_tokens:
        raise InvalidRequest(
            "min_tokens cannot be combined with a grammar, which may end earlier: leave one out",
            field="stopping.min_tokens",
        )
    return grammar_text(message.sampling.grammar)


def _processed_logprobs(output: generate_pb2.Output, model: ServedModel) -> bool:
    if output.logprobs_mode not in _PROCESSED:
        raise InvalidRequest(
            f"logprobs_mode {output.logprobs_mode} is not a LogprobsMode", field="output.logprobs_mode"
        )
    asked = _PROCESSED[output.logprobs_mode]
    processed = output.logprobs and (model.processed_logprobs if asked is None else asked)
    if processed and not model.shape.processed_logprobs:
        raise InvalidRequest(
            "the worker computes raw log-probabilities only: set logprobs_mode to LOGPROBS_MODE_RAW, or use a newer"
            " worker",
            field="output.logprobs_mode",
        )
    return processed


def _routed_start(message: generate_pb2.GenerateRequest, tokens: int, model: ServedModel) -> int | None:
    """Return the position of the first of ``tokens`` prompt tokens whose experts are wanted, or None for none."""
    output, start, layout = message.output, message.output.routed_experts_start, model.shape.routed_experts
    field = "output.routed_experts_start"
    if not output.routed_experts:
        if start:
            raise InvalidRequest(
                "routed_experts_start needs routed_experts: set output.routed_experts, or leave it out", field=field
            )
        return None
    if layout is None:
        raise InvalidRequest(
            "the worker keeps no experts of tokens: leave routed_experts out, or start the worker of a mixture of"
            " experts with return_routed_experts=T",
            field="output.routed_experts",
        )
    if start > tokens:
        raise InvalidRequest(f"routed_experts_start is {start}: expected at most {tokens}, the prompt", field=field)
    if (size := (tokens - start) * layout.token_bytes) > _MOST_ROUTED_BYTES:
        least = tokens - _MOST_ROUTED_BYTES // layout.token_bytes
        raise InvalidRequest(
            f"the experts of {tokens - start} prompt tokens take {size} bytes: expected at most {_MOST_ROUTED_BYTES};"
            f" set routed_experts_start to at least {least}, and take those of earlier tokens from an earlier request",
            field=field,
        )
    return start


def _check_logit_bias(sampling: Sampling, model: ServedModel, n: int) -> None:
    if not sampling.logit_bias_token_ids and not sampling.logit_bias_values:
        return
    tokens, values = read_fixed32(sampling.logit_bias_token_ids), read_float(sampling.logit_bias_values)
    if len(tokens) != len(values):
        raise InvalidRequest(
            f"{len(tokens)} logit_bias_token_ids and {len(values)} logit_bias_values: expected the same number of each",
            field="sampling.logit_bias_values",
        )
    if len(tokens) > MAX_BIASES or n * len(tokens) > MAX_BIAS_COPIES:
        raise InvalidRequest(
            f"logit_bias has {len(tokens)} tokens for each of n={n} samples: expected at most {MAX_BIASES}, and"
            f" {MAX_BIAS_COPIES} for all samples together; bias fewer tokens, or send several requests",
            field="sampling.logit_bias_token_ids",
        )
    check_tokens(tokens, model.card.vocab_size, "sampling.logit_bias_token_ids")
    for index in np.flatnonzero(~np.isfinite(values)).tolist():
        raise InvalidRequest("a bias is not a finite number", field=f"sampling.logit_bias_values[{index}]")
    first = np.unique(tokens, return_index=True)[1]
    if len(first) < len(tokens):
        index = int(np.setdiff1d(np.arange(len(tokens)), first)[0])
        raise InvalidRequest(
            f"token id {int(tokens[index])} is biased twice", field=f"sampling.logit_bias_token_ids[{index}]"
        )


def _max_tokens(stopping: generate_pb2.Stopping, defaults: GenerationDefaults) -> int | None:
    """Return the limit of a sample's tokens. None means the rest of the context."""
    if not stopping.HasField("max_tokens"):
        most = defaults.max_new_tokens
        return None if most is None else max(most, stopping.min_tokens)
    if stopping.max_tokens < 1:
        raise InvalidRequest("max_tokens is 0: expected at least 1", field="stopping.max_tokens")
    return stopping.max_tokens


def _min_tokens(stopping: generate_pb2.Stopping) -> int:
    if stopping.HasField("max_tokens") and stopping.min_tokens > stopping.max_tokens:
        raise InvalidRequest(
            f"min_tokens is {stopping.min_tokens}: expected at most max_tokens, {stopping.max_tokens}",
            field="stopping.min_tokens",
        )
    return stopping.min_tokens


def _stragglers(stragglers: generate_pb2.Stragglers, n: int) -> tuple[int | None, int | None]:
    """Return ``end_after`` and ``park_after`` in samples, None if not set. Raises ``InvalidRequest``."""
    given: dict[str, int | None] = dict.fromkeys(("end_after", "park_after"))
    for name in given:
        if stragglers.HasField(name):
            given[name] = after = getattr(stragglers, name)
            if not 1 <= after <= n:
                raise InvalidRequest(
                    f"{name} is {after}: expected 1 to n={n}, a number of samples", field=f"stragglers.{name}"
                )
    end_after, park_after = given.values()
    if end_after is not None and park_after is not None and park_after >= end_after:
        raise InvalidRequest(
            f"park_after is {park_after}: expected less than end_after={end_after}, because samples that have ended"
            " cannot be parked; lower park_after, or leave it out",
            field="stragglers.park_after",
        )
    return end_after, park_after


def _stop_strings(stopping: generate_pb2.Stopping) -> tuple[str, ...]:
    strings = tuple(stopping.strings)
    if len(strings) > _MOST_STOP_STRINGS:
        raise InvalidRequest(
            f"{len(strings)} stop strings: expected at most {_MOST_STOP_STRINGS}", field="stopping.strings"
        )
    for index, string in enumerate(strings):
        if not string:
            raise InvalidRequest("a stop string is empty", field=f"stopping.strings[{index}]")
        if len(string.encode()) > _LONGEST_STOP_BYTES:
            raise InvalidRequest(
                f"a stop string has {len(string.encode())} bytes: expected at most {_LONGEST_STOP_BYTES}",
                field=f"stopping.strings[{index}]",
            )
    return strings


def _stop_tokens(stopping: generate_pb2.Stopping, model: ServedModel) -> frozenset[int]:
    own = frozenset() if stopping.ignore_eos else frozenset(model.card.eos_token_ids)
    if not stopping.token_ids:
        return own
    if len(stopping.token_ids) > MAX_STOP_TOKENS:
        raise InvalidRequest(
            f"{len(stopping.token_ids)} stop tokens: expected at most {MAX_STOP_TOKENS}", field="stopping.token_ids"
        )
    tokens = read_fixed32(stopping.token_ids)
    check_tokens(tokens, model.card.vocab_size, "stopping.token_ids")
    return own | frozenset(tokens.tolist())


def _deadline_ms(message: generate_pb2.GenerateRequest) -> int | None:
    """Return the deadline by this host's monotonic clock, which changes of the wall clock do not affect."""
    now = time.monotonic_ns() // 1_000_000
    if message.HasField("deadline_in_ms"):
        return now + message.deadline_in_ms
    if message.HasField("deadline_unix_ms"):
        return now + message.deadline_unix_ms - time.time_ns() // 1_000_000
    return None
