"""Endpoints for trainers. They concern the requests of all clients, so they need the scope ``admin``."""

from typing import Annotated, Any, Literal

from fastapi import Request, Response
from pydantic import Field

from services.common.errors import InvalidRequest, TokaError, UnsupportedParameter
from services.common.keys import ADMIN
from services.gateway.http.errors import response
from services.gateway.http.request import while_connected
from services.gateway.openai.body import Body, optional
from services.gateway.openai.parse import ignored_header
from services.gateway.openai.router import Router, parameters, takes
from services.gateway.rollout import control
from services.gateway.rollout.request import MODES, gateway_of, read_mode, read_optional
from services.gateway.rollout.safetensors_body import SafetensorsBody

_ID = "The id of a completion, or the x-request-id of a response whose request had none,"
_MOST_IDS = 4096  # of requests to abort
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_CHECKSUMS = {"name": "checksums", "in": "query", "schema": {"type": "boolean", "default": False}}
_UPLOAD = parameters(
    {
        "name": "weight_version",
        "in": "query",
        "required": True,
        "schema": {"type": "string", "maxLength": 256, "description": "Name of the new weights."},
    },
    {
        "name": "abort_all_requests",
        "in": "query",
        "schema": {"type": "boolean", "default": False, "description": "End running requests with their tokens."},
    },
) | takes({"type": "string", "format": "binary"}, "application/octet-stream")
_PAUSE_QUERY = parameters(
    {"name": "mode", "in": "query", "schema": {"type": "string", "enum": [*MODES], "default": "abort"}},
    {"name": "clear_cache", "in": "query", "schema": {"type": "boolean", "default": True}},
)

SglangMode = Literal["abort", "retract", "in_place"]
# SGLang's modes as (mode, recompute).
_SGLANG_MODES: dict[SglangMode, tuple[control.PauseMode, bool]] = {
    "abort": ("abort", False),
    "retract": ("keep", True),
    "in_place": ("keep", False),
}


class PauseGenerationBody(Body):
    """``POST /pause_generation``, which may have no body."""

    mode: SglangMode = Field(
        default="abort",
        description="abort: end all requests with their tokens. in_place: stop them where they are. retract: as"
        " in_place, and compute their tokens again when generation continues.",
    )


class AbortRequestBody(Body):
    """``POST /abort_request``."""

    rid: str = Field(default="", description=f"{_ID} to abort.")
    abort_all: bool = Field(default=False, description="true: abort all requests.")


class AbortRequestsBody(Body):
    """``POST /abort_requests``, which may have no body."""

    request_ids: Annotated[
        list[str],
        Field(
            max_length=_MOST_IDS,
            default_factory=list,
            description=f"{_ID} for each request to abort. Empty: all requests.",
        ),
    ]


class UpdateWeightsBody(Body):
    """``POST /update_weights_from_disk``."""

    model_path: str = Field(
        min_length=1,
        max_length=4096,
        description="A directory on the workers' hosts with safetensors files, inside of weight_directories.",
    )
    weight_version: str | None = optional("The name of the new weights, of 1 to 256 characters. Default: model_path.")
    abort_all_requests: bool = Field(
        default=False,
        description="true: end all requests with their tokens. false: they continue with the new weights.",
    )


router = Router(scope=ADMIN)


@router.post("/pause", openapi_extra=_PAUSE_QUERY)
async def pause(request: Request) -> Response:
    """Stop all computation, as vLLM does. New requests wait until ``/resume``.

    ``mode=abort`` ends accepted requests with their tokens and the finish reason ``abort``, ``wait`` lets them finish,
    and ``keep`` stops them where they are. Later requests do not use the prefix cache from before the pause, unless
    ``clear_cache`` is false.
    """
    mode, clear_cache = read_mode(request), _read_flag(request, "clear_cache", default=True)
    fleet = gateway_of(request).fleet
    aborted = await while_connected(request.receive, control.pause(fleet, mode))
    if clear_cache:
        await control.reset_prefix_cache(fleet)
    return response(200, {"status": "paused", "aborted_samples": aborted})


@router.post("/resume")
async def resume(request: Request) -> Response:
    """Continue after ``/pause``."""
    await control.resume(gateway_of(request).fleet)
    return response(200, {"status": "resumed"})


