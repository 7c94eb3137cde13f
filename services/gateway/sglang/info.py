"""The endpoints of SGLang that describe the server, with the members that trainers read."""

from typing import Any

from fastapi import Request, Response

from services.common.errors import TokaError
from services.common.keys import ADMIN
from services.gateway.engine.each_scheduler import call_all, call_each
from services.gateway.http.errors import response
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.other import server_version
from services.gateway.openai.router import Router
from tokasaurus.scheduler.v1 import control_pb2, observe_pb2

_SINCE, _SINCE_WEIGHTS = "1.0", "1.12"  # versions of the contract

router = Router()
operators_router = Router(scope=ADMIN)


@router.get("/model_info")
@router.get("/get_model_info")
async def model_info(request: Request) -> Response:
    """Return the model and the version of its weights, as SGLang does."""
    return response(200, await _model(request.app.state.gateway))


@router.get("/server_info")
@router.get("/get_server_info")
async def server_info(request: Request) -> Response:
    """Return the model and the number of workers, as SGLang does.

    ``num_gpus`` is the number of workers of all schedulers, on CPUs too. ``vllm_config`` says, as vLLM does, that the
    server has no engine of vLLM for weights.
    """
    gateway: Gateway = request.app.state.gateway
    schedulers, workers = await _weights(gateway)
    return response(
        200,
        await _model(gateway)
        | {
            "context_length": (await gateway.fleet.model(None)).max_context_tokens,
            "dp_size": schedulers,
            "num_gpus": workers,
            "version": server_version(),
            "vllm_config": {"weight_transfer_config": None},
        },
    )


@operators_router.get("/v1/loads")
async def loads(request: Request) -> Response:
    """Return the numbers of requests at each scheduler, as SGLang does. The parameter ``include`` has no effect."""
    fleet = request.app.state.gateway.fleet
    found = await call_all(fleet.replicas, lambda stub: stub.GetLoad, observe_pb2.GetLoadRequest(), since=_SINCE)
    by_rank = [
        {
            "dp_rank": rank,
            "num_running_reqs": each.load.running_sequences,
            "num_waiting_reqs": each.load.waiting_sequences + each.load.parked_sequences,
            "num_total_reqs": each.load.running_sequences + each.load.waiting_sequences + each.load.parked_sequences,
        }
        for rank, each in enumerate(found)
    ]
    return response(200, {"dp_rank_count": len(by_rank), "loads": by_rank})


async def _model(gateway: Gateway) -> dict[str, Any]:
    facts = await gateway.fleet.model(None)
    request = control_pb2.GetWeightsRequest()
    found = await call_each(gateway.fleet.replicas, lambda stub: stub.GetWeights, request, since=_SINCE_WEIGHTS)
    versions = [each.weights.version for each in found if not isinstance(each, TokaError)]
    return {
        "model_path": facts.root or facts.id,
        "served_model_name": facts.id,
        "tokenizer_path": facts.root or facts.id,
        "is_generation": True,
        "weight_version": next(iter(versions), ""),  # of the first that is connected
    }


async def _weights(gateway: Gateway) -> tuple[int, int | None]:
    """Return the number of schedulers, and that of their workers, or None if a scheduler cannot say it."""
    request = control_pb2.GetWeightsRequest()
    found = await call_each(gateway.fleet.replicas, lambda stub: stub.GetWeights, request, since=_SINCE_WEIGHTS)
    ranks = [len(each.ranks) for each in found if not isinstance(each, TokaError)]
    return len(found), sum(ranks) if len(ranks) == len(found) else None
