"""GSM8K's problems, and new ones made from them by other names and other numbers.

A problem's numbers can be drawn anew when its annotations tell how each number of the answer comes
from those of the question. `Template.parse` refuses every problem where that is in doubt.
"""

import json
import random
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from training.problems import (
    FEMALE_NAMES,
    MALE_NAMES,
    Problem,
    evaluate_expression,
    format_number,
)

HELD_OUT = 300  # The last problems of the training file are kept for validation.
NUMBER = re.compile(r"(?<![\w.])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\d])|(?<![\w.\d])\.\d+")
OPERAND = re.compile(r"\d+(?:\.\d+)?|\.\d+")
ANNOTATION = re.compile(r"<<([^<>=]*)=([^<>=]*)>>")

# Constants that an answer may use without the question's digits, and the words that bring them.
CUES: list[tuple[str, str]] = [
    ("2", r"half|halv|twice|double|two|couple|pair|both|second|round trip|biweekly"),
    ("3", r"three|third|triple|thrice"), ("4", r"four|quarter|quadruple"),
    ("5", r"five|fifth|weekday|nickel"), ("6", r"six"), ("7", r"seven|week|daily|day"),
    ("8", r"eight"), ("9", r"nine"), ("10", r"ten|dime|decade"), ("11", r"eleven"),
    ("12", r"twelve|dozen|month|year|foot|feet|inch|annual"), ("15", r"fifteen|quarter"),
    ("20", r"twenty|score"), ("24", r"day|hour"), ("25", r"quarter"), ("30", r"month|half|thirty"),
    ("50", r"fifty|half"), ("52", r"year|week|annual"), ("60", r"hour|minute|second|sixty"),
    ("100", r"%|percent|cent|hundred|penn"), ("365", r"year"), ("1", r"one|rest|left|himself|herself|\ba\b"),
    ("1.5", r"half"), (".5", r"half"), ("0.5", r"half"), (".25", r"quarter"), ("0.25", r"quarter"),
]  # fmt: skip


def read_problems(path: Path) -> list[Problem]:
    """The problems of one of GSM8K's files."""
    records = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [Problem(record["question"].strip(), record["answer"].strip()) for record in records]


def to_number(text: str) -> Fraction:
    """The value of a number as a text shows it."""
    return Fraction(text.replace(",", ""))


def rename_people(problem: Problem, rng: random.Random) -> Problem:
    """The same problem with other first names, each of the same pronoun."""
    text = problem.question + " " + problem.solution
    words = set(re.findall(r"\b[A-Z][a-z]+\b", text))
    mapping = {}
    for pool in (FEMALE_NAMES, MALE_NAMES):
        present = sorted(words.intersection(pool))
        choices = [name for name in pool if name not in words]
        mapping.update(zip(present, rng.sample(choices, len(present)), strict=True))
    if not mapping:
        return problem
    pattern = re.compile(r"\b(" + "|".join(mapping) + r")\b")
    return Problem(*(pattern.sub(lambda m: mapping[m[0]], part) for part in (problem.question, problem.solution)))


def constants_of(question: str) -> set[Fraction]:
    """Values that an answer to this question may use though its digits do not show them."""
    lowered = question.lower()
    found = {Fraction(value) for value, cue in CUES if re.search(cue, lowered)}
    for rate in re.findall(r"(\d+(?:\.\d+)?)\s*(?:%|percent)", lowered):
        found.add(Fraction(rate) / 100)
    return found


def fixed_numbers(question: str) -> set[Fraction]:
    """Values that must stay: one and two, rates, parts of fractions, years, times, or shown twice."""
    seen: set[Fraction] = set()
    fixed: set[Fraction] = set()
    for match in NUMBER.finditer(question):
        value = to_number(match[0])
        before, after = question[: match.start()][-1:], question[match.end() :][:9]
        is_year = 1900 <= value <= 2100 and "," not in match[0] and before != "$"
        if value in seen or is_year or value <= 2 or before in ("/", ":", "-"):
            fixed.add(value)
        if re.match(r"\s*%|\s*percent|/|:|-?[a-z]|\s*[ap]\.?m\b|th\b", after):
            fixed.add(value)
        seen.add(value)
    return fixed


