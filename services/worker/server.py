"""The process of a worker: a server that listens at once, a compute thread that loads the model, and their health."""

import asyncio
import atexit
import contextlib
import sys
import uuid
from collections.abc import Callable
from dataclasses import asdict

import structlog

from services.common.config import WorkerConfig
from services.common.errors import Internal
from services.common.metrics.server import serve_metrics
from services.common.process.service import Stop, collect_seldom, exit_now, service_name
from services.common.process.tracing import Tracing
from services.common.rpc.blocking import BlockingRpcServer
from services.common.rpc.certificates import Certificates
from services.worker.api.servicer import WorkerServicer
from services.worker.boot.common import Booted, boot
from services.worker.boot.compilation import kernel_compilations, recompilations
from services.worker.boot.precompile.background import KernelCompiler
from services.worker.boot.progress import BootProgress
from services.worker.engine.engine import Engine
from services.worker.engine.sleep import Sleeper
from services.worker.engine.weights import ModelWeights
from services.worker.metrics import WorkerMetrics
from services.worker.parallel.errors import ParallelError
from tokasaurus.worker.v1 import worker_pb2, worker_pb2_grpc

SERVICE = "tokasaurus.worker.v1.WorkerService"
CONTRACT_VERSION = "2.6"
MAX_PLANS_IN_FLIGHT = 16
STOP_GRACE_S = 5.0

log = structlog.get_logger(__name__)


async def serve(
    config: WorkerConfig,
    stop: Stop,
    *,
    listening: "asyncio.Future[str] | None" = None,
    load: Callable[[], Booted] | None = None,
    on_serving: Callable[[Callable[[], bool]], None] = lambda progresses: None,
    progress: BootProgress | None = None,
    compiler: KernelCompiler | None = None,
) -> None:
    """Run until ``stop`` is set or the compute thread ends.

    ``listening`` receives the address once it is bound. ``load`` makes the runner in the compute thread; None: the
    runner that ``config`` asks for. ``on_serving`` is called when the runner is made, with a function that returns
    whether there was progress since its last call. ``progress`` reports the phases of the start. ``compiler`` compiles
    the kernels of the start.
    """
    ranks = {"toka.dp_rank": config.dp_rank, "toka.tp_rank": config.tp_rank, "toka.pp_rank": config.pp_rank}
    tracing = Tracing.of(config, "toka-worker", **ranks)
    engine = Engine(load or (lambda: boot(config, engine.end, progress, compiler)), tracing)
    metrics = WorkerMetrics(engine, config)
    try:
        async with serve_metrics(config, metrics):
            await _serve(config, stop, engine, metrics, listening, on_serving)
    finally:
        if tracing is not None:
            await asyncio.to_thread(tracing.close)


async def _serve(
    config: WorkerConfig,
    stop: Stop,
    engine: Engine,
    metrics: WorkerMetrics,
    listening: "asyncio.Future[str] | None",
    on_serving: Callable[[Callable[[], bool]], None],
) -> None:
    servicer = WorkerServicer(engine)
    server = BlockingRpcServer(SERVICE, certificates=Certificates.of(config))
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server.grpc_server)
    address = server.start(config.worker_listen)
    log.info("listening", address=address)
    if listening is not None:
        listening.set_result(address)
    booted, ended = engine.start()
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((booted, stopping), return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            return
        made = await booted
        info = describe(made, config)
        metrics.begin(info.device, made.expert_load)
        collect_seldom()
        on_serving(engine.progresses)
        if made.loaded is not None:
            directories = config.weight_directories
            servicer.weights = ModelWeights(made.loaded, made.runner, engine.run_alone, directories, address)
            servicer.sleeper = Sleeper.of(made.loaded, made.runner, servicer.weights, engine)
        servicer.info = info  # from now on, streams are accepted
        watch = asyncio.create_task(_watch(engine, server, config.step_deadline))
        await asyncio.wait((ended, stopping, watch), return_when=asyncio.FIRST_COMPLETED)
        if watch.done():
            watch.result()
        watch.cancel()
        if ended.done() and not stop.is_set():
            await ended
            raise Internal("the compute thread has ended")
        server.set_ready(False)
        # Several ranks would have to stop at the same plan, so they are not drained.
        if not ended.done() and booted.result().group is None:
            await stop.within(config.drain_seconds, lambda: asyncio.to_thread(servicer.drain, config.drain_seconds))
    except ParallelError as error:
        servicer.fail(error)
        raise
    finally:
        stopped = stop.is_set()
        stopping.cancel()
        await asyncio.to_thread(server.stop)
        engine.stop()
        if booted.done():  # a running step may end; a model that is still loading is abandoned
            await asyncio.wait((booted, ended), timeout=STOP_GRACE_S)
        # A thread that loads a model cannot be interrupted, and the interpreter would abort if it ended first.
        if config.tp_size * config.pp_size > 1 or (service_name() and not booted.done()):
            _exit_past_connections(0 if stopped else getattr(sys.exception(), "exit_status", 1))
        for future in (booted, ended):
            if not future.cancel():
                future.exception()  # mark it as retrieved: it was raised above, or the worker stopped first


def _exit_past_connections(status: int) -> None:
    """Make the process exit with ``status`` as soon as the main thread is done.

    The interpreter would first close connections to other ranks, and block on threads that wait for lost ranks.
    """
    atexit.register(exit_now, status)  # called before that, after the reason is logged


def describe(booted: Booted, config: WorkerConfig) -> worker_pb2.WorkerInfo:
    """Return the response of GetWorkerInfo, with a new incarnation id, or with that of the replica."""
    limits, ranks = booted.runner.limits, booted.ranks
    return worker_pb2.WorkerInfo(
        model=booted.model,
        incarnation_id=uuid.uuid4().hex if booted.group is None else booted.group.incarnation_id,
        contract_version=CONTRACT_VERSION,
        max_plans_in_flight=MAX_PLANS_IN_FLIGHT,
        tensor_parallel=worker_pb2.Rank(rank=ranks.tp_rank, size=ranks.tp_size),
        pipeline_parallel=worker_pb2.Rank(rank=ranks.pp_rank, size=ranks.pp_size),
        data_parallel_rank=config.dp_rank,
        device=booted.device,
        dtype=booted.dtype,
        choices=[worker_pb2.Choice(**each._asdict()) for each in booted.choices],
        **asdict(limits) | {"max_top_logprobs": limits.most_top_logprobs},  # fields of the same names
    )


async def _watch(engine: Engine, server: BlockingRpcServer, step_deadline_s: float, interval_s: float = 1.0) -> None:
    """Report SERVING while the steps of the compute thread end in time. Log compilations after the start."""
    ready, compiled = None, 0
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            working = engine.busy_s() < step_deadline_s
            if working is not ready:
                ready = working
                server.set_ready(ready)
                if not ready:
                    log.error("a step does not end", seconds=round(engine.busy_s()))
            if (now := recompilations() + kernel_compilations()) > compiled:
                compiled = now
                log.warning("compiled while serving: a step was slow", compilations=compiled)
            await asyncio.sleep(interval_s)
