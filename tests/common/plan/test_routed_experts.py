"""Experts of tokens as arrays and as messages: they are judged, and take no bytes if no row asks."""

import dataclasses

import numpy as np
import pytest

from services.common.plan.codec import decode_plan, decode_result, encode_plan, encode_result
from services.common.plan.result import StepResult
from services.common.plan.result_rules import BrokenResult, check_result
from services.common.plan.routed_experts import RoutedExperts, RoutedExpertsLayout
from services.common.plan.types import Admission, Plan, SamplingSettings, WorkerLimits

NONE = np.empty(0, np.int64)
LAYOUT = RoutedExpertsLayout(2, 3, 1)
LIMITS = WorkerLimits(16, 8, 4, 64, 128, 300, routed_experts=LAYOUT)
EXPERTS = np.arange(24, dtype=np.uint8).reshape(4, 6)
ROUTED = RoutedExperts(np.array([2, 0]), np.array([5, 0]), np.array([1, 3]), EXPERTS)


def equal(one: RoutedExperts, other: RoutedExperts) -> bool:
    return all(np.array_equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def result(routed: RoutedExperts | None) -> StepResult:
    return StepResult(3, NONE, NONE, routed=routed)


def test_a_result_is_read_as_it_was_written():
    message = encode_result(result(ROUTED))
    assert equal(decode_result(message).routed, ROUTED)
    check_result(decode_result(message), NONE, LIMITS)


def test_a_result_without_experts_has_no_bytes_for_them():
    message = encode_result(result(None))
    assert not message.HasField("routed_experts")
    assert decode_result(message).routed is None


def test_samples_that_want_experts_from_different_positions_are_told_apart():
    tokens, settings = np.arange(9), SamplingSettings()
    starts = [None, 0, 0, 7]
    admissions = [
        Admission(slot, tokens, 8, np.array([slot]), settings, 9, slot, routed_start=start)
        for slot, start in enumerate(starts)
    ]
    message = encode_plan(Plan(1, admissions=admissions))
    assert not message.admissions[0].HasField("routed_experts_start")
    assert [admission.routed_start for admission in decode_plan(message).admissions] == starts


def test_parts_are_joined_and_taken():
    other = RoutedExperts(np.array([3]), np.array([1]), np.array([2]), EXPERTS[:2])
    both = RoutedExperts.join([None, ROUTED, other])
    assert both.is_consistent
    assert equal(both.take(np.array([False, False, True])), other)
    assert equal(both.take(np.array([True, True, False])), ROUTED)
    assert both.take(np.zeros(3, bool)) is None
    assert RoutedExperts.join([None, None]) is None
    pieces = [(owner, start, experts.tolist()) for owner, start, experts in both.pieces()]
    assert pieces == [(2, 5, EXPERTS[:1].tolist()), (0, 0, EXPERTS[1:].tolist()), (3, 1, EXPERTS[:2].tolist())]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"owners": np.array([2, 4])}, "a slot that does not exist"),
        ({"owners": np.array([2, 2])}, "occurs twice"),
        ({"counts": np.array([1, 2])}, "bytes of experts"),
        ({"counts": np.array([4, 0])}, "bytes of experts"),
        ({"starts": np.array([5])}, "bytes of experts"),
        ({"experts": EXPERTS[:, :5]}, "bytes of experts"),
    ],
)
def test_a_result_that_does_not_fit_is_broken(changes, message):
    sent = encode_result(result(ROUTED._replace(**changes)))
    with pytest.raises(BrokenResult, match=message):
        check_result(decode_result(sent), NONE, LIMITS)


@pytest.mark.parametrize("size", [0, 1, 23, 25])
def test_bytes_that_are_no_whole_tokens_are_broken(size):
    message = encode_result(result(ROUTED))
    message.routed_experts.experts = bytes(size)
    with pytest.raises(BrokenResult, match="bytes of experts"):
        check_result(decode_result(message), NONE, LIMITS)


def test_experts_that_the_worker_did_not_announce_are_broken():
    with pytest.raises(BrokenResult, match="does not announce"):
        check_result(result(ROUTED), NONE, dataclasses.replace(LIMITS, routed_experts=None))
