"""Versions of the weights that generated the tokens of a sample, joined over the schedulers that ran it."""

from dataclasses import replace
from typing import TypeAlias

from services.gateway.engine.codec import SampleEnding

# (version, number of tokens) in the order of the tokens. The version is empty for the weights of the workers' start,
# and None for the tokens of schedulers before contract 1.15.
Spans: TypeAlias = tuple[tuple[str | None, int], ...]


def join_spans(first: Spans, second: Spans) -> Spans:
    """Return the spans of the tokens of ``first`` and then ``second``.

    Empty spans are left out, and the last span of ``first`` is joined with the first of ``second`` if both have the
    same version.
    """
    second = tuple(span for span in second if span[1])
    if first and second and first[-1][0] == second[0][0]:
        (version, count), (_, more) = first[-1], second[0]
        return (*first[:-1], (version, count + more), *second[1:])
    return first + second


def count_tokens(spans: Spans) -> int:
    """Return the number of tokens in ``spans``."""
    return sum(count for _, count in spans)


def add_earlier_spans(ending: SampleEnding, earlier: Spans) -> SampleEnding:
    """Return ``ending`` with the spans of all tokens, or without spans if no weights were ever replaced.

    ``ending`` has those of the last scheduler, or none if its weights were never replaced. ``earlier`` are those of the
    tokens that the schedulers before it generated.
    """
    last = ending.weights or (("", ending.completion_tokens - count_tokens(earlier)),)
    spans = tuple((version, count) for version, count in join_spans(earlier, last) if version is not None)
    return replace(ending, weights=spans if any(version for version, _ in spans) else ())
