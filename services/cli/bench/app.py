"""The ``toka-bench`` command."""

from services.cli.bench.clients import ClientError
from services.cli.bench.commands.latency import LatencyConfig, latency
from services.cli.bench.commands.monkeys import MonkeysConfig, monkeys
from services.cli.bench.commands.serve import ServeConfig, serve
from services.cli.bench.server import ServerError
from services.common.config import command_from_command_line, fail
from services.common.flags import Config, FlagError

_PURPOSE = (
    "Measure a server that speaks the OpenAI API: throughput, and the time to tokens. Tokens are counted by the server,"
    " in usage. The exit status is 1 if a request failed, 2 for a wrong flag, and 130 after Ctrl-C, which shows what"
    " was measured so far. Start with: toka-bench serve --requests 50 --concurrency 8"
)
COMMANDS: dict[str, type[Config]] = {"serve": ServeConfig, "monkeys": MonkeysConfig, "latency": LatencyConfig}


def main() -> None:
    """Run the ``toka-bench`` command."""
    _, config = command_from_command_line(COMMANDS, _PURPOSE)
    try:
        match config:
            case ServeConfig():
                status = serve(config)
            case MonkeysConfig():
                status = monkeys(config)
            case LatencyConfig():
                status = latency(config)
    except (ServerError, ClientError) as error:
        fail(str(error))
    except FlagError as error:
        fail(str(error), status=2)
    raise SystemExit(status)
