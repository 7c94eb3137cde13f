"""Answer lengths are predicted as a naive product-limit estimate in plain Python says, and without looking ahead."""

import math
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.lengths import CAUTION, MOST_CLASSES, MOST_LABELS, UNKNOWN, LengthPredictor

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


# -- against the naive estimate


@settings(max_examples=200, deadline=None)
@given(stops, answers, ages, st.integers(0, 64), st.integers(1, 64))
def test_a_mean_is_that_of_the_naive_estimate(stopped, ended, running, age, limit):
    ended = ended + [(length, True) for length in stopped]
    survival = naive_survival(ended, running)
    expected = limit
    if age < limit and survival[age] > 0:
        expected = age + sum(survival[age:limit]) / survival[age]
    assert mean(learnt(ended, running), limit, age) == pytest.approx(expected, rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(stops, answers, ages, st.integers(0, 64), st.floats(0.001, 0.999))
def test_a_draw_is_the_quantile_of_the_naive_estimate(stopped, ended, running, age, quantile):
    ended = ended + [(length, True) for length in stopped]
    survival = naive_survival(ended, running)
    target = survival[age] * (1 - quantile)
    drawn = int(draw(learnt(ended, running), np.array([quantile]), age)[0])
    if drawn > 64:
        assert survival[age] == 0 or survival[-1] >= target - 1e-12
    else:
        assert drawn > age
        assert survival[drawn] <= target + 1e-12
        assert survival[drawn - 1] >= target - 1e-12


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 100_000), min_size=16, max_size=60))
def test_long_answers_are_known_to_a_bin(lengths):
    predictor = learnt([(length, True) for length in lengths], longest=100_000)
    error = 1e-9 + max(lengths) / 32
    assert mean(predictor, 100_000) == pytest.approx(np.mean(lengths), abs=error)
    assert spread(predictor) == pytest.approx(np.std(lengths), abs=error)
    assert abs(draw(predictor, QUANTILES).max() - max(lengths)) <= error


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6000), st.booleans()), max_size=80),
    st.lists(st.integers(0, 6000), max_size=40),
    st.integers(0, 6000),
)
def test_draws_are_longer_than_the_age_and_rise_with_the_quantile(ended, running, age):
    drawn = draw(learnt([*ended, *[(900, True)] * 16], running), QUANTILES, age)
    assert (drawn > age).all()
    assert (np.diff(drawn) >= 0).all()
    assert ((drawn <= LONGEST) | (drawn == UNKNOWN)).all()


@settings(max_examples=100, deadline=None)
@given(stops, st.lists(st.tuples(st.integers(1, 900), st.booleans()), max_size=60), st.integers(0, 900))
def test_the_mean_is_the_mean_of_the_draws(stopped, ended, age):
    predictor = learnt(ended + [(length, True) for length in stopped])
    drawn = np.minimum(draw(predictor, QUANTILES, age), 1000)
    assert mean(predictor, 1000, age) == pytest.approx(drawn.mean(), abs=1.1)


# -- what cannot be seen


def test_those_that_run_keep_short_answers_from_counting_too_much():
    lengths = geometric(np.random.default_rng(0), 150, 1000)
    ended = lengths[lengths <= 50]
    assert ended.mean() < 27
    predictor = learnt([(length, True) for length in ended.tolist()], [50] * (1000 - len(ended)))
    drawn = draw(predictor, QUANTILES)
    assert drawn[:280] == pytest.approx(geometric_quantiles(QUANTILES[:280], 150), abs=6)
    beyond = (1 - 1 / 150) ** 50  # of all, guessed with caution
    expected = 150 * (1 - beyond) + beyond * 150 / CAUTION
    assert drawn.mean() == pytest.approx(expected, rel=0.1)
    assert mean(predictor, LONGEST) == pytest.approx(expected, rel=0.1)
    assert mean(predictor, LONGEST, age=50) == pytest.approx(50 + 150 / CAUTION, rel=0.1)


