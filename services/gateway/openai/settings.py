"""Makes the settings of a body's samples, with the checks that need the facts of the model and no prompt."""

import re
from dataclasses import replace

from services.common.errors import InvalidRequest, InvalidValue, UnsupportedParameter
from services.common.logprobs_mode import PROCESSED
from services.common.plan.routed_experts import RoutedExpertsLayout
from services.common.sampling import PARAMETERS
from services.common.text.thinking import BEGINS, ENDS
from services.gateway.engine.codec import ModelFacts
from services.gateway.engine.request import Grammar, RequestPriority, Settings
from services.gateway.http.request import Caller
from services.gateway.openai.grammar.answer import Thoughts
from services.gateway.openai.output.formats import OutputFormats
from services.gateway.openai.schemas import GenerationBody
from tokasaurus.common.v1.sampling_pb2 import Sampling, ThinkingBudget

_TOKEN_ID = re.compile(r"[0-9]{1,10}")
_THINKING_OPENED = {Thoughts.OPENED: True, Thoughts.MAYBE: False}


def make_settings(body: GenerationBody, facts: ModelFacts, caller: Caller, grammar: Grammar | None) -> Settings:
    """Return the settings that all prompts of ``body`` share. Raises InvalidRequest."""
    logprobs = body.answer_top
    _check_top(body.answer_top_field, logprobs, facts)
    _check_prompt_logprobs(body, facts)
    _check_stragglers(body, facts)
    check_grammar(body, facts, grammar)
    stop_token_ids = tuple(body.stop_token_ids or ())
    for token in stop_token_ids:
        _check_token(token, token, facts, "stop_token_ids")
    return Settings(
        n=body.samples,
        sampling=_sampling(body, facts),
        min_tokens=body.min_tokens or 0,
        stop_strings=body.stop,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
        end_after=body.end_stragglers_after,
        park_after=body.park_stragglers_after,
        # The best samples are found by their log-probabilities.
        logprobs=logprobs is not None or bool(body.logprobs_in_fingerprint) or body.samples > (body.n or 1),
        top_logprobs=logprobs or 0,
        prompt_logprobs=body.prompt_top,
        prompt_logprobs_start=body.prompt_logprobs_start or 0,
        processed_logprobs=_processed_logprobs(body, facts),
        routed_experts=_routed_experts(body, facts),
        routed_experts_start=body.routed_experts_prompt_start or 0,
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


def check_grammar(body: GenerationBody, facts: ModelFacts, grammar: Grammar | None) -> None:
    """Raise InvalidRequest for a grammar if the worker supports none, and for parameters that contradict it."""
    if grammar is None:
        return
    if not facts.grammars:
        raise UnsupportedParameter.at(
            grammar.field, "the worker that serves this model cannot hold answers to a grammar; leave it out"
        )
    for name in ("ignore_eos", "min_tokens"):
        if getattr(body, name):
            raise InvalidValue.at(
                name, f"not with {grammar.field}, which says where the answer ends; leave one of them out"
            )


def _check_prompt_logprobs(body: GenerationBody, facts: ModelFacts) -> None:
    if body.prompt_top is not None and not facts.prompt_logprobs:
        field = "echo" if body.prompt_logprobs is None else "prompt_logprobs"
        what = "echo with logprobs" if field == "echo" else field
        raise UnsupportedParameter(
            f"{what}: the worker that serves this model computes no log-probabilities of prompts; leave it out",
            field=field,
        )
    _check_top("prompt_logprobs", body.prompt_logprobs, facts)


def _routed_experts(body: GenerationBody, facts: ModelFacts) -> RoutedExpertsLayout | None:
    """Return the layout of a token's experts, or None if the caller wants none. Raises ``UnsupportedParameter``."""
    if not body.return_routed_experts:
        return None
    if facts.routed_experts is None:
        raise UnsupportedParameter.at(
            "return_routed_experts",
            "the worker that serves this model keeps no experts of tokens; leave it out, or have the worker of a"
            " mixture of experts started with return_routed_experts=T",
        )
    return facts.routed_experts


def _check_stragglers(body: GenerationBody, facts: ModelFacts) -> None:
    for name in ("end_stragglers_after", "park_stragglers_after"):
        if getattr(body, name) is not None and not facts.stragglers:
            raise UnsupportedParameter.at(
                name,
                "the scheduler of this model cannot end or park samples of a group; upgrade it to contract 1.13, or"
                " leave this out",
            )


def _check_top(field: str, count: int | None, facts: ModelFacts) -> None:
    if (count or 0) > facts.max_top_logprobs:
        raise InvalidValue(f"{field}={count}: this server returns at most {facts.max_top_logprobs}", field=field)


def _processed_logprobs(body: GenerationBody, facts: ModelFacts) -> bool | None:
    if body.logprobs_mode is None:
        return None
    if not facts.logprobs_modes and body.logprobs_mode == PROCESSED:
        raise UnsupportedParameter.at(
            "logprobs_mode", "the scheduler that serves this model has raw log-probabilities only; leave it out"
        )
    return body.logprobs_mode == PROCESSED


def _priority(value: int | None) -> RequestPriority:
    if not value:
        return RequestPriority.NORMAL
    return RequestPriority.HIGH if value < 0 else RequestPriority.LOW


def _sampling(body: GenerationBody, facts: ModelFacts) -> Sampling:
    given = {name: value for name in PARAMETERS if (value := getattr(body, name)) is not None}
    if given.get("top_k") == -1:
        given["top_k"] = 0
    bias = _logit_bias(body.logit_bias or {}, facts)
    return Sampling(**given, logit_bias_token_ids=bias.keys(), logit_bias_values=bias.values())


def _logit_bias(bias: dict[str, float], facts: ModelFacts) -> dict[int, float]:
    pairs = {}
    for key, value in bias.items():
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidValue.at(
                "logit_bias", f"{key[:40]!r} is not a token id; keys are token ids written as strings"
            )
        _check_token(int(key), key, facts, "logit_bias")
        pairs[int(key)] = value
    return pairs


def _check_token(token: int, given: int | str, facts: ModelFacts, field: str) -> None:
    if token >= facts.vocab_size:
        raise InvalidRequest.at(
            field,
            f"token id {given} does not exist; this model has ids 0 to {facts.vocab_size - 1}",
            reason="UNKNOWN_TOKEN",
        )


def limit_thinking(
    settings: Settings, tokens: int | None, formats: OutputFormats, facts: ModelFacts, thoughts: Thoughts | None
) -> Settings:
    """Return ``settings`` with a budget of ``tokens`` for the reasoning section. None: no budget.

    ``thoughts``: the beginning of the answer. None: the end of each prompt decides. An answer that cannot begin with a
    reasoning section is not limited. Raises InvalidRequest if the model has no such section.
    """
    if tokens is None:
        return settings
    if not formats.reasoning:
        raise UnsupportedParameter.at(
            "thinking_token_budget",
            f"this model's chat template has no reasoning section ({BEGINS}...{ENDS}); leave it out, or have"
            " the server started with reasoning_parser=qwen3",
        )
    if None in formats.thinking_tokens:
        raise UnsupportedParameter.at(
            "thinking_token_budget",
            f"this model's tokenizer has no single tokens for {BEGINS} and {ENDS}, so the section cannot be"
            " ended at a token; leave it out, and limit the whole answer with max_tokens",
        )
    if not facts.thinking_budgets:
        raise UnsupportedParameter.at(
            "thinking_token_budget", "the worker that serves this model has no thinking budgets; leave it out"
        )
    if thoughts is Thoughts.NONE:
        return settings
    opened = None if thoughts is None else _THINKING_OPENED[thoughts]
    sampling = Sampling(thinking=ThinkingBudget(tokens=tokens, opened=opened))
    sampling.MergeFrom(settings.sampling)
    return replace(settings, sampling=sampling)