def draw_number(old: Fraction, rng: random.Random) -> Fraction:
    """A new value of the same kind: as many decimals, and round where the old one is round."""
    if old.denominator != 1:
        grain = Fraction(1, 10) if (old * 10).denominator == 1 else Fraction(1, 100)
        if rng.random() < 0.7 and (old * 4).denominator == 1:
            grain = Fraction(1, 2) if (old * 2).denominator == 1 else Fraction(1, 4)
    else:
        grain = next(Fraction(g) for g in (1000, 100, 50, 10, 5, 1) if old % g == 0)
        if grain > 1 and old == grain:
            grain = grain / 5 if grain in (50, 10, 5) else grain / 10
        elif grain >= 5 and rng.random() < 0.3:
            grain = Fraction(1)
    low, high = max(old / 3, 2 * grain), max(old * Fraction(5, 2), 9 * grain)
    return grain * rng.randint(int(low / grain), int(high / grain))


@dataclass(frozen=True)
class Template:
    """A problem whose free numbers can be drawn anew.

    free: the question's values that may change.
    steps: each annotation's expression and value, in the answer's order.
    """

    problem: Problem
    free: tuple[Fraction, ...]
    steps: tuple[tuple[str, Fraction], ...]

    @classmethod
    def parse(cls, problem: Problem) -> "Template | None":
        """The template of a problem, or None where its arithmetic is not clear."""
        try:
            steps = tuple(
                (expression, to_number(result)) for expression, result in ANNOTATION.findall(problem.solution)
            )
            if any(evaluate_expression(expression) != value for expression, value in steps):
                return None
        except (ValueError, SyntaxError, ZeroDivisionError):
            return None
        shown = {to_number(text) for text in NUMBER.findall(problem.question)}
        constants = constants_of(problem.question)
        operands = [{to_number(text) for text in OPERAND.findall(step[0])} for step in steps]
        used = set[Fraction]().union(*operands)
        results: set[Fraction] = set()
        for needed, (_, value) in zip(operands, steps, strict=True):
            two_meanings = value in results or (value in shown | constants and value in used)
            if two_meanings or needed - shown - constants - results:
                return None
            results.add(value)
        free = (shown & used) - fixed_numbers(problem.question) - constants
        known = shown | constants | results
        visible = ANNOTATION.sub("", problem.solution)
        mentioned = {to_number(text) for text in NUMBER.findall(visible)}
        if not free or mentioned - known or to_number(problem.answer) not in results:
            return None
        return cls(problem, tuple(sorted(free)), steps)

    def resample(self, rng: random.Random, tries: int = 40) -> Problem | None:
        """The problem with new numbers, or None when no draw gave sensible quantities.

        Sensible: every value positive and exact to two decimals, and whole where it was whole.
        """
        for _ in range(tries):
            mapping = {old: draw_number(old, rng) for old in self.free}
            try:
                for expression, old in self.steps:
                    new = evaluate_expression(replace_operands(expression, mapping))
                    if new <= 0 or (old.denominator == 1 and new.denominator != 1):
                        raise ValueError("not a sensible quantity")
                    format_number(new)
                    mapping[old] = new
            except (ValueError, ZeroDivisionError):
                continue
            return Problem(
                replace_numbers(self.problem.question, {old: mapping[old] for old in self.free}),
                replace_numbers(self.problem.solution, mapping),
            )
        return None


def replace_operands(expression: str, mapping: dict[Fraction, Fraction]) -> str:
    """An annotation's expression with its operands replaced."""

    def new(match: re.Match[str]) -> str:
        value = to_number(match[0])
        return format_number(mapping[value]) if value in mapping else match[0]

    return OPERAND.sub(new, expression)


def replace_numbers(text: str, mapping: dict[Fraction, Fraction]) -> str:
    """A text with the mapped values replaced, in annotations too; money keeps its two decimals."""

    def new(match: re.Match[str]) -> str:
        value = to_number(match[0])
        if value not in mapping:
            return match[0]
        number = format_number(mapping[value])
        if re.search(r"\.\d\d$", match[0]) and "." in number:
            return f"{float(mapping[value]):.2f}"
        return f"{int(number):,}" if "," in match[0] and "." not in number else number

    pieces = re.split(r"(<<[^<>]*>>)", text)
    return "".join(
        replace_operands(piece, mapping) if piece.startswith("<<") else NUMBER.sub(new, piece) for piece in pieces
    )


def is_consistent(problem: Problem) -> bool:
    """Whether every annotation is right and the final number is an annotated result."""
    steps = ANNOTATION.findall(problem.solution)
    right = all(evaluate_expression(expression) == to_number(result) for expression, result in steps)
    return right and to_number(problem.answer) in {to_number(result) for _, result in steps}
