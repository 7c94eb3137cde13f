"""Deletion of expired records."""

from typing import Any, cast

from sqlalchemy import ColumnElement, CursorResult, delete, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from services.gateway.store.tables import Base

AT_ONCE = 500  # rows per transaction, so that other writers do not wait for long


async def delete_some(session: AsyncSession, table: type[Base], *conditions: ColumnElement[bool]) -> int:
    """Delete at most ``AT_ONCE`` rows of ``table`` that meet the ``conditions``. Return the number of deleted rows."""
    key = table.__table__.primary_key.columns
    some = select(*key).where(*conditions).limit(AT_ONCE)
    statement = delete(table).where(tuple_(*key).in_(some)).execution_options(synchronize_session=False)
    return cast("CursorResult[Any]", await session.execute(statement)).rowcount
