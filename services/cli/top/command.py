"""The options and the loop of ``toka-top``. It has ``--options``, unlike services: see ``services/cli/__init__.py``."""

import contextlib
import os
import time
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from services.cli.top.figures import History
from services.cli.top.source import GatewayUnavailable, Source, SourceError
from services.cli.top.view import frame, unavailable

_PIPE_COLUMNS = 200  # wide enough for complete lines, for grep

app = typer.Typer(rich_markup_mode="markdown", pretty_exceptions_enable=False)

_EPILOG = "\n\n".join(
    (
        "Examples:",
        "    toka-top",
        "    toka-top --url https://llm.example.com --api-key $ADMIN_KEY",
        "    toka-top --url http://127.0.0.1:9100      (of a gateway with admin_port=9100)",
        "    toka-top --once | head -3",
        "Exit status: 0 after Ctrl-C; 1 if the gateway does not respond (--once) or refuses the key.",
    )
)


@app.command(epilog=_EPILOG)
def top(
    url: Annotated[str, typer.Option(help="The gateway, as toka prints it.")] = "http://127.0.0.1:10210",
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=["TOKA_API_KEY", "OPENAI_API_KEY"],
            show_envvar=True,
            help="A key with the scope admin, if the gateway requires keys.",
        ),
    ] = None,
    ca: Annotated[
        str | None, typer.Option(metavar="FILE", help="PEM of the authority that signed the gateway's certificate.")
    ] = None,
    interval: Annotated[float, typer.Option(min=0.5, metavar="SECONDS", help="Time between two updates.")] = 1.0,
    requests: Annotated[int, typer.Option(min=0, help="Number of the oldest requests to show.")] = 10,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit; the default in a pipe.")] = False,
) -> None:
    """Show a running deployment: throughput, running and waiting requests, the KV cache and its forecast, and replicas.

    It also shows the state of their workers and the oldest requests. Ctrl-C exits.
    """
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_COLUMNS
    try:
        with contextlib.closing(Source(url, api_key, ca)) as source:
            if once or not console.is_terminal:
                console.print(_once(source, interval, requests))
            else:
                _live(source, interval, requests, console)
    except (GatewayUnavailable, SourceError) as error:
        typer.echo(f"toka-top: {error}", err=True)
        raise typer.Exit(1) from None
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
