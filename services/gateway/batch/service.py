"""Files and batches of one gateway: the store it opens, and what works on it in the background."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import structlog
from fastapi import Request
from sqlalchemy.engine import make_url

from services.common.config import GatewayConfig
from services.common.descriptors import current_limit
from services.common.errors import InvalidRequest, NotFound, StoreUnavailable, TokaError
from services.common.private_files import warn_if_shared
from services.gateway.access.lines import Lines
from services.gateway.batch.background import Background
from services.gateway.batch.batches import Batches
from services.gateway.batch.blobs import Blobs
from services.gateway.batch.chats import Chats
from services.gateway.batch.conversations import Conversations
from services.gateway.batch.executor import Executor
from services.gateway.batch.expiry import ExpiringTogether
from services.gateway.batch.files import Files
from services.gateway.batch.health import StoreHealth
from services.gateway.batch.ids import new_id
from services.gateway.batch.leases import Leases
from services.gateway.batch.line_runner import LineRunner
from services.gateway.batch.requests import Endpoint, Requests
from services.gateway.batch.responses import Responses
from services.gateway.batch.store import Store
from services.gateway.batch.transfers import Transfers, most_transfers
from services.gateway.batch.tries import Tries

if TYPE_CHECKING:
    from services.gateway.gateway import Gateway

log = structlog.get_logger(__name__)

NO_STORE = "none"
_DATABASE = "batches.db"
_OPEN_AGAIN_S = 5.0
_FIRST_TRY_S = 10.0  # a request waits so long for the first attempt to open the store


class Opened(NamedTuple):
    """What the routes work with."""

    files: Files
    batches: Batches
    blobs: Blobs
    responses: Responses
    background: Background
    conversations: Conversations
    chats: Chats
    tries: Tries
    executor: Executor
    transfers: Transfers
    pool: str
    endpoints: Mapping[str, Endpoint]


class BatchService:
    """Made with the gateway; has a store between ``start`` and ``close``, if it can be opened.

    ``endpoints``: those that a batch may ask, by path. The application fills it.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self.endpoints: dict[str, Endpoint] = {}
        self._config = config
        self._trouble: TokaError = StoreUnavailable("the store is being opened; send the request again in a moment")
        self._tried = asyncio.Event()  # to open it, once
        self._opened: Opened | None = None
        self._store: Store | None = None
        self._health = StoreHealth()
        self._opening: asyncio.Task[None] | None = None
        # From the file limit at the gateway's start, as for ``max_connections``, even if the store is opened later.
        self._most_transfers = most_transfers(current_limit())

    def start(self, gateway: "Gateway") -> None:
        """Open the store, as often as that takes, and then begin to work."""
        self._health = StoreHealth(gateway.metrics.count_store_problem)
        if self._config.store_url == NO_STORE:
            self._trouble = NotFound(
                "this server keeps no files, batches and responses (store_url=none); start it with a store",
                reason="NO_STORE",
            )
            self._tried.set()
        else:
            self._opening = asyncio.create_task(self._open(gateway), name="open the store")

    async def opened(self) -> Opened:
        """What there is to work with. Raises why there is nothing."""
        if self._opened is None and self._opening is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_TRY_S):
                    await self._tried.wait()
        if self._opened is None:
            raise self._trouble
        return self._opened

    async def background_idle(self) -> None:
        """Wait until this gateway generates no background response."""
        if self._opened is not None:
            await self._opened.background.idle()

    async def stop(self) -> None:
        """Leave the work to others. Files and batches can still be asked for."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        if self._opened is not None:
            await self._opened.executor.stop()

    async def close(self) -> None:
        """After ``stop``, when nobody asks any more."""
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.background.stop()
            opened.blobs.stop()
        if self._store is not None:
            await self._store.close()

    async def _open(self, gateway: "Gateway") -> None:
        logged = ""
        while self._opened is None:
            try:
                self._opened = await self._open_once(gateway)
            except TokaError as error:
                if isinstance(error, InvalidRequest) and error.message != logged:  # others were logged by the health
                    log.warning("no files and batches", reason=error.message)
                    logged = error.message
                self._trouble = StoreUnavailable(f"files and batches are not available: {error.message}")
            except Exception as error:
                if repr(error) != logged:
                    log.exception("the store cannot be opened")
                    logged = repr(error)
                self._trouble = StoreUnavailable(
                    "files and batches are not available; the server's log has the details"
                )
            if self._opened is None:
                self._tried.set()
                await asyncio.sleep(_OPEN_AGAIN_S)
        self._tried.set()
        self._opened.executor.start()
        self._opened.background.start()

    async def _open_once(self, gateway: "Gateway") -> Opened:
        config = self._config
        blobs = await asyncio.to_thread(Blobs, f"{config.store_dir}/files", self._health)
        try:
            store = await Store.open(store_url(config), self._health)
        except BaseException:
            blobs.stop()
            raise
        self._store = store
        await asyncio.to_thread(_warn_if_shared, config)
        pool = next(iter(config.served_model_name), os.path.basename(config.model.rstrip("/")))
        owner = f"{socket.gethostname()}-{os.getpid()}-{new_id('')[:8]}"
        leases, files, responses = Leases(store, owner=owner, pool=pool), Files(store), Responses(store, owner)
        background, conversations, chats, tries = (
            Background(responses),
            Conversations(store),
            Chats(store),
            Tries(store),
        )
        executor = Executor(
            leases,
            files,
            ExpiringTogether(responses, conversations, chats),
            tries,
            blobs,
            LineRunner(blobs, Requests(gateway, self.endpoints), Lines(gateway.guard), config.batch_concurrency),
            max_body_bytes=config.max_body_bytes,
        )
        log.info("store open", pool=pool, owner=owner)
        batches, transfers = Batches(store), Transfers(self._most_transfers)
        return Opened(
            files,
            batches,
            blobs,
            responses,
            background,
            conversations,
            chats,
            tries,
            executor,
            transfers,
            pool,
            self.endpoints,
        )


def store_url(config: GatewayConfig) -> str:
    """The database's, which by default lies beside the files. Raises ``InvalidRequest``."""
    if config.store_url is not None:
        return config.store_url
    if "://" in config.store_dir:
        raise InvalidRequest(
            f"flag store_dir={config.store_dir}: SQLite needs a directory; name a database with store_url=",
            field="store_dir",
        )
    return f"sqlite+aiosqlite:///{Path(config.store_dir).expanduser().absolute() / _DATABASE}"


def _warn_if_shared(config: GatewayConfig) -> None:
    """Log a warning if other users of the host can read the store, as far as it consists of local files."""
    directory, url = Path(config.store_dir).expanduser(), make_url(store_url(config))
    paths = [] if "://" in config.store_dir else [directory, directory / "files"]
    if url.get_backend_name() == "sqlite" and url.database:
        paths += [Path(f"{url.database}{end}") for end in ("", "-wal", "-shm")]
    warn_if_shared("the store", paths)


async def opened(request: Request) -> Opened:
    """Of the gateway that answers ``request``. Raises why there is no store."""
    batches: BatchService = request.app.state.gateway.batches
    return await batches.opened()
