"""Answers for a ``LengthPredictor`` to learn from, and what it says of one class."""

import math

import numpy as np
from hypothesis import strategies as st

from services.scheduler.core.queue.lengths import CAUTION, LengthPredictor

LONGEST = 4096
QUANTILES = (np.arange(1000) + 0.5) / 1000
CLASS = 3  # any

answers = st.lists(st.tuples(st.integers(1, 64), st.booleans()), max_size=60)
ages = st.lists(st.integers(0, 64), max_size=30)
stops = st.lists(st.integers(1, 64), min_size=16, max_size=40)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def learn(predictor: LengthPredictor, ended, running=(), number: int = CLASS) -> None:
    """``ended``: (length, whether it stopped by itself); ``running``: ages."""
    lengths = np.array([length for length, _ in ended], np.int64)
    stopped = np.array([by_itself for _, by_itself in ended], bool)
    predictor.observe(np.full(len(lengths), number), lengths, stopped, np.zeros(len(lengths), np.int64))
    predictor.refresh(np.full(len(running), number), np.array(running, np.int64), np.zeros(len(running), np.int64))


def learnt(ended, running=(), longest: int = LONGEST) -> LengthPredictor:
    predictor = LengthPredictor(longest)
    learn(predictor, ended, running)
    return predictor


def draw(predictor: LengthPredictor, quantiles: np.ndarray, age: int = 0, number: int = CLASS) -> np.ndarray:
    rows = len(quantiles)
    return predictor.draw(np.full(rows, number), np.full(rows, age), quantiles)


def mean(predictor: LengthPredictor, limit: int, age: int = 0, number: int = CLASS) -> float:
    return float(predictor.mean(ints(number), ints(age), ints(limit))[0])


def spread(predictor: LengthPredictor, number: int = CLASS) -> float:
    return float(predictor.spread(ints(number))[0])


def naive_survival(ended, running) -> list[float]:
    """P(length > t) for t in 0..64, token by token."""
    survival = [1.0]
    seen = [(age, False) for age in running] + list(ended)
    longest = max(length for length, _ in seen)
    for token in range(1, 65):
        at_risk = sum(length >= token for length, _ in seen)
        stopped = sum(by_itself and length == token for length, by_itself in seen)
        if at_risk == 0:
            stopped = sum(by_itself and length > longest // 2 for length, by_itself in seen)
            at_risk = sum(max(length - longest // 2, 0) for length, _ in seen)
            stopped = CAUTION * stopped if stopped >= 16 else 0
        survival.append(survival[-1] * (1 - stopped / at_risk))
    return survival


def geometric(rng: np.random.Generator, average: float, count: int) -> np.ndarray:
    return rng.geometric(1 / average, count)


def geometric_quantiles(quantiles: np.ndarray, average: float) -> np.ndarray:
    return np.ceil(np.log(1 - quantiles) / math.log(1 - 1 / average))
