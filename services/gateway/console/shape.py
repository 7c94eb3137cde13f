"""The JSON of ``/console/state``. Times are seconds from now, or null if the duration of a step is unknown."""

from typing import Any

import numpy as np

from services.common.packed import read_fixed32
from tokasaurus.scheduler.v1 import generate_pb2, observe_pb2

_MAX_POINTS = 300  # of a curve, which is drawn with few pixels
_PRIORITIES = {
    generate_pb2.PRIORITY_CLASS_LOW: "low",
    generate_pb2.PRIORITY_CLASS_NORMAL: "normal",
    generate_pb2.PRIORITY_CLASS_HIGH: "high",
}


def load_document(load: observe_pb2.Load) -> dict[str, Any]:
    """Return a scheduler's load, with the field names of the contract."""
    document = {
        name: getattr(load, name)
        for name in (
            "running_sequences", "waiting_sequences", "total_pages", "free_pages", "cached_pages", "in_use_pages",
            "page_size", "outstanding_tokens", "plans_in_flight",
        )
    }  # fmt: skip
    counters = load.counters
    return document | {"counters": {field.name: getattr(counters, field.name) for field in counters.DESCRIPTOR.fields}}


def plan_document(plan: observe_pb2.WatchPlansResponse) -> dict[str, Any]:
    """Return the contents of a step."""
    names = ("step", "sequences", "tokens", "prefill_tokens", "hydragen_groups", "hydragen_rows", "micro_batches")
    return {name: getattr(plan, name) for name in names}


def schedule_document(listed: observe_pb2.ListRequestsResponse) -> dict[str, Any]:
    """Return requests with their expected ends, and the forecast of pages in use."""
    step_s = listed.step_seconds if listed.HasField("step_seconds") else None
    return {
        "step_seconds": step_s,
        "unfinished_requests": listed.unfinished_requests,
        "requests": [_request(each, step_s) for each in listed.requests],
        "curve": _curve(listed.curve),
    }


def _request(each: observe_pb2.RequestOutlook, step_s: float | None) -> dict[str, Any]:
    return {
        "id": each.request_id,
        "key": each.fairness_key,
        "priority": _PRIORITIES.get(each.priority, "normal"),
        "prompt_tokens": each.prompt_tokens,
        "max_tokens": each.max_tokens,
        "running": each.running_samples,
        "waiting": each.waiting_samples,
        "finished": each.finished_samples,
        "generated_tokens": each.generated_tokens,
        "age_s": each.age_ms / 1000,
        "start_s": None if step_s is None else each.start_step * step_s,
        "finish_s": None if step_s is None else each.finish_step * step_s,
    }


def _curve(curve: observe_pb2.PageCurve) -> dict[str, Any]:
    """Return pages in use from each step on. A long curve is reduced to the maximum of each interval."""
    steps, pages = read_fixed32(curve.steps), read_fixed32(curve.pages)
    if len(steps) > _MAX_POINTS:
        firsts = np.arange(_MAX_POINTS) * len(steps) // _MAX_POINTS
        steps, pages = steps[firsts], np.maximum.reduceat(pages, firsts)
    return {"steps": steps.tolist(), "pages": pages.tolist(), "total_pages": curve.total_pages}
