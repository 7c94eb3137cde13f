"""A deployment that answers with what the user said, under a chat template like those of well-known models."""

import json
import shutil
from pathlib import Path

from services.common.model.files import BUILTIN
from tests.gateway.deployment import Deployment

_USER, _END, _ASSISTANT = 3, 1, 4  # of the built-in model's tokenizer

THINKING_TOKENS = {"<think>": 2046, "</think>": 2047}  # once they are added

QWEN = """\
{%- if tools -%}<|system|># Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call one so: <tool_call>{"name": ..., "arguments": ...}</tool_call><|end|>{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}<|user|>
{%- elif message.role in ['system', 'user', 'assistant'] -%}<|{{ message.role }}|>
{%- else -%}{{- raise_exception('unknown role: ' + message.role) -}}{%- endif -%}
{%- if message.reasoning_content -%}<think>{{ message.reasoning_content }}</think>{%- endif -%}
{{- message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' -}}
{{- (call.function.arguments | tojson) -}}}</tool_call>
{%- endfor -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}
{%- elif open_thoughts -%}{{- '<think>\\n' -}}{%- endif -%}
{%- endif -%}
"""
LLAMA = """\
{%- if tools -%}<|system|>Call one so: {"name": function name, "parameters": {}}
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|end|>{%- endif -%}
{%- for message in messages -%}
{%- set role = 'user' if message.role in ['tool', 'ipython'] else message.role -%}
<|{{ role }}|>{{ message.content }}<|end|>
{%- endfor -%}
{%- if documents -%}<|system|>{{ documents | tojson }}<|end|>{%- endif -%}
{%- if reasoning_effort -%}<|system|>{{ reasoning_effort }}<|end|>{%- endif -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""


def make_model(directory: Path, template: str) -> Path:
    """The built-in model under another template."""
    shutil.copytree(BUILTIN, directory)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(template)
    return directory


def add_thinking_tokens(model: Path) -> Path:
    """Make <think> and </think> tokens of ``model``, as those of models that think are.

    They take the places of the last two merges of the built-in model's tokenizer, which no other merge needs.
    """
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    for merge, (mark, token) in zip((["'", "ll"], ["d", "er"]), THINKING_TOKENS.items(), strict=True):
        tokenizer["model"]["merges"].remove(merge)
        assert tokenizer["model"]["vocab"].pop("".join(merge)) == token
        kind = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
        tokenizer["added_tokens"].append({"id": token, "content": mark, **kind})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    return model


def start_parrot(directory: Path, template: str, *, thinking_tokens: bool = False, **gateway) -> Deployment:
    """Whatever the user says last is the answer, and then its end."""
    model = make_model(directory / "parrot", template)
    if thinking_tokens:
        add_thinking_tokens(model)
    return Deployment(
        directory,
        worker={"parrot_ids": f"{_USER},{_END},{_ASSISTANT}"},
        scheduler={"model": model},
        gateway={"model": model} | gateway,
    ).wait_ready()
