"""Rendering of conversations with the model's chat template. Parameters that the template lacks are rejected."""

from functools import partial
from typing import Any, NamedTuple

from services.common.errors import InvalidValue, UnsupportedParameter
from services.common.text.thinking import BEGINS, ENDS
from services.gateway.engine.request import Grammar
from services.gateway.engine.text import TextEngine
from services.gateway.openai.grammar.answer import Thoughts, compose
from services.gateway.openai.grammar.calls import CallRules
from services.gateway.openai.messages import ConversationBody, NamedTool, ReasoningEffort, Tool
from services.gateway.openai.output.formats import OutputFormats
from services.gateway.openai.schemas import ChatBody

# Names that chat templates and other engines have for thinking_token_budget.
_BUDGET_NAMES = frozenset({"thinking_budget", "thinking_token_budget", "max_thinking_tokens", "reasoning_budget"})


class Prompt(NamedTuple):
    """The prompt that a conversation is rendered to."""

    ids: list[int]
    text: str  # special tokens included
    unknown: list[str]  # parameters that the template does not know

    def thoughts(self, continued: str | None) -> Thoughts:
        """Return the beginning of a reasoning model's answer. ``continued``: the assistant's text that it continues."""
        if continued is not None:
            return Thoughts.OPENED if continued.rfind(BEGINS) > continued.rfind(ENDS) else Thoughts.NONE
        text = self.text.rstrip()
        if text.endswith(BEGINS):
            return Thoughts.OPENED
        return Thoughts.NONE if text.endswith(ENDS) else Thoughts.MAYBE


async def render(
    engine: TextEngine, body: ConversationBody, *, max_tokens: int | None, add_special_tokens: bool = False
) -> Prompt:
    """Return the prompt of ``body``.

    Raises ``InvalidRequest``, also for a prompt of more than ``max_tokens`` tokens unless that is None.
    """
    tools = body.shown_tools
    known = engine.tokenizer.chat_template(tools=bool(tools)).variables
    given = body.chat_template_kwargs or {}
    for name in sorted(_BUDGET_NAMES.intersection(given).difference(known)):
        raise UnsupportedParameter(
            f"this model's chat template does not know {name!r}; send thinking_token_budget instead, outside of"
            " chat_template_kwargs",
            field=f"chat_template_kwargs.{name}",
        )
    variables = {name: value for name, value in given.items() if name in known} | _thinking(body.effort, known, given)
    for name, value in (("tools", tools), ("documents", body.documents or [])):
        if value and name not in known:
            raise UnsupportedParameter(
                f"this model's chat template does not know of {name}; leave them out", field=name
            )
        if value:
            variables[name] = value

    def messages() -> list[dict[str, Any]]:
        if tools:
            variables["tools"] = [tool.render() for tool in tools]
        return [message.render() for message in body.messages]

    text, ids = await engine.encode_chat(
        messages,
        add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
        continue_final_message=bool(body.continue_final_message),
        variables=variables,
        max_tokens=max_tokens,
        add_special_tokens=add_special_tokens,
    )
    return Prompt(ids, text, [f"chat_template_kwargs.{name}" for name in given if name not in known])


def check_tools(formats: OutputFormats, body: ChatBody) -> list[Tool]:
    """Return the tools that the model may call.

    Raises InvalidRequest for a ``tool_choice`` that is not among the tools, and if the server does not know how the
    model writes its calls.
    """
    choice = body.tool_choice
    if not body.tools or choice == "none":
        if choice not in (None, "none", "auto"):
            raise InvalidValue.at("tool_choice", "there are no tools to choose from; send tools, or leave it out")
        return []
    if not formats.calls_known:
        raise UnsupportedParameter(
            "this server does not know how this model writes its tool calls; leave tools out, or have the server"
            " started with tool_call_parser=llama3, hermes or none",
            field="tools",
        )
    strict = body.only_allowed or any(tool.function.strict for tool in body.tools)
    constrained = strict or choice not in (None, "auto")
    if constrained and formats.calls is None:
        raise UnsupportedParameter(
            "with tool_call_parser=none calls stay text: they cannot be required, strict or limited to allowed tools;"
            " have the server started with tool_call_parser=llama3 or hermes",
            field="tools",
        )
    if not isinstance(choice, NamedTool):
        return body.tools
    named = [tool for tool in body.tools if tool.function.name == choice.function.name]
    if not named:
        raise InvalidValue.at("tool_choice", f"there is no tool {choice.function.name[:64]!r} among tools")
    return named


async def make_grammar(
    engine: TextEngine,
    formats: OutputFormats,
    body: ChatBody,
    thoughts: Thoughts,
    tools: list[Tool],
    wanted: Grammar | None,
) -> Grammar | None:
    """Return the grammar of the whole answer, reasoning and calls included, or None if there is none.

    ``thoughts``: the beginning of the answer. ``wanted``: the grammar of its text. Raises InvalidRequest.
    """
    calls = None
    named = isinstance(body.tool_choice, NamedTool)
    must_call = named or body.tool_choice == "required"
    restricted = wanted is not None or body.only_allowed
    constrained = must_call or (tools and restricted) or any(tool.function.strict for tool in tools)
    if constrained and formats.calls is not None:
        parallel = body.parallel_tool_calls is not False and not named
        calls = CallRules(formats.calls, tools, parallel=parallel, strict_only=not must_call)
    if calls is None and wanted is None:
        return None
    thoughts = thoughts if formats.reasoning else Thoughts.NONE
    return await engine.in_thread(partial(compose, wanted, calls, must_call=must_call, thoughts=thoughts))


def _thinking(effort: ReasoningEffort | None, known: frozenset[str], given: dict[str, Any]) -> dict[str, Any]:
    """Return the template's variables for ``reasoning_effort``: that name, and the switch ``enable_thinking``.

    A variable in ``chat_template_kwargs`` wins. Raises ``InvalidRequest`` if the template has neither variable.
    """
    if effort is None:
        return {}
    variables = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    if effort != "none" and not variables.keys() & known:
        raise UnsupportedParameter(
            f"this model's chat template takes no reasoning_effort={effort!r}; leave it out, or send 'none'",
            field="reasoning_effort",
        )
    return {name: value for name, value in variables.items() if name in known and name not in given}
