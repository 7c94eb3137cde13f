"""``/health``, ``/health_generate``, ``/ready``, ``/ping`` and ``/metrics``: for supervisors and dashboards."""

import asyncio
from collections.abc import Iterator

from fastapi import Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.common.keys import ADMIN
from services.gateway.http.errors import response
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.router import Router

METRICS = "/metrics"

router = Router(scope=None)
metrics_router = Router(scope=ADMIN)


@router.get("/health")
async def health() -> Response:
    """Return 200 while this process answers, whatever the schedulers do."""
    return response(200, {"status": "ok"})


@router.get("/health_generate")
async def health_generate(request: Request) -> Response:
    """Return 200 if the gateway can serve a request now, else 503, under SGLang's name. Nothing is generated."""
    return await ready(request)


@router.get("/ping", response_class=PlainTextResponse)
async def ping() -> Response:
    """Return ``pong``."""
    return Response("pong", media_type="text/plain")


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Return 200 if the gateway can serve a request now, else 503. Only operators get the reason."""
    gateway: Gateway = request.app.state.gateway
    reason = gateway.fleet.trouble
    status, headers = (503, {"retry-after": "1"}) if reason else (200, None)
    if not (request.app.state.for_operators or gateway.guard.tells_all(request.scope)):
        hint = "not ready; operators are told why" if reason else None
        return response(status, {"ready": not reason, "reason": hint}, headers)
    replicas = [
        {
            "address": replica.address,
            "scheduler_id": replica.scheduler_id,
            "model": replica.model.id if replica.model else None,
            "ready": replica.ready,
            "reason": replica.trouble or None,
        }
        for replica in gateway.fleet.replicas
    ]
    return response(status, {"ready": not reason, "reason": reason or None, "replicas": replicas}, headers)


@metrics_router.get(METRICS, response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Return the metrics as Prometheus text. Streams of other requests continue while the text is written."""
    gateway: Gateway = request.app.state.gateway
    texts = []
    for family in list(gateway.registry.collect()):
        texts.append(generate_latest(_Family(family)))
        await asyncio.sleep(0)
    return Response(b"".join(texts), media_type=CONTENT_TYPE_LATEST)


class _Family(Collector):
    """A family of metrics that is already collected."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family
