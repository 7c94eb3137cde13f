"""Word problems with worked answers, and the means to write them.

A worked answer is in GSM8K's format: every calculation carries an annotation such as
`48/2 = <<48/2=24>>24`, and the last line is `#### ` and the final number.
"""

import ast
import operator
import random
import re
from dataclasses import dataclass
from fractions import Fraction


def words(text: str) -> list[str]:
    """The words of a text, as a list is easiest to read."""
    return text.split()


def phrases(text: str) -> list[str]:
    """The parts of a text between bars."""
    return text.split("|")


FEMALE_NAMES = words(
    "Alice Amy Anna Ava Bella Betty Carla Chloe Clara Daisy Diana Ella Emily Emma Eva Fatima Fiona Grace "
    "Hannah Helen Ivy Jane Jasmine Jenna Jessica Julia Karen Kate Kayla Laura Leah Lily Linda Lisa Lucy "
    "Maria Martha Mary Maya Mia Mei Nadia Natalia Nina Nora Olivia Paula Priya Rachel Rita Rosa Ruth "
    "Sally Sandra Sara Sofia Susan Tina Valerie Violet Wendy Yara Zoe"
)
MALE_NAMES = words(
    "Aaron Adam Ahmed Albert Alex Andy Ben Bob Brian Carl Carlos Charlie Chris Daniel David Dan Eric "
    "Ethan Felix Frank Fred Gary George Greg Harry Henry Hugo Ian Ivan Jack Jacob James Jason Jim Joe "
    "John Jose Josh Juan Kevin Kyle Larry Leo Liam Louis Luke Marcus Mark Matt Max Michael Mike Nathan "
    "Noah Oliver Omar Oscar Paul Peter Raj Ray Robert Ryan Sam Scott Sean Simon Steve Ted Tim Toby Tom "
    "Tony Victor Wei Will Zach"
)

# Things that a person may own, collect, give away or sell.
THINGS = words(
    "apples oranges pears lemons peaches plums marbles stickers stamps coins shells buttons beads cards "
    "books pencils pens crayons erasers notebooks balloons cookies cupcakes muffins donuts candies lollipops "
    "chocolates toys dolls puzzles bracelets ribbons flowers roses tulips seeds eggs tomatoes carrots potatoes "
    "pumpkins bricks tiles keys magnets badges tickets postcards photos paintings bottles cups plates "
    "spoons hats scarves shirts socks gloves"
)

MULTIPLES = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}
PARTS = {2: "half", 3: "a third", 4: "a quarter", 5: "a fifth"}

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@dataclass(frozen=True)
class Problem:
    """A word problem and its worked solution in GSM8K's format, ending in `#### answer`."""

    question: str
    solution: str

    @property
    def answer(self) -> str:
        """The final number."""
        return final_number(self.solution) or ""


def final_number(text: str) -> str | None:
    """The number after the last `####` of a worked answer, without thousands separators."""
    found = re.findall(r"####\s*\$?(-?[\d,]*\.?\d+)", text)
    return found[-1].replace(",", "") if found else None


def evaluate_expression(expression: str) -> Fraction:
    """The exact value of sums, differences, products and quotients of decimal numbers."""

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return Fraction(str(node.value))
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        raise ValueError(f"not plain arithmetic: {expression}")

    # A literal such as `05` is a Python error but means five.
    cleaned = re.sub(r"(?<![\d.])0+(?=\d)", "", expression)
    return value(ast.parse(cleaned.strip(), mode="eval").body)


def format_number(value: Fraction | int) -> str:
    """Decimal digits of a value that has at most two decimals; ValueError for any other."""
    value = Fraction(value)
    if value.denominator == 1:
        return str(value.numerator)
    if (value * 100).denominator != 1:
        raise ValueError(f"more than two decimals: {value}")
    return f"{float(value):.2f}".rstrip("0")


def dollars(amount: str) -> str:
    """A price as a question shows it: two decimals or none."""
    return f"${float(amount):.2f}" if "." in amount else f"${amount}"


@dataclass(frozen=True)
class Person:
    """A name and its pronouns."""

    name: str
    they: str
    them: str
    their: str

    def __str__(self) -> str:
        return self.name


class Story:
    """Collects a problem's sentences and calculations; every choice comes from one generator."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.sentences: list[str] = []
        self.lines: list[str] = []
        self.used: set[str] = set()
        self.result = Fraction(0)
        self.sign = rng.choice(["*", "*", "x"])
        self.spaced = rng.random() < 0.5

    def pick(self, *options: str) -> str:
        """One of several wordings."""
        return self.rng.choice(options)

    def number(self, low: int, high: int, step: int = 1) -> int:
        """A multiple of `step` between `low` and `high`, both included."""
        return step * self.rng.randint(-(-low // step), high // step)

    def size(self, low: int = 3) -> int:
        """A count from `low` up: mostly two digits, sometimes one or three."""
        high = self.rng.choice([12, 30, 60, 100, 100, 400])
        return self.number(low, high, 10 if high == 400 else 1)

    def fresh(self, options: list[str]) -> str:
        """An option that this story has not used yet."""
        word = self.rng.choice([option for option in options if option not in self.used])
        self.used.add(word)
        return word

    def price(self, low: int, high: int) -> str:
        """A price in dollars: mostly whole, sometimes with fifty or twenty-five cents."""
        cents = self.rng.choice(["", "", "", "", ".5", ".25"])
        return f"{self.number(low, high)}{cents}"

    def person(self) -> Person:
        """A person whose name is new in this story."""
        if self.rng.random() < 0.5:
            return Person(self.fresh(FEMALE_NAMES), "she", "her", "her")
        return Person(self.fresh(MALE_NAMES), "he", "him", "his")

    def thing(self) -> str:
        """A plural noun that is new in this story."""
        return self.fresh(THINGS)

    def say(self, *wordings: str) -> None:
        """Add one of these sentences to the question."""
        self.sentences.append(self.rng.choice(wordings))

    def step(self, expression: str, *wordings: str) -> int | Fraction:
        """Add a line to the solution, `@` in it being the calculation; returns its value.

        The value must be positive and exact to two decimals.
        """
        value = evaluate_expression(expression)
        if value <= 0:
            raise ValueError("a quantity must be positive")
        shown = expression.replace("*", self.sign)
        if self.spaced:
            shown = re.sub(r"([-+*/x])", r" \1 ", shown)
        number = format_number(value)
        note = f"<<{expression}={number}>>{number}"
        line = self.rng.choice(wordings)
        line = line.replace("$@", f"{shown} = ${note}").replace("@", f"{shown} = {note}")
        self.lines.append(line[0].upper() + line[1:])
        self.result = value
        return value.numerator if value.denominator == 1 else value

    def problem(self) -> Problem:
        """The question and solution written so far; the last step's value is the answer."""
        question = " ".join(sentence[0].upper() + sentence[1:] for sentence in self.sentences)
        lines = [*self.lines, f"#### {format_number(self.result)}"]
        return Problem(question, "\n".join(lines))
