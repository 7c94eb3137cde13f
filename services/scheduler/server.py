"""Creates, starts and stops the parts of a scheduler: model, core, step loop, worker link, gRPC server."""

import asyncio
import sys
import uuid
from collections.abc import Coroutine
from typing import Any

import structlog

from services.common.boundaries import errors_to
from services.common.config import SchedulerConfig
from services.common.errors import FailedPrecondition, Internal, TokaError, Unavailable
from services.common.logprobs_mode import PROCESSED
from services.common.metrics.server import serve_metrics
from services.common.model.files import read_card
from services.common.process.service import Stop, collect_seldom
from services.common.process.tracing import Tracing
from services.common.process.watchdog_client import WatchdogClient
from services.common.rpc.channel import MAX_PUBLIC_MESSAGE_BYTES, Dialer
from services.common.rpc.server import RpcServer
from services.common.text.tokenizer import Tokenizer
from services.scheduler.api.access import Access, exposure
from services.scheduler.api.broadcast import BroadcastUpdates
from services.scheduler.api.hub import Hub
from services.scheduler.api.metrics import SchedulerMetrics
from services.scheduler.api.model import ServedModel
from services.scheduler.api.send_timeout import SendTimeout
from services.scheduler.api.servicer import SchedulerServicer
from services.scheduler.api.sleep import Sleeps
from services.scheduler.api.weights import WeightUpdates
from services.scheduler.core.memory.hydragen import HydragenPolicy
from services.scheduler.core.policy import Policy
from services.scheduler.core.request import AdmissionMode, Priority
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.engine.loop import EngineLoop
from services.scheduler.engine.pace import MOST_AHEAD
from services.scheduler.engine.statsd import Statsd
from services.scheduler.grammar.checker import GrammarChecker
from services.scheduler.record.recorder import Recorder
from services.scheduler.workers.broadcast import BroadcastCalls
from services.scheduler.workers.link import WorkerLink
from services.scheduler.workers.upload import Uploader
from tokasaurus.scheduler.v1 import scheduler_pb2_grpc
from tokasaurus.worker.v1 import worker_pb2

log = structlog.get_logger(__name__)

SERVICE = "tokasaurus.scheduler.v1.SchedulerService"
_HEALTH_S = 1.0  # longest interval between two checks of the step loop
_HEALTH_TIMEOUT_S = 10.0  # longest time for the step loop to respond
_IDLE_CHECK_S = 0.05  # interval of checks whether the last request has finished
# The step loop must not wait long for the GIL. The default of 5 ms is a third of a step.
_SWITCH_INTERVAL_S = 0.0005


def read_policy(config: SchedulerConfig) -> Policy:
    """Convert the flags to the core's policy."""
    hydragen = HydragenPolicy(config.hydragen_min_group_size, config.hydragen_min_prefix_len)
    return Policy(
        steps_ahead=config.scheduling_steps_ahead,
        prefix_caching=config.prefix_caching,
        max_queued=config.max_queued_sequences,
        mode=AdmissionMode[config.admission.upper()],
        guaranteed_classes=frozenset(Priority[name.upper()] for name in config.guaranteed_classes),
        margin=config.admission_margin,
        ageing_s=config.priority_ageing_seconds,
        hydragen=hydragen if config.use_hydragen is not False else None,
        micro_batches=config.pp_size + config.pp_num_buffer_stages if config.pp_size > 1 else 1,
    )