def test_nothing_is_concluded_from_where_hardly_any_answer_ended():
    predictor = learnt([(10, True)] * 300 + [(45, True)] * 15, [50] * 685)
    drawn = draw(predictor, QUANTILES)
    assert (drawn[:300] == 10).all()
    assert (drawn[320:] == UNKNOWN).all()
    assert mean(predictor, 1000) > 650
    learn(predictor, [(45, True)], [50] * 684)
    assert (draw(predictor, QUANTILES)[:600] < UNKNOWN).all()


def test_the_sum_of_many_answers_is_the_less_certain_the_fewer_were_seen():
    lengths = geometric(np.random.default_rng(6), 100, 400)
    counts = np.zeros(MOST_CLASSES, np.int64)
    counts[CLASS] = 1600
    deviations = []
    for seen in (100, 400):
        predictor = learnt([(length, True) for length in lengths[:seen].tolist()])
        deviations.append(predictor.deviation(counts) / spread(predictor))
    assert deviations == pytest.approx([(1600 + 1600**2 / seen) ** 0.5 for seen in (100, 400)])


@pytest.mark.parametrize("running", [300, 3000])  # far fewer than are remembered, and nearly as many
def test_a_batch_that_is_kept_full_is_predicted_without_bias(running):
    rng = np.random.default_rng(1)
    lengths, ages, since = geometric(rng, 150, running), *np.zeros((2, running), np.int64)
    predictor = LengthPredictor(LONGEST)
    means = []
    for step in range(1, 1001):
        ages += 1
        ended = ages == lengths
        count = int(ended.sum())
        predictor.observe(np.full(count, CLASS), ages[ended], np.ones(count, bool), since[ended])
        lengths[ended], ages[ended], since[ended] = geometric(rng, 150, count), 0, 0
        if step % 32 == 0:
            predictor.refresh(np.full(running, CLASS), ages, since)
            since = ages.copy()
            means.append(draw(predictor, QUANTILES).clip(max=LONGEST).mean())
    assert np.mean(means[5:]) == pytest.approx(150, rel=0.06)


def test_geometric_lengths_are_memoryless():
    lengths = geometric(np.random.default_rng(2), 100, 4000)
    predictor = learnt([(length, True) for length in lengths.tolist()])
    fresh = draw(predictor, QUANTILES[:900])
    for age in (30, 100, 150):
        assert draw(predictor, QUANTILES[:900], age) - age == pytest.approx(fresh, rel=0.15, abs=5)
        assert mean(predictor, 2000, age) == pytest.approx(age + 100, rel=0.06)


def test_answers_cut_off_at_random_do_not_bias_long_ones():
    rng = np.random.default_rng(3)
    lengths = np.ceil(rng.lognormal(6, 0.5, 4000)).astype(np.int64)
    limits = rng.integers(100, 4000, 4000)
    ended = zip(np.minimum(lengths, limits).tolist(), (lengths <= limits).tolist(), strict=True)
    drawn = draw(learnt(list(ended)), QUANTILES[10:950])
    assert drawn == pytest.approx(np.quantile(lengths, QUANTILES[10:950]), rel=0.08)


def test_nothing_is_predicted_from_few_answers():
    predictor = learnt([(5, True)] * 15 + [(9, False)] * 1000)
    assert (draw(predictor, QUANTILES) == UNKNOWN).all()
    assert mean(predictor, 700) == 700
    assert spread(predictor) == 0
    learn(predictor, [(5, True)])
    assert draw(predictor, QUANTILES)[0] == 5
    assert 9 < mean(predictor, 700) < 700
    assert spread(predictor) > 0


def test_a_class_nothing_is_known_of_runs_to_the_limit():
    predictor = learnt([(5, True)] * 100)
    assert (draw(predictor, QUANTILES, number=CLASS + 1) == UNKNOWN).all()
    assert mean(predictor, 300, number=CLASS + 1) == 300
    assert spread(predictor, CLASS + 1) == 0


