"""The application without schedulers: its document, its paths, and what happens when something in it is broken."""

from dataclasses import replace

import httpx
import pytest

from services.common.config import GatewayConfig
from services.gateway.app.app import make_app
from services.gateway.app.routes import CLIENT_ROUTERS
from services.gateway.batch.requests import BATCHABLE
from services.gateway.batch.service import BatchService
from services.gateway.console.observer import Observer
from services.gateway.engine.session import Timings
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.schemas import ChatBody, CompletionBody

GENERATE = ("/v1/completions", "/v1/chat/completions")
BODY = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}


@pytest.fixture
def gateway():
    made = Gateway.make(GatewayConfig(), Timings(wait_for_ready=0.0))
    yield made
    made.text.stop()


def client(gateway: Gateway, observer: Observer) -> httpx.AsyncClient:
    app = make_app(gateway, BatchService(gateway), observer)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://gateway")


def responses(gateway: Gateway) -> dict[tuple[str, str], float]:
    """``toka_http_requests`` by route and status."""
    samples = [sample for family in gateway.metrics.families("m") for sample in family.samples]
    counts = [sample for sample in samples if sample.name == "toka_http_requests_total"]
    return {tuple(sample.labels.values()): sample.value for sample in counts}


async def test_the_document_describes_the_bodies(gateway):
    async with client(gateway, Observer(gateway.fleet)) as asking:
        paths = (await asking.get("/openapi.json")).json()["paths"]
    assert set(gateway.metrics.routes) == {path.replace("{model_id}", "{model_id:path}") for path in paths}
    for path, kind in zip(GENERATE, (CompletionBody, ChatBody), strict=True):
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert set(kind.model_fields) <= set(schema["properties"])


def test_the_endpoints_of_batches_are_served_over_http():
    served = [route.path for router in CLIENT_ROUTERS for route in router.routes if "POST" in route.methods]
    assert list(BATCHABLE) == [*GENERATE, "/v1/responses"]
    assert set(BATCHABLE) <= set(served)


@pytest.mark.parametrize("path", GENERATE)
async def test_every_response_is_counted_by_route_and_status(gateway, path):
    async with client(gateway, Observer(gateway.fleet)) as asking:
        statuses = [
            (await asking.post(path, json=BODY)).status_code,
            (await asking.post(path, content=b"{", headers={"content-type": "application/json"})).status_code,
            (await asking.put(path)).status_code,
            (await asking.post(path + "/", json=BODY)).status_code,
            (await asking.get("/health")).status_code,
            (await asking.head("/health")).status_code,
        ]
    assert statuses == [503, 400, 405, 404, 200, 200]
    counted = {(path, "503"): 1, (path, "400"): 1, (path, "405"): 1, ("other", "404"): 1, ("/health", "200"): 2}
    assert responses(gateway) == counted


@pytest.mark.parametrize("path", [*GENERATE, "/ready"])
async def test_a_defect_is_an_error_in_the_same_form_and_its_cause_stays_here(gateway, path):
    async with client(replace(gateway, fleet=None), Observer(gateway.fleet)) as asking:
        answer = await (asking.get(path) if path == "/ready" else asking.post(path, json=BODY))
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert (error["type"], error["message"]) == ("server_error", "internal error; the server's log has the details")
    assert responses(gateway) == {(path, "500"): 1}
