"""Sends the plans of a recording to a worker again, and compares the results."""

import queue
import uuid
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import grpc

from services.common.packed import read_fixed32
from services.common.rpc.channel import PLAIN, Dialer
from services.scheduler.record.occupants import Occupants
from services.scheduler.record.reader import Recording
from tokasaurus.common.v1 import weights_pb2
from tokasaurus.worker.v1 import plan_pb2, record_pb2, worker_pb2, worker_pb2_grpc
from tokasaurus.worker.v1 import weights_pb2 as worker_weights_pb2

_MOST_DIFFERENCES = 20  # lines
_SCHEDULER_ID = "toka-replay"

_Requests = queue.SimpleQueue[worker_pb2.RunStepsRequest | None]  # None = end of the stream
_Responses = Iterator[worker_pb2.RunStepsResponse]
_Differing = dict[int, tuple[object, object]]  # slot -> (recorded, found)


class Unsuitable(Exception):
    """The worker cannot run the plans of the recording. The message gives the reason."""


@dataclass
class ReplayOutcome:
    """Outcome of a replay. After a different token, later tokens of the sequence may differ too."""

    steps: int = 0
    tokens: int = 0  # recorded
    different_tokens: int = 0  # different, additional or missing tokens
    different_failures: int = 0
    different_steps: int = 0
    differences: list[str] = field(default_factory=list)  # sentences about the first different steps
    # Different facts of the workers that affect tokens: field of ``WorkerInfo`` -> {"recorded": ..., "worker": ...}.
    mismatch: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def same(self) -> bool:
        """True if no step differs."""
        return not self.different_steps


def feed(recording: Recording, address: str, dialer: Dialer = PLAIN) -> ReplayOutcome:
    """Replay the plans of ``recording`` that have results, with the recorded number of plans in flight.

    A scheduler that uses the worker at ``address`` loses it. Raises ``Unsuitable``, ``RecordingError``, and
    ``grpc.RpcError`` if the worker refuses the stream or is lost.
    """
    with dialer.open(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        info = stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest(), timeout=30.0).info
        _check_worker(recording, info)
        requests: _Requests = queue.SimpleQueue()
        hello = worker_pb2.Hello(
            scheduler_id=_SCHEDULER_ID,
            expected_incarnation_id=info.incarnation_id,
            plans_in_flight=recording.connected.plans_in_flight,
        )
        requests.put(worker_pb2.RunStepsRequest(hello=hello))
        call = stub.RunSteps(iter(requests.get, None))
        try:
            _next(call)  # ready
            outcome = _run(recording, stub, requests, call)
            outcome.mismatch = _mismatch(recording.info, info)
            requests.put(None)
            for _ in call:
                pass
        finally:
            requests.put(None)
            call.cancel()
    return outcome


def _run(
    recording: Recording, stub: worker_pb2_grpc.WorkerServiceStub, requests: _Requests, responses: _Responses
) -> ReplayOutcome:
    outcome, occupants = ReplayOutcome(), Occupants()
    in_flight: deque[tuple[record_pb2.PlanRecord, plan_pb2.StepResult]] = deque()
    for step in recording.steps():
        if step.result is None:
            break
        most = 0 if step.weights is not None else recording.connected.plans_in_flight - 1
        while len(in_flight) > most:
            _compare(*in_flight.popleft(), _next(responses).result, occupants, outcome)
        if step.weights is not None:
            _replace_weights(stub, step.weights, step.plan.plan.step)
        requests.put(worker_pb2.RunStepsRequest(plan=step.plan.plan))
        in_flight.append((step.plan, step.result.result))
    while in_flight:
        _compare(*in_flight.popleft(), _next(responses).result, occupants, outcome)
    return outcome


def _replace_weights(stub: worker_pb2_grpc.WorkerServiceStub, weights: weights_pb2.Weights, step: int) -> None:
    """Replace the worker's weights by ``weights`` before ``step``. No plan may be in flight. Raises ``Unsuitable``."""
    staging = worker_weights_pb2.StageWeightsRequest(
        update_id=uuid.uuid4().hex, version=weights.version, directory=weights.directory
    )
    try:
        staged = stub.StageWeights(staging)
        if staged.fingerprint != weights.fingerprint:
            raise Unsuitable(
                f"step {step} has the weights {weights.version!r}, but the files in {weights.directory} have changed"
                " since; put these weights back"
            )
        stub.CommitWeights(worker_weights_pb2.CommitWeightsRequest(update_id=staging.update_id))
    except grpc.RpcError as error:
        raise Unsuitable(
            f"step {step} has the weights {weights.version!r} of {weights.directory}, which this worker cannot load:"
            f" {error.details()}"
        ) from error