def test_where_no_answer_ended_lengths_are_unknown():
    predictor = learnt([(10, True)] * 50 + [(30, False)] * 50)
    drawn = draw(predictor, QUANTILES)
    assert (drawn[:500] == 10).all()
    assert (drawn[500:] == UNKNOWN).all()
    assert (draw(predictor, QUANTILES, age=10) == UNKNOWN).all()
    assert mean(predictor, 1000) == pytest.approx(0.5 * 10 + 0.5 * 1000)
    assert mean(predictor, 1000, age=400) == 1000
    assert mean(predictor, 12, age=12) == 12
    assert spread(predictor) == pytest.approx(10)


def test_an_answer_older_than_any_is_unknown():
    predictor = learnt([(10, True)] * 50)
    assert (draw(predictor, QUANTILES, age=10) == UNKNOWN).all()
    assert mean(predictor, 100, age=10) == 100
    assert (draw(predictor, QUANTILES, age=10 * LONGEST) == UNKNOWN).all()


def test_estimates_stand_still_between_refreshes():
    predictor = learnt([(10, True)] * 50)
    predictor.observe(np.full(500, CLASS), np.full(500, 90), np.ones(500, bool), np.zeros(500, np.int64))
    assert (draw(predictor, QUANTILES) == 10).all()
    predictor.refresh(ints(), ints(), ints())
    assert draw(predictor, np.array([0.9]))[0] >= 80


# -- classes, time, bounds


def test_what_is_expected_of_a_new_answer_is_the_mean_of_what_is_known_now():
    predictor = LengthPredictor(LONGEST)
    assert predictor.expected(CLASS, 300) == 300
    for length in (20, 400):
        learn(predictor, [(length, True)] * 100)
        for limit in (10, 300, 300, 1000):
            assert predictor.expected(CLASS, limit) == int(mean(predictor, limit))
    label = predictor.class_of("taken", 10)
    learn(predictor, [(20, True)] * 100, number=label)
    assert predictor.expected(label, 300) == 20
    for number in range(MOST_LABELS):
        predictor.class_of(f"label {number}", 10)
    assert predictor.expected(label, 300) == 300


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


def test_a_change_of_lengths_is_followed():
    rng = np.random.default_rng(5)
    predictor = LengthPredictor(LONGEST)
    for average, batches in ((50, 40), (400, 12)):
        for _ in range(batches):
            learn(predictor, [(length, True) for length in geometric(rng, average, 1000).tolist()])
        assert mean(predictor, 10_000) == pytest.approx(average, rel=0.1)


def test_memory_fades_but_is_not_lost():
    predictor = LengthPredictor(LONGEST)
    learn(predictor, [(40, True)] * 20)
    for _ in range(20):
        learn(predictor, [(30, False)] * 2000)
    assert draw(predictor, np.array([0.5]))[0] == 40


def test_lengths_beyond_the_longest_count_as_the_longest():
    predictor = learnt([(10_000_000, True)] * 20 + [(10_000_000, False)] * 20, [0, 10_000_000], longest=1000)
    drawn = draw(predictor, QUANTILES)
    assert drawn[0] > 900
    assert (drawn[drawn < UNKNOWN] <= 1000).all()
    assert mean(predictor, 10_000_000, age=20_000_000) == 10_000_000
    assert 900 < mean(predictor, 1000) <= 1000


def test_an_answer_of_no_tokens_counts_as_one():
    predictor = learnt([(0, True)] * 20 + [(0, False)] * 20, [0] * 20)
    assert (draw(predictor, QUANTILES) == 1).all()
    assert mean(predictor, 100) == 1


@pytest.mark.parametrize("longest", [1, 2, 63, 64, 65, 131_072])
def test_any_longest_answer_will_do(longest):
    predictor = learnt([(longest, True)] * 20, longest=longest)
    assert draw(predictor, np.array([0.999]), age=longest - 1)[0] == longest
    assert mean(predictor, longest) == pytest.approx(longest, rel=1 / 32)


def test_no_rows_are_no_answers():
    predictor = LengthPredictor(LONGEST)
    learn(predictor, [])
    assert draw(predictor, np.zeros(0)).dtype == np.int64
    assert predictor.mean(ints(), ints(), ints()).shape == predictor.spread(ints()).shape == (0,)
