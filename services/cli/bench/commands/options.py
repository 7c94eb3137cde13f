"""The options of the commands, and how their values are read."""

import importlib.util
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import typer

from services.cli.bench.prompts import Lengths

_SERVER, _LOAD, _REQUESTS, _OUTPUT = "Server", "Load", "Requests", "Results"
DEFAULT_URL = "http://127.0.0.1:10210"

T = TypeVar("T")


def read(file: Callable[[], T]) -> T:
    """What ``file`` gives; what is wrong with it is told as a wrong option."""
    try:
        return file()
    except KeyError as error:
        raise typer.BadParameter(f"--dataset: a line has no {error}") from None
    except (ValueError, OSError) as error:
        raise typer.BadParameter(f"--dataset: {error}") from None


def fields(temperature: float, ignore_eos: bool, extra_body: dict[str, Any] | None) -> dict[str, Any]:
    """Of every request's body."""
    found = {"temperature": temperature} | ({"ignore_eos": True} if ignore_eos else {})
    return found | (extra_body or {})


def refuse(context: typer.Context, names: Iterable[str], why: str) -> None:
    """What was given of ``names`` and has no effect: whoever measures would believe that it had."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(f"--{name.replace('_', '-')}: has no effect {why}")


def refuse_beside(context: typer.Context, dataset: Path | None, of_dataset: str) -> None:
    """``refuse`` what is for made-up prompts with ``dataset``, and ``of_dataset`` without."""
    if dataset is None:
        refuse(context, [of_dataset], "without --dataset")
    else:
        refuse(context, ["prompt_tokens", "vocab_size"], "with --dataset, whose prompts are sent as they are")


def _address(url: str) -> str:
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return url
    except ValueError:  # a port that is no number
        pass
    raise typer.BadParameter(f"{url!r} is no address: expected http://HOST:PORT, or https://")


def _lengths(text: str | Lengths) -> Lengths:
    if isinstance(text, Lengths):  # a default
        return text
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"{text!r} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise typer.BadParameter(f"""{text!r} is no JSON object: write e.g. '{{"top_p": 0.9}}'""")
    return found


@dataclass(frozen=True)
class Counts:
    """Some numbers; typer would ask for a tuple's, each as an argument of its own."""

    values: tuple[int, ...]

    def __str__(self) -> str:
        return ",".join(map(str, self.values))


def _counts(text: str | Counts) -> Counts:
    if isinstance(text, Counts):  # a default
        return text
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise typer.BadParameter(f"{text!r}: expected whole numbers above 0, such as 1,8,64")
    return Counts(found)


def _placed(path: Path | None) -> Path | None:
    """Asked before the load, so that nothing is measured in vain."""
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"{path}: there is no directory {path.parent}; make it, or choose another")
    return path


def _drawable(path: Path | None) -> Path | None:
    if path is not None and path.suffix != ".png":
        raise typer.BadParameter(f"{path}: expected a name that ends in .png")
    _placed(path)
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("matplotlib is not installed: pip install matplotlib, or leave --plot out")
    return path


# -- who is asked

Url = Annotated[
    str,
    typer.Option(
        help="Where an OpenAI-compatible server listens; with or without /v1.",
        callback=_address,
        rich_help_panel=_SERVER,
    ),
]
Model = Annotated[
    str | None, typer.Option(help="Default: the first model that the server lists.", rich_help_panel=_SERVER)
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar=["TOKA_API_KEY", "OPENAI_API_KEY"],
        help="Better in the environment than in the shell's history.",
        rich_help_panel=_SERVER,
        show_default=False,
    ),
]
Ca = Annotated[
    Path | None,
    typer.Option(
        help="PEM of who signed the server's certificate; default: who the system trusts.",
        exists=True,
        dir_okay=False,
        rich_help_panel=_SERVER,
    ),
]
Timeout = Annotated[
    float, typer.Option(help="Seconds for one request, after which it failed.", min=0.001, rich_help_panel=_SERVER)
]
Clients = Annotated[
    int,
    typer.Option(help="Client processes. More where the client is busy (it says so).", min=1, rich_help_panel=_SERVER),
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="Of prompts, lengths and arrivals. Default: drawn and told, so that no server has a run's prompts cached.",
        min=0,
        rich_help_panel=_REQUESTS,
    ),
]
Temperature = Annotated[float, typer.Option(min=0.0, rich_help_panel=_REQUESTS)]
VocabSize = Annotated[
    int | None,
    typer.Option(
        help="Make prompts of random token ids below this instead of words: as long as said, to the token, where the "
        "server takes ids.",
        min=2,
        rich_help_panel=_REQUESTS,
    ),
]
IgnoreEos = Annotated[
    bool | None,
    typer.Option(
        "--ignore-eos/--no-ignore-eos",
        help="Send ignore_eos, so that answers are as long as said; not every server knows it. Default: yes, but not "
        "for prompts of a file.",
        rich_help_panel=_REQUESTS,
        show_default=False,
    ),
]
ExtraBody = Annotated[
    dict[str, Any] | None,
    typer.Option(
        parser=_json_object,
        metavar="JSON",
        help="""Further fields of every request: '{"top_p": 0.9}'.""",
        rich_help_panel=_REQUESTS,
        show_default=False,
    ),
]
PromptTokens = Annotated[
    Lengths,
    typer.Option(
        "--prompt-tokens",
        parser=_lengths,
        metavar="LENGTH",
        help="256, 128-512, or lognormal:MEDIAN,SIGMA,MOST. A word is a token or so: the result has the true number.",
        rich_help_panel=_REQUESTS,
    ),
]
OutputTokens = Annotated[
    Lengths,
    typer.Option(
        "--output-tokens",
        parser=_lengths,
        metavar="LENGTH",
        help="max_tokens of the requests, written likewise.",
        rich_help_panel=_REQUESTS,
    ),
]

