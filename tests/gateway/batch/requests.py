"""Lines of batch files, and what came of them."""

import io
import json
from typing import Any

from openai import OpenAI
from openai.types import Batch

from tests.gateway.deployment import eventually

ENDED = ("completed", "failed", "expired", "cancelled")
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
_NEEDED: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x", "max_tokens": 3},
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
    RESPONSES: {"input": "Hi", "max_output_tokens": 3},
}


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> str:
    """A request of ``body`` and what it must have."""
    content = {"model": "tokasaurus-builtin"} | _NEEDED[url] | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": content})


def upload(sdk: OpenAI, lines: list[str]) -> str:
    """The id of a file of ``lines``."""
    return sdk.files.create(file=("in.jsonl", io.BytesIO("\n".join(lines).encode())), purpose="batch").id


def begin(sdk: OpenAI, lines: list[str], endpoint: str = COMPLETIONS, **settings: Any) -> Batch:
    """A batch of ``lines``."""
    return sdk.batches.create(input_file_id=upload(sdk, lines), endpoint=endpoint, completion_window="24h", **settings)


def ended(sdk: OpenAI, batch: Batch) -> Batch:
    """``batch`` once it has ended."""
    eventually(lambda: sdk.batches.retrieve(batch.id).status in ENDED)
    return sdk.batches.retrieve(batch.id)


def results(sdk: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of an output or error file."""
    return [json.loads(text) for text in sdk.files.content(file_id).text.splitlines()] if file_id else []
