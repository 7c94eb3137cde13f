"""The answer to a request, and its comparison with the expected answer."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["lost", "duplicated", "wrong", "hang"]
# Tolerance of a log-probability in float32, which depends slightly on the other rows of the batch.
_LOGPROB_TOLERANCE = 5e-3
_SHOWN = 60
_DEPARTED = "the gateway is shutting down; send the request again"


class Defect(Exception):
    """An answer differs from the expected one. Raised while it is read or compared."""

    def __init__(self, kind: Kind, reason: str) -> None:
        super().__init__(f"{kind}: {reason}")
        self.kind, self.reason = kind, reason


class Departed(Defect):
    """A gateway reports that it is shutting down. This is no defect if the gateway really is."""


def failed(told: str) -> Defect:
    """Return the defect for an error message instead of an answer, or within one."""
    return (Departed if _DEPARTED in told else Defect)("lost", told)


@dataclass
class Choice:
    """A sample, possibly incomplete."""

    text: str = ""
    finish: str | None = None
    tokens: list[str] = field(default_factory=list)  # only if log-probabilities are requested, as the next two
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[int] = field(default_factory=list)  # number of alternatives at each token


@dataclass
class Answer:
    """The answer to a request, which is the same whether it is streamed or not."""

    choices: dict[int, Choice] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, document: dict[str, Any]) -> None:
        """Add a whole answer, or a chunk."""
        if "error" in document:
            raise failed(f"an error: {document['error']}")
        for part in document["choices"]:
            self._add_choice(self.choices.setdefault(part["index"], Choice()), part)
        if usage := document.get("usage"):
            if self.prompt_tokens:
                raise Defect("duplicated", "usage came twice")
            self.prompt_tokens, self.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]

    @staticmethod
    def _add_choice(choice: Choice, part: dict[str, Any]) -> None:
        message = part.get("delta") or part.get("message") or {}
        text = part.get("text") or message.get("content") or ""
        if choice.finish is not None and (text or part.get("finish_reason")):
            raise Defect("duplicated", f"choice {part['index']} goes on behind its end: {str(part)[:200]}")
        choice.text += text
        choice.finish = part.get("finish_reason") or choice.finish
        if scores := part.get("logprobs"):
            if "content" in scores:
                entries = scores["content"] or []
                choice.tokens += [entry["token"] for entry in entries]
                choice.logprobs += [entry["logprob"] for entry in entries]
                choice.alternatives += [len(entry["top_logprobs"]) for entry in entries]
            else:
                choice.tokens += scores["tokens"]
                choice.logprobs += scores["token_logprobs"]
                choice.alternatives += [len(top) for top in scores["top_logprobs"] or []]


class Stream:
    """A parser of the events of a streamed answer."""

    def __init__(self) -> None:
        self.answer = Answer()
        self._buffer = b""
        self._id: str | None = None
        self._done = False

    def feed(self, data: bytes) -> int:
        """Add bytes. Return the number of events that they complete."""
        count = 0
        for event in self._events(data):
            count += 1
            if self._done:
                raise Defect("duplicated", f"an event behind the end: {event[:200]!r}")
            if event == b"[DONE]":
                self._done = True
                continue
            self._add(event)
        return count

    def _add(self, event: bytes) -> None:
        try:
            document = json.loads(event)
            if self._id not in (None, document.get("id", self._id)):
                raise Defect("wrong", f"an event of {document['id']} in the stream of {self._id}")
            self._id = document.get("id", self._id)
            self.answer.add(document)
        except (ValueError, KeyError, TypeError) as error:
            raise Defect("wrong", f"no event ({error!r}): {event[:500]!r}") from error

    def end(self) -> Answer:
        """Return the answer after the connection was closed. Raises ``Defect`` if it is incomplete."""
        if not self._done:
            raise Defect("lost", "the stream ended without [DONE]")
        return self.answer

    def _events(self, data: bytes) -> Iterator[bytes]:
        *complete, self._buffer = (self._buffer + data).split(b"\n\n")
        for event in complete:
            if event.startswith(b"data: "):
                yield event[6:]


def check(expected: Answer, got: Answer) -> None:
    """Raise ``Defect`` for the first difference between ``got`` and ``expected``."""
    if expected.choices.keys() != got.choices.keys():
        raise Defect("lost", f"choices {sorted(got.choices)} instead of {sorted(expected.choices)}")
    for index, right in expected.choices.items():
        choice = got.choices[index]
        _check_text(index, right.text, choice.text)
        if choice.finish is None:
            raise Defect("lost", f"choice {index} has no end")
        if choice.finish != right.finish:
            raise Defect("wrong", f"choice {index} ends with {choice.finish} instead of {right.finish}")
        _check_logprobs(index, right, choice)
    for name in ("prompt_tokens", "completion_tokens"):
        right_count, count = getattr(expected, name), getattr(got, name)
        if count != right_count:
            kind: Kind = "duplicated" if count > right_count else "lost"
            raise Defect(kind, f"usage says {name}={count} instead of {right_count}")


def check_beginning(expected: Answer, got: Answer) -> None:
    """Raise ``Defect`` if the incomplete answer ``got`` is not the beginning of ``expected``."""
    for index, choice in got.choices.items():
        right = expected.choices.get(index, Choice()).text
        _check_text(index, right[: len(choice.text)], choice.text)


def _check_text(index: int, right: str, text: str) -> None:
    if text == right:
        return
    at = next((n for n, (a, b) in enumerate(zip(right, text, strict=False)) if a != b), min(len(right), len(text)))
    told = f"choice {index} at character {at}: {text[at : at + _SHOWN]!r} instead of {right[at : at + _SHOWN]!r}"
    raise Defect(_difference(right, text), told)


def _difference(right: str, text: str) -> Kind:
    """Return ``duplicated`` if a part occurs twice, ``lost`` if a part is missing, and ``wrong`` otherwise."""
    missing = len(right) - len(text)
    shorter, longer = (text, right) if missing > 0 else (right, text)
    begin = next((n for n, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), len(shorter))
    inserted = abs(missing)
    if not inserted or longer[begin + inserted :] != shorter[begin:]:
        return "wrong"
    if missing > 0:
        return "lost"
    piece = longer[begin : begin + inserted]
    return "duplicated" if longer[:begin].endswith(piece) or longer[begin + inserted :].startswith(piece) else "wrong"


def _check_logprobs(index: int, right: Choice, choice: Choice) -> None:
    if choice.tokens != right.tokens or choice.alternatives != right.alternatives:
        more = len(choice.tokens) - len(right.tokens)
        kind: Kind = "duplicated" if more > 0 else "lost" if more < 0 else "wrong"
        raise Defect(kind, f"choice {index} has log-probabilities of {choice.tokens} instead of {right.tokens}")
    for place, (a, b) in enumerate(zip(right.logprobs, choice.logprobs, strict=True)):
        if a is None or b is None:
            same = a is b
        else:
            same = math.isclose(a, b, abs_tol=_LOGPROB_TOLERANCE, rel_tol=_LOGPROB_TOLERANCE)
        if not same:
            raise Defect("wrong", f"choice {index} has log-probability {b} instead of {a} at token {place}")
