"""Encodes the core's events as messages of the public contract."""

from functools import partial

import numpy as np

from services.common.boundaries import errors_to
from services.common.errors import Internal
from services.common.packed import fill
from services.common.plan.result import ScoredTokens
from services.common.plan.top_logprobs import TopLogprobs
from services.common.rpc.status import to_status
from services.scheduler.core.future.overview import Overview
from services.scheduler.core.output import Delta
from services.scheduler.core.plan import NO_SLOTS
from services.scheduler.core.request import Finish, FinishReason, Priority, Request
from services.scheduler.engine.events import Accepted, PlanEvent, Rejected
from tokasaurus.scheduler.v1 import generate_pb2, observe_pb2, session_pb2

PRIORITIES = {each: generate_pb2.PriorityClass.Value(f"PRIORITY_CLASS_{each.name}") for each in Priority}


def encode_event(item: object) -> session_pb2.SessionResponse:
    """Encode any item of a session's mailbox."""
    match item:
        case Delta():
            return session_pb2.SessionResponse(outputs=encode_outputs(item))
        case Accepted():
            return session_pb2.SessionResponse(acceptance=_encode_acceptance(item))
        case list() as accepted:
            acceptances = [_encode_acceptance(each) for each in accepted]
            return session_pb2.SessionResponse(acceptances=session_pb2.Acceptances(acceptances=acceptances))
        case Rejected(handle=handle, error=error):
            rejection = session_pb2.Rejection(handle=handle, status=to_status(error))
            return session_pb2.SessionResponse(rejection=rejection)
        case session_pb2.Heartbeat():
            return session_pb2.SessionResponse(heartbeat=item)
        case observe_pb2.Load():
            return session_pb2.SessionResponse(load=item)
    raise TypeError(f"no message for {type(item).__name__}")


def _encode_acceptance(item: Accepted) -> session_pb2.Acceptance:
    return session_pb2.Acceptance(handle=item.request.handle, accepted=encode_accepted(item.request))


def encode_accepted(request: Request) -> generate_pb2.Accepted:
    return generate_pb2.Accepted(request_id=request.request_id, prompt_tokens=request.prompt_tokens)


def encode_outputs(delta: Delta) -> session_pb2.StepOutputs:
    """Encode ``delta`` as parallel arrays of packed bytes."""
    message = session_pb2.StepOutputs(step=delta.step, weights_version=delta.weights_version)
    fill(message, "handles", delta.handles)
    fill(message, "token_counts", NO_SLOTS if delta.counts is None else delta.counts)
    fill(message, "token_ids", delta.tokens)
    if len(delta.logprobs):
        fill(message.logprobs, "chosen", delta.logprobs)
        if delta.top is not None:
            fill_top(message.logprobs, delta.top)
    for handle, scored in delta.scored:
        encode_scored(message.prompts.add(handle=handle).logprobs, scored)
    if (routed := delta.routed) is not None:
        experts = message.routed_experts.add(experts=routed.experts.tobytes())
        fill(experts, "handles", routed.owners)
        fill(experts, "starts", routed.starts)
        fill(experts, "token_counts", routed.counts)
    for finish in delta.finished:
        message.finished.add(handle=finish.handle).finish.CopyFrom(encode_finish(finish))
    return message


def encode_by_handle(delta: Delta) -> tuple[session_pb2.StepOutputs, dict[int, Exception]]:
    """Encode ``delta`` handle by handle. Return the message, and the exception of each handle that cannot be encoded.

    If such a handle has finished, the message contains a finish with an error for it.
    """
    message = session_pb2.StepOutputs(step=delta.step)
    failures: dict[int, Exception] = {}
    finished = {finish.handle for finish in delta.finished}
    routed = [] if delta.routed is None else delta.routed.owners.tolist()
    scored = (handle for handle, _ in delta.scored)
    for handle in dict.fromkeys([*delta.handles.tolist(), *scored, *routed, *finished]):
        with errors_to(partial(failures.__setitem__, handle)):
            message.MergeFrom(encode_outputs(_of_handle(delta, handle)))
    for handle in finished & failures.keys():
        end = generate_pb2.Finish(error=to_status(Internal.logged()))
        end.reason = int(FinishReason.ERROR)  # type: ignore[assignment]  # the type requires an enum member, an int is accepted
        message.finished.add(handle=handle).finish.CopyFrom(end)
    return message, failures


