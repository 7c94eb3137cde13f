"""Draws a snapshot."""

import math
import time
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from services.cli.sparkline import sparkline
from services.cli.top.figures import History
from services.cli.top.source import Snapshot

_BAR, _CURVE = 12, 48
_CROWDED = 0.9  # share of the cache


def frame(url: str, sample: Snapshot, history: History, most: int) -> RenderableType:
    """Draw everything. ``most`` is the number of requests shown."""
    state = sample.state
    parts: list[RenderableType] = [_head(url, state), _rates(history)]
    parts.append(_replicas(state["replicas"], history))
    parts += [_forecast(each) for each in state["replicas"] if each["schedule"] and each["load"]]
    parts.append(_requests(state["replicas"], most))
    return Group(*parts)


def unavailable(url: str, reason: str, seconds: float) -> RenderableType:
    """Draw the reason why there is no snapshot."""
    text = Text(f"away for {duration(seconds)}\n", "bold red")
    text.append(f"{reason}\nIt is retried until it responds; Ctrl-C exits.", "default")
    return Panel(text, title=Text(url))


def _head(url: str, state: dict[str, Any]) -> Text:
    gateway = state["gateway"]
    models = sorted({each["model"] for each in state["replicas"] if each["model"]})
    text = Text.assemble(("toka-top  ", "bold"), url, "  ", (", ".join(models) or "no model known", "bold cyan"), "  ")
    if gateway["draining"]:
        text.append("draining", "yellow")
    elif gateway["ready"]:
        text.append("ready", "green")
    else:
        text.append(f"not ready: {gateway['reason']}", "bold red")
    return text.append(time.strftime("  %H:%M:%S", time.localtime(state["at"])), "dim")


def _rates(history: History) -> Text:
    rates = history.rates
    if rates is None:
        return Text("rates follow with the second update", "dim")
    text = Text.assemble(
        ("generated ", "dim"), (f"{rates.generated:,.0f} tokens/s ", "bold"),
        (sparkline(list(history.generated)), "cyan"), ("\nprompts   ", "dim"), f"{rates.prompt:,.0f} tokens/s",
        f", {rates.cached / rates.prompt:.0%} cached" if rates.prompt else "",
        ("   samples finished ", "dim"), f"{rates.finished:,.1f}/s",
    )  # fmt: skip
    for label, (p50, p99) in history.quantiles.items():
        text.append(f"   {label} ", "dim").append(f"p50 {duration(p50)} p99 {duration(p99)}")
    return text


def _replicas(replicas: list[dict[str, Any]], history: History) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("replica", overflow="fold")
    table.add_column("state", overflow="fold")
    for name in ("running", "waiting"):
        table.add_column(name, justify="right")
    table.add_column("KV cache", no_wrap=True)
    for name in ("tokens/s", "step", "plans", "preempted", "worker restarts"):
        table.add_column(name, justify="right")
    for each in replicas:
        load = each["load"]
        cells = [] if load is None else _load_cells(each, load, history)
        table.add_row(_printable(each["address"]), _replica_state(each), *cells)
    return table


def _replica_state(replica: dict[str, Any]) -> Text:
    """Return the state of the scheduler. Its reason includes the absence of its workers."""
    if not replica["ready"]:
        return _printable(replica["reason"] or "not ready", "bold red")
    if replica["trouble"]:
        return _printable(f"ready, but its state cannot be read: {replica['trouble']}", "yellow")
    return Text("ready", "green")


def _load_cells(replica: dict[str, Any], load: dict[str, Any], history: History) -> list[str | Text]:
    share = load["in_use_pages"] / max(1, load["total_pages"])
    filled = round(share * _BAR)
    bar = Text("█" * filled, "red" if share > _CROWDED else "green").append("░" * (_BAR - filled), "dim")
    step_s = (replica["schedule"] or {}).get("step_seconds")
    rate = history.rates.by_replica.get(replica["address"]) if history.rates is not None else None
    counters = load["counters"]
    return [
        f"{load['running_sequences']:,}",
        f"{load['waiting_sequences']:,}",
        bar.append(f" {share:.0%}"),
        "" if rate is None else f"{rate:,.0f}",
        "" if step_s is None else duration(step_s),
        str(load["plans_in_flight"]),
        f"{counters['preemptions']:,}",
        f"{counters['worker_restarts']:,}",
    ]


def _forecast(replica: dict[str, Any]) -> Text:
    """Draw the pages in use from now to the end of the forecast."""
    schedule = replica["schedule"]
    curve, step_s = schedule["curve"], schedule["step_seconds"]
    steps, pages, total = curve["steps"], curve["pages"], max(1, curve["total_pages"])
    text = Text.assemble(("forecast  ", "dim"), f"{replica['address']} ")
    if not steps or not any(pages):
        return text.append("nothing is in use", "dim")
    end = steps[-1] + 1
    text.append(sparkline(resample(steps, pages, _CURVE), total), "magenta")
    text.append(f" highest {max(pages) / total:.0%}, free ", "dim")
    return text.append(f"after {end:,} steps" if step_s is None else f"in {duration(end * step_s)}")


def resample(steps: list[int], pages: list[int], count: int) -> list[float]:
    """Return the curve's maximum in each of ``count`` equal intervals. ``pages[i]`` hold from ``steps[i]`` on."""
    width = max(1.0, (steps[-1] + 1) / count)
    parts = [0.0] * count
    for index, (step, used) in enumerate(zip(steps, pages, strict=True)):
        until = steps[index + 1] if index + 1 < len(steps) else step + 1
        for part in range(int(step / width), min(count, int((until - 1) / width) + 1)):
            parts[part] = max(parts[part], float(used))
    return parts


def _requests(replicas: list[dict[str, Any]], most: int) -> Table:
    """Draw the oldest requests."""
    found = [each for replica in replicas if replica["schedule"] for each in replica["schedule"]["requests"]]
    unfinished = sum(replica["schedule"]["unfinished_requests"] for replica in replicas if replica["schedule"])
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column(f"longest of {unfinished:,} requests" if unfinished else "no requests", overflow="fold")
    for name in ("key", "class"):
        table.add_column(name)
    for name in ("age", "prompt", "running", "waiting", "done", "generated", "ends in"):
        table.add_column(name, justify="right")
    for each in sorted(found, key=lambda request: -request["age_s"])[:most]:
        table.add_row(
            _printable(each["id"]),
            _printable(each["key"]),
            each["priority"],
            duration(each["age_s"]),
            f"{each['prompt_tokens']:,}",
            *(f"{each[name]:,}" for name in ("running", "waiting", "finished", "generated_tokens")),
            "" if each["finish_s"] is None else duration(each["finish_s"]),
        )
    return table


def _printable(text: str, style: str = "") -> Text:
    """Return text of clients, such as request ids, without markup and control characters."""
    return Text("".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text), style)


def duration(seconds: float) -> str:
    """Format a duration: ``12.3 ms``, ``3.45 s``, ``2:05``, ``1:02:05``, and ``∞`` for infinity."""
    if math.isinf(seconds):
        return "∞"
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"