# -- when requests are sent

Rate = Annotated[
    float | None,
    typer.Option(help="Requests a second, as a Poisson process, whatever still runs.", min=1e-6, rich_help_panel=_LOAD),
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        help="Requests at once: one ends, the next is sent. Default without --rate: 16.",
        min=1,
        rich_help_panel=_LOAD,
        show_default=False,
    ),
]
Requests = Annotated[
    int | None,
    typer.Option(help="How many. Default without --duration: 100.", min=1, rich_help_panel=_LOAD, show_default=False),
]
Duration = Annotated[
    float | None,
    typer.Option(
        help="Seconds after which no request begins; those that run are waited for.", min=0.001, rich_help_panel=_LOAD
    ),
]
WarmUp = Annotated[int, typer.Option(help="Requests beforehand, which do not count.", min=0, rich_help_panel=_LOAD)]
Problems = Annotated[int, typer.Option(help="Different prompts.", min=1, rich_help_panel=_LOAD)]
Samples = Annotated[int, typer.Option(help="Samples of each.", min=1, rich_help_panel=_LOAD)]
RequestsPerProblem = Annotated[
    int,
    typer.Option(
        help="The samples of a problem are asked for in so many requests: for servers that bound n.",
        min=1,
        rich_help_panel=_LOAD,
    ),
]
Streams = Annotated[
    Counts,
    typer.Option(parser=_counts, metavar="COUNTS", help="Streams at once, one after the other.", rich_help_panel=_LOAD),
]
Rounds = Annotated[
    int, typer.Option(help="Rounds of each, after one that does not count.", min=1, rich_help_panel=_LOAD)
]

# -- what they ask

Chat = Annotated[
    bool,
    typer.Option("--chat", help="Ask /v1/chat/completions, not /v1/completions.", rich_help_panel=_REQUESTS),
]
Stream = Annotated[bool, typer.Option(help="Ask for streams, or else for whole answers.", rich_help_panel=_REQUESTS)]
Dataset = Annotated[
    Path | None,
    typer.Option(
        help="JSON lines with a prompt in each, instead of made-up ones.",
        exists=True,
        dir_okay=False,
        rich_help_panel=_REQUESTS,
    ),
]
Field = Annotated[
    str,
    typer.Option(
        help="Where a line of the dataset has its prompt, or a chat's messages; a.b: in an object.",
        rich_help_panel=_REQUESTS,
    ),
]
ProblemFile = Annotated[
    Path | None,
    typer.Option(
        "--dataset",
        help="JSON lines with question and answer, as GSM8K's, instead of made-up prompts.",
        exists=True,
        dir_okay=False,
        rich_help_panel=_REQUESTS,
    ),
]
Shots = Annotated[
    int, typer.Option(help="Solved problems of the dataset before each question.", min=0, rich_help_panel=_REQUESTS)
]

# -- what becomes of it

Json = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write all figures to a file.",
        dir_okay=False,
        callback=_placed,
        rich_help_panel=_OUTPUT,
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot", metavar="PNG", help="Draw them. Needs matplotlib.", callback=_drawable, rich_help_panel=_OUTPUT
    ),
]
