"""A validated body and its token ids to the jobs that schedulers get: every check that needs the model's facts."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from services.common.errors import InvalidRequest
from services.common.logprobs_mode import PROCESSED
from services.common.request_bounds import MAX_BIAS_COPIES
from services.common.text.vocabulary import TokenIds
from services.gateway.engine.codec import ModelFacts
from services.gateway.engine.request import Grammar, Priority, PromptRequest, Settings
from services.gateway.engine.text import check_token_ids
from services.gateway.http.request import Caller
from services.gateway.openai.schemas import GenerationBody

# What schedulers and workers hold of one request's grammar, of which each sample has its own.
MAX_GRAMMAR_COPIES_BYTES = 16 * 1024 * 1024

# Room for the answer behind a prompt that is cut to the context, if the request sets no limit.
DEFAULT_ANSWER_TOKENS = 16

Ids = TypeVar("Ids", Sequence[int], np.ndarray, TokenIds)

_U64 = 2**64
_TOKEN_ID = re.compile(r"[0-9]{1,10}")


def make_settings(
    body: GenerationBody,
    facts: ModelFacts,
    logprobs: int | None,
    logprobs_field: str,
    caller: Caller,
    grammar: Grammar | None = None,
) -> Settings:
    """What all prompts of ``body`` share. ``logprobs``: None, or how many of the most likely tokens to return."""
    if logprobs is not None and logprobs > facts.max_top_logprobs:
        raise InvalidRequest(
            f"{logprobs_field}={logprobs}: this server returns at most {facts.max_top_logprobs}",
            field=logprobs_field,
            reason="INVALID_VALUE",
        )
    _check_prompt_logprobs(body, facts)
    check_grammar(body, facts, grammar)
    stop_token_ids = tuple(body.stop_token_ids or ())
    for token in stop_token_ids:
        _check_token(token, token, facts, "stop_token_ids")
    return Settings(
        n=body.samples,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=None if body.top_k is None else max(body.top_k, 0),
        min_p=body.min_p,
        logit_bias=_logit_bias(body.logit_bias or {}, facts),
        repetition_penalty=body.repetition_penalty,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        min_tokens=body.min_tokens or 0,
        stop_strings=body.stop,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
        # The best are found by them.
        logprobs=logprobs is not None or bool(body.logprobs_in_fingerprint) or body.samples > (body.n or 1),
        top_logprobs=logprobs or 0,
        prompt_logprobs=body.prompt_top,
        prompt_logprobs_start=body.prompt_logprobs_start or 0,
        processed_logprobs=_processed_logprobs(body, facts),
        grammar=grammar,
        priority=_priority(body.priority),
        cache_salt=caller.cache_salt(body.cache_salt or ""),
        traceparent=caller.traceparent,
        fairness_key=caller.fairness_key,
        deadline_ms=caller.deadline_ms(body.timeout),
        include_stop=bool(body.include_stop_str_in_output),
        special_tokens=body.skip_special_tokens is False,
        return_token_ids=bool(body.return_token_ids),
        packed_logprobs=bool(body.logprobs_in_fingerprint),
        requested_prompt_logprobs=body.prompt_logprobs,
        open_ended=body.most_tokens is None,
        discard_output=body.most_tokens == 0,
    )


def _processed_logprobs(body: GenerationBody, facts: ModelFacts) -> bool | None:
    if body.logprobs_mode is None:
        return None
    if not facts.logprobs_modes and body.logprobs_mode == PROCESSED:
        raise InvalidRequest(
            "logprobs_mode: the scheduler that serves this model has raw log-probabilities only; leave it out",
            field="logprobs_mode",
            reason="UNSUPPORTED_PARAMETER",
        )
    return body.logprobs_mode == PROCESSED


def _check_prompt_logprobs(body: GenerationBody, facts: ModelFacts) -> None:
    if body.prompt_top is not None and not facts.prompt_logprobs:
        field = "echo" if body.prompt_logprobs is None else "prompt_logprobs"
        what = "echo with logprobs" if field == "echo" else field
        raise InvalidRequest(
            f"{what}: the worker that serves this model computes no log-probabilities of prompts; leave it out",
            field=field,
            reason="UNSUPPORTED_PARAMETER",
        )
    if (body.prompt_logprobs or 0) > facts.max_top_logprobs:
        raise InvalidRequest(
            f"prompt_logprobs={body.prompt_logprobs}: this server returns at most {facts.max_top_logprobs}",
            field="prompt_logprobs",
            reason="INVALID_VALUE",
        )


def check_grammar(body: GenerationBody, facts: ModelFacts, grammar: Grammar | None) -> None:
    """Refuse a grammar where none can be followed, and what does not go with one."""
    if grammar is None:
        return
    if not facts.grammars:
        raise InvalidRequest(
            f"{grammar.field}: the worker that serves this model cannot hold answers to a grammar; leave it out",
            field=grammar.field,
            reason="UNSUPPORTED_PARAMETER",
        )
    for name in ("ignore_eos", "min_tokens"):
        if getattr(body, name):
            raise InvalidRequest(
                f"{name}: not with {grammar.field}, which says where the answer ends; leave one of them out",
                field=name,
                reason="INVALID_VALUE",
            )


def kept_tokens(body: GenerationBody, facts: ModelFacts, most: int | None = None) -> int | None:
    """Return how many trailing prompt tokens to keep, at most ``most``, or None for all.

    Raises ``InvalidRequest`` if the rest of the context cannot hold the answer, or the answer leaves no room for a
    prompt.
    """
    kept = body.truncate_prompt_tokens
    if kept is None:
        return None
    asked = DEFAULT_ANSWER_TOKENS if body.most_tokens is None else body.most_tokens
    answer = 1 if kept > 0 else max(1, asked, body.min_tokens or 0)
    room = facts.max_context_tokens - answer
    if kept > room or room < 1:
        what = "leaves no room for an answer" if kept > 0 else f"leaves no room for a prompt before {answer} tokens"
        raise InvalidRequest(
            f"truncate_prompt_tokens={kept} {what}: this model's context is"
            f" {facts.max_context_tokens} tokens, prompt and answer together",
            field="truncate_prompt_tokens",
            reason="CONTEXT_LENGTH_EXCEEDED",
        )
    return kept if kept > 0 else min(room, most or room)


def cut(prompt: Ids, kept: int | None, side: str | None) -> Ids:
    """Return ``kept`` tokens of ``prompt``: the last ones, or the first ones if ``side`` is right. None: all."""
    if kept is None:
        return prompt
    return prompt[:kept] if side == "right" else prompt[-kept:]


def check_choices(prompts: int, body: GenerationBody, max_choices: int) -> None:
    """Refuse more choices than one request may have."""
    if prompts * body.samples > max_choices:
        given = "best_of" if body.samples > (body.n or 1) else "n"
        raise InvalidRequest(
            f"{prompts} prompt(s) with {given}={body.samples} are more than {max_choices} choices;"
            " send several requests",
            field=given if body.samples > 1 else "prompt",
            reason="INVALID_VALUE",
        )


def check_max_tokens(body: GenerationBody, most: int | None, default: int | None = None) -> int | None:
    """Tokens that each answer may have: as asked for, else ``default``; ``most`` where that is less, or None. Refuse
    more, as the operator has it."""
    asked = body.most_tokens
    if most is None:
        return default if asked is None else asked
    if asked is None:
        return most if default is None else min(default, most)
    if asked > most:
        field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        raise InvalidRequest(
            f"{field}={asked}: this server makes at most {most} tokens of each answer; ask for less",
            field=field,
            reason="INVALID_VALUE",
        )
    return asked


def default_max_tokens(body: GenerationBody, facts: ModelFacts) -> int | None:
    """Return the most tokens of an answer if the request does not say, or None for the rest of the context. A request
    for more tokens at least raises the model's default."""
    most = facts.default_max_tokens
    return None if most is None else max(most, body.min_tokens or 0)


