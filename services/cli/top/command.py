"""The ``toka-top`` command."""

import contextlib
import os
import time
from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field
from rich.console import Console, RenderableType
from rich.live import Live

from services.cli.top.figures import History
from services.cli.top.source import GatewayUnavailable, Source, SourceError
from services.cli.top.view import frame, unavailable
from services.common.config import API_KEY_VARIABLES, fail, from_command_line
from services.common.flags import Bool, Config, Examples, Float, Int

_PIPE_COLUMNS = 200  # wide enough for complete lines, for grep


class TopConfig(Config):
    """Show a running deployment live, until Ctrl-C.

    Shows throughput, running and waiting sequences, the KV cache and its forecast, replicas and the state of their
    workers, and the oldest requests.
    """

    examples: ClassVar[Examples] = (
        ("", "the deployment on this host"),
        ("--url https://llm.example.com --api-key $ADMIN_KEY", "another one, which has keys"),
        ("--url http://127.0.0.1:9100", "a gateway with admin_port=9100"),
        ("--once | head -3", "one frame; the exit status is 1 if the gateway cannot be reached or refuses the key"),
    )
    variables: ClassVar[Mapping[str, tuple[str, ...]]] = {"api_key": API_KEY_VARIABLES}

    url: str = Field("http://127.0.0.1:10210", description="the gateway, as toka prints it")
    api_key: str | None = Field(None, description="a key with the scope admin, where the gateway has keys")
    ca: str | None = Field(None, description="PEM of the authority that signed the gateway's certificate")
    interval: Float = Field(1.0, ge=0.5, description="seconds between two readings")
    requests: Int = Field(10, ge=0, description="requests to show, the oldest ones")
    once: Bool = Field(False, description="two readings, one frame, and exit; always so if the output is no terminal")


def main() -> None:
    """Run the ``toka-top`` command. Exits with status 1 and the reason if there is no answer."""
    config = from_command_line(TopConfig)
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_COLUMNS
    try:
        with contextlib.closing(Source(config.url, config.api_key, config.ca)) as source:
            if config.once or not console.is_terminal:
                console.print(_once(source, config.interval, config.requests))
            else:
                _live(source, config.interval, config.requests, console)
    except (GatewayUnavailable, SourceError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        pass


def _once(source: Source, interval: float, most: int) -> RenderableType:
    history = History()
    history.take(source.read())
    time.sleep(interval)
    sample = source.read()
    history.take(sample)
    return frame(source.url, sample, history, most)


def _live(source: Source, interval: float, most: int, console: Console) -> None:
    """Update the terminal until Ctrl-C or a ``SourceError``. A gateway that does not respond is retried."""
    history, responded_at = History(), time.monotonic()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                sample = source.read()
                responded_at = time.monotonic()
                history.take(sample)
                live.update(frame(source.url, sample, history, most), refresh=True)
            except GatewayUnavailable as error:
                history.forget()
                live.update(unavailable(source.url, str(error), time.monotonic() - responded_at), refresh=True)
            time.sleep(interval)
