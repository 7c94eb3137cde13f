"""``/openapi.json``, and what it promises."""

import json
import re

import httpx
import pytest


@pytest.fixture(scope="module")
def document(deployment):
    return httpx.get(f"{deployment.url}/openapi.json").json()


def test_every_reference_leads_somewhere(document):
    references = re.findall(r'"\$ref": "([^"]+)"', json.dumps(document))
    schemas = document["components"]["schemas"]
    assert len(references) > 20
    assert {reference.removeprefix("#/components/schemas/") for reference in references} <= set(schemas)


def test_every_error_is_openais_or_anthropics(document, deployment):
    for name, path in document["paths"].items():
        error = "/AnthropicError" if name.startswith("/v1/messages") else "/Error"
        for operation in path.values():
            assert "422" not in operation["responses"]
            assert operation["responses"]["default"]["content"]["application/json"]["schema"]["$ref"].endswith(error)
    wrong = deployment.complete(prompt=7)
    required = document["components"]["schemas"]["Error"]["properties"]["error"]["required"]
    assert set(wrong.json()["error"]) == set(required)


@pytest.mark.parametrize(
    ("path", "methods"), [("/v1/files", "GET, POST"), ("/v1/files/file-1", "DELETE, GET"), ("/v1/batches", "GET, POST")]
)
def test_a_method_that_is_not_taken_is_told_which_are(deployment, path, methods):
    answer = httpx.put(deployment.url + path)
    assert (answer.status_code, answer.headers["allow"]) == (405, methods)


def test_an_order_that_is_none_is_refused(deployment):
    answer = httpx.get(f"{deployment.url}/v1/files?order=")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "order")