def check_prompts(prompts: Sequence[TokenIds], most: int | None, field: str) -> None:
    """Refuse a prompt that is longer than ``max_prompt_tokens``, in words that clients know from a full context."""
    if most is None:
        return
    for prompt in prompts:
        if len(prompt) > most:
            raise InvalidRequest(
                f"This model's maximum context length is {most} tokens for prompts on this server. However, your"
                f" {field} resulted in {len(prompt)} tokens. Please reduce the length of the {field}.",
                field=field,
                reason="CONTEXT_LENGTH_EXCEEDED",
            )


def check_grammar_copies(prompts: int, body: GenerationBody, grammar: Grammar | None) -> None:
    """Refuse a large grammar for many choices: each has a copy on its way to the worker."""
    choices = prompts * body.samples
    if grammar is not None and choices > 1 and choices * grammar.size > MAX_GRAMMAR_COPIES_BYTES:
        raise InvalidRequest(
            f"{grammar.field}: {grammar.size} bytes for each of {choices} choices are more than"
            f" {MAX_GRAMMAR_COPIES_BYTES} bytes; send several requests, or make it smaller",
            field=grammar.field,
            reason="INVALID_GRAMMAR",
        )


def make_jobs(
    request_id: str,
    prompts: Sequence[TokenIds],
    settings: Settings,
    facts: ModelFacts,
    *,
    field: str,
    max_tokens: int | None,
    seed: int | None,
) -> list[PromptRequest]:
    """One job for each prompt. Answers are cut where the context ends; ``max_tokens`` None: there only; 0: none."""
    _check_bias_copies(len(prompts), settings)
    jobs = []
    seen: Counter[bytes] = Counter()
    for number, prompt in enumerate(prompts):
        ids = np.asarray(prompt, np.uint32)
        check_token_ids(ids, facts.vocab_size, facts.max_context_tokens, field)
        _check_prompt_logprobs_start(settings.prompt_logprobs_start, len(ids))
        repeat = 0
        if seed is not None and len(prompts) > 1:
            key = ids.tobytes()
            repeat, seen[key] = seen[key], seen[key] + 1
        room = facts.max_context_tokens - len(ids)
        _check_min_tokens(settings.min_tokens, max_tokens, room)
        jobs.append(
            PromptRequest(
                request_id=request_id if len(prompts) == 1 else f"{request_id}-{number}",
                model=facts.id,
                prompt_ids=ids,
                max_tokens=room if max_tokens is None else min(max(max_tokens, 1), room),
                seed=None if seed is None else seed_of(seed, repeat),
                settings=settings,
            )
        )
    return jobs


