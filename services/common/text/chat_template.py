"""Renders a model's chat template like transformers' ``apply_chat_template``, without transformers."""

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser

from services.common.errors import InvalidRequest
from services.common.model.json_object import JsonObject, read_text
from services.common.text.template_bounds import BoundedEnvironment, bounded
from services.common.text.tokenizer_class import read_tokenizer_config

# Marks the end of the message to continue, so that its position in the rendered text can be found.
_END_MARK = "<<the answer goes on here>> "
_LONGEST = 256 * 1024  # characters of a template; published templates have up to 40,000
_OWN_NAMES = {"messages", "add_generation_prompt"}
# Exceptions of a template that rejects the messages, or gets a variable of an unexpected type.
_REFUSALS = (
    jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError,
    MemoryError,
)  # fmt: skip


class ChatTemplate:
    """Compiled template. It runs in a sandbox and in bounded time, since its author is not trusted.

    ``variables`` are the names that it reads beside the messages, such as ``tools`` and ``enable_thinking``.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self._special_tokens = special_tokens
        self.source = source
        if len(source) > _LONGEST:
            raise InvalidRequest(
                f"the model's chat template has {len(source):,} characters; at most {_LONGEST:,} are compiled: replace"
                " it by a shorter one",
                field="tokenizer",
            )
        try:
            self._template = environment.from_string(source)
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except (SyntaxError, *_REFUSALS) as error:  # Jinja compiles to Python, which may raise SyntaxError
            reason = f"{type(error).__name__}: {error}" if not isinstance(error, jinja2.TemplateError) else error
            raise InvalidRequest(f"the model's chat template does not compile: {reason}", field="tokenizer") from error
        self.variables = frozenset(names - environment.globals.keys() - special_tokens.keys() - _OWN_NAMES)

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        *,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text. With ``continue_final_message`` it ends at the end of the last message.

        Raises ``InvalidRequest`` (field ``messages``) if the template rejects the messages.
        """
        if continue_final_message:
            last = messages[-1]
            messages = [*messages[:-1], last | {"content": last["content"] + _END_MARK}]
        known = {"messages": messages, "add_generation_prompt": add_generation_prompt, **self._special_tokens}
        try:
            text = bounded(self._template.generate(dict(variables or {}) | known))
        except _REFUSALS as error:
            message = f"the model's chat template refuses these messages: {error}"
            raise InvalidRequest(message, field="messages") from error
        return _text_before_mark(text) if continue_final_message else text


def _text_before_mark(text: str) -> str:
    """Return ``text`` up to ``_END_MARK``.

    A template that trims messages also removes the trailing space of the mark.
    """
    before, mark, rest = text.rpartition(_END_MARK.rstrip())
    if not mark:
        raise InvalidRequest(
            "the model's chat template does not show the end of the last message, so no answer can continue it; leave"
            " out continue_final_message",
            field="continue_final_message",
        )
    return before if rest.startswith(" ") else before.rstrip()


class ChatTemplates(NamedTuple):
    """Templates of a model. Some models have a separate template for conversations with tools."""

    plain: ChatTemplate
    with_tools: ChatTemplate


def read_chat_templates(directory: Path, special_tokens: dict[str, str]) -> ChatTemplates | None:
    """Return the templates of a Hugging Face directory, or None if it has none. Raises ``InvalidRequest``.

    They are in ``chat_template.jinja`` or in ``tokenizer_config.json``.
    """
    source = read_text(directory / "chat_template.jinja", field="tokenizer")
    source_with_tools = None
    settings = read_tokenizer_config(directory)
    if source is None:
        named = _named_templates(settings)
        source, source_with_tools = named.get("default"), named.get("tool_use")
    return compile_templates(source, source_with_tools, special_tokens)


def compile_templates(
    source: str | None, source_with_tools: str | None, special_tokens: dict[str, str]
) -> ChatTemplates | None:
    """Return the templates of the sources, or None if there are none. Raises ``InvalidRequest``."""
    if not source:
        return None
    plain = ChatTemplate(source, special_tokens)
    return ChatTemplates(plain, ChatTemplate(source_with_tools, special_tokens) if source_with_tools else plain)


def _named_templates(settings: JsonObject) -> dict[str, str]:
    """Return the templates in ``tokenizer_config.json`` by name. A template without a name is ``default``."""
    given = settings.values.get("chat_template")
    listed = given if isinstance(given, list) else [] if given is None else [{"name": "default", "template": given}]
    try:
        named = {entry["name"]: entry["template"] for entry in listed}
    except (TypeError, KeyError):
        named = {"": None}
    if any(not isinstance(text, str) for pair in named.items() for text in pair):
        raise settings.wrong("chat_template", "a string, or a list of objects with name and template, both strings")
    return named


class _GenerationBlock(jinja2.ext.Extension):
    """Block ``{% generation %}``, which marks the assistant's text for training. Here it renders its body only."""

    tags = {"generation"}  # noqa: RUF012 (jinja's interface)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON. Jinja's own filter escapes HTML, which is wrong in a prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
