"""Endpoints for trainers that broadcast weights, under the names of SGLang and vLLM. They need the scope ``admin``."""

from datetime import UTC, datetime
from typing import Annotated, ClassVar, Literal

from fastapi import Request, Response
from pydantic import Field, Tag, model_validator

from services.common.boundaries import undo_on_error_async
from services.common.errors import InvalidRequest, UnsupportedParameter
from services.common.keys import ADMIN
from services.common.request_bounds import MAX_GROUP_HOST, MAX_GROUP_NAME, MAX_GROUP_RANKS, MAX_GROUP_SECONDS
from services.gateway.http.errors import response
from services.gateway.http.request import while_connected
from services.gateway.openai.body import Body, optional
from services.gateway.openai.parse import ignored_header
from services.gateway.openai.router import Router, takes
from services.gateway.rollout import broadcast, control, ipc
from services.gateway.rollout.request import gateway_of, read_optional
from services.gateway.rollout.routes import updated
from services.gateway.rollout.tensors import DtypeNames, Names, Shapes, described
from tokasaurus.common.v1 import weights_pb2

_NAME = "weight_update_group"  # SGLang's default
_VLLM_NAME = "weight_transfer"  # vLLM has one group without a name
_VERSION = "The name of the new weights, of 1 to 256 characters. Default: the time."

GroupName = Annotated[str, Field(min_length=1, max_length=MAX_GROUP_NAME, description="Name of the group.")]


class GroupBody(Body):
    """The process group of a trainer, as ``init_info`` of vLLM has it."""

    master_address: str = Field(min_length=1, max_length=MAX_GROUP_HOST, description="Host of the trainer's TCPStore.")
    master_port: int = Field(ge=1, le=65535, description="Its port.")
    rank_offset: int = Field(ge=1, le=MAX_GROUP_RANKS, description="Rank of the first worker. The trainer has rank 0.")
    world_size: int = Field(ge=2, le=MAX_GROUP_RANKS, description="Number of processes, with the trainer.")
    group_name: GroupName = _VLLM_NAME
    backend: Literal["gloo", "nccl"] | None = optional("Default: nccl if the workers compute on CUDA, otherwise gloo.")
    timeout_seconds: float | None = Field(
        default=None,
        gt=0,
        le=MAX_GROUP_SECONDS,
        description="Longest time to form the group, and without a tensor during a call. Default: 300.",
    )

    def message(self) -> weights_pb2.UpdateGroup:
        """Return the group as a message to schedulers."""
        message = weights_pb2.UpdateGroup(
            name=self.group_name,
            backend=self.backend,
            master_address=self.master_address,
            master_port=self.master_port,
            first_rank=self.rank_offset,
            world_size=self.world_size,
        )
        if self.timeout_seconds is not None:
            message.timeout_ns = round(self.timeout_seconds * 1e9)
        return message


class InitWeightsUpdateGroupBody(GroupBody):
    """``POST /init_weights_update_group``."""

    group_name: GroupName = _NAME


class DestroyWeightsUpdateGroupBody(Body):
    """``POST /destroy_weights_update_group``."""

    group_name: GroupName = _NAME


class UpdateFromDistributedBody(Body):
    """``POST /update_weights_from_distributed``."""

    names: Names
    dtypes: list[str] = Field(description="Dtypes of the same tensors, as torch names them: bfloat16, float32, ...")
    shapes: Shapes
    group_name: GroupName = _NAME
    load_format: Literal["flattened_bucket"] | None = optional(
        "flattened_bucket: rank 0 broadcasts the bytes of all tensors, one after the other, as one tensor."
    )
    weight_version: str | None = optional(_VERSION)
    abort_all_requests: bool = Field(
        default=False,
        description="true: end all requests with their tokens. false: they continue with the new weights.",
    )


class InitWeightTransferBody(Body):
    """``POST /init_weight_transfer_engine``."""

    nested: ClassVar[tuple[str, ...]] = ("init_info",)

    init_info: Annotated[
        Annotated[ipc.IpcInitInfo, Tag("#ipc")] | Annotated[GroupBody, Tag("#group")], ipc.by_backend()
    ] = Field(description="The process group. Empty, or with the backend ipc: tensors will come from shared memory.")


