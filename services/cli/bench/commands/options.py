"""The flags that the commands share, and the parsers of their values."""

import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from services.cli.bench.prompts import PromptLengths
from services.common.config import API_KEY_VARIABLES
from services.common.flags import Bool, Config, Excludes, FlagError, Float, Int

T = TypeVar("T")


def read(file: Callable[[], T]) -> T:
    """Return what ``file`` returns. Raises ``FlagError`` if the dataset that it reads is wrong."""
    try:
        return file()
    except KeyError as error:
        raise FlagError(f"flag dataset: a line has no {error}") from None
    except (ValueError, OSError) as error:
        raise FlagError(f"flag dataset: {error}") from None


def _address(url: str) -> str:
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return url
    except ValueError:  # the port is not a number
        pass
    raise ValueError("is no address: expected http://HOST:PORT, or https://")


def _lengths(value: Any) -> PromptLengths:
    return value if isinstance(value, PromptLengths) else PromptLengths.parse(str(value))


def _json_object(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("""is no JSON object: write e.g. '{"top_p": 0.9}'""")
    return found


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    return path


def _writable(path: Path) -> Path:
    """Return ``path``. Raises ``ValueError`` if its directory is missing, before a load is measured."""
    if not path.absolute().parent.is_dir():
        raise ValueError(f"there is no directory {path.parent}; make it, or choose another")
    return path


def _drawable(path: Path) -> Path:
    if path.suffix != ".png":
        raise ValueError("expected a name that ends in .png")
    _writable(path)
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("matplotlib is not installed: pip install matplotlib, or leave plot= out")
    return path


ExistingFile = Annotated[Path, AfterValidator(_existing)]
Timeout = Annotated[Float, Field(ge=0.001, description="seconds for one request, after which it failed")]
PromptTokens = Annotated[
    PromptLengths,
    PlainValidator(_lengths),
    Excludes("dataset"),
    Field(
        description="256, 128-512, or lognormal:MEDIAN,SIGMA,MAXIMUM; a word is about one token, and the results have"
        " the exact numbers"
    ),
]
OutputTokens = Annotated[
    PromptLengths, PlainValidator(_lengths), Field(description="max_tokens of the requests, in the same form")
]


class ServerFlags(Config):
    """Server."""

    variables: ClassVar[Mapping[str, tuple[str, ...]]] = {"api_key": API_KEY_VARIABLES}

    url: Annotated[str, AfterValidator(_address)] = Field(
        "http://127.0.0.1:10210", description="address of an OpenAI-compatible server, with or without /v1"
    )
    model: str | None = Field(None, description="default: the first model that the server lists")
    api_key: str | None = Field(None, description="better in the environment than in the shell's history")
    ca: ExistingFile | None = Field(
        None, description="PEM of the authority that signed the server's certificate; default: those of the system"
    )
    clients: Int = Field(1, ge=1, description="client processes; use more if the client is busy (it says so)")


class RequestFlags(Config):
    """Requests."""

    vocab_size: Annotated[Int | None, Excludes("dataset", chat=True)] = Field(
        None,
        ge=2,
        description="make prompts of random token ids below this instead of words: their lengths are exact, if the"
        " server takes ids",
    )
    ignore_eos: Bool | None = Field(
        None,
        description="send ignore_eos, so that answers have their full length; not every server knows it; default: T,"
        " and F for prompts of a file",
    )
    temperature: Float = Field(0.6, ge=0)
    extra_body: Annotated[dict[str, Any] | None, BeforeValidator(_json_object)] = Field(
        None, description="""further fields of every request: '{"top_p": 0.9}'"""
    )
    seed: Int | None = Field(
        None,
        ge=0,
        description="of prompts, lengths and arrivals; default: drawn and shown, so that no server has the prompts of a"
        " run cached",
    )

    def fields(self, *, ignore_eos: bool) -> dict[str, Any]:
        """Return the fields that every request's body has. ``ignore_eos`` applies if the flag is not given."""
        ignores = ignore_eos if self.ignore_eos is None else self.ignore_eos
        found = {"temperature": self.temperature} | ({"ignore_eos": True} if ignores else {})
        return found | (self.extra_body or {})


class ResultFlags(Config):
    """Results."""

    json_to: Annotated[Path, AfterValidator(_writable)] | None = Field(
        None, alias="json", description="file for all figures"
    )
    plot_to: Annotated[Path, AfterValidator(_drawable)] | None = Field(
        None, alias="plot", description="PNG file for a plot of them; needs matplotlib"
    )
