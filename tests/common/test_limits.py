"""What a key may use, with a clock of the test's own."""

import pytest

from services.common.errors import InvalidRequest, Overloaded
from services.common.keys import Key
from services.common.limits import KeyLimits
from tests.fakes.clock import Clock


def key(name: str = "a", **limits) -> Key:
    return Key(name, frozenset({"inference"}), **limits)


@pytest.fixture
def clock():
    return Clock()


def test_so_many_requests_run_at_once_of_each_key(clock):
    limits, one, other = KeyLimits(clock=clock), key(max_concurrent=2), key("b", max_concurrent=2)
    with limits.running(one), limits.running(one):
        with pytest.raises(Overloaded) as caught, limits.running(one):
            pass
        assert caught.value.reason == "RATE_LIMIT_EXCEEDED"
        assert limits.headers(one)["x-ratelimit-remaining-requests"] == "0"
        with limits.running(other), limits.running(None):
            pass
    assert limits.headers(one)["x-ratelimit-remaining-requests"] == "2"


def test_a_bucket_of_tokens_fills_in_a_minute(clock):
    limits, one = KeyLimits(clock=clock), key(tokens_per_minute=600)
    limits.reserve(one, 600)
    with pytest.raises(Overloaded) as caught:
        limits.reserve(one, 100)
    assert caught.value.retry_after_s == pytest.approx(10)
    clock.now = 10.0
    limits.reserve(one, 100)
    clock.now = 1000.0
    assert limits.headers(one) == {
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "600",
        "x-ratelimit-reset-tokens": "0.000s",
    }


def test_what_was_not_used_comes_back_and_what_was_used_beyond_is_owed(clock):
    limits, one = KeyLimits(clock=clock), key(tokens_per_minute=600)
    made = limits.reserve(one, 500)
    made.settle(200)
    assert limits.headers(one)["x-ratelimit-remaining-tokens"] == "400"
    made.settle(0)
    assert limits.headers(one)["x-ratelimit-remaining-tokens"] == "600"
    limits.reserve(one, 500).settle(900)
    assert limits.headers(one)["x-ratelimit-remaining-tokens"] == "0"
    clock.now = 30.0
    with pytest.raises(Overloaded):
        limits.reserve(one, 1)
    clock.now = 31.0
    limits.reserve(one, 1)


def test_what_never_fits_is_not_to_be_tried_again(clock):
    with pytest.raises(InvalidRequest, match="601 tokens together") as caught:
        KeyLimits(clock=clock).reserve(key(tokens_per_minute=600), 601)
    assert caught.value.field == "max_tokens"


def test_gateways_of_one_deployment_share_a_keys_limits(clock):
    limits, one = KeyLimits(4, clock), key(max_concurrent=6, tokens_per_minute=600)
    assert limits.headers(one)["x-ratelimit-limit-requests"] == "2"
    assert limits.headers(one)["x-ratelimit-limit-tokens"] == "150"


def test_nothing_is_counted_where_nothing_is_limited(clock):
    limits = KeyLimits(clock=clock)
    assert limits.reserve(None, 10**9) is limits.reserve(key(), 10**9) is None
    assert limits.headers(None) == limits.headers(key()) == {}


def test_limits_that_a_new_file_sets_hold_at_once(clock):
    limits = KeyLimits(clock=clock)
    limits.reserve(key(tokens_per_minute=600), 600)
    with pytest.raises(Overloaded):
        limits.reserve(key(tokens_per_minute=60), 10)
    clock.now = 60.0
    limits.reserve(key(tokens_per_minute=60), 60)
