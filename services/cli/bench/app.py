"""The ``toka-bench`` command. It has ``--options``, unlike the services: see ``services/cli/__init__.py``."""

import functools
from collections.abc import Callable

import typer

from services.cli.bench.clients import ClientError
from services.cli.bench.commands import latency, monkeys, serve
from services.cli.bench.server import ServerError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Measure a server that speaks the OpenAI API: throughput, and the time to tokens.\n\n"
    "Tokens are counted by the server, in usage. The exit status is 1 if a request failed, 2 for a wrong option, and"
    " 130 after Ctrl-C, which shows what was measured so far.",
    epilog="Start with: toka-bench serve --requests 50 --concurrency 8",
)


def _told(command: Callable[..., None]) -> Callable[..., None]:
    """What keeps a command from measuring is told as a sentence."""

    @functools.wraps(command)
    def run(*arguments: object, **options: object) -> None:
        try:
            command(*arguments, **options)
        except (ServerError, ClientError) as error:
            typer.echo(f"toka-bench: {error}", err=True)
            raise typer.Exit(1) from None

    return run


for function, examples in (
    (serve.serve, serve.EXAMPLES),
    (monkeys.monkeys, monkeys.EXAMPLES),
    (latency.latency, latency.EXAMPLES),
):
    app.command(epilog="\n\n".join(("Examples:", *(f"    {each}" for each in examples))))(_told(function))
