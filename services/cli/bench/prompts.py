"""What requests ask: made-up prompts of given lengths, or the rows of a file. Read-only once made, and pickled."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from services.cli.bench.sending import Bodies, Body

# Common words, since those are a token each in most vocabularies.
_TEXT = """
the of and to in a is that for it was on are as with his they at be this from have or by one had not but what all were
when we there can an your which their said if do will each about how up out them then she many some so these would other
into has more her two like him see time could no make than first been its who now people my made over did down only way
find use may water long little very after words called just where most know get through back much before go good new
write our used me man too any day same right look think also around another came come work three word must because does
part even place well such here take why things help put years different away again off went old number
"""
_WORDS = _TEXT.split()


@dataclass(frozen=True)
class Lengths:
    """How many tokens: always ``low``, any number up to ``high``, or lognormal around ``median``, cut at ``high``."""

    low: int
    high: int
    median: float | None = None
    sigma: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """``256``, ``128-512`` or ``lognormal:99,1.2,2048`` (median, sigma, most). Raises ``ValueError``."""
        kind, colon, values = text.partition(":")
        try:
            if colon and kind == "lognormal":
                median, sigma, most = values.split(",")
                found = cls(1, int(most), float(median), float(sigma))
            else:
                low, dash, high = text.partition("-")
                found = cls(int(low), int(high) if dash else int(low))
        except ValueError:
            raise ValueError(f"{text!r} is no length: write 256, 128-512 or lognormal:99,1.2,2048") from None
        if not 1 <= found.low <= found.high or not found.sigma >= 0 or (found.median is not None and found.median < 1):
            raise ValueError(f"{text!r}: a length is 1 at least, and the first not above the last")
        return found

    def draw(self, rng: np.random.Generator) -> int:
        if self.median is None:
            return int(rng.integers(self.low, self.high, endpoint=True))
        return int(np.clip(rng.lognormal(np.log(self.median), self.sigma), self.low, self.high))

    def __str__(self) -> str:
        if self.median is not None:
            return f"lognormal:{self.median:g},{self.sigma:g},{self.high}"
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True)
class Asking:
    """What the requests of a load have in common."""

    model: str
    chat: bool = False
    stream: bool = True
    fields: dict[str, Any] = field(default_factory=dict)  # further ones of the body

    def body(self, prompt: str | list[Any], max_tokens: int) -> Body:
        """``prompt``: text, token ids, or a chat's messages."""
        asked: Body = {"model": self.model, "max_tokens": max_tokens}
        if self.chat:
            asked["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        else:
            asked["prompt"] = prompt
        if self.stream:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        return asked | self.fields


@dataclass(frozen=True)
class Synthetic:
    """A body for every number, the same for the same seed: random words, or random tokens below ``vocab_size``."""

    asking: Asking
    seed: int
    prompt_tokens: Lengths
    output_tokens: Lengths
    vocab_size: int | None = None

    def __call__(self, number: int) -> Body:
        rng = np.random.default_rng((self.seed, number))
        length, answer = self.prompt_tokens.draw(rng), self.output_tokens.draw(rng)
        if self.vocab_size is not None:
            return self.asking.body(rng.integers(1, self.vocab_size, length).tolist(), answer)
        return self.asking.body(" ".join(_WORDS[index] for index in rng.integers(0, len(_WORDS), length)), answer)


@dataclass(frozen=True)
class Repeated:
    """Each body of another source so many times, one after the other."""

    body: Bodies
    times: int

    def __call__(self, number: int) -> Body:
        return self.body(number // self.times)


@dataclass(frozen=True)
class Once:
    """One sample of four tokens in place of what another source asks: something may be made on first use."""

    body: Bodies

    def __call__(self, number: int) -> Body:
        return self.body(number) | {"n": 1, "max_tokens": 4}


@dataclass(frozen=True)
class Rows:
    """A body for every number, from the prompts of a file, in order and round again."""

    asking: Asking
    seed: int
    prompts: list[str] | list[list[Any]]
    output_tokens: Lengths

    def __call__(self, number: int) -> Body:
        answer = self.output_tokens.draw(np.random.default_rng((self.seed, number)))
        return self.asking.body(self.prompts[number % len(self.prompts)], answer)


def made_up_or_read(
    asking: Asking,
    seed: int,
    prompts: list[str] | list[list[Any]] | None,
    prompt_tokens: Lengths,
    output_tokens: Lengths,
    vocab_size: int | None,
) -> Bodies:
    """``Rows`` of ``prompts``; where there are none, ``Synthetic``."""
    if prompts is None:
        return Synthetic(asking, seed, prompt_tokens, output_tokens, vocab_size)
    return Rows(asking, seed, prompts, output_tokens)


def read_rows(path: Path, name: str) -> list[Any]:
    """Field ``name`` (``a.b``: of an object within) of each line of a JSONL file: a prompt, or a chat's messages.
    Raises ``ValueError``, which names the line."""
    found = []
    with path.open() as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                found.append(_read(line, name, f"{path}:{number}"))
    if not found:
        raise ValueError(f"{path} has no rows")
    if len({type(each) for each in found}) > 1:
        raise ValueError(f"{path}: {name!r} is text in some rows and messages in others")
    return found


def _read(line: str, name: str, where: str) -> str | list[Any]:
    try:
        row = value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is no JSON: {error}") from None
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            there = ", ".join(row) if isinstance(row, dict) else "no fields"
            raise ValueError(f"{where} has no {name!r} (it has {there}): name the prompt's field with --field")
        value = value[part]
    if not isinstance(value, str | list) or not value:
        raise ValueError(f"{where}: {name!r} is neither text nor a list of messages")
    return value
