"""The limit ``thinking_token_budget`` on the reasoning section of an answer."""

from dataclasses import replace

from services.common.errors import UnsupportedParameter
from services.common.text.thinking import BEGINS, ENDS
from services.gateway.engine.codec import ModelFacts
from services.gateway.engine.request import Settings
from services.gateway.openai.grammar.answer import Thoughts
from services.gateway.openai.output.formats import OutputFormats
from tokasaurus.common.v1.sampling_pb2 import Sampling, ThinkingBudget

FIELD = "thinking_token_budget"
# Names of the limit in chat templates and other engines.
TEMPLATE_NAMES = frozenset({"thinking_budget", "thinking_token_budget", "max_thinking_tokens", "reasoning_budget"})

_OPENED = {Thoughts.OPENED: True, Thoughts.MAYBE: False}


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
            FIELD,
            f"this model's chat template has no reasoning section ({BEGINS}...{ENDS}); leave it out, or have"
            " the server started with reasoning_parser=qwen3",
        )
    if None in formats.thinking_tokens:
        raise UnsupportedParameter.at(
            FIELD,
            f"this model's tokenizer has no single tokens for {BEGINS} and {ENDS}, so the section cannot be"
            " ended at a token; leave it out, and limit the whole answer with max_tokens",
        )
    if not facts.thinking_budgets:
        raise UnsupportedParameter.at(FIELD, "the worker that serves this model has no thinking budgets; leave it out")
    if thoughts is Thoughts.NONE:
        return settings
    opened = None if thoughts is None else _OPENED[thoughts]
    sampling = Sampling(thinking=ThinkingBudget(tokens=tokens, opened=opened))
    sampling.MergeFrom(settings.sampling)
    return replace(settings, sampling=sampling)
