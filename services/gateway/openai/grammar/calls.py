"""Rules for tool calls, in the formats that models write them in."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.common.errors import InvalidRequest
from services.common.text.grammar_text import MAX_GRAMMAR_BYTES, json_rule, literal
from services.gateway.openai.json_value import json_size
from services.gateway.openai.messages import Tool
from services.gateway.openai.output.calls import HERMES, CallFormat

_ANY_OBJECT = {"type": "object"}
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
_PARAMETERS = literal(', "parameters": ')
_SPACE = r"[ \n\r\t]{0,32}"
# What begins a text, and does not begin thoughts.
NO_THOUGHTS = r"~/\s*<think>(?s:.*)/"


@dataclass(frozen=True)
class CallRules:
    """How an answer calls ``tools``. ``strict_only``: arguments of the others may be any object."""

    form: CallFormat
    tools: Sequence[Tool]
    parallel: bool
    strict_only: bool

    def check_size(self) -> None:
        """Raise ``InvalidRequest`` when the schemas alone are larger than any grammar may be."""
        size = 0
        for tool in self.tools:
            if tool.function.strict or not self.strict_only:
                size += json_size(tool.function.parameters, MAX_GRAMMAR_BYTES)
            if size > MAX_GRAMMAR_BYTES:
                raise InvalidRequest(
                    f"tools: the parameters of those that calls are held to have more than {MAX_GRAMMAR_BYTES} bytes"
                    " together; give fewer tools, or smaller schemas",
                    field="tools",
                    reason="INVALID_GRAMMAR",
                )

    def alone(self) -> list[str]:
        """Rules for ``calls``: one call, or several, and nothing else."""
        hermes = self.form is HERMES
        more = "" if not self.parallel else ' ("\\n" call)*' if hermes else " (/;[ \\n]{0,2}/ call)*"
        if hermes:
            return [f"calls: call{more}", 'call: "<tool_call>\\n" called "\\n</tool_call>"', *self._called()]
        bodies = [f"call_{number}: {json_rule(self._whole(tool))}" for number, tool in enumerate(self.tools)]
        return [f"calls: call{more}", f"call: {self._any_of('call')}", *bodies]

    def among_words(self) -> list[str]:
        """Rules for ``answer``: any text, with calls in it that are held to their tools."""
        several = "*" if self.parallel else "?"
        if self.form is HERMES:
            return [
                f"answer: (to_call call){several} WORDS?",
                'call: "\\n" called "\\n</tool_call>"',
                f"to_call[lazy]: WORDS {literal('<tool_call>')}",
                f"WORDS: /(?s:.*)/ & ~/(?s:.*)<tool_call>(?s:.*)/ & {NO_THOUGHTS}",
                *self._called(),
            ]
        names = "|".join(re.escape(tool.function.name) for tool in self.tools)
        rules = [
            f"answer: ({self._any_of('call')}){several} WORDS?",
            f'WORDS: /(?s:.*)/ & ~/(?s:.*)"name"{_SPACE}:{_SPACE}"({names})"(?s:.*)/ & {NO_THOUGHTS}',
            f'OPENS: /\\{{{_SPACE}("type"{_SPACE}:{_SPACE}"function"{_SPACE},{_SPACE})?"name"{_SPACE}:{_SPACE}/',
        ]
        for number, tool in enumerate(self.tools):
            rules += [
                f"to_{number}[lazy]: WORDS OPENS {literal(json.dumps(tool.function.name))}",
                f'call_{number}: to_{number} {_PARAMETERS} arguments_{number} "}}"',
                f"arguments_{number}: {json_rule(self._arguments(tool))}",
            ]
        return rules

    def _called(self) -> list[str]:
        """Rules for ``called``: the JSON of one call, written as Hermes' is."""
        rules = [f"called: {self._any_of('call')}"]
        for number, tool in enumerate(self.tools):
            opening = f'{{"name": {json.dumps(tool.function.name)}, "arguments": '
            rules += [
                f'call_{number}: {literal(opening)} arguments_{number} "}}"',
                f"arguments_{number}: {json_rule(self._arguments(tool))}",
            ]
        return rules

    def _any_of(self, prefix: str) -> str:
        return " | ".join(f"{prefix}_{number}" for number in range(len(self.tools)))

    def _whole(self, tool: Tool) -> dict[str, Any]:
        """One call as Llama 3 writes it. As JSON throughout, an answer in another JSON may stand in its place."""
        properties = {"name": {"const": tool.function.name}, "parameters": _moved(self._arguments(tool))}
        return {
            "type": "object",
            "properties": properties,
            "required": [*properties],
            "additionalProperties": False,
        }

    def _arguments(self, tool: Tool) -> dict[str, Any]:
        function = tool.function
        if self.strict_only and not function.strict:
            return _ANY_OBJECT
        if function.parameters is None:
            return _NOTHING
        if function.parameters.get("type", "object") != "object":
            raise InvalidRequest(
                f"the parameters of {function.name!r} are not of type 'object': arguments always are",
                field="tools",
                reason="INVALID_VALUE",
            )
        return {**function.parameters, "type": "object"}


def _moved(schema: dict[str, Any]) -> dict[str, Any]:
    """``schema`` where it stands below ``parameters``: references to its own parts lead there. One that has a name of
    its own is where its references begin, wherever it stands."""
    return schema if "$id" in schema else _redirected(schema)


def _redirected(part: Any) -> Any:
    if isinstance(part, list):
        return [_redirected(item) for item in part]
    if not isinstance(part, dict):
        return part
    moved = {name: value if name in ("const", "enum") else _redirected(value) for name, value in part.items()}
    reference = part.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = f"#/properties/parameters{reference[1:]}"
    return moved
