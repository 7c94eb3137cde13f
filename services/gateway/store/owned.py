"""Objects with an owner: one of them by its id, or a page of a list."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from sqlalchemy import ColumnElement, select, true
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute, undefer

from services.common.errors import InvalidRequest, NotFound
from services.gateway.store.tables import Listed

R = TypeVar("R", bound=Listed)


class OwnedRows(Generic[R]):
    """The rows of ``table``, which clients call ``noun``.

    A row is visible to the owner that the column ``owner`` names, usually an API key, while ``visible()`` holds.
    ``field`` is the request parameter with the id of a row. ``why`` ends the message about a missing one.
    """

    def __init__(
        self,
        table: type[R],
        owner: InstrumentedAttribute[Any],
        noun: str,
        field: str,
        why: str = "",
        *,
        visible: Callable[[], ColumnElement[bool]] = true,
    ) -> None:
        self._table, self._owner, self._visible = table, owner, visible
        self._noun, self._field, self._why = noun, field, why

    async def find(
        self,
        session: AsyncSession,
        object_id: str,
        owner: str | int,
        *,
        field: str | None = None,
        locked: bool = False,
        shared: bool = False,
        read: InstrumentedAttribute[Any] | None = None,
    ) -> R:
        """Return a row. Raises ``NotFound``, also for another owner's, which names ``field`` if that is given.

        If ``locked``, no other transaction can change the row until this one ends. A ``shared`` lock allows others to
        lock it, too. ``read``: a deferred column to load.
        """
        table = self._table
        query = select(table).where(table.id == object_id, self._owner == owner, self._visible())
        if read is not None:
            query = query.options(undefer(read))
        found = await session.scalar(query.with_for_update(read=shared) if locked else query)
        if found is None:
            raise NotFound(
                f"there is no {self._noun} {object_id[:100]!r}{self._why}",
                field=field or self._field,
                reason=f"{self._noun.upper().replace(' ', '_')}_NOT_FOUND",
            )
        return found

    async def page(
        self,
        session: AsyncSession,
        owner: str | int,
        *wanted: ColumnElement[bool],
        after: str | None,
        limit: int,
        newest_first: bool,
    ) -> tuple[Sequence[R], bool]:
        """Return at most ``limit`` rows that meet the conditions ``wanted``, and whether there are more.

        The page begins after the row with the id ``after``, which need not be visible. Raises ``InvalidRequest`` if
        there is no such row.
        """
        table = self._table
        query = select(table).where(self._owner == owner, self._visible(), *wanted)
        if after is not None:
            last = await session.scalar(select(table.seq).where(table.id == after, self._owner == owner))
            if last is None:
                raise InvalidRequest(f"after={after[:100]!r}: there is no such {self._noun}", field="after")
            query = query.where(table.seq < last if newest_first else table.seq > last)
        query = query.order_by(table.seq.desc() if newest_first else table.seq).limit(limit + 1)
        found = (await session.scalars(query)).all()
        return found[:limit], len(found) > limit
