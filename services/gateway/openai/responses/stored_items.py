"""Items in the form in which they are stored and listed."""

from collections.abc import Iterable
from typing import Any

import orjson

from services.common.errors import FailedPrecondition
from services.gateway.openai.responses.input_items import (
    InputCall,
    InputCallOutput,
    InputCustomCall,
    InputCustomCallOutput,
    InputMessage,
    InputReasoning,
    InputShellCall,
    InputShellCallOutput,
)
from services.gateway.store.ids import new_id

_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "local_shell_call": "lsh_",
    "local_shell_call_output": "lsho_",
}


def stored(item: Any) -> dict[str, Any]:
    """Return an input item in the form in which it is stored, with its own id or a new one."""
    kept: dict[str, Any]
    match item:
        case InputMessage(role=role):
            kind = "output_text" if role == "assistant" else "input_text"
            texts = [item.content] if isinstance(item.content, str) else [part.text for part in item.content]
            more: dict[str, Any] = {"annotations": []} if role == "assistant" else {}
            parts = [{"type": kind, "text": text, **more} for text in texts]
            kept = {"type": "message", "status": "completed", "role": role, "content": parts}
        case InputCall():
            kept = _call(item) | {"name": item.name, "arguments": item.arguments} | _namespace(item)
        case InputCustomCall():
            kept = _call(item) | {"name": item.name, "input": item.input} | _namespace(item)
        case InputShellCall():
            kept = _call(item) | {"action": {"env": {}} | item.action.model_dump(exclude_none=True)}
        case InputShellCallOutput():
            return {"id": item.id, "type": item.type, "status": "completed", "output": item.output}
        case InputCallOutput() | InputCustomCallOutput():
            output = item.output if isinstance(item.output, str) else [_part(part) for part in item.output]
            kept = {"type": item.type, "status": "completed", "call_id": item.call_id, "output": output}
        case InputReasoning():
            kept = {"type": item.type, "summary": [_part(part) for part in item.summary or ()]}
            if item.content is not None:
                kept["content"] = [_part(part) for part in item.content]
            elif item.encrypted_content is not None:
                kept["encrypted_content"] = item.encrypted_content
        case _:
            raise FailedPrecondition(f"an item of type {item.type!r} cannot be stored; send store=false")
    given = (item.model_extra or {}).get("id")
    return {"id": given if isinstance(given, str) and given else new_id(_PREFIXES[kept["type"]]), **kept}


def all_stored(earlier: Iterable[dict[str, Any]], given: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the stored items ``earlier`` and the input items ``given``, each with a unique id."""
    items: dict[str, dict[str, Any]] = {}
    for item in (*earlier, *map(stored, given)):
        name = item["id"]
        if name in items:
            name = new_id(_PREFIXES[item["type"]])
        items[name] = item | {"id": name}
    return list(items.values())


def outputs(bodies: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return the output items of responses, as parts of a later conversation."""
    return [without_logprobs(item) for body in bodies for item in orjson.loads(body)["output"]]


def without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    """Return an output item without its log-probabilities, which are many times larger than its text."""
    if item["type"] != "message":
        return item
    return item | {"content": [part | {"logprobs": []} for part in item["content"]]}


def _call(item: Any) -> dict[str, Any]:
    return {"type": item.type, "status": "completed", "call_id": item.call_id}


def _namespace(item: Any) -> dict[str, Any]:
    return {"namespace": item.namespace} if item.namespace else {}


def _part(part: Any) -> dict[str, Any]:
    return {"type": part.type, "text": part.text}
