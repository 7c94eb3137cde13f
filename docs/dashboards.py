"""Draws Grafana's dashboards of ``docker/grafana`` without Grafana: ``python -m docs.dashboards [seconds=240]``.

It runs ``toka`` on the CPU with two replicas, some traffic, and a Prometheus (Debian's package ``prometheus``), asks it
what the panels ask, and draws what comes by the dashboards' own grid, units and legends.
"""

import contextlib
import json
import math
import random
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.dates import DateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LinearLocator, MaxNLocator

from bench.prometheus import Prometheus, Series, prometheus
from bench.server import Server, free_port, serve

DOCS = Path(__file__).resolve().parent
DASHBOARDS = DOCS.parent / "docker" / "grafana" / "dashboards"
TARGETS = {
    "overview": DOCS / "dashboard.png",
    "scheduler": DOCS / "dashboard-scheduler.png",
    "workers": DOCS / "dashboard-workers.png",
}
FEW_TOKENS = {"kv_cache_num_tokens": 6144}  # so that the cache fills
CAPTION = "drawn from the dashboard's queries by docs/dashboards.py, not by Grafana"

Panel = dict[str, Any]  # as in a dashboard's JSON

_COLUMNS, _COLUMN_IN, _ROW_IN = 24, 0.58, 0.34  # of Grafana's grid; inches
_COLOURS = ("#7eb26d", "#eab839", "#6ed0e0", "#ef843c", "#e24d42", "#1f78c1", "#ba43a9", "#705da0")
_PALE, _TEXT = "#d8dbe0", "#24292e"
_PREFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "K"), (1, ""))
_BYTES = ((2**30, " GiB"), (2**20, " MiB"), (2**10, " KiB"), (1, " B"))
_SECONDS = ((60, " min"), (1, " s"), (1e-3, " ms"), (1e-6, " µs"))


def dashboard(name: str) -> dict[str, Any]:
    """The JSON of one."""
    return json.loads((DASHBOARDS / f"{name}.json").read_text())


def expression(target: Mapping[str, Any], board: Mapping[str, Any], every_s: int) -> str:
    """What Grafana asks for a panel's target when all is chosen; Prometheus gets its figures every ``every_s``."""
    text = target["expr"].replace("$__rate_interval", f"{4 * every_s}s")
    for variable in board["templating"]["list"]:
        text = text.replace(f"${variable['name']}", variable["allValue"])
    return text


