"""Unknown parameters with lists and objects, in all parts of a request that are echoed or stored."""

import httpx
import pytest

from tests.gateway.deployment import PATIENCE_S

MOOD = {"mood": {"a": [1]}, "moods": [1], "no_mood": {}, "no_moods": []}
CUSTOM = {"type": "custom", "name": "draw"}
SHELL_CALL = {"type": "local_shell_call", "call_id": "a", "action": {"type": "exec", "command": ["ls"], **MOOD}}
SHELL_OUTPUT = {"type": "local_shell_call_output", "id": "a", "output": "x"}
USER = {"role": "user", "content": "Hi"}


def get(deployment, path: str) -> httpx.Response:
    return httpx.get(deployment.url + path, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    "body",
    [
        {"input": [SHELL_CALL, SHELL_OUTPUT, USER]},
        {"text": {"format": {"type": "text", **MOOD}}},
        {"tools": [CUSTOM | MOOD]},
        {"tools": [CUSTOM | {"format": {"type": "text", **MOOD}}]},
        {"tools": [CUSTOM], "tool_choice": CUSTOM | MOOD},
        {"tools": [{"type": "namespace", "name": "n", "tools": [CUSTOM | MOOD], "description": "x", **MOOD}]},
    ],
)
def test_a_response_echoes_and_stores_only_known_parameters(qwen, body):
    response = qwen.post("/v1/responses", {"input": "Hi", "max_output_tokens": 3} | body)
    assert response.status_code == 200, response.text
    stored = get(qwen, f"/v1/responses/{response.json()['id']}")
    assert stored.json()["status"] in ("completed", "incomplete")
    assert "mood" not in stored.text
    assert "mood" not in get(qwen, f"/v1/responses/{response.json()['id']}/input_items").text


def test_a_stored_chat_has_only_known_parameters(qwen):
    parts = [{"type": "text", "text": "Hi", **MOOD}]
    response = qwen.chat(messages=[{"role": "user", "content": parts, **MOOD}], store=True)
    assert response.status_code == 200, response.text
    [message] = get(qwen, f"/v1/chat/completions/{response.json()['id']}/messages").json()["data"]
    assert message["content_parts"] == [{"type": "text", "text": "Hi"}]
    assert "mood" not in message


def test_a_conversation_has_only_known_parameters(qwen):
    response = qwen.post("/v1/conversations", {"items": [SHELL_CALL]})
    assert response.status_code == 200, response.text
    assert "mood" not in get(qwen, f"/v1/conversations/{response.json()['id']}/items").text
