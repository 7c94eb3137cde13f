"""A run of the command: it sends loads to a server, and shows and writes the figures."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from services.cli.bench.display import Live, show, warn_if_busy
from services.cli.bench.exchange import Endpoint, Reply
from services.cli.bench.figures import Figures
from services.cli.bench.load import LoadOutcome, OfferedLoad, drive
from services.cli.bench.plot import plot
from services.cli.bench.sending import Bodies
from services.cli.bench.server import ServerError, served_model, without_version
from services.common.flags import Config, as_text

INTERRUPTED = 130  # the exit status after Ctrl-C


@dataclass
class BenchRun:
    """A run of a command, used by its only thread."""

    command: str
    settings: dict[str, Any]  # the flags, for the results file
    url: str
    model: str
    endpoint: Endpoint
    clients: int
    json_to: Path | None
    plot_to: Path | None
    console: Console = field(default_factory=Console)
    progress: Console = field(default_factory=lambda: Console(stderr=True))
    busy: float = 0.0
    interrupted: bool = False

    @classmethod
    def of(cls, command: str, config: Config, *, chat: bool = False) -> "BenchRun":
        """Return the run that ``config`` describes. Raises ``ServerError``."""
        given: dict[str, Any] = {name: as_text(value) if isinstance(value, tuple) else value for name, value in config}
        json_to, plot_to, api_key, ca = (given.pop(name, None) for name in ("json_to", "plot_to", "api_key", "ca"))
        if given.get("seed", 0) is None:
            given["seed"] = random.SystemRandom().randrange(2**32)
        url = without_version(given.pop("url"))
        model = given.pop("model") or served_model(url, api_key, ca)
        path = "/v1/chat/completions" if chat else "/v1/completions"
        authority = None if ca is None else str(ca)
        endpoint = Endpoint(url + path, api_key or "none", authority, given.pop("timeout"))
        return cls(command, given, url, model, endpoint, given.pop("clients"), json_to, plot_to)

    def warm_up(self, live: Live, body: Bodies, first: int, count: int) -> None:
        """Send ``count`` requests one after the other, which are not measured. Raises ``ServerError`` if one fails."""
        if not count or self.interrupted:
            return
        outcome = self.drive(live, "warming up", OfferedLoad(body, count, first, concurrency=1), clients=1)
        for _, reply in outcome.replies:
            if reply.error:
                raise ServerError(f"{self.url} does not serve such requests: {reply.error}")

    def drive(self, live: Live, title: str, load: OfferedLoad, clients: int | None = None) -> LoadOutcome:
        """Send a load, unless Ctrl-C has interrupted the run."""
        live.begin(title, load.count)
        if self.interrupted:
            return LoadOutcome(interrupted=True)
        outcome = drive(self.endpoint, load, clients or self.clients, live.update)
        self.busy, self.interrupted = max(self.busy, outcome.busy), outcome.interrupted
        return outcome

    def report(self, outcome: LoadOutcome, title: str, *, streamed: bool) -> int:
        """Show, write and plot the figures of a load. Return the exit status."""
        replies = [reply for _, reply in outcome.replies]
        figures = Figures.of(replies, streamed=streamed, unfinished=outcome.running if outcome.interrupted else 0)
        show(self.console, title, figures, replies)
        return self.finish(figures.as_json(), replies, title, streamed=streamed, failed=figures.failed)

    def finish(
        self, figures: dict[str, Any], replies: Sequence[Reply], title: str, *, streamed: bool, failed: int
    ) -> int:
        """Write and plot the figures. Return the exit status: 1 if requests failed, or if there is no reply."""
        warn_if_busy(self.console, self.busy)
        if self.json_to is not None:
            head = {"command": self.command, "url": self.url, "model": self.model, "settings": self.settings}
            tail = {"client_busy": self.busy, "interrupted": self.interrupted}
            self.json_to.write_text(json.dumps(head | figures | tail, default=str, indent=2) + "\n")
            self.console.print(f"figures: {self.json_to}", highlight=False, markup=False)
        if self.plot_to is not None and replies:
            plot(replies, title, self.plot_to, streamed=streamed)
            self.console.print(f"plot: {self.plot_to}", highlight=False, markup=False)
        if self.interrupted:
            self.console.print("interrupted: these are the figures so far")
            return INTERRUPTED
        return 1 if failed or not replies else 0
