"""Rules for tool calls, in the formats that models write them in."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.common.errors import InvalidGrammar, InvalidValue
from services.common.text.grammar_text import MAX_GRAMMAR_BYTES, json_rule, literal
from services.gateway.openai.json_value import json_size
from services.gateway.openai.messages import Tool
from services.gateway.openai.output.calls import HERMES, CallFormat

_ANY_OBJECT = {"type": "object"}
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
_PARAMETERS = literal(', "parameters": ')
_SPACE = r"[ \n\r\t]{0,32}"
# Any text that does not begin with a reasoning section.
NO_THOUGHTS = r"~/\s*<think>(?s:.*)/"


@dataclass(frozen=True)
class CallRules:
    """The grammar rules for calls of ``tools``. With ``strict_only``, other tools accept any object as arguments."""

    form: CallFormat
    tools: Sequence[Tool]
    parallel: bool
    strict_only: bool

    def check_size(self) -> None:
        """Raise ``InvalidRequest`` if the schemas are larger than the largest grammar."""
        size = 0
        for tool in self.tools:
            if tool.function.strict or not self.strict_only:
                size += json_size(tool.function.parameters, MAX_GRAMMAR_BYTES)
            if size > MAX_GRAMMAR_BYTES:
                raise InvalidGrammar.at(
                    "tools",
                    f"the parameters that calls must match have more than {MAX_GRAMMAR_BYTES} bytes together;"
                    " give fewer tools, or smaller schemas",
                )

    def alone(self) -> list[str]:
        """Return the rules for ``calls``: one call or several calls, and no other text."""
        hermes = self.form is HERMES
        more = "" if not self.parallel else ' ("\\n" call)*' if hermes else " (/;[ \\n]{0,2}/ call)*"
        if hermes:
            return [f"calls: call{more}", 'call: "<tool_call>\\n" called "\\n</tool_call>"', *self._called()]
        bodies = [f"call_{number}: {json_rule(self._whole(tool))}" for number, tool in enumerate(self.tools)]
        return [f"calls: call{more}", f"call: {self._any_of('call')}", *bodies]

    def among_words(self) -> list[str]:
        """Return the rules for ``answer``: any text, with calls in it that match their tools."""
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
        """Return the rules for ``called``: the JSON of one call in the form of Hermes."""
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
        """Return the schema of one call in the form of Llama 3.

        The whole call is one JSON rule, so that the grammar can also offer JSON that is no call at the same position.
        """
        arguments = self._arguments(tool)
        properties = {
            "name": {"const": tool.function.name},
            "parameters": arguments if "$id" in arguments else _redirected(arguments),
        }
        return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}

    def _arguments(self, tool: Tool) -> dict[str, Any]:
        function = tool.function
        if self.strict_only and not function.strict:
            return _ANY_OBJECT
        if function.parameters is None:
            return _NOTHING
        if function.parameters.get("type", "object") != "object":
            raise InvalidValue(
                f"the parameters of {function.name!r} are not of type 'object'; arguments are always an object",
                field="tools",
            )
        return {**function.parameters, "type": "object"}


def _redirected(part: Any) -> Any:
    """Return a schema as part of the schema of a call: references to the root now refer to ``parameters``.

    A schema with ``$id`` needs no such change, because its references begin at itself.
    """
    if isinstance(part, list):
        return [_redirected(item) for item in part]
    if not isinstance(part, dict):
        return part
    moved = {name: value if name in ("const", "enum") else _redirected(value) for name, value in part.items()}
    reference = part.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = f"#/properties/parameters{reference[1:]}"
    return moved