def _next(responses: _Responses) -> worker_pb2.RunStepsResponse:
    response = next(responses, None)
    if response is None:
        raise Unsuitable("the worker ended the stream")
    return response


def _check_worker(recording: Recording, found: worker_pb2.WorkerInfo) -> None:
    """Check the sizes of the worker. It rejects other unsupported parts of plans itself. Raises ``Unsuitable``."""
    recorded, ranks = recording.info, found.tensor_parallel.size * found.pipeline_parallel.size
    if ranks > 1:
        raise Unsuitable(
            f"the worker is one of {ranks} ranks, which wait for one another: start one with tp_size=1 pp_size=1"
        )
    for name, flag in (
        ("page_size", ""),
        ("vocab_size", ""),
        ("page_count", "kv_cache_num_tokens"),
        ("max_slots", "max_seqs_per_forward"),
        ("max_tokens_per_step", "max_tokens_per_forward"),
        ("max_context_tokens", "max_context_tokens"),
    ):
        now, then = getattr(found, name), getattr(recorded, name)
        if now < then or (now > then and not flag):
            remedy = f"it with {flag} as it was" if flag else "a worker with the same model and page_size"
            raise Unsuitable(f"the worker has {name}={now}, recorded was {name}={then}: start {remedy}")
    if found.max_plans_in_flight < recording.connected.plans_in_flight:
        raise Unsuitable(
            f"the worker takes {found.max_plans_in_flight} plans in flight, recorded were"
            f" {recording.connected.plans_in_flight}"
        )


def _mismatch(recorded: worker_pb2.WorkerInfo, found: worker_pb2.WorkerInfo) -> dict[str, dict[str, str]]:
    """Return the facts that affect tokens and differ. They are no error: a replay may be meant to compare them."""
    pairs = ((name, getattr(recorded, name), getattr(found, name)) for name in ("model", "dtype", "device"))
    different = {name: {"recorded": then, "worker": now} for name, then, now in pairs if then != now}
    if recorded.weights.fingerprint != found.weights.fingerprint:
        different["weights"] = {"recorded": recorded.weights.version, "worker": found.weights.version}
    return different


def _compare(
    plan: record_pb2.PlanRecord,
    recorded: plan_pb2.StepResult,
    found: plan_pb2.StepResult,
    occupants: Occupants,
    outcome: ReplayOutcome,
) -> None:
    occupants.apply(plan)
    outcome.steps += 1
    outcome.tokens += len(recorded.token_ids)
    pairs = [_tokens(message) for message in (recorded, found)]
    tokens = _differing(*pairs)
    failures = _differing(*({failure.slot: failure.message for failure in m.failures} for m in (recorded, found)))
    order = not tokens and not failures and list(recorded.slots) != list(found.slots)
    if not (tokens or failures or order or recorded.step != found.step):
        return
    outcome.different_steps += 1
    outcome.different_tokens += len(tokens)
    outcome.different_failures += len(failures)
    if len(outcome.differences) < _MOST_DIFFERENCES:
        outcome.differences.append(_describe(plan.plan.step, found, tokens, failures, occupants))


def _tokens(result: plan_pb2.StepResult) -> dict[int, int]:
    return dict(zip(read_fixed32(result.slots).tolist(), read_fixed32(result.token_ids).tolist(), strict=True))


def _differing(recorded: Mapping[int, object], found: Mapping[int, object]) -> _Differing:
    """Return slot -> (recorded, found) for the slots that differ. A missing value is None."""
    if recorded == found:
        return {}
    slots = sorted(recorded.keys() | found.keys())
    return {slot: (recorded.get(slot), found.get(slot)) for slot in slots if recorded.get(slot) != found.get(slot)}


def _describe(
    number: int, found: plan_pb2.StepResult, tokens: _Differing, failures: _Differing, occupants: Occupants
) -> str:
    if found.step != number:
        return f"step {number}: the worker returned the result of step {found.step}"
    if not tokens and not failures:
        return f"step {number}: the same tokens in another order of slots"
    kind, differing = ("token", tokens) if tokens else ("failure", failures)
    slot, (recorded, now) = next(iter(differing.items()))
    more = len(tokens) + len(failures) - 1
    rest = f", and {more} more in this step" if more else ""
    return f"step {number}, slot {slot} ({occupants.name(slot)}): recorded {kind} {recorded}, now {now}{rest}"