class UpdateInfo(Body):
    """``update_info`` of ``POST /update_weights``."""

    names: Names
    dtype_names: DtypeNames
    shapes: Shapes
    group_name: GroupName = _VLLM_NAME
    packed: bool = Field(default=False, description="Must be false: rank 0 broadcasts each tensor as it is.")


class VllmUpdateBody(Body):
    """``POST /update_weights``."""

    nested: ClassVar[tuple[str, ...]] = ("update_info",)

    update_info: (
        Annotated[
            Annotated[ipc.IpcUpdateInfo, Tag("#ipc")] | Annotated[UpdateInfo, Tag("#group")],
            ipc.by_backend("ipc_handles", "ipc_handles_pickled"),
        ]
        | None
    ) = optional("The tensors. With ipc_handles, workers copy them out of memory that the trainer shares.")
    weight_dir: Annotated[str, Field(min_length=1, max_length=4096)] | None = optional(
        "prime-rl's parameter: a directory, as model_path of /update_weights_from_disk."
    )

    @model_validator(mode="after")
    def _has_one_source(self) -> "VllmUpdateBody":
        if (self.update_info is None) == (self.weight_dir is None):
            raise ValueError("update_info: send either update_info or weight_dir")
        return self


class StartUpdateBody(Body):
    """``POST /start_weight_update``, which may have no body."""

    is_checkpoint_format: bool = Field(
        default=True, description="Must be true: tensors have the names and shapes of a checkpoint."
    )
    group_name: GroupName = _VLLM_NAME
    backend: Literal["ipc"] | None = optional("ipc: tensors will come from shared memory, and not from the group.")


class FinishUpdateBody(Body):
    """``POST /finish_weight_update``, which may have no body."""

    weight_version: str | None = optional(_VERSION)


router = Router(scope=ADMIN)


@router.post("/init_weights_update_group", openapi_extra=takes(InitWeightsUpdateGroupBody.model_json_schema()))
async def init_weights_update_group(request: Request) -> Response:
    """Make all workers join a process group of the trainer, as SGLang does. Their ranks begin with ``rank_offset``.

    The response is sent when all processes have joined, so make the group in the trainer meanwhile.
    """
    body = await read_optional(request, InitWeightsUpdateGroupBody)
    count = await while_connected(request.receive, broadcast.join(gateway_of(request).fleet, body.message()))
    message = f"{count} workers are in the group {body.group_name}"
    return response(200, {"success": True, "message": message}, ignored_header(body))


@router.post("/destroy_weights_update_group", openapi_extra=takes(DestroyWeightsUpdateGroupBody.model_json_schema()))
async def destroy_weights_update_group(request: Request) -> Response:
    """Make all workers leave a process group, as SGLang does. An unfinished update is forgotten."""
    body = await read_optional(request, DestroyWeightsUpdateGroupBody)
    left = await broadcast.leave(gateway_of(request).fleet, body.group_name)
    message = f"the workers left the group {body.group_name}" if left else f"no worker is in {body.group_name}"
    return response(200, {"success": True, "message": message}, ignored_header(body))


@router.post("/update_weights_from_distributed", openapi_extra=takes(UpdateFromDistributedBody.model_json_schema()))
async def update_weights_from_distributed(request: Request) -> Response:
    """Receive tensors that rank 0 of a group broadcasts, and replace the weights when all have arrived.

    Unlike SGLang, it changes no weights before every tensor of the model has arrived, in this call and those before it.
    After an error nothing changes, the error names the tensor, and the group is closed.
    """
    body = await read_optional(request, UpdateFromDistributedBody)
    fleet = gateway_of(request).fleet
    async with undo_on_error_async(broadcast.leave, fleet, body.group_name):  # the trainer may send the tensors
        tensors = described(body.names, body.dtypes, body.shapes, "dtypes")
    flat = body.load_format is not None
    bucket = broadcast.Bucket(body.group_name, tensors, flat, body.weight_version or "")
    version, mode = _version(body.weight_version), _mode(abort=body.abort_all_requests)
    receiving = broadcast.receive_and_commit(fleet, bucket, version, mode)
    if (missing := await while_connected(request.receive, receiving)) is None:
        return response(200, updated(version), ignored_header(body))
    message = f"{len(tensors)} tensors have arrived, {missing[0]} are missing, e.g. {missing[1]}"
    return response(200, {"success": True, "message": message, "missing": missing[0]}, ignored_header(body))