def _check_prompt_logprobs_start(start: int, prompt_tokens: int) -> None:
    if start >= prompt_tokens:
        raise InvalidRequest(
            f"prompt_logprobs_start={start}: the prompt has {prompt_tokens} tokens; expected 0 to {prompt_tokens - 1}",
            field="prompt_logprobs_start",
            reason="INVALID_VALUE",
        )


def _check_min_tokens(least: int, max_tokens: int | None, room: int) -> None:
    if max_tokens is not None and least > max_tokens:
        limit = f"max_tokens={max_tokens}"
    elif least > room:
        limit = f"the {room} tokens that the context has left behind the prompt"
    else:
        return
    raise InvalidRequest(
        f"min_tokens={least} is more than {limit}; ask for less", field="min_tokens", reason="INVALID_VALUE"
    )


def seed_of(seed: int, repeat: int) -> int:
    """The seed of a prompt's ``repeat``-th occurrence in one request: the first one's is the caller's own, so that a
    prompt gets the same answer in a list as alone; the others get noise of their own."""
    mixed = (seed + repeat * 0x9E3779B97F4A7C15) % _U64
    if repeat:
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % _U64
        mixed ^= mixed >> 31
    return mixed


def _priority(value: int | None) -> Priority:
    if not value:
        return Priority.NORMAL
    return Priority.HIGH if value < 0 else Priority.LOW


def _logit_bias(bias: dict[str, float], facts: ModelFacts) -> tuple[tuple[int, float], ...]:
    pairs = {}
    for key, value in bias.items():
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequest(
                f"logit_bias: {key[:40]!r} is not a token id; keys are token ids written as strings",
                field="logit_bias",
                reason="INVALID_VALUE",
            )
        _check_token(int(key), key, facts, "logit_bias")
        pairs[int(key)] = value
    return tuple(pairs.items())


def _check_bias_copies(prompts: int, settings: Settings) -> None:
    """Refuse a large bias for many choices, as a large grammar."""
    choices, entries = prompts * settings.n, len(settings.logit_bias)
    if choices * entries > MAX_BIAS_COPIES:
        raise InvalidRequest(
            f"logit_bias: {entries} tokens for each of {choices} choices are more than {MAX_BIAS_COPIES}; send several"
            " requests, or bias fewer tokens",
            field="logit_bias",
            reason="INVALID_VALUE",
        )


def _check_token(token: int, given: int | str, facts: ModelFacts, field: str) -> None:
    if token >= facts.vocab_size:
        raise InvalidRequest(
            f"{field}: token id {given} does not exist; this model has ids 0 to {facts.vocab_size - 1}",
            field=field,
            reason="UNKNOWN_TOKEN",
        )
