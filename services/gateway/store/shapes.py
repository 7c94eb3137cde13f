"""OpenAI's JSON objects of files, Batch jobs and lists."""

from collections.abc import Sequence
from typing import Any

from services.common.errors import InvalidRequest
from services.gateway.store.batches import Shown
from services.gateway.store.queries import Query
from services.gateway.store.tables import StoredFile


def file_object(file: StoredFile) -> dict[str, Any]:
    """Return the object of a file."""
    names = ("bytes", "created_at", "expires_at", "filename", "purpose", "status")
    columns = {name: getattr(file, name) for name in names}
    return {"id": file.id, "object": "file"} | columns | {"status_details": None}


def page(items: Sequence[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """Return the object of one page of a list."""
    ids = [item["id"] for item in items]
    return {
        "object": "list",
        "data": items,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": has_more,
    }


def page_of(items: list[dict[str, Any]], query: Query, most: int, *, reverse: bool) -> dict[str, Any]:
    """Return a page of ``items``, of at most ``most`` items after the item ``after`` of the query.

    ``reverse``: list the last item first. Raises InvalidRequest if there is no item ``after``.
    """
    if reverse:
        items = items[::-1]
    if (after := query.text("after")) is not None:
        start = next((number for number, item in enumerate(items, 1) if item["id"] == after), None)
        if start is None:
            raise InvalidRequest(f"after={after[:100]!r}: there is no such item", field="after")
        items = items[start:]
    return page(items[:most], len(items) > most)


def batch_object(shown: Shown) -> dict[str, Any]:
    """Return the object of a Batch job. ``forecast`` is an extension: its end at the rate of its last lines."""
    batch, counts, forecast = shown
    names = (
        "endpoint", "model", "input_file_id", "completion_window", "status", "output_file_id", "error_file_id",
        "created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at",
        "cancelling_at", "cancelled_at",
    )  # fmt: skip
    columns = {name: getattr(batch, name) for name in names}
    return (
        {"id": batch.id, "object": "batch"}
        | columns
        | {
            "errors": None if not batch.errors else {"object": "list", "data": batch.errors},
            "request_counts": {"total": counts.total, "completed": counts.completed, "failed": counts.failed},
            "usage": {
                "input_tokens": counts.prompt_tokens,
                "input_tokens_details": {"cached_tokens": counts.cached_tokens},
                "output_tokens": counts.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
                "total_tokens": counts.prompt_tokens + counts.completion_tokens,
            },
            "metadata": batch.labels,
            "forecast": None if forecast is None else forecast._asdict(),
        }
    )