def _of_handle(delta: Delta, handle: int) -> Delta:
    """Return the part of ``delta`` that belongs to ``handle``."""
    mine = delta.handles == handle
    part = delta.take(mine, mine if delta.counts is None else np.repeat(mine, delta.counts))
    part.finished = [finish for finish in delta.finished if finish.handle == handle]
    part.scored = [scored for scored in delta.scored if scored[0] == handle]
    part.routed = None if delta.routed is None else delta.routed.take(delta.routed.owners == handle)
    return part


def fill_top(message: generate_pb2.Logprobs, top: TopLogprobs) -> None:
    """Append the most likely tokens of each row."""
    fill(message, "top_counts", top.counts)
    fill(message, "top_token_ids", top.token_ids)
    fill(message, "top_logprobs", top.logprobs)


def encode_scored(message: generate_pb2.PromptLogprobs, scored: ScoredTokens) -> None:
    message.start = scored.start
    fill(message, "ranks", scored.ranks)
    fill(message.logprobs, "chosen", scored.logprobs)
    if len(scored.top.token_ids):
        fill_top(message.logprobs, scored.top)


def encode_finish(finish: Finish) -> generate_pb2.Finish:
    message = generate_pb2.Finish(
        reason=int(finish.reason),  # type: ignore[arg-type]  # the type requires an enum member, an int is accepted
        usage=generate_pb2.Usage(
            prompt_tokens=finish.prompt_tokens,
            completion_tokens=finish.completion_tokens,
            cached_prompt_tokens=finish.cached_prompt_tokens,
        ),
        timing=generate_pb2.Timing(
            queued_ns=finish.queued_ns,
            prefill_ns=finish.prefill_ns,
            decode_ns=finish.decode_ns,
            preemptions=finish.preemptions,
        ),
    )
    if finish.stop_token_id is not None:
        message.stop_token_id = finish.stop_token_id
    elif finish.stop_string is not None:
        message.stop_string.index, message.stop_string.trailing_bytes = finish.stop_string
    for span in finish.spans:
        message.weights.add(version=span.version, tokens=span.tokens)
    if finish.error is not None:
        message.error.CopyFrom(to_status(finish.error))
    return message


def encode_plan_event(event: PlanEvent) -> observe_pb2.WatchPlansResponse:
    plan = event.plan
    return observe_pb2.WatchPlansResponse(
        step=plan.step,
        sequences=plan.sequences,
        tokens=plan.tokens,
        prefill_tokens=plan.prefill_tokens,
        waiting_sequences=event.waiting_sequences,
        in_use_pages=event.in_use_pages,
        plans_in_flight=event.plans_in_flight,
        admitted_request_ids=plan.admitted_ids,
        released_request_ids=plan.released_ids,
        hydragen_groups=plan.hydragen_groups,
        hydragen_rows=plan.hydragen_rows,
        micro_batches=plan.micro_batches,
        preempted_request_ids=plan.preempted_ids,
        postponed=plan.postponed,
    )


def encode_overview(overview: Overview) -> observe_pb2.ListRequestsResponse:
    """Encode the overview without its curve."""
    message = observe_pb2.ListRequestsResponse(unfinished_requests=overview.unfinished)
    for entry in overview.entries:
        request = entry.request
        message.requests.add(
            request_id=request.request_id,
            fairness_key=request.fairness_key,
            priority=PRIORITIES[request.priority],
            prompt_tokens=request.prompt_tokens,
            max_tokens=request.limit - request.prompt_tokens,
            running_samples=entry.running,
            waiting_samples=request.waiting,
            finished_samples=len(request.samples) - request.unfinished,
            generated_tokens=entry.generated,
            age_ms=entry.age_ns // 1_000_000,
            start_step=entry.start or 0,
            finish_step=entry.finish,
        )
    return message


def encode_curve(pages: np.ndarray, total: int, horizon: int) -> observe_pb2.PageCurve:
    """Encode ``pages`` as the steps at which the number of pages changes."""
    pages = pages[:horizon]
    steps = np.flatnonzero(np.diff(pages, prepend=-1))
    message = observe_pb2.PageCurve(total_pages=total)
    fill(message, "steps", steps)
    fill(message, "pages", pages[steps])
    return message
