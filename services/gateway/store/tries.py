"""Records of idempotency keys: the request of each key, and the id of the object that it created."""

from sqlalchemy import delete, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from services.common.errors import ReusedIdempotencyKey
from services.gateway.store.database import Store
from services.gateway.store.expiry import AT_ONCE, delete_some
from services.gateway.store.ids import new_id, now
from services.gateway.store.tables import StoredTry

TRIES_EXPIRE_S = 24 * 3600


class Tries:
    """The records of idempotency keys in ``store``.

    Attempts with the same key do not wait for each other. They create an object with the same id, which the store
    accepts once.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    async def name(self, key_name: str, idempotency_key: str, fingerprint: str) -> str:
        """Return 128 random bits for the id of the object that a request creates, the same for each attempt.

        Raises ``ReusedIdempotencyKey`` if the key was used for another request within 24 hours.
        """
        while True:
            try:
                async with self._store.writing() as session:
                    found = await self._find(session, key_name, idempotency_key)
                    if found is None:
                        found = StoredTry(
                            key_name=key_name,
                            idempotency_key=idempotency_key,
                            fingerprint=fingerprint,
                            name=new_id(""),
                            created_at=now(),
                        )
                        session.add(found)
                        await session.flush()
            except IntegrityError:  # another gateway added the key at the same time
                continue
            if found.fingerprint != fingerprint:
                raise ReusedIdempotencyKey(
                    "this idempotency key was used for another request; send a new key with each new request",
                    field="Idempotency-Key",
                )
            return found.name

    async def forget_expired(self) -> bool:
        """Delete a number of expired records. Return whether there may be more."""
        expired = StoredTry.created_at <= now() - TRIES_EXPIRE_S
        async with self._store.writing() as session:
            return await delete_some(session, StoredTry, expired) == AT_ONCE

    async def _find(self, session: AsyncSession, key_name: str, idempotency_key: str) -> StoredTry | None:
        mine = StoredTry.key_name == key_name, StoredTry.idempotency_key == idempotency_key
        await session.execute(delete(StoredTry).where(*mine, StoredTry.created_at <= now() - TRIES_EXPIRE_S))
        return await session.scalar(select(StoredTry).where(*mine))
