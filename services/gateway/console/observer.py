"""What the console shows of schedulers: asked for when somebody looks, once for all who do."""

import asyncio
import time
from typing import Any

import grpc
import orjson

from services.common.rpc.status import from_rpc_error
from services.gateway.console.plan_watch import PlanWatch
from services.gateway.console.shape import load_document, plan_document, schedule_document
from services.gateway.engine.fleet import Fleet
from services.gateway.engine.replica import Replica
from tokasaurus.scheduler.v1 import observe_pb2

_FRESH_S = 0.5  # an answer is everybody's for so long
_PATIENCE_S = 2.0  # with a scheduler
_MOST_REQUESTS = 100
_HORIZON_STEPS = 65_536


class Observer:
    """Made with the gateway; lives on its event loop. While nobody looks it does nothing; any number of viewers cost
    schedulers two small calls each ``_FRESH_S``, and a message for each plan."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._watches = {replica: PlanWatch(replica) for replica in fleet.replicas}
        self._document = b""
        self._made_at = float("-inf")
        self._making: asyncio.Task[None] | None = None

    async def state(self) -> bytes:
        """JSON, of ``_FRESH_S`` ago at most."""
        if self._making is None and time.monotonic() - self._made_at >= _FRESH_S:
            self._making = asyncio.create_task(self._make())
        if self._making is not None:
            await asyncio.shield(self._making)  # a viewer that leaves does not take it from the others
        return self._document

    async def _make(self) -> None:
        try:
            fleet = self._fleet
            replicas = await asyncio.gather(*map(self._of_replica, fleet.replicas))
            reason = fleet.trouble
            gateway = {"ready": not reason, "reason": reason or None, "draining": fleet.draining}
            self._document = orjson.dumps({"at": time.time(), "gateway": gateway, "replicas": replicas})
            self._made_at = time.monotonic()
        finally:
            self._making = None

    async def _of_replica(self, replica: Replica) -> dict[str, Any]:
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
            "trouble": None,  # with asking it
        }
        if (stub := replica.stub) is None:
            return document
        who = replica.metadata()
        listing = observe_pb2.ListRequestsRequest(most=_MOST_REQUESTS, horizon_steps=_HORIZON_STEPS)
        try:
            load = await stub.GetLoad(observe_pb2.GetLoadRequest(), metadata=who, timeout=_PATIENCE_S)
            document |= {"at": time.time(), "load": load_document(load.load)}
            listed = await stub.ListRequests(listing, metadata=who, timeout=_PATIENCE_S)
            document["schedule"] = schedule_document(listed)
        except grpc.RpcError as error:
            document["trouble"] = from_rpc_error(error).message
        except (grpc.aio.UsageError, asyncio.CancelledError):  # its channel was closed, before or meanwhile
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            document["trouble"] = "the connection to it has ended"
        return document
