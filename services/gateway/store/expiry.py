"""Deletion of expired records."""

from typing import Any

from sqlalchemy import ColumnElement, delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from services.gateway.store.tables import Base

AT_ONCE = 500  # rows per transaction, so that other writers do not wait for long


async def delete_some(session: AsyncSession, table: type[Base], name: Any, condition: ColumnElement[bool]) -> bool:
    """Delete at most ``AT_ONCE`` rows of ``table`` that match ``condition``. Return whether there may be more.

    ``name`` has the columns of the primary key.
    """
    columns = list(name.clauses) if hasattr(name, "clauses") else [name]
    found = (await session.execute(select(*columns).where(condition).limit(AT_ONCE))).all()
    if found:
        names = [tuple(row) if len(columns) > 1 else row[0] for row in found]
        await session.execute(delete(table).where(name.in_(names)))
    return len(found) == AT_ONCE
