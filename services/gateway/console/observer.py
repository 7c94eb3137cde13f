"""State of schedulers for the console, collected on demand and shared by all viewers."""

import asyncio
import time
from typing import Any

import grpc
import orjson

from services.common.rpc.channel import task_is_cancelled
from services.common.rpc.status import from_rpc_error
from services.gateway.console.plan_watch import PlanWatch
from services.gateway.console.shape import load_document, plan_document, schedule_document
from services.gateway.engine.fleet import Fleet
from services.gateway.engine.replica import Replica
from tokasaurus.scheduler.v1 import observe_pb2

_CACHE_S = 0.5  # lifetime of a collected state
_TIMEOUT_S = 2.0  # of an RPC
_MAX_REQUESTS = 100
_HORIZON_STEPS = 65_536


class Observer:
    """Collects the state of all schedulers. Runs on the gateway's event loop.

    Without viewers it does nothing. Any number of viewers cost a scheduler two small RPCs per ``_CACHE_S``, and a
    message per plan.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._watches = {replica: PlanWatch(replica) for replica in fleet.replicas}
        self._document = b""
        self._collected_at = float("-inf")
        self._collecting: asyncio.Task[None] | None = None

    async def state(self) -> bytes:
        """Return the state as JSON, at most ``_CACHE_S`` old."""
        if self._collecting is None and time.monotonic() - self._collected_at >= _CACHE_S:
            self._collecting = asyncio.create_task(self._collect())
        if self._collecting is not None:
            await asyncio.shield(self._collecting)  # a viewer that disconnects must not cancel it for the others
        return self._document

    async def _collect(self) -> None:
        try:
            fleet = self._fleet
            replicas = await asyncio.gather(*map(self._describe, fleet.replicas))
            reason = fleet.trouble
            gateway = {"ready": not reason, "reason": reason or None, "draining": fleet.draining}
            self._document = orjson.dumps({"at": time.time(), "gateway": gateway, "replicas": replicas})
            self._collected_at = time.monotonic()
        finally:
            self._collecting = None

    async def _describe(self, replica: Replica) -> dict[str, Any]:
        plan = self._watches[replica].latest()
        document: dict[str, Any] = {
            "address": replica.address,
            "scheduler_id": replica.scheduler_id or None,
            "model": replica.model.id if replica.model is not None else None,
            "contract": replica.model.contract_version if replica.model is not None else None,
            "ready": replica.ready,
            "reason": replica.trouble or None,
            "at": None,
            "load": None,
            "schedule": None,
            "plan": None if plan is None else plan_document(plan),
            "trouble": None,  # error of the RPCs below
        }
        if (stub := replica.stub) is None:
            return document
        metadata = replica.metadata()
        listing = observe_pb2.ListRequestsRequest(most=_MAX_REQUESTS, horizon_steps=_HORIZON_STEPS)
        try:
            load = await stub.GetLoad(observe_pb2.GetLoadRequest(), metadata=metadata, timeout=_TIMEOUT_S)
            document |= {"at": time.time(), "load": load_document(load.load)}
            listed = await stub.ListRequests(listing, metadata=metadata, timeout=_TIMEOUT_S)
            document["schedule"] = schedule_document(listed)
        except grpc.RpcError as error:
            document["trouble"] = from_rpc_error(error).message
        except (grpc.aio.UsageError, asyncio.CancelledError):  # the channel was closed
            if task_is_cancelled():
                raise
            document["trouble"] = "the connection to the scheduler has ended"
        return document