def variables(board: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(metric, label): what there is to choose from."""
    for variable in board["templating"]["list"]:
        yield re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"]).groups()


@contextlib.contextmanager
def deployment(replicas: int, **flags: Any) -> Iterator[tuple[Server, dict[str, list[str]]]]:
    """``toka`` on the CPU with metrics on, and the addresses of its pages by Prometheus' jobs."""
    first = _free_ports(3 * replicas)
    ports = {"metrics_port": first, "grpc_port": first + 2 * replicas}
    with serve(device="cpu", dtype="float32", dp_size=replicas, **ports, **flags) as server:
        pages = [f"127.0.0.1:{first + index}" for index in range(2 * replicas)]
        yield (
            server,
            {
                "gateway": [server.base_url.removeprefix("http://")],
                "scheduler": pages[:replicas],
                "worker": pages[replicas:],
            },
        )


def _free_ports(count: int) -> int:
    """The first of some in a row."""
    while True:
        first = free_port()
        with contextlib.suppress(OSError), contextlib.ExitStack() as taken:
            for port in range(first, first + count):
                taken.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def traffic(server: Server, until: threading.Event, clients: int = 12) -> list[threading.Thread]:
    """Threads that ask for this and that: few, many and few again, as days go."""
    half = clients / 2

    def ask(number: int) -> None:
        chance, began = random.Random(number), time.monotonic()
        with httpx.Client(base_url=server.base_url, timeout=120, trust_env=False) as http:
            while not until.is_set():
                if number > half + half * math.sin((time.monotonic() - began) / 25):
                    until.wait(1.0)
                    continue
                _ask_once(http, chance)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    return threads


def _ask_once(http: httpx.Client, chance: random.Random) -> None:
    shared = "You are a careful assistant. Answer in one word. " * 6
    kinds = {
        "samples": {"prompt": shared + "Name a colour:", "n": 6, "max_tokens": chance.randint(10, 60)},
        "short": {"prompt": f"{chance.random()} is", "max_tokens": chance.randint(5, 40)},
        "long": {"prompt": "word " * chance.randint(100, 600), "max_tokens": 20, "priority": 1},
        "wrong": {"prompt": "x", "temperature": -1},
    }
    kind = chance.choices(list(kinds), (5, 8, 3, 1))[0]
    if chance.random() < 0.05:  # a client that does not wait
        body = kinds["samples"] | {"stream": True, "max_tokens": 200, "ignore_eos": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
        return
    http.post("/v1/completions", json=kinds[kind])


def draw(name: str, asked: Prometheus, start: float, end: float, every_s: int, target: Path) -> None:
    """One dashboard between two moments, Unix time."""
    board = dashboard(name)
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"]) + 2
    plt.rcParams.update({"font.size": 7, "text.color": _TEXT, "axes.edgecolor": _PALE, "axes.labelcolor": _TEXT})
    figure = plt.figure(figsize=(_COLUMNS * _COLUMN_IN, rows * _ROW_IN), dpi=100, facecolor="#f4f5f8")
    figure.text(0.008, 1 - 0.75 / rows, board["title"], fontsize=12, weight="bold", va="center")
    figure.text(0.992, 1 - 0.75 / rows, CAPTION, fontsize=8, va="center", ha="right", color="#6b7280")
    for panel in board["panels"]:
        found = [
            (_legend(each, series), series.points)
            for each in panel["targets"]
            for series in asked.over(expression(each, board, every_s), start, end, every_s)
        ]
        _draw_panel(figure, panel, found, rows)
    figure.savefig(target)
    plt.close(figure)


def _legend(target: Mapping[str, Any], series: Series) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: series.labels.get(found[1], ""), target.get("legendFormat", ""))


Found = list[tuple[str, list[tuple[float, float]]]]  # legend, and (Unix time, value)


def _draw_panel(figure: Figure, panel: Panel, found: Found, rows: int) -> None:
    at = panel["gridPos"]
    left, top = at["x"] / _COLUMNS, 1 - (at["y"] + 1.5) / rows
    width, height = at["w"] / _COLUMNS, at["h"] / rows
    frame = figure.add_axes((left + 0.003, top - height + 0.06 / rows, width - 0.006, height - 0.12 / rows))
    frame.set(xticks=[], yticks=[], facecolor="white")
    frame.set_title(panel["title"], fontsize=8, loc="left", weight="bold", y=1, pad=-10, x=0.012)
    inset = (left + 0.038, top - height + 1.5 / rows, width - 0.05, height - 2.35 / rows)
    if panel["type"] == "stat":
        inset = (left + 0.008, top - height + 0.15 / rows, width - 0.016, height - 1.0 / rows)
    axes = figure.add_axes(inset)
    axes.set_facecolor("none")
    found = [(name, points) for name, points in found if any(math.isfinite(value) for _, value in points)]
    if not found:
        axes.axis("off")
        axes.text(0.5, 0.5, "No data", ha="center", va="center", color="#6b7280", fontsize=9)
        return
    {"stat": _draw_stat, "bargauge": _draw_bars, "timeseries": _draw_lines}[panel["type"]](axes, panel, found)


def _draw_stat(axes: Axes, panel: Panel, found: Found) -> None:
    [(_, points)] = found
    times, values = zip(*[point for point in points if math.isfinite(point[1])], strict=True)
    axes.fill_between(times, values, color=_COLOURS[5], alpha=0.15, linewidth=0)
    axes.set_ylim(0, 2 * max(*values, 1e-9))
    axes.axis("off")
    unit = _unit(panel)
    axes.text(0.5, 0.6, written(values[-1], unit), fontsize=17, ha="center", va="center", transform=axes.transAxes)


def _draw_bars(axes: Axes, panel: Panel, found: Found) -> None:
    """Of a bar gauge: the last values."""
    last = sorted(((name, points[-1][1]) for name, points in found), key=lambda each: _number(each[0]))
    for index, (_, value) in enumerate(last):
        axes.bar(index, value, color=_COLOURS[index % len(_COLOURS)], width=0.6)
        axes.text(index, value, written(value, _unit(panel)), ha="center", va="bottom")
    axes.set_xticks(range(len(last)), [name for name, _ in last])
    _dress(axes, panel)


def _number(legend: str) -> float:
    found = re.search(r"\d+", legend)
    return float(found[0]) if found else math.inf


def _draw_lines(axes: Axes, panel: Panel, found: Found) -> None:
    custom = panel["fieldConfig"]["defaults"]["custom"]
    stacked, below = "stacking" in custom, {}
    for index, (name, points) in enumerate(found):
        colour = _COLOURS[index % len(_COLOURS)]
        at = [datetime.fromtimestamp(moment, UTC) for moment, _ in points]
        floor = [below.get(moment, 0.0) if stacked else 0.0 for moment, _ in points]
        top = [low + value for low, (_, value) in zip(floor, points, strict=True)]
        below |= {moment: value for (moment, _), value in zip(points, top, strict=True) if math.isfinite(value)}
        axes.plot(at, top, color=colour, linewidth=custom["lineWidth"], label=name)
        axes.fill_between(at, floor, top, color=colour, alpha=custom["fillOpacity"] / 100, linewidth=0)
    axes.xaxis.set_major_locator(LinearLocator(4))
    axes.xaxis.set_major_formatter(DateFormatter("%H:%M:%S"))
    axes.grid(color=_PALE, linewidth=0.4)
    room = 72 * axes.get_window_extent().width / axes.figure.dpi  # in points, of which a letter takes 0.6 of its size
    wanted = 6 * sum(0.6 * len(name) + 3 for name, _ in found)
    axes.legend(
        loc="upper left", bbox_to_anchor=(-0.03, -0.1), ncols=-(-len(found) // (1 + (wanted > room))), frameon=False,
        handlelength=1.2, columnspacing=1.0, borderpad=0, labelspacing=0.3, fontsize=6,
    )  # fmt: skip
    _dress(axes, panel)
    if not axes.get_ylim()[1] or not any(value for _, points in found for _, value in points):
        axes.set_ylim(0, 1)


def _dress(axes: Axes, panel: Panel) -> None:
    bounds, unit = panel["fieldConfig"]["defaults"], _unit(panel)
    axes.set_ylim(bottom=bounds.get("min"), top=bounds.get("max"))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: written(value, unit)))
    axes.tick_params(length=0, labelsize=6.5)
    axes.spines[["top", "right"]].set_visible(False)