class SchedulerServer:
    """Parts of a scheduler process. Used on the event loop."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.scheduler_id = uuid.uuid4().hex
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop_responded = True  # since the last call of ``has_progressed``
        self.address = ""

    async def start(self) -> str:
        """Start to listen. Return the actual address. Health is SERVING when a worker is connected."""
        config, loop = self._config, asyncio.get_running_loop()
        card = await asyncio.to_thread(read_card, config.model, config.served_model_name)
        if card.defaults.ignored:
            log.warning(
                "generation_config.json has settings that are not supported", settings=list(card.defaults.ignored)
            )
        tokenizer = await asyncio.to_thread(Tokenizer.load, config.tokenizer or str(card.directory))
        processed = config.logprobs_mode == PROCESSED
        self.model = ServedModel(card, tokenizer, config.max_samples_per_request, processed_logprobs=processed)
        self._core = Scheduler(tokenizer.vocabulary.token_bytes, card.vocab_size, read_policy(config))
        self._recorder = Recorder(config.record_plans, self.scheduler_id) if config.record_plans else None
        server, prefix = config.statsd_server_url, config.statsd_prefix
        self._statsd = await asyncio.to_thread(Statsd, server, prefix) if server else None
        self._tracing = Tracing.of(config, "toka-scheduler", **{"service.instance.id": self.scheduler_id})
        self._hub = Hub()
        self._hub.tracing = self._tracing
        self.engine = self._hub.engine = EngineLoop(
            self._core,
            card.max_context_tokens,
            self._hub.deliver,
            lambda error: loop.call_soon_threadsafe(
                self._fail, Internal(f"the step loop failed: {type(error).__name__}: {error}")
            ),
            step_deadline_s=config.step_deadline,
            stats_report_seconds=config.stats_report_seconds,
            recorder=self._recorder,
            statsd=self._statsd,
        )
        dialer = Dialer.of(config)
        self._link = WorkerLink(
            config.worker_addresses,
            self.scheduler_id,
            max(config.scheduling_steps_ahead, MOST_AHEAD),
            self.engine,
            self._check_worker,
            lambda reason: loop.call_soon_threadsafe(self._fail, FailedPrecondition(reason)),
            dialer,
        )
        self._hub.weights = lambda: self._link.committed
        access = Access.of(config)
        self._rpc = RpcServer(
            SERVICE,
            max_receive_bytes=MAX_PUBLIC_MESSAGE_BYTES,
            certificates=dialer.certificates,
            interceptors=[access],
        )
        self._grammar_checker = GrammarChecker(config.tokenizer or str(card.directory), card.eos_token_ids)
        send_timeout = SendTimeout(config.slow_client_seconds)
        updates = WeightUpdates(self._hub, self._link, Uploader(config.worker_addresses, dialer))
        broadcasts = BroadcastUpdates(self._link, updates, BroadcastCalls(config.worker_addresses, dialer))
        sleeps = Sleeps(self._hub, self._link, updates.committing)
        parts = self._hub, self.model, self._grammar_checker, updates, broadcasts, sleeps
        servicer = SchedulerServicer(*parts, self.scheduler_id, send_timeout, access)
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(servicer, self._rpc.grpc_server)
        self.address = await self._rpc.start(config.scheduler_listen)
        self.engine.start()
        self._link.start()
        self._health = asyncio.create_task(self._update_health())
        collect_seldom()
        workers = ",".join(config.worker_addresses)
        log.info("scheduler listening", address=self.address, model=card.name, workers=workers)
        if reason := exposure(config):
            log.warning("exposed", reason=reason)
        return self.address

    async def wait(self, stop: asyncio.Event) -> None:
        """Block until ``stop`` is set.

        Raises ``Internal`` if the step loop failed, and ``FailedPrecondition`` if the first worker cannot be used.
        """
        await self._unless_failed(stop.wait())

    async def drain(self, stop: Stop) -> None:
        """Refuse new requests and wait for the others, then end their streams.

        It waits until all requests have finished, the drain time is over, the worker is lost or ``stop.at_once`` is
        set. Raises as ``wait``.
        """
        await self._rpc.set_ready(False)
        self.engine.drain()
        log.info("draining", seconds=self._config.drain_seconds)
        await stop.within(self._config.drain_seconds, lambda: self._unless_failed(self._idle()))
        if unfinished := await self._hub.ask(lambda core: len(core.state.queue.requests)):
            log.warning("unfinished requests are handed over", requests=unfinished)
        self._hub.end(Unavailable("the scheduler is draining; send unfinished requests to another", reason="DRAINING"))

    def metrics(self) -> SchedulerMetrics:
        """Return the collector of the metrics page. Call it after ``start``."""
        return SchedulerMetrics(self.engine, self.model.card.name, self.address)

    def has_progressed(self) -> bool:
        """Return whether the step loop has responded since the last call."""
        responded, self._loop_responded = self._loop_responded, False
        return responded

    async def stop(self) -> None:
        """Refuse new calls, end running calls, and disconnect the worker."""
        self._health.cancel()
        await self._rpc.stop(0.5)
        self.model.text.stop()
        await self._grammar_checker.close()
        await asyncio.to_thread(self._link.stop)
        await asyncio.to_thread(self.engine.stop)
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)
        if self._statsd is not None:
            self._statsd.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        if not self._failure.cancel():
            self._failure.exception()  # marks it as retrieved

    def _check_worker(self, info: worker_pb2.WorkerInfo) -> None:
        """Check that the worker fits this scheduler. Runs on the link's thread. Raises ``ValueError``."""
        card = self.model.card
        if info.vocab_size != card.vocab_size:
            raise ValueError(
                f"the worker's vocabulary has {info.vocab_size} tokens and that of model={self._config.model!r} has"
                f" {card.vocab_size}: start both with the same model"
            )
        policy, stages = self._core.state.policy, info.pipeline_parallel.size
        if self._config.pp_size != stages:
            raise ValueError(
                f"flag pp_size={self._config.pp_size} of the scheduler and pp_size={stages} of its workers: start both"
                " with the same pp_size"
            )
        if self._config.use_hydragen is True and not info.hydragen:
            log.warning("use_hydragen=T has no effect: the worker has no shared-prefix attention", device=info.device)
        if policy.micro_batches > max(1, info.max_micro_batches):
            raise ValueError(
                f"pp_size={self._config.pp_size} pp_num_buffer_stages={self._config.pp_num_buffer_stages} divide a step"
                f" into {policy.micro_batches} micro-batches, but the worker supports"
                f" {max(1, info.max_micro_batches)} at most: lower pp_num_buffer_stages"
            )
        self.model.set_shape(self.engine.limits_of(info))

    async def _unless_failed(self, waiting: Coroutine[Any, Any, Any]) -> None:
        """Wait for ``waiting``. Raises the failure of the scheduler if it comes first."""
        waited = asyncio.create_task(waiting)
        await asyncio.wait((waited, self._failure), return_when=asyncio.FIRST_COMPLETED)
        waited.cancel()
        if self._failure.done():
            self._failure.result()

    async def _idle(self) -> None:
        """Wait until there are no requests, or no worker."""
        while True:
            unfinished = await self._hub.ask(lambda core: self.engine.connected and bool(core.state.queue.requests))
            if not (unfinished or self.engine.backlog):
                return
            await asyncio.sleep(_IDLE_CHECK_S)

    def _fail(self, error: TokaError) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    def _rpc_failed(self, error: Exception) -> None:
        self._fail(Internal(f"the gRPC server no longer accepts calls: {error!r}"))

    async def _update_health(self) -> None:
        """Report the readiness of the step loop as health until the scheduler fails.

        Fail after the gRPC server fails.
        """
        ready, pause = False, min(_HEALTH_S, self._config.step_deadline / 8)
        while not self._failure.done():
            now = await self._loop_is_ready()
            with errors_to(self._rpc_failed):
                await self._rpc.check()
            if self._failure.done():
                break
            if now != ready:
                ready = now
                await self._rpc.set_ready(ready)
                log.info("ready" if ready else "not ready")
            await asyncio.sleep(pause if ready else pause / 10)
        await self._rpc.set_ready(False)

    async def _loop_is_ready(self) -> bool:
        timeout_s = min(_HEALTH_TIMEOUT_S, self._config.step_deadline)
        try:
            ready = await asyncio.wait_for(self._hub.ask(lambda core: self.engine.ready), timeout_s)
        except (TimeoutError, Unavailable):
            return False
        self._loop_responded = True
        return ready


async def serve(config: SchedulerConfig, stop: Stop) -> None:
    """Run a scheduler until ``stop`` is set, then drain it."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    async with WatchdogClient(config, "step loop") as watchdog:
        server = SchedulerServer(config)
        await server.start()
        watchdog.serving(server.has_progressed)
        try:
            async with serve_metrics(config, server.metrics()):
                await server.wait(stop)
                await server.drain(stop)
        finally:
            await server.stop()
