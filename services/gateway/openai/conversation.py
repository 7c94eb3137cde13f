"""A conversation to what the model's chat template is given: whatever the template does not know is refused here."""

from typing import Any, NamedTuple

from services.common.errors import InvalidRequest
from services.gateway.gateway import Gateway
from services.gateway.openai.messages import ConversationBody, ReasoningEffort
from services.gateway.openai.output.reader import OutputReader
from services.gateway.openai.output.reasoning import BEGINS, ENDS


class Prompt(NamedTuple):
    """A conversation as the model gets it."""

    ids: list[int]
    text: str  # special tokens included
    unknown: list[str]  # what the request says and the template does not know

    def thinking_opened(self, continued: str | None) -> bool:
        """Whether the answer begins within the model's thoughts. ``continued``: the words that it goes on with."""
        if continued is None:
            return self.text.rstrip().endswith(BEGINS)
        return continued.rfind(BEGINS) > continued.rfind(ENDS)


async def render(
    gateway: Gateway,
    body: ConversationBody,
    *,
    max_tokens: int | None,
    effort: ReasoningEffort | None = None,
    with_tools: bool = True,
    add_special_tokens: bool = False,
) -> Prompt:
    """The prompt of ``body``. ``max_tokens``: more are refused; None: none are. Raises ``InvalidRequest``."""
    tools = [tool.render() for tool in body.tools or ()] if with_tools else []
    known = gateway.text.tokenizer.chat_template(tools=bool(tools)).variables
    given = body.chat_template_kwargs or {}
    variables = {name: value for name, value in given.items() if name in known} | _thinking(effort, known, given)
    for name, value in (("tools", tools), ("documents", body.documents or [])):
        if value and name not in known:
            raise _unsupported(name, f"this model's chat template does not know of {name}; leave them out")
        if value:
            variables[name] = value
    text, ids = await gateway.text.encode_chat(
        [message.render() for message in body.messages],
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        variables=variables,
        max_tokens=max_tokens,
        add_special_tokens=add_special_tokens,
    )
    return Prompt(ids, text, [f"chat_template_kwargs.{name}" for name in given if name not in known])


def check_tools(gateway: Gateway, body: ConversationBody, choice: Any) -> list[str]:
    """The names of the tools that the model may call. Raises ``InvalidRequest`` for a ``tool_choice`` that the server
    cannot keep, and for tools whose calls it cannot read."""
    if choice not in (None, "none", "auto"):
        raise _unsupported(
            "tool_choice",
            "tool_choice 'required' or a tool by its name needs constrained decoding, which this server does not have"
            " yet; send 'auto' or 'none'",
        )
    if not body.tools or choice == "none":
        return []
    if not gateway.formats.calls_known:
        raise _unsupported(
            "tools",
            "this server does not know how this model writes its tool calls; leave tools out, or have the server"
            " started with tool_call_parser=llama3, hermes or none",
        )
    return [tool.function.name for tool in body.tools]


def make_reader(
    gateway: Gateway, body: ConversationBody, prompt: Prompt, tools: list[str], *, parallel: bool
) -> OutputReader | None:
    """For one answer to ``prompt``; None when its text is all there is to it."""
    continued = body.messages[-1].text if body.continue_final_message else None
    return gateway.formats.reader(
        gateway.text.vocabulary,
        tools=tools,
        parallel=parallel,
        thinking_opened=gateway.formats.reasoning and prompt.thinking_opened(continued),
    )


def _thinking(effort: ReasoningEffort | None, known: frozenset[str], given: dict[str, Any]) -> dict[str, Any]:
    """``reasoning_effort`` as the template has it: by that name, or as a switch that ``none`` turns off."""
    if effort is None or "reasoning_effort" in given:
        return {}
    if "reasoning_effort" in known:
        return {"reasoning_effort": effort}
    if effort == "none":
        return {"enable_thinking": False} if "enable_thinking" in known else {}
    raise _unsupported(
        "reasoning_effort",
        f"this model's chat template takes no reasoning_effort={effort!r}; leave it out, or send 'none'",
    )


def _unsupported(field: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, field=field, reason="UNSUPPORTED_PARAMETER")
