"""Answer lengths are predicted as a naive product-limit estimate in plain Python says, and without looking ahead."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.queue.lengths import CAUTION, MOST_CLASSES, MOST_LABELS, UNKNOWN, LengthPredictor
from tests.properties import examples
from tests.scheduler.core.answer_lengths import (
    CLASS,
    LONGEST,
    QUANTILES,
    ages,
    answers,
    draw,
    geometric,
    geometric_quantiles,
    ints,
    learn,
    learnt,
    mean,
    naive_survival,
    spread,
    stops,
)

# -- against the naive estimate


@settings(max_examples=examples(200), deadline=None)
@given(stops, answers, ages, st.integers(0, 64), st.integers(1, 64))
def test_a_mean_is_that_of_the_naive_estimate(stopped, ended, running, age, limit):
    ended = ended + [(length, True) for length in stopped]
    survival = naive_survival(ended, running)
    expected = limit
    if age < limit and survival[age] > 0:
        expected = age + sum(survival[age:limit]) / survival[age]
    assert mean(learnt(ended, running), limit, age) == pytest.approx(expected, rel=1e-9)


@settings(max_examples=examples(200), deadline=None)
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


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.integers(1, 100_000), min_size=16, max_size=60))
def test_long_answers_are_known_to_a_bin(lengths):
    predictor = learnt([(length, True) for length in lengths], longest=100_000)
    error = 1e-9 + max(lengths) / 32
    assert mean(predictor, 100_000) == pytest.approx(np.mean(lengths), abs=error)
    assert spread(predictor) == pytest.approx(np.std(lengths), abs=error)
    assert abs(draw(predictor, QUANTILES).max() - max(lengths)) <= error


@settings(max_examples=examples(100), deadline=None)
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


@settings(max_examples=examples(100), deadline=None)
@given(stops, st.lists(st.tuples(st.integers(1, 900), st.booleans()), max_size=60), st.integers(0, 900))
def test_the_mean_is_the_mean_of_the_draws(stopped, ended, age):
    predictor = learnt(ended + [(length, True) for length in stopped])
    drawn = np.minimum(draw(predictor, QUANTILES, age), 1000)
    assert mean(predictor, 1000, age) == pytest.approx(drawn.mean(), abs=1.1)


# -- what cannot be seen


def test_running_answers_keep_short_answers_from_biasing_the_estimate():
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


def test_lengths_at_which_few_answers_ended_have_no_influence():
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


def test_an_unknown_class_runs_to_the_limit():
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


def test_the_expected_length_of_a_new_answer_is_the_present_mean():
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
def test_the_predictor_accepts_any_longest_answer(longest):
    predictor = learnt([(longest, True)] * 20, longest=longest)
    assert draw(predictor, np.array([0.999]), age=longest - 1)[0] == longest
    assert mean(predictor, longest) == pytest.approx(longest, rel=1 / 32)


def test_empty_arrays_are_accepted():
    predictor = LengthPredictor(LONGEST)
    learn(predictor, [])
    assert draw(predictor, np.zeros(0)).dtype == np.int64
    assert predictor.mean(ints(), ints(), ints()).shape == predictor.spread(ints()).shape == (0,)
