"""A call of every method of a scheduler, and who may make it."""

import grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.scheduler.service import PROMPT
from tokasaurus.scheduler.v1 import (
    broadcast_pb2,
    control_pb2,
    generate_pb2,
    observe_pb2,
    scheduler_pb2_grpc,
    session_pb2,
    shared_weights_pb2,
    sleep_pb2,
    tensor_pb2,
)


def request(max_tokens: int = 2, stop_token_ids=(), **fields) -> generate_pb2.GenerateRequest:
    prompt = generate_pb2.TokenPrompt(token_ids=PROMPT)
    stopping = generate_pb2.Stopping(max_tokens=max_tokens, ignore_eos=True, token_ids=stop_token_ids)
    sampling = generate_pb2.Sampling(temperature=0)
    return generate_pb2.GenerateRequest(tokens=prompt, stopping=stopping, sampling=sampling, **fields)


INFERENCE = {
    "Generate": request(),
    "GetModel": observe_pb2.GetModelRequest(),
    "GetLoad": observe_pb2.GetLoadRequest(),
    "Forecast": observe_pb2.ForecastRequest(request=request()),
    "Tokenize": observe_pb2.TokenizeRequest(text="a"),
    "Detokenize": observe_pb2.DetokenizeRequest(token_ids=[40]),
}
ADMIN = {
    "ListRequests": observe_pb2.ListRequestsRequest(),
    "CancelRequest": observe_pb2.CancelRequestRequest(request_id="x"),
    "WatchPlans": observe_pb2.WatchPlansRequest(),
    "Pause": control_pb2.PauseRequest(mode=99),
    "Resume": control_pb2.ResumeRequest(),
    "AbortRequests": control_pb2.AbortRequestsRequest(request_ids=["x"]),
    "ResetPrefixCache": control_pb2.ResetPrefixCacheRequest(),
    "StageWeights": control_pb2.StageWeightsRequest(directory="/none"),
    "CommitWeights": control_pb2.CommitWeightsRequest(update_id="x"),
    "DiscardWeights": control_pb2.DiscardWeightsRequest(update_id="x"),
    "GetWeights": control_pb2.GetWeightsRequest(),
    "LeaseUpdates": control_pb2.LeaseUpdatesRequest(),
    "ReadTensor": tensor_pb2.ReadTensorRequest(name="x", rows=1),
    "JoinUpdateGroup": broadcast_pb2.JoinUpdateGroupRequest(),
    "LeaveUpdateGroup": broadcast_pb2.LeaveUpdateGroupRequest(name="x"),
    "ReceiveWeights": broadcast_pb2.ReceiveWeightsRequest(version="x" * 257),
    "CopySharedWeights": shared_weights_pb2.CopySharedWeightsRequest(version="x" * 257),
    "Sleep": sleep_pb2.SleepRequest(level=3),
    "Wake": sleep_pb2.WakeRequest(parts=[99]),
}
OF_ADMINS = {"Session", "UploadWeights", *ADMIN}
METHODS = {*OF_ADMINS, *INFERENCE, "reflection"}
# How calls end that are allowed and do not succeed: there is no such request, tensor, mode, directory, header, update,
# level, holder and part.
CODES = {
    "CancelRequest": grpc.StatusCode.NOT_FOUND,
    "ReadTensor": grpc.StatusCode.NOT_FOUND,
    "Pause": grpc.StatusCode.INVALID_ARGUMENT,
    "StageWeights": grpc.StatusCode.INVALID_ARGUMENT,
    "UploadWeights": grpc.StatusCode.INVALID_ARGUMENT,
    "CommitWeights": grpc.StatusCode.FAILED_PRECONDITION,
    "LeaseUpdates": grpc.StatusCode.INVALID_ARGUMENT,
    "JoinUpdateGroup": grpc.StatusCode.INVALID_ARGUMENT,
    "ReceiveWeights": grpc.StatusCode.INVALID_ARGUMENT,
    "CopySharedWeights": grpc.StatusCode.INVALID_ARGUMENT,
    "Sleep": grpc.StatusCode.INVALID_ARGUMENT,
    "Wake": grpc.StatusCode.INVALID_ARGUMENT,
}


def calls(channel: grpc.aio.Channel, metadata=()) -> dict[str, grpc.aio.Call]:
    """Return a call of every method."""
    stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
    opening = session_pb2.SessionRequest(open=session_pb2.SessionOpen(client_id="test"))
    reflected = reflection_pb2.ServerReflectionRequest(list_services="")
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    return {
        **{name: getattr(stub, name)(message, metadata=metadata) for name, message in (INFERENCE | ADMIN).items()},
        "Session": stub.Session(iter([opening]), metadata=metadata),
        "UploadWeights": stub.UploadWeights(iter([control_pb2.UploadWeightsRequest()]), metadata=metadata),
        "reflection": reflection.ServerReflectionInfo(iter([reflected]), metadata=metadata),
    }
