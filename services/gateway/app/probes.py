"""``/health``, ``/ready``, ``/ping`` and ``/metrics``: for supervisors and dashboards."""

from fastapi import Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from services.gateway.http.errors import response
from services.gateway.openai.gateway import Gateway


async def health() -> Response:
    """This process answers, whatever the schedulers do."""
    return response(200, {"status": "ok"})


async def ping() -> Response:
    """The shortest answer there is."""
    return Response("pong", media_type="text/plain")


async def ready(request: Request) -> Response:
    """200 when a request sent now would be served; else 503 and the reason."""
    gateway: Gateway = request.app.state.gateway
    reason = gateway.fleet.trouble
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
    document = {"ready": not reason, "reason": reason or None, "replicas": replicas}
    return response(503 if reason else 200, document, {"retry-after": "1"} if reason else None)


async def metrics(request: Request) -> Response:
    """Prometheus text."""
    gateway: Gateway = request.app.state.gateway
    return Response(generate_latest(gateway.registry), media_type=CONTENT_TYPE_LATEST)
