"""The ``toka-top`` command. It has ``--options``, unlike the services: see ``services/cli/__init__.py``."""

import contextlib
import os
import time
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from services.cli.top.figures import History
from services.cli.top.source import Away, Refused, Source
from services.cli.top.view import away, frame

_PIPE_COLUMNS = 200  # where nothing is cut, for grep

app = typer.Typer(rich_markup_mode="markdown", pretty_exceptions_enable=False)

_EPILOG = "\n\n".join(
    (
        "Examples:",
        "    toka-top",
        "    toka-top --url https://llm.example.com --api-key $ADMIN_KEY",
        "    toka-top --url http://127.0.0.1:9100      (of a gateway with admin_port=9100)",
        "    toka-top --once | head -3",
        "Exit status: 0 after Ctrl-C; 1 where the gateway is away (--once), or will never tell, as for a wrong key.",
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
            help="A key with the scope admin, where the gateway has keys.",
        ),
    ] = None,
    ca: Annotated[str | None, typer.Option(metavar="FILE", help="PEM of who signed the gateway's certificate.")] = None,
    interval: Annotated[float, typer.Option(min=0.5, metavar="SECONDS", help="Between two looks.")] = 1.0,
    requests: Annotated[int, typer.Option(min=0, help="Requests to show: those that are here longest.")] = 10,
    once: Annotated[bool, typer.Option("--once", help="Two looks, one frame, and end; so it is in a pipe.")] = False,
) -> None:
    """A running deployment, live: throughput, what runs and waits, the cache and its forecast, replicas and the state
    of their workers, and the requests that are here longest. Ctrl-C ends."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_COLUMNS
    try:
        with contextlib.closing(Source(url, api_key, ca)) as source:
            if once or not console.is_terminal:
                console.print(_once(source, interval, requests))
            else:
                _live(source, interval, requests, console)
    except (Away, Refused) as error:
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
    """Until Ctrl-C, or until there is no hope. A gateway that is away comes back by itself."""
    history, answered = History(), time.monotonic()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                sample = source.read()
                answered = time.monotonic()
                history.take(sample)
                live.update(frame(source.url, sample, history, most), refresh=True)
            except Away as error:
                history.forget()
                live.update(away(source.url, str(error), time.monotonic() - answered), refresh=True)
            time.sleep(interval)
