"""Answers are predicted by class: that of their label, else by their limit. Labels in use keep theirs."""

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.queue.lengths import MOST_CLASSES, MOST_LABELS, UNKNOWN, LengthPredictor
from tests.scheduler.core.answer_lengths import LONGEST, QUANTILES, draw, geometric, learn, mean, spread, stops


def test_rows_of_many_classes_are_drawn_as_one_by_one():
    rng = np.random.default_rng(4)
    predictor = LengthPredictor(LONGEST)
    numbers = np.array([predictor.class_of(f"kind {index}", 0) for index in range(40)])
    for index, number in enumerate(numbers.tolist()):
        ended = [(int(length), length % 7 > 0) for length in geometric(rng, 20 + 40 * index, 300)]
        learn(predictor, ended, number=number)
    classes, ages = rng.choice(numbers, 2000), rng.integers(0, 3000, 2000)
    quantiles, limits = rng.random(2000), rng.integers(1, 6000, 2000)
    drawn, means = predictor.draw(classes, ages, quantiles), predictor.mean(classes, ages, limits)
    for row in range(2000):
        at = slice(row, row + 1)
        assert predictor.draw(classes[at], ages[at], quantiles[at])[0] == drawn[row]
        assert predictor.mean(classes[at], ages[at], limits[at])[0] == means[row]
    assert (drawn > ages).all()
    assert (means <= limits).all()
    assert (means >= np.minimum(ages + 1, limits) - 1e-6).all()


def test_requests_without_a_label_go_by_the_magnitude_of_their_limit():
    predictor = LengthPredictor(LONGEST)
    numbers = [predictor.class_of("", limit) for limit in range(1, 3 * LONGEST)]
    assert list(accumulate(numbers, max)) == numbers
    assert predictor.class_of("", 512) == predictor.class_of("", 1023) != predictor.class_of("", 1024)
    assert predictor.class_of("", 10**9) == predictor.class_of("", LONGEST)


def test_a_label_names_a_class_whatever_the_limit():
    predictor = LengthPredictor(LONGEST)
    one, other = predictor.class_of("one", 16), predictor.class_of("other", 16)
    assert len({one, other, predictor.class_of("", 16)}) == 3
    assert predictor.class_of("one", 2048) == one


@pytest.mark.parametrize("longest", [1, LONGEST, 2**20])
def test_labels_and_limits_have_classes_of_their_own(longest):
    predictor = LengthPredictor(longest)
    labelled = {predictor.class_of(f"label {index}", 100) for index in range(10 * MOST_LABELS)}
    limits = {predictor.class_of("", min(2**bits, 2 * longest)) for bits in range(40)}
    assert len(labelled) == MOST_LABELS
    assert not labelled & limits
    assert max(labelled | limits) < MOST_CLASSES


def test_a_label_too_many_takes_the_class_of_the_one_unused_longest():
    predictor = LengthPredictor(LONGEST)
    numbers = [predictor.class_of(f"label {index}", 100) for index in range(MOST_LABELS)]
    for number in numbers:
        learn(predictor, [(50, True)] * 40 + [(60, False)], [10], number=number)
    assert predictor.class_of("label 0", 100) == numbers[0]
    assert predictor.class_of("new", 100) == numbers[1]
    everything = [0] * MOST_CLASSES
    everything[numbers[1]] = 7
    assert draw(predictor, np.array([0.01]), number=numbers[1])[0] == UNKNOWN
    assert mean(predictor, 77, number=numbers[1]) == 77
    assert spread(predictor, numbers[1]) == predictor.deviation(np.array(everything)) == 0
    assert all(draw(predictor, np.array([0.5]), number=number)[0] == 50 for number in numbers if number != numbers[1])
    assert predictor.class_of("label 1", 100) == numbers[2]


def test_a_caller_with_a_label_for_every_request_does_not_take_those_in_use():
    predictor = LengthPredictor(LONGEST)
    used = predictor.class_of("used", 100)
    learn(predictor, [(50, True)] * 40, number=used)
    for index in range(3000):
        predictor.class_of(f"once {index}", 100)
        if index % (MOST_LABELS - 1) == 0:
            assert predictor.class_of("used", 100) == used
    assert draw(predictor, np.array([0.5]), number=used)[0] == 50


@given(st.lists(st.tuples(st.integers(0, 64), st.integers(0, 64), st.booleans()), min_size=1, max_size=60), stops)
def test_answers_of_a_forgotten_label_teach_the_new_one_what_is_seen_of_them(rest, new):
    """They count as answers not seen from the beginning. ``rest``: (age by then, tokens after it, stopped)."""
    forgotten, fresh = LengthPredictor(LONGEST), LengthPredictor(LONGEST)
    number = fresh.class_of("new", 100)
    assert forgotten.class_of("old", 100) == number
    for index in range(MOST_LABELS - 1):
        forgotten.class_of(f"label {index}", 100)
    since, ended, stopped = (np.array(column) for column in zip(*rest, strict=True))
    ended, rows = since + ended, np.full(len(rest), number)
    forgotten.refresh(rows, since, np.zeros(len(rest), np.int64))
    assert forgotten.class_of("new", 100) == number
    for predictor in (forgotten, fresh):
        predictor.observe(rows, ended, stopped, since)
        learn(predictor, [(length, True) for length in new], number=number)
    assert (draw(forgotten, QUANTILES, number=number) == draw(fresh, QUANTILES, number=number)).all()
    assert mean(forgotten, 1000, number=number) == mean(fresh, 1000, number=number) <= 1000
