"""The tools of ``/v1/responses``. The model gets each as a function, and its calls become items of the tool's type.

The client runs functions, custom tools and the local shell. Hosted tools run on OpenAI's servers, and not here.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import from_json

from services.common.errors import InvalidValue, UnsupportedParameter
from services.gateway.openai.body import Body, optional
from services.gateway.openai.json_value import BoundedValue
from services.gateway.openai.messages import (
    MAX_TOOLS,
    AllowedFunctions,
    AllowedTools,
    Function,
    NamedFunction,
    NamedTool,
    Tool,
    ToolChoice,
)

INPUT = "input"  # the one argument of a custom tool
LOCAL_SHELL = "local_shell"
_MAX_NAME = 64
_SHELL_PARAMETERS = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
    },
    "required": ["command"],
    "additionalProperties": False,
}


class _Typed(Body):
    """The type of a function, in a base class so that it is validated before the other fields."""

    type: Literal["function"]


class FunctionTool(Function, _Typed):
    """A function that the model may call."""


class ToolGrammar(Body):
    """The format of a custom tool's input."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None

    @model_validator(mode="after")
    def _definition_with_grammar(self) -> "ToolGrammar":
        if (self.type == "grammar") is (self.syntax is None or self.definition is None):
            raise ValueError("'syntax' and 'definition' are needed with type 'grammar', and not allowed with 'text'")
        return self


class CustomTool(Body):
    """A tool whose input is a text, not JSON."""

    type: Literal["custom"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    format: ToolGrammar | None = optional(
        "Form of the input. A regular expression is enforced. A Lark grammar is shown to the model."
    )


class ShellTool(Body):
    """The shell of the client's computer."""

    type: Literal["local_shell"]


MemberTool = Annotated[
    Annotated[FunctionTool, Tag("#function")] | Annotated[CustomTool, Tag("#custom")],
    Discriminator(lambda tool: _tag(tool)),
]


class NamespaceTool(Body):
    """A group of tools. Each is offered to the model as ``NAMESPACE__NAME``."""

    type: Literal["namespace"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    tools: Annotated[
        list[MemberTool],
        Field(max_length=MAX_TOOLS, description="Each tool is offered to the model as NAMESPACE__NAME."),
    ]

    @model_validator(mode="after")
    def _names_are_short(self) -> "NamespaceTool":
        for tool in self.tools:
            if len(name := qualified(self.name, tool.name)) > _MAX_NAME:
                raise ValueError(f"{name[:100]!r}, its name with the namespace, has more than {_MAX_NAME} characters")
        return self


class HostedTool(Body):
    """A tool that OpenAI's servers run. The model does not get it."""

    type: Literal[
        "apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search", "image_generation", "mcp",
        "programmatic_tool_calling", "shell", "tool_search", "web_search", "web_search_2025_08_26",
        "web_search_preview", "web_search_preview_2025_03_11",
    ]  # fmt: skip


_HOSTED = frozenset(HostedTool.model_json_schema()["properties"]["type"]["enum"])


def _tag(tool: Any) -> str:
    """Return the tag of a tool's class. An unknown type is validated as a function, whose error names ``type``."""
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    if not isinstance(kind, str):
        return "#function"
    if kind in _HOSTED:
        return "#hosted"
    return f"#{kind}" if kind in ("custom", "local_shell", "namespace") else "#function"


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("#function")]
    | Annotated[CustomTool, Tag("#custom")]
    | Annotated[ShellTool, Tag("#local_shell")]
    | Annotated[NamespaceTool, Tag("#namespace")]
    | Annotated[HostedTool, Tag("#hosted")],
    Discriminator(_tag),
]


class NamedResponseTool(Body):
    """A tool by its type and name."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None

    @property
    def qualified(self) -> str:
        """Name of the tool for the model."""
        return qualified(self.namespace, self.name)


class AllowedResponseTools(Body):
    """The tools that the model may call. With mode ``required`` it must call one of them."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[
        list[dict[str, BoundedValue]],
        Field(min_length=1, max_length=MAX_TOOLS, description="Tools of the request, by type and name."),
    ]


class Offered(NamedTuple):
    """A tool that the model gets as a function."""

    kind: Literal["function", "custom", "local_shell"]
    name: str
    namespace: str | None = None


FUNCTION_CALL, CUSTOM_CALL, SHELL_CALL = "function_call", "custom_tool_call", "local_shell_call"
CALLS = {"function": FUNCTION_CALL, "custom": CUSTOM_CALL, "local_shell": SHELL_CALL}  # output items by kind


