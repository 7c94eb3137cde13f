"""Grammars that are too large, too deep, or too often there: refused by name, and nobody else waits for it."""

import json

from tests.gateway.deployment import eventually

DEEP = 900  # levels: more than Python's own recursion takes, less than what a body may have
NUMBERS = b"[" + b"1e200," * 100_000 + b"1]"  # more than a scheduler takes once it is written out
SAY = b'"messages": [{"role": "user", "content": "x"}]'


def nested(levels: int) -> bytes:
    return b'{"not": ' * levels + b"{}" + b"}" * levels


def refused(response, param: str, part: str) -> None:
    assert response.status_code == 400, response.text[:300]
    error = response.json()["error"]
    assert (error["param"], part in error["message"]) == (param, True), error


def tool(parameters: str | bytes, *, strict: bytes = b"false") -> bytes:
    parameters = parameters if isinstance(parameters, bytes) else parameters.encode()
    return b'{"type": "function", "function": {"name": "f", "strict": %b, "parameters": %b}}' % (strict, parameters)


def test_a_text_of_many_lines_is_read_in_one_pass(deployment):
    for grammar in ("\n" * 200_000, " \n" * 100_000, "a" * 200_000, "a" + " " * 200_000 + "\n" * 20_000):
        refused(deployment.complete(prompt="x", guided_grammar=grammar), "guided_grammar", "grammar")
    assert deployment.complete(prompt="x", guided_grammar='\n\n  root ::= "a"').json()["choices"][0]["text"] == "a"


def test_a_large_schema_is_refused_by_its_name_before_it_is_written_out(deployment):
    schema = b'{"enum": %b}' % NUMBERS
    ways = {
        "guided_json": schema,
        "structured_outputs.json": schema,
        "guided_choice": json.dumps(["x" * 1000] * 300).encode(),
        "structured_outputs.choice": json.dumps(["x" * 1000] * 300).encode(),
    }
    for param, value in ways.items():
        name, _, inner = param.partition(".")
        given = b'{"%b": %b}' % (inner.encode(), value) if inner else value
        refused(
            deployment.post("/v1/completions", b'{"prompt": "x", "%b": %b}' % (name.encode(), given)), param, "262144"
        )
    form = b'"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": %b}}' % schema
    refused(
        deployment.post("/v1/chat/completions", b"{%b, %b}" % (SAY, form)),
        "response_format.json_schema.schema",
        "262144",
    )
    text = b'{"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": %b}}}' % schema
    refused(deployment.post("/v1/responses", text), "text.format.schema", "262144")


def test_large_tools_are_refused_by_their_name(qwen):
    large = tool(b'{"x": %b}' % NUMBERS)
    refused(
        qwen.post("/v1/chat/completions", b'{%b, "tools": [%b]}' % (SAY, large)),
        "tools[0].function.parameters",
        "262144",
    )
    half = json.dumps({"properties": {"x": {"enum": ["y" * 150_000]}}})
    tools = b", ".join(tool(half, strict=b"true").replace(b'"f"', b'"f%d"' % number) for number in range(2))
    body = b'{%b, "tools": [%b], "truncate_prompt_tokens": 9}' % (SAY, tools)
    refused(qwen.post("/v1/chat/completions", body), "tools", "262144")


def test_a_deep_schema_is_refused_by_its_name(qwen):
    deep = nested(DEEP)
    ways = {
        "guided_json": b'"guided_json": %b' % deep,
        "structured_outputs.json": b'"structured_outputs": {"json": %b}' % deep,
        "response_format.json_schema.schema": b'"response_format": {"type": "json_schema", "json_schema":'
        b' {"name": "x", "schema": %b}}' % deep,
    }
    for param, way in ways.items():
        refused(qwen.post("/v1/chat/completions", b"{%b, %b}" % (SAY, way)), param, "200 levels")
        refused(qwen.post("/v1/completions", b'{"prompt": "x", %b}' % way), param, "200 levels")


def test_a_deep_schema_as_text_or_of_a_tool_is_refused_by_its_name(qwen):
    text = nested(DEEP).decode()  # of what a model says that may think before it
    refused(qwen.chat(guided_json=text), "guided_json", "200 levels")
    for strict in (b"true", b"false"):
        body = b'{%b, "tools": [%b], "tool_choice": "required"}' % (SAY, tool(nested(DEEP), strict=strict))
        refused(qwen.post("/v1/chat/completions", body), "tools[0].function.parameters", "200 levels")


def test_what_is_nested_less_is_followed(deployment):
    schema: dict = {"const": 1}
    for _ in range(20):
        schema = {"type": "array", "prefixItems": [schema], "minItems": 1, "maxItems": 1}
    response = deployment.complete(prompt="x", guided_json=schema, max_tokens=1000)
    assert response.status_code == 200, response.text


def test_a_large_grammar_for_many_choices_is_refused(deployment):
    texts = [f"{number:066}" for number in range(3400)]
    refused(deployment.complete(prompt=["a"] * 1000, guided_choice=texts), "guided_choice", "1000 choices")
    refused(deployment.complete(prompt="a", n=100, guided_choice=texts), "guided_choice", "100 choices")
    response = deployment.complete(prompt=["a", "b"], guided_choice=texts, max_tokens=100)
    assert response.status_code == 200, response.text
    assert {choice["text"] for choice in response.json()["choices"]} <= set(texts)


def test_many_prompts_with_one_grammar_lose_no_scheduler(deployment):
    texts = [f"{number:066}" for number in range(220)]  # of 15 KB: as much as there may be
    response = deployment.complete(prompt=["a"] * 1000, guided_choice=texts, max_tokens=2)
    assert response.status_code == 200, response.text
    eventually(lambda: deployment.metric("toka_num_requests_running") == 0)
