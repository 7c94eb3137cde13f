"""The bodies of requests: synthetic prompts of given lengths, or the rows of a file.

Client processes get these objects pickled.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from services.cli.bench.sending import Bodies, Body

# Common words, because each is one token in most vocabularies.
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
class PromptLengths:
    """A distribution of token counts: uniform from ``low`` to ``high``, or lognormal with ``median`` up to ``high``."""

    low: int
    high: int
    median: float | None = None
    sigma: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "PromptLengths":
        """Parse ``256``, ``128-512`` or ``lognormal:99,1.2,2048`` (median, sigma, maximum). Raises ``ValueError``."""
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
            raise ValueError(f"{text!r}: expected lengths of at least 1, the smaller one first")
        return found

    def draw(self, rng: np.random.Generator) -> int:
        """Return a random token count."""
        if self.median is None:
            return int(rng.integers(self.low, self.high, endpoint=True))
        return int(np.clip(rng.lognormal(np.log(self.median), self.sigma), self.low, self.high))

    def __str__(self) -> str:
        if self.median is not None:
            return f"lognormal:{self.median:g},{self.sigma:g},{self.high}"
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True)
class Asking:
    """The parameters that all requests of a load share."""

    model: str
    chat: bool = False
    stream: bool = True
    fields: dict[str, Any] = field(default_factory=dict)  # other fields of the body

    def body(self, prompt: str | list[Any], max_tokens: int) -> Body:
        """Return the body for ``prompt``, which is a text, token ids, or the messages of a chat."""
        body: Body = {"model": self.model, "max_tokens": max_tokens}
        if self.chat:
            body["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        else:
            body["prompt"] = prompt
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body | self.fields


@dataclass(frozen=True)
class Synthetic:
    """Bodies of random words, or of random token ids below ``vocab_size``. The seed and the number determine a body."""

    asking: Asking
    seed: int
    prompt_tokens: PromptLengths
    output_tokens: PromptLengths
    vocab_size: int | None = None

    def __call__(self, number: int) -> Body:
        rng = np.random.default_rng((self.seed, number))
        length, answer = self.prompt_tokens.draw(rng), self.output_tokens.draw(rng)
        if self.vocab_size is not None:
            return self.asking.body(rng.integers(1, self.vocab_size, length).tolist(), answer)
        return self.asking.body(" ".join(_WORDS[index] for index in rng.integers(0, len(_WORDS), length)), answer)


@dataclass(frozen=True)
class Repeated:
    """Bodies of another source, each of them ``times`` times in a row."""

    body: Bodies
    times: int

    def __call__(self, number: int) -> Body:
        return self.body(number // self.times)


@dataclass(frozen=True)
class Once:
    """Bodies of another source with one sample of four tokens, for a short request that warms the server up."""

    body: Bodies

    def __call__(self, number: int) -> Body:
        return self.body(number) | {"n": 1, "max_tokens": 4}


@dataclass(frozen=True)
class Rows:
    """Bodies of the prompts of a file, in order. After the last prompt they are used again."""

    asking: Asking
    seed: int
    prompts: list[str] | list[list[Any]]
    output_tokens: PromptLengths

    def __call__(self, number: int) -> Body:
        answer = self.output_tokens.draw(np.random.default_rng((self.seed, number)))
        return self.asking.body(self.prompts[number % len(self.prompts)], answer)


def make_bodies(
    asking: Asking,
    seed: int,
    prompts: list[str] | list[list[Any]] | None,
    prompt_tokens: PromptLengths,
    output_tokens: PromptLengths,
    vocab_size: int | None,
) -> Bodies:
    """Return ``Rows`` of ``prompts``, or ``Synthetic`` if they are None."""
    if prompts is None:
        return Synthetic(asking, seed, prompt_tokens, output_tokens, vocab_size)
    return Rows(asking, seed, prompts, output_tokens)


def read_rows(path: Path, name: str) -> list[Any]:
    """Return the field ``name`` of each line of a JSONL file: a prompt, or the messages of a chat.

    The name ``a.b`` is the field ``b`` of the object ``a``. Raises ``ValueError``, which names the line.
    """
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
            names = ", ".join(row) if isinstance(row, dict) else "no fields"
            raise ValueError(f"{where} has no {name!r} (it has {names}): name the prompt's field with --field")
        value = value[part]
    if not isinstance(value, str | list) or not value:
        raise ValueError(f"{where}: {name!r} is neither text nor a list of messages")
    return value