@router.get("/get_world_size")
async def get_world_size(request: Request) -> Response:
    """Return the number of workers of all schedulers, as vLLM does."""
    return response(200, {"world_size": sum(await broadcast.count_workers(gateway_of(request).fleet))})


@router.post("/init_weight_transfer_engine", openapi_extra=takes(InitWeightTransferBody.model_json_schema()))
async def init_weight_transfer_engine(request: Request) -> Response:
    """Do the same as ``/init_weights_update_group``, with vLLM's body. With the backend ``ipc``, begin an update."""
    body = await read_optional(request, InitWeightTransferBody)
    info, fleet = body.init_info, gateway_of(request).fleet
    joining = ipc.begin(fleet) if isinstance(info, ipc.IpcInitInfo) else broadcast.join(fleet, info.message())
    await while_connected(request.receive, joining)
    return response(200, {"message": "Weight transfer initialized"}, ignored_header(body))


@router.post("/start_weight_update", openapi_extra=takes(StartUpdateBody.model_json_schema()))
async def start_weight_update(request: Request) -> Response:
    """Begin an update, as vLLM does. An unfinished update is forgotten."""
    body = await read_optional(request, StartUpdateBody)
    if not body.is_checkpoint_format:
        raise UnsupportedParameter(
            "only tensors with the names and shapes of a checkpoint are read; send true", field="is_checkpoint_format"
        )
    fleet = gateway_of(request).fleet
    beginning = broadcast.begin(fleet, body.group_name) if body.backend is None else ipc.begin(fleet)
    await while_connected(request.receive, beginning)
    return response(200, {"message": "Weight update started"}, ignored_header(body))


@router.post("/update_weights", openapi_extra=takes(VllmUpdateBody.model_json_schema()))
async def update_weights(request: Request) -> Response:
    """Receive tensors that rank 0 broadcasts, as vLLM does. Weights change at ``/finish_weight_update``.

    With ``ipc_handles``, the workers copy the tensors out of memory that the trainer shares. The response is sent when
    they have copied them. With ``weight_dir``, replace the weights by those of a directory at once, as prime-rl's
    server does.
    """
    body = await read_optional(request, VllmUpdateBody)
    info, fleet = body.update_info, gateway_of(request).fleet
    if info is None:
        updating = control.update_weights(fleet, body.weight_dir or "", None, "keep")
        try:
            version = await while_connected(request.receive, updating)
        except InvalidRequest as error:
            error.field = "weight_dir" if error.field == "directory" else error.field
            raise
        return response(200, {"status": "ok"} | updated(version), ignored_header(body))
    if isinstance(info, ipc.IpcUpdateInfo):
        try:
            await while_connected(request.receive, ipc.copy(fleet, info.message()))
        except InvalidRequest as error:
            error.field = "update_info" if error.field == "tensors" else error.field
            raise
        return response(200, {"message": "Weights updated"}, ignored_header(body))
    async with undo_on_error_async(broadcast.leave, fleet, info.group_name):  # the trainer may send the tensors
        if info.packed:
            raise UnsupportedParameter("each tensor must be broadcast as it is; send false", field="update_info.packed")
        tensors = described(info.names, info.dtype_names, info.shapes, "update_info.dtype_names")
    receiving = broadcast.receive(fleet, broadcast.Bucket(info.group_name, tensors))
    await while_connected(request.receive, receiving)
    return response(200, {"message": "Weights updated"}, ignored_header(body))


@router.post("/finish_weight_update", openapi_extra=takes(FinishUpdateBody.model_json_schema()))
async def finish_weight_update(request: Request) -> Response:
    """Replace the weights of all workers by the received tensors, as vLLM does. Return an error if one is missing."""
    body = await read_optional(request, FinishUpdateBody)
    version = _version(body.weight_version)
    await while_connected(request.receive, broadcast.commit(gateway_of(request).fleet, version, _mode(abort=False)))
    return response(200, {"message": "Weight update finished", "weight_version": version}, ignored_header(body))


def _version(given: str | None) -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds") if given is None else given


def _mode(*, abort: bool) -> control.PauseMode:
    return "abort" if abort else "keep"
