"""Renders a model's own chat template, as transformers' ``apply_chat_template`` does, without transformers."""

import datetime
import json
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from services.common.errors import InvalidRequest
from services.common.model_files import read_json


class ChatTemplate:
    """One compiled template. Templates come from model directories, so they run sandboxed."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self._special_tokens = special_tokens
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the model's chat template does not compile: {error}", field="tokenizer") from error

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        """The prompt text. ``InvalidRequest`` (field ``messages``) when the template refuses the messages."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            message = f"the model's chat template refuses these messages: {error}"
            raise InvalidRequest(message, field="messages") from error


def read_chat_template(directory: Path, special_tokens: dict[str, str]) -> ChatTemplate | None:
    """The template of a Hugging Face directory (``chat_template.jinja``, or in ``tokenizer_config.json``), if any."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return ChatTemplate(path.read_text(), special_tokens)
    source = read_json(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(source, list):
        source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
    return ChatTemplate(source, special_tokens) if source else None


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's words for training; when serving, its body is all that counts."""

    tags = {"generation"}  # noqa: RUF012 (jinja's interface)

    def parse(self, parser):
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(["name:endgeneration"], drop_needle=True), lineno=line)


def _to_json(value: Any, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
    """Plain JSON: jinja's own filter escapes HTML, which a prompt must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str):
    raise jinja2.TemplateError(message)