def qualified(namespace: str | None, name: str) -> str:
    """Return the name of a tool for the model."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def offered(tools: Sequence[Any]) -> dict[str, Offered]:
    """Return the tools that the model gets, by their name for the model."""
    return dict(_named(tools))


def names_of(tools: Sequence[Any]) -> list[str]:
    """Return the names of ``tools`` for the model, in order."""
    return [name for name, _ in _named(tools)]


def hosted(tools: Sequence[Any]) -> list[str]:
    """Return the types of the hosted tools in ``tools``."""
    return [tool.type for tool in tools if isinstance(tool, HostedTool)]


def grammars(tools: Sequence[Any]) -> bool:
    """Return whether a custom tool has a Lark grammar. It is part of the prompt, and not enforced."""
    members = [member for tool in tools for member, _ in _members(tool)]
    return any(isinstance(tool, CustomTool) and tool.format and tool.format.syntax == "lark" for tool in members)


def chat_tools(tools: Sequence[Any]) -> list[Tool]:
    """Return ``tools`` in the form of chat completions. Raises ``InvalidRequest`` if all of them are hosted."""
    functions = [function for tool in tools for function in _functions(tool)]
    if tools and not functions:
        index = next((index for index, tool in enumerate(tools) if isinstance(tool, HostedTool)), 0)
        kinds = ", ".join(hosted(tools)) or "an empty namespace"
        raise UnsupportedParameter.at(
            f"tools[{index}].type",
            f"no tool is left for the model: this server runs no hosted tools ({kinds}); send"
            " tools of type 'function', 'custom', 'local_shell' or 'namespace'",
        )
    return [Tool(type="function", function=function) for function in functions]


def chat_choice(choice: Any, tools: Sequence[Any]) -> ToolChoice | None:
    """Return ``tool_choice`` in the form of chat completions. Raises ``InvalidRequest`` for tools of another type."""
    if isinstance(choice, NamedResponseTool):
        return NamedTool(type="function", function=NamedFunction(name=choice.qualified))
    if not isinstance(choice, AllowedResponseTools):
        known: ToolChoice | None = choice
        return known
    names, ignored = [], hosted(tools)
    for tool in choice.tools:
        kind, name = tool.get("type"), tool.get("name")
        if kind == "local_shell":
            names.append(LOCAL_SHELL)
        elif isinstance(name, str) and kind in ("function", "custom"):
            namespace = tool.get("namespace")
            names.append(qualified(namespace if isinstance(namespace, str) else None, name))
        elif kind not in ignored:  # a hosted tool of the request is left out here too
            raise InvalidValue.at(
                "tool_choice.tools", "expected tools that are among tools, such as {'type': 'function', 'name': ...}"
            )
    allowed = [NamedTool(type="function", function=NamedFunction(name=name)) for name in names]
    if not allowed:
        raise UnsupportedParameter.at(
            "tool_choice.tools", "only hosted tools are allowed, and this server runs none; allow others"
        )
    return AllowedTools(type="allowed_tools", allowed_tools=AllowedFunctions(mode=choice.mode, tools=allowed))


def call_content(kind: str, arguments: str, *, complete: bool) -> dict[str, Any]:
    """Return the members of an output item for the ``arguments`` of its call, which are JSON from the model."""
    if kind == FUNCTION_CALL:
        return {"arguments": arguments}
    given = _arguments(arguments, complete=complete)
    if kind == CUSTOM_CALL:
        text = given.get(INPUT)
        return {"input": text if isinstance(text, str) else arguments}
    command = given.get("command")
    action = {"type": "exec", "command": command if isinstance(command, list) else [], "env": {}}
    return {"action": action | {name: given.get(name) for name in ("working_directory", "timeout_ms")}}


def _arguments(arguments: str, *, complete: bool) -> dict[str, Any]:
    try:
        given = from_json(arguments, allow_partial=False if complete else "trailing-strings")
    except ValueError:
        return {}
    return given if isinstance(given, dict) else {}


def _named(tools: Sequence[Any]) -> Iterator[tuple[str, Offered]]:
    for tool in tools:
        for member, namespace in _members(tool):
            name = LOCAL_SHELL if isinstance(member, ShellTool) else member.name
            yield qualified(namespace, name), Offered(member.type, name, namespace)


def _members(tool: Any) -> list[tuple[Any, str | None]]:
    if isinstance(tool, NamespaceTool):
        return [(member, tool.name) for member in tool.tools]
    return [] if isinstance(tool, HostedTool) else [(tool, None)]


def _functions(tool: Any) -> list[Function]:
    functions = [_function(member, namespace) for member, namespace in _members(tool)]
    if isinstance(tool, NamespaceTool) and tool.description and functions:  # the first function carries it for all
        functions[0].description = "\n\n".join(filter(None, (tool.description, functions[0].description)))
    return functions


def _function(tool: Any, namespace: str | None) -> Function:
    if isinstance(tool, ShellTool):
        description = "Runs a program on the user's computer, and returns what it prints."
        return Function(name=LOCAL_SHELL, description=description, parameters=_SHELL_PARAMETERS, strict=True)
    name = qualified(namespace, tool.name)
    if isinstance(tool, FunctionTool):
        return Function(**tool.model_dump(exclude={"type", "name"}), name=name)
    schema: dict[str, Any] = {"type": "string"}
    description, form = tool.description, tool.format
    if form is not None and form.definition is not None:
        if form.syntax == "regex":
            schema["pattern"] = f"^(?:{form.definition})$"
        hint = f"The input matches this {'Lark grammar' if form.syntax == 'lark' else 'regular expression'}:"
        description = "\n\n".join(part for part in (description, f"{hint}\n{form.definition}") if part)
    parameters = {"type": "object", "properties": {INPUT: schema}, "required": [INPUT], "additionalProperties": False}
    return Function(name=name, description=description, parameters=parameters, strict=True)