def _unit(panel: Panel) -> str:
    return panel["fieldConfig"]["defaults"]["unit"]


def written(value: float, unit: str) -> str:
    """As Grafana writes it."""
    if not value:
        return "0"
    match unit:
        case "percentunit":
            return f"{100 * value:.3g}%"
        case "s":
            steps, end = _SECONDS, ""
        case "bytes":
            steps, end = _BYTES, ""
        case _:
            steps, end = _PREFIXES, {"reqps": " req/s", "watt": " W"}.get(unit, "")
    least, prefix = next((step for step in steps if abs(value) >= step[0]), steps[-1])
    return f"{value / least:.3g}{prefix}{end}"


def main(seconds: int = 240, every_s: int = 2) -> None:
    with tempfile.TemporaryDirectory() as directory, deployment(2, **FEW_TOKENS) as (server, pages):
        over = threading.Event()
        with prometheus(Path(directory), pages, every_s) as asked:
            threads, start = traffic(server, over), time.time()
            time.sleep(seconds)
            end = time.time()
            over.set()
            for name, target in TARGETS.items():
                draw(name, asked, start + 4 * every_s, end, every_s, target)
            for thread in threads:
                thread.join()


if __name__ == "__main__":
    main(**{name: int(value) for name, _, value in (argument.partition("=") for argument in sys.argv[1:])})
