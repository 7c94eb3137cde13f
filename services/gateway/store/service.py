"""The store of one gateway: opened in the background, and again until it opens."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import structlog
from fastapi import Request
from sqlalchemy.engine import make_url

from services.common.boundaries import undo_on_error
from services.common.config import GatewayConfig
from services.common.errors import InvalidRequest, NotFound, StoreUnavailable, TokaError
from services.common.host.descriptors import current_limit
from services.common.host.private_files import warn_if_shared
from services.gateway.engine.metrics import StoreProblem
from services.gateway.store.background import Background
from services.gateway.store.batches import Batches
from services.gateway.store.blobs import Blobs
from services.gateway.store.chats import Chats
from services.gateway.store.conversations import Conversations
from services.gateway.store.database import Store
from services.gateway.store.files import Files
from services.gateway.store.health import StoreHealth
from services.gateway.store.ids import new_id
from services.gateway.store.leases import Leases
from services.gateway.store.responses import Responses
from services.gateway.store.transfers import Transfers, most_transfers
from services.gateway.store.tries import Tries

log = structlog.get_logger(__name__)

NO_STORE = "none"
_DATABASE = "batches.db"
_RETRY_S = 5.0  # between two attempts to open the store
_FIRST_ATTEMPT_TIMEOUT_S = 10.0  # timeout of a request that arrives before the first attempt has ended


class OpenStore(NamedTuple):
    """The tables and files of an open store."""

    files: Files
    batches: Batches
    blobs: Blobs
    responses: Responses
    background: Background
    conversations: Conversations
    chats: Chats
    tries: Tries
    leases: Leases
    transfers: Transfers
    pool: str  # the first served model name. Gateways of one pool share Batch jobs.


class StoreService:
    """Opens the store of a gateway. Created with the gateway, on its event loop."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._trouble: TokaError = StoreUnavailable("the store is being opened; send the request again in a moment")
        self._attempted = asyncio.Event()  # set when the first attempt to open the store has ended
        self._opening: asyncio.Task[OpenStore] | None = None
        self._opened: OpenStore | None = None
        self._database: Store | None = None
        self._health = StoreHealth()
        # From the file limit at the gateway's start, as for ``max_connections``, even if the store is opened later.
        self._most_transfers = most_transfers(current_limit())

    def start(self, count_problem: Callable[[StoreProblem], None]) -> None:
        """Start to open the store. ``count_problem`` is called for each problem of the store."""
        self._health = StoreHealth(count_problem)
        if self._config.store_url == NO_STORE:
            self._trouble = NotFound(
                "this server keeps no files, batches and responses (store_url=none); start it with a store",
                reason="NO_STORE",
            )
            self._attempted.set()
        else:
            self._opening = asyncio.create_task(self._open(), name="open the store")

    async def opened(self) -> OpenStore:
        """Return the open store. Raises the reason if there is none."""
        if self._opened is None and self._opening is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_ATTEMPT_TIMEOUT_S):
                    await self._attempted.wait()
        if self._opened is None:
            raise self._trouble
        return self._opened

    async def until_open(self) -> OpenStore | None:
        """Return the store once it is open, or None if this gateway has no store."""
        return None if self._opening is None else await asyncio.shield(self._opening)

    async def background_idle(self) -> None:
        """Wait until this gateway generates no background response."""
        if self._opened is not None:
            await self._opened.background.idle()

    async def close(self) -> None:
        """Close the store. No request may use it any longer."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.background.stop()
            opened.blobs.stop()
        if self._database is not None:
            await self._database.close()

    async def _open(self) -> OpenStore:
        logged = ""
        while self._opened is None:
            try:
                self._opened = await self._open_once()
            except TokaError as error:
                if isinstance(error, InvalidRequest) and error.message != logged:  # the health logs other errors
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
                self._attempted.set()
                await asyncio.sleep(_RETRY_S)
        self._attempted.set()
        self._opened.background.start()
        return self._opened

    async def _open_once(self) -> OpenStore:
        config = self._config
        blobs = await asyncio.to_thread(Blobs, f"{config.store_dir}/files", self._health)
        with undo_on_error(blobs.stop):
            database = await Store.open(store_url(config), self._health)
        self._database = database
        await asyncio.to_thread(_warn_if_shared, config)
        pool = next(iter(config.served_model_name), os.path.basename(config.model.rstrip("/")))
        owner = f"{socket.gethostname()}-{os.getpid()}-{new_id('')[:8]}"
        log.info("store open", pool=pool, owner=owner)
        responses = Responses(database, owner)
        return OpenStore(
            files=Files(database),
            batches=Batches(database),
            blobs=blobs,
            responses=responses,
            background=Background(responses),
            conversations=Conversations(database),
            chats=Chats(database),
            tries=Tries(database),
            leases=Leases(database, owner=owner, pool=pool),
            transfers=Transfers(self._most_transfers),
            pool=pool,
        )


def store_url(config: GatewayConfig) -> str:
    """Return the URL of the database, by default a file in ``store_dir``. Raises ``InvalidRequest``."""
    if config.store_url is not None:
        return config.store_url
    if "://" in config.store_dir:
        raise InvalidRequest(
            f"flag store_dir={config.store_dir}: SQLite needs a directory; name a database with store_url=",
            field="store_dir",
        )
    return f"sqlite+aiosqlite:///{Path(config.store_dir).expanduser().absolute() / _DATABASE}"


def _warn_if_shared(config: GatewayConfig) -> None:
    """Log a warning if other users of the host can read the local files of the store."""
    directory, url = Path(config.store_dir).expanduser(), make_url(store_url(config))
    paths = [] if "://" in config.store_dir else [directory, directory / "files"]
    if url.get_backend_name() == "sqlite" and url.database:
        paths += [Path(f"{url.database}{end}") for end in ("", "-wal", "-shm")]
    warn_if_shared("the store", paths)


async def opened(request: Request) -> OpenStore:
    """Return the open store of the gateway that answers ``request``. Raises the reason if there is none."""
    store: StoreService = request.app.state.gateway.store
    return await store.opened()
