"""The RPC methods of the public service."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager, suppress
from functools import partial

import numpy as np
import structlog

from services.common.errors import FailedPrecondition, InvalidRequest, NotFound, Unavailable
from services.common.keys import Key
from services.common.memory_parts import check_level, read_parts
from services.common.packed import fill, read_fixed32
from services.common.request_bounds import MAX_WEIGHTS_VERSION
from services.common.rpc.interceptor import AnyContext
from services.scheduler.api.access import Access
from services.scheduler.api.broadcast import BroadcastUpdates
from services.scheduler.api.encoding import encode_curve, encode_overview, encode_plan_event
from services.scheduler.api.generate import GenerateCall
from services.scheduler.api.hub import Hub
from services.scheduler.api.lease import UpdateLease
from services.scheduler.api.model import ServedModel
from services.scheduler.api.prompt import check_tokens, encode_chat, encode_text
from services.scheduler.api.send_timeout import SendTimeout
from services.scheduler.api.session import SessionStream
from services.scheduler.api.sleep import Sleeps
from services.scheduler.api.spending import Spending
from services.scheduler.api.validation import read_message
from services.scheduler.api.weights import WeightUpdates
from services.scheduler.core.future.estimate import estimate
from services.scheduler.core.future.overview import read_overview
from services.scheduler.core.life.intake import resolve_limit
from services.scheduler.core.request import PauseMode, Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.state import State
from services.scheduler.engine import pauses
from services.scheduler.grammar.checker import GrammarChecker
from services.scheduler.grammar.message import name_of
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

log = structlog.get_logger(__name__)

_LONGEST_HORIZON = 65536
_MOST_LISTED, _LISTED = 1000, 100
_MOST_ABORTED = 4096  # ids in a call
_NAMED = 8  # ids in a log line


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Service implementation. Used on the event loop."""

    def __init__(
        self,
        hub: Hub,
        model: ServedModel,
        grammar_checker: GrammarChecker,
        updates: WeightUpdates,
        broadcasts: BroadcastUpdates,
        sleeps: Sleeps,
        scheduler_id: str,
        send_timeout: SendTimeout,
        access: Access | None = None,
    ) -> None:
        self._hub = hub
        self._model = model
        self._grammar_checker = grammar_checker
        self._updates, self._broadcasts, self._sleeps = updates, broadcasts, sleeps
        self._lease = UpdateLease()
        self._scheduler_id = scheduler_id
        self._send_timeout = send_timeout
        self._access = access or Access()
        self._limits: set[asyncio.Task[None]] = set()  # a task without a reference may be collected

    async def Generate(
        self, request: generate_pb2.GenerateRequest, context: AnyContext
    ) -> AsyncIterator[generate_pb2.GenerateResponse]:
        with self._running(context) as key:
            self._access.sign(request, key)
            spending = Spending(self._access.limits, key)
            stream = GenerateCall(self._hub, self._model, self._grammar_checker, spending).run(request, context)
            async with aclosing(self._send_timeout.monitor(stream, context)) as responses:
                async for response in responses:
                    yield response

    async def Session(
        self, request_iterator: AsyncIterator[session_pb2.SessionRequest], context: AnyContext
    ) -> AsyncIterator[session_pb2.SessionResponse]:
        stream = SessionStream(self._hub, self._model, self._grammar_checker, self._scheduler_id).run(request_iterator)
        async with aclosing(self._send_timeout.monitor(stream, context)) as responses:
            async for response in responses:
                yield response

    async def GetModel(self, request: observe_pb2.GetModelRequest, context: AnyContext) -> observe_pb2.GetModelResponse:
        self._model.check_name(request.model)
        return observe_pb2.GetModelResponse(model=self._model.message())

    async def GetLoad(self, request: observe_pb2.GetLoadRequest, context: AnyContext) -> observe_pb2.GetLoadResponse:
        load = self._hub.with_weights(await self._hub.ask(lambda core: self._hub.engine.load()))
        return observe_pb2.GetLoadResponse(load=load)

    async def Forecast(self, request: observe_pb2.ForecastRequest, context: AnyContext) -> observe_pb2.ForecastResponse:
        with self._running(context) as key:
            return await self._forecast(request, key)

    async def _forecast(self, request: observe_pb2.ForecastRequest, key: Key | None) -> observe_pb2.ForecastResponse:
        _check_horizon(request.horizon_steps)
        shape = self._model.shape
        match request.WhichOneof("subject"):
            case "request_id":
                find = partial(_unfinished, request_id=request.request_id, key=key)
                found, step_s = await self._hub.ask(lambda core: (estimate(_attached(core), find(core)), core.step_s))
            case "request":
                self._access.sign(request.request, key)
                subject = await read_message(request.request, self._model)
                if grammar := subject.sampling.grammar:
                    await self._grammar_checker.check(grammar, name_of(request.request.sampling.grammar))
                subject.limit = resolve_limit(subject, shape)
                found, step_s = await self._hub.ask(lambda core: (estimate(_attached(core), subject), core.step_s))
            case _:
                raise InvalidRequest("set request_id or request", field="subject")
        response = observe_pb2.ForecastResponse(start_step=found.start, finish_step=found.finish)
        fill(response, "sample_finish_steps", found.ends.astype(np.uint32))
        if step_s:
            response.step_seconds = step_s
            response.start_seconds, response.finish_seconds = found.start * step_s, found.finish * step_s
        if request.horizon_steps:
            response.curve.CopyFrom(encode_curve(found.curve, shape.page_count, request.horizon_steps))
        return response

    async def ListRequests(
        self, request: observe_pb2.ListRequestsRequest, context: AnyContext
    ) -> observe_pb2.ListRequestsResponse:
        _check_horizon(request.horizon_steps)
        most = request.most if request.HasField("most") else _LISTED
        if most > _MOST_LISTED:
            raise InvalidRequest(f"most is {most}: expected 0 to {_MOST_LISTED}", field="most")
        now_ns = time.monotonic_ns()
        overview, step_s = await self._hub.ask(lambda core: (read_overview(_attached(core), most, now_ns), core.step_s))
        response = encode_overview(overview)
        if step_s:
            response.step_seconds = step_s
        if request.horizon_steps:
            pages = self._model.shape.page_count
            response.curve.CopyFrom(encode_curve(overview.curve, pages, request.horizon_steps))
        return response

    async def CancelRequest(
        self, request: observe_pb2.CancelRequestRequest, context: AnyContext
    ) -> observe_pb2.CancelRequestResponse:
        samples = await self._hub.cancel(request.request_id)
        if not samples:
            raise _not_found(request.request_id)
        log.info("a request was cancelled by an operator", request_id=request.request_id, samples=samples)
        return observe_pb2.CancelRequestResponse(samples=samples)

    async def Pause(self, request: control_pb2.PauseRequest, context: AnyContext) -> control_pb2.PauseResponse:
        mode = _read_mode(request.mode)
        log.info("pause", mode=mode.name.lower(), recompute=request.recompute)
        async with self._updates.committing:  # a pause that waits would let requests continue meanwhile
            pausing = asyncio.wrap_future(self._hub.engine.pause(mode, recompute=request.recompute))
            unchecked = self._hub.unchecked.abort(None) if mode is PauseMode.ABORT else 0
        if request.HasField("limit_ns"):
            limit = asyncio.create_task(self._limit(pausing, request.limit_ns * 1e-9))
            self._limits.add(limit)
            limit.add_done_callback(self._limits.discard)
        pause = await asyncio.shield(pausing)
        aborted = unchecked + pause.aborted
        log.info("paused", aborted_samples=aborted)
        return control_pb2.PauseResponse(aborted_samples=aborted, pause=pause.number)

    async def Resume(self, request: control_pb2.ResumeRequest, context: AnyContext) -> control_pb2.ResumeResponse:
        await self._resume(request.pause if request.HasField("pause") else None)
        return control_pb2.ResumeResponse()

    async def _limit(self, pausing: asyncio.Future[pauses.Pause], seconds: float) -> None:
        """End a pause when it has lasted ``seconds``, unless it was resumed or replaced before."""
        with suppress(FailedPrecondition):  # the pause was resumed before it had begun
            pause = await asyncio.shield(pausing)
            await asyncio.sleep(seconds)
            await self._resume(pause.number)

    async def _resume(self, number: int | None) -> None:
        """Resume. With ``number``, only if the pause of this number is the last."""
        async with self._updates.committing:
            paused_s = await asyncio.wrap_future(self._hub.engine.resume(number))
        if paused_s is None:
            log.info("another pause stays")
        else:
            log.info("resumed", paused_ms=round(1e3 * paused_s))

    async def AbortRequests(
        self, request: control_pb2.AbortRequestsRequest, context: AnyContext
    ) -> control_pb2.AbortRequestsResponse:
        ids = list(request.request_ids)
        if len(ids) > _MOST_ABORTED:
            raise InvalidRequest(f"{len(ids)} ids: expected at most {_MOST_ABORTED}", field="request_ids")
        if "" in ids:
            raise InvalidRequest("an id is empty; leave out all ids to abort every request", field="request_ids")
        samples = await self._hub.abort(frozenset(ids) or None)
        log.info("requests were aborted", request_ids=ids[:_NAMED] or "all", samples=samples)
        return control_pb2.AbortRequestsResponse(samples=samples)

    async def ResetPrefixCache(
        self, request: control_pb2.ResetPrefixCacheRequest, context: AnyContext
    ) -> control_pb2.ResetPrefixCacheResponse:
        freed = await self._hub.ask(lambda core: core.reset_prefix_cache())
        return control_pb2.ResetPrefixCacheResponse(freed_pages=freed)

    async def StageWeights(
        self, request: control_pb2.StageWeightsRequest, context: AnyContext
    ) -> control_pb2.StageWeightsResponse:
        if request.received:
            if request.directory:
                raise InvalidRequest("must be empty, because received is true", field="directory")
            return await self._broadcasts.stage(request.version)
        version = request.version if request.HasField("version") else request.directory[:MAX_WEIGHTS_VERSION]
        return await self._updates.stage(request.directory, version)

    async def UploadWeights(
        self, request_iterator: AsyncIterator[control_pb2.UploadWeightsRequest], context: AnyContext
    ) -> control_pb2.StageWeightsResponse:
        return await self._updates.upload(request_iterator)

    async def JoinUpdateGroup(
        self, request: broadcast_pb2.JoinUpdateGroupRequest, context: AnyContext
    ) -> broadcast_pb2.JoinUpdateGroupResponse:
        await self._broadcasts.join(request.group)
        return broadcast_pb2.JoinUpdateGroupResponse()

    async def LeaveUpdateGroup(
        self, request: broadcast_pb2.LeaveUpdateGroupRequest, context: AnyContext
    ) -> broadcast_pb2.LeaveUpdateGroupResponse:
        return broadcast_pb2.LeaveUpdateGroupResponse(left=await self._broadcasts.leave(request.name))

    async def ReceiveWeights(
        self, request: broadcast_pb2.ReceiveWeightsRequest, context: AnyContext
    ) -> broadcast_pb2.ReceiveWeightsResponse:
        received = await self._broadcasts.receive(request)
        return broadcast_pb2.ReceiveWeightsResponse(missing=received.missing, first_missing=received.first_missing)

    async def CopySharedWeights(
        self, request: shared_weights_pb2.CopySharedWeightsRequest, context: AnyContext
    ) -> shared_weights_pb2.CopySharedWeightsResponse:
        copied = await self._broadcasts.copy(request)
        return shared_weights_pb2.CopySharedWeightsResponse(missing=copied.missing, first_missing=copied.first_missing)

    async def CommitWeights(
        self, request: control_pb2.CommitWeightsRequest, context: AnyContext
    ) -> control_pb2.CommitWeightsResponse:
        mode = _read_mode(request.mode)
        return await self._updates.commit(request.update_id, mode, recompute=request.recompute)

    async def DiscardWeights(
        self, request: control_pb2.DiscardWeightsRequest, context: AnyContext
    ) -> control_pb2.DiscardWeightsResponse:
        await self._updates.discard(request.update_id)
        return control_pb2.DiscardWeightsResponse()

    async def GetWeights(
        self, request: control_pb2.GetWeightsRequest, context: AnyContext
    ) -> control_pb2.GetWeightsResponse:
        return await self._updates.read(checksums=request.checksums)

    async def LeaseUpdates(
        self, request: control_pb2.LeaseUpdatesRequest, context: AnyContext
    ) -> control_pb2.LeaseUpdatesResponse:
        self._lease.take(request.holder, request.duration_ns)
        return control_pb2.LeaseUpdatesResponse()

    async def ReadTensor(
        self, request: tensor_pb2.ReadTensorRequest, context: AnyContext
    ) -> tensor_pb2.ReadTensorResponse:
        return await self._updates.read_tensor(request.name, request.rows)

    async def Sleep(self, request: sleep_pb2.SleepRequest, context: AnyContext) -> sleep_pb2.SleepResponse:
        level = request.level if request.HasField("level") else 1
        check_level(level)
        return await self._sleeps.sleep(read_parts(request.parts), level, _read_mode(request.mode))

    async def Wake(self, request: sleep_pb2.WakeRequest, context: AnyContext) -> sleep_pb2.WakeResponse:
        return await self._sleeps.wake(read_parts(request.parts))

    async def WatchPlans(
        self, request: observe_pb2.WatchPlansRequest, context: AnyContext
    ) -> AsyncIterator[observe_pb2.WatchPlansResponse]:
        async with aclosing(self._send_timeout.monitor(self._plans(), context)) as responses:
            async for response in responses:
                yield response

    async def Tokenize(self, request: observe_pb2.TokenizeRequest, context: AnyContext) -> observe_pb2.TokenizeResponse:
        with self._running(context):
            match request.WhichOneof("input"):
                case "text":
                    special = request.add_special_tokens if request.HasField("add_special_tokens") else True
                    tokens = await encode_text(
                        self._model, request.text, "text", max_tokens=None, add_special_tokens=special
                    )
                case "chat":
                    tokens = await encode_chat(self._model, request.chat, "chat.messages", max_tokens=None)
                case _:
                    raise InvalidRequest("set text or chat", field="input")
        response = observe_pb2.TokenizeResponse()
        fill(response, "token_ids", tokens)
        return response

    async def Detokenize(
        self, request: observe_pb2.DetokenizeRequest, context: AnyContext
    ) -> observe_pb2.DetokenizeResponse:
        with self._running(context):
            tokens = read_fixed32(request.token_ids)
            check_tokens(tokens, self._model.card.vocab_size, "token_ids")
            skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
            text = await self._model.text.decode(tokens.tolist(), skip_special_tokens=skip, field="token_ids")
        return observe_pb2.DetokenizeResponse(text=text)

    async def _plans(self) -> AsyncGenerator[observe_pb2.WatchPlansResponse, None]:
        with self._hub.watching() as plans:
            while True:
                yield encode_plan_event(await plans.get())

    @contextmanager
    def _running(self, context: AnyContext) -> Iterator[Key | None]:
        """Count a call of a key while it runs. Yields the key."""
        key = self._access.key_of(context.invocation_metadata() or ())
        with self._access.limits.running(key):
            yield key


def _unfinished(core: Scheduler, request_id: str, key: Key | None) -> Request:
    request = core.state.queue.requests.get(request_id)
    if request is None or (key is not None and request.fairness_key != key.name):
        raise _not_found(request_id)
    return request


def _not_found(request_id: str) -> NotFound:
    # A gRPC status has little room.
    return NotFound(f"no unfinished request has the id {request_id[:100]!r}", field="request_id")


def _attached(core: Scheduler) -> State:
    """Return the core's state. Raises ``Unavailable`` until a worker has connected."""
    if not core.state.attached:
        raise Unavailable("the worker has not connected yet; try again")
    return core.state


def _read_mode(mode: int) -> PauseMode:
    try:
        return PauseMode(mode or PauseMode.KEEP)
    except ValueError:
        names = ", ".join(f"{each.name} ({each.value})" for each in PauseMode)
        raise InvalidRequest(f"mode is {mode}: expected {names}", field="mode") from None


def _check_horizon(steps: int) -> None:
    if steps > _LONGEST_HORIZON:
        raise InvalidRequest(f"horizon_steps is {steps}: expected 0 to {_LONGEST_HORIZON}", field="horizon_steps")