@router.get("/is_paused")
async def is_paused(request: Request) -> Response:
    """Return whether all schedulers are paused. A scheduler that has restarted is not."""
    return response(200, {"is_paused": await control.is_paused(gateway_of(request).fleet)})


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Compute the prompts of later requests again, instead of reading the prefix cache. Running requests continue."""
    return response(200, {"freed_pages": await control.reset_prefix_cache(gateway_of(request).fleet)})


@router.post("/abort_requests", openapi_extra=takes(AbortRequestsBody.model_json_schema()))
async def abort_requests(request: Request) -> Response:
    """End requests with their tokens and the finish reason ``abort``, as vLLM does. Unknown ids are ignored."""
    body = await read_optional(request, AbortRequestsBody)
    samples = await control.abort(gateway_of(request).fleet, body.request_ids)
    return response(200, {"samples": samples}, ignored_header(body))


@router.post("/pause_generation", openapi_extra=takes(PauseGenerationBody.model_json_schema()))
async def pause_generation(request: Request) -> Response:
    """Stop all computation, as SGLang does."""
    body = await read_optional(request, PauseGenerationBody)
    mode, recompute = _SGLANG_MODES[body.mode]
    pausing = control.pause(gateway_of(request).fleet, mode, recompute=recompute)
    await while_connected(request.receive, pausing)
    return response(200, {"status": "ok", "message": "generation is paused"}, ignored_header(body))


@router.post("/continue_generation")
async def continue_generation(request: Request) -> Response:
    """Continue after ``/pause_generation``, as SGLang does."""
    await control.resume(gateway_of(request).fleet)
    return response(200, {"status": "ok", "message": "generation continues"})


@router.post("/flush_cache")
@router.get("/flush_cache")
async def flush_cache(request: Request) -> Response:
    """Compute the prompts of later requests again, as SGLang does."""
    freed = await control.reset_prefix_cache(gateway_of(request).fleet)
    return response(200, {"status": "ok", "message": f"the prefix cache is empty: {freed} pages are free again"})


@router.post("/abort_request", openapi_extra=takes(AbortRequestBody.model_json_schema()))
async def abort_request(request: Request) -> Response:
    """End a request with its tokens and the finish reason ``abort``, as SGLang does. An unknown id is ignored."""
    body = await read_optional(request, AbortRequestBody)
    if not body.rid and not body.abort_all:
        raise InvalidRequest("name the request to abort, or set abort_all to true", field="rid")
    ids = [] if body.abort_all else [body.rid]
    return response(200, {"samples": await control.abort(gateway_of(request).fleet, ids)}, ignored_header(body))


@router.post("/update_weights_from_disk", openapi_extra=takes(UpdateWeightsBody.model_json_schema()))
async def update_weights_from_disk(request: Request) -> Response:
    """Replace the weights of all workers between two steps, as SGLang does.

    If the new weights do not fit the model, nothing changes, and the error names the tensor. The prefix cache is empty
    afterwards. Choices name the ``weights`` that generated their tokens.
    """
    body = await read_optional(request, UpdateWeightsBody)
    mode: control.PauseMode = "abort" if body.abort_all_requests else "keep"
    fleet = gateway_of(request).fleet
    updating = control.update_weights(fleet, body.model_path, body.weight_version, mode)
    version = await while_connected(request.receive, updating)
    return response(200, updated(version), ignored_header(body))


@router.put("/weights", openapi_extra=_UPLOAD)
async def put_weights(request: Request) -> Response:
    """Replace the weights of all workers by the safetensors file in the body, as ``/update_weights_from_disk`` does.

    The body is forwarded while it arrives, so it may be larger than ``max_body_bytes``. If the client disconnects
    before the end of the body, nothing changes. If it disconnects later, the update continues.
    """
    version = request.query_params.get("weight_version", "")
    mode: control.PauseMode = "abort" if _read_flag(request, "abort_all_requests", default=False) else "keep"
    if not version:
        raise InvalidRequest("name the new weights: PUT /weights?weight_version=NAME", field="weight_version")
    body = SafetensorsBody(aiter(request.stream()))
    try:
        version = await control.upload_weights(gateway_of(request).fleet, body.messages(version), mode)
    except TokaError:
        if body.began or "expect" not in request.headers:  # a client that expects 100 Continue has sent nothing
            await body.discard()
        raise
    return response(200, updated(version))


@router.post("/update_weights_from_tensor")
async def update_weights_from_tensor(request: Request) -> Response:
    """Return an error: SGLang's bodies hold Python pickles. Use ``/update_weights_from_distributed``."""
    await SafetensorsBody(aiter(request.stream())).discard()
    raise UnsupportedParameter(
        "/update_weights_from_tensor is not supported: its tensors are Python pickles, which can run code and are not"
        " read here; broadcast them and call /update_weights_from_distributed, share them by CUDA IPC and call"
        " /update_weights with ipc_handles, send a safetensors file to"
        " PUT /weights?weight_version=NAME, call UploadWeights over gRPC, or write the file where the workers can read"
        " it and call /update_weights_from_disk"
    )


@router.get("/get_weight_version")
async def get_weight_version(request: Request) -> Response:
    """Return the version of the weights of the first scheduler, as SGLang does. Empty: those of the start."""
    [first, *_] = await control.read_weights(gateway_of(request).fleet, checksums=False)
    return response(200, {"weight_version": first["version"]})


@router.get("/weights", openapi_extra=parameters(_CHECKSUMS))
async def get_weights(request: Request) -> Response:
    """Return version and directory of the weights of each scheduler, and checksums of all tensors if asked."""
    checksums = _read_flag(request, "checksums", default=False)
    return response(200, {"schedulers": await control.read_weights(gateway_of(request).fleet, checksums=checksums)})


def updated(version: str) -> dict[str, Any]:
    """Return the response after an update of the weights."""
    return {"success": True, "message": f"all workers have the weights {version}", "weight_version": version}


def _read_flag(request: Request, name: str, *, default: bool) -> bool:
    given = request.query_params.get(name)
    if given is None:
        return default
    if given.lower() not in _BOOLEANS:
        raise InvalidRequest(f"{name} is {given[:100]!r}: expected true or false", field=name)
    return _BOOLEANS[given.lower()]
