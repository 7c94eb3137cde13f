"""The Batch jobs of one gateway: validated, executed and finished once its store is open."""

import asyncio

from services.gateway.batch.executor import Executor
from services.gateway.batch.line_runner import LineRunner
from services.gateway.batch.requests import Requests
from services.gateway.http.lines import Lines
from services.gateway.openai.gateway import Gateway


class BatchService:
    """Works on Batch jobs between ``start`` and ``stop``. Runs on the gateway's event loop."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._executor: Executor | None = None
        self._starting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to work as soon as the store is open."""
        self._starting = asyncio.create_task(self._start(), name="start batches")

    def look(self) -> None:
        """Look for new work now, not at the next interval."""
        if self._executor is not None:
            self._executor.look()

    async def stop(self) -> None:
        """Leave the work to other gateways. Clients can still read files and batches."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._executor is not None:
            await self._executor.stop()

    async def _start(self) -> None:
        gateway = self._gateway
        store = await gateway.store.until_open()
        if store is None:
            return
        requests, lines = Requests(gateway), Lines(gateway.guard)
        self._executor = Executor(
            store.leases,
            store.files,
            store.blobs,
            LineRunner(store.blobs, requests, lines, gateway.config.batch_concurrency),
            forget_expired=[
                kind.forget_expired for kind in (store.responses, store.conversations, store.chats, store.tries)
            ],
            max_body_bytes=gateway.config.max_body_bytes,
        )
        self._executor.start()
