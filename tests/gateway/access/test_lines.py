"""What lines of batches take of a key's limits, with a clock of the test's own."""

import asyncio

import pytest

from services.common.config import GatewayConfig
from services.common.errors import InvalidRequest, Overloaded, Unauthenticated
from services.common.limits import KeyLimits
from services.gateway.http.guard import Guard
from services.gateway.http.lines import MAX_UNFUNDED, Displaced, Lines
from tests.fakes.clock import Clock
from tests.gateway.access.conftest import KeysFile

PATIENCE_S = 60.0


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def keys(tmp_path):
    return KeysFile(tmp_path / "keys.toml")


@pytest.fixture
def lines(keys, clock):
    guard = Guard(GatewayConfig(api_keys_file=str(keys.path)))
    guard.limits = KeyLimits(clock=clock)
    return Lines(guard)


async def soon(work):
    return await asyncio.wait_for(work, PATIENCE_S)


async def for_ever():
    await asyncio.get_running_loop().create_future()


async def test_lines_begin_while_there_is_room_behind_requests(lines):
    key = lines.guard.key_named("two-at-once")
    with lines.guard.limits.running(key):
        one = lines.begin_now("two-at-once")
        assert one is not None
        assert lines.begin_now("two-at-once") is None
        waiting = asyncio.create_task(lines.begin("two-at-once"))
        one.end()
        two = await soon(waiting)
        waiting = asyncio.create_task(lines.begin("two-at-once"))
        await asyncio.sleep(0)
    three = await soon(waiting)  # a request has ended
    assert lines.begin_now("two-at-once") is None
    for line in (two, two, three):
        line.end()
    assert lines.begin_now("two-at-once") is not None


async def test_a_request_takes_the_place_of_the_line_that_began_last(lines):
    limits, key = lines.guard.limits, lines.guard.key_named("two-at-once")
    first, last = [asyncio.create_task(lines.begin_now("two-at-once").hold(for_ever)) for _ in range(2)]
    await asyncio.sleep(0)
    with limits.running(key):
        with pytest.raises(Displaced):
            await soon(last)
        assert not first.done()
        assert lines.begin_now("two-at-once") is None
        with limits.running(key):
            with pytest.raises(Displaced):
                await soon(first)
            with pytest.raises(Overloaded), limits.running(key):
                pass
    assert limits.headers(key)["x-ratelimit-remaining-requests"] == "2"


async def test_a_line_that_is_stopped_is_not_displaced(lines):
    held = asyncio.create_task(lines.begin_now("two-at-once").hold(for_ever))
    await asyncio.sleep(0)
    held.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(held)


async def test_a_line_that_loses_its_place_before_it_runs_does_not_run(lines):
    limits, key = lines.guard.limits, lines.guard.key_named("two-at-once")
    line = lines.begin_now("two-at-once")
    with limits.running(key), limits.running(key), pytest.raises(Displaced):
        await line.hold(for_ever)


async def test_lines_leave_half_of_a_minutes_tokens_to_requests(lines, clock):
    limits, key = lines.guard.limits, lines.guard.key_named("thrifty")
    line = lines.begin_now("thrifty")
    line.reserve(150)
    line = lines.begin_now("thrifty")
    with pytest.raises(Overloaded):
        line.reserve(10)
    assert limits.headers(key)["x-ratelimit-remaining-tokens"] == "150"
    waiting = asyncio.create_task(line.wait_for_tokens())
    behind = lines.begin_now("thrifty")
    await asyncio.sleep(0)
    clock.now = 2.0  # 10 tokens
    with pytest.raises(Overloaded):
        behind.reserve(1)  # not before those who wait
    await soon(waiting)
    assert limits.headers(key)["x-ratelimit-remaining-tokens"] == "150"
    assert line.reserve(10).tokens == 10
    assert not line.wants_tokens
    limits.reserve(key, 150)


async def test_a_line_that_needs_more_than_half_waits_for_a_full_bucket_and_others_fail(lines, clock):
    key = lines.guard.key_named("thrifty")
    line = lines.begin_now("thrifty")
    lines.guard.limits.reserve(key, 1)
    with pytest.raises(Overloaded):
        line.reserve(300)
    with pytest.raises(InvalidRequest):
        line.reserve(301)
    clock.now = 1.0
    assert line.reserve(300).tokens == 300


async def test_a_line_that_waits_goes_on_when_its_key_has_no_limit_of_tokens_any_more(lines, keys, clock):
    line = lines.begin_now("thrifty")
    lines.guard.limits.reserve(lines.guard.key_named("thrifty"), 300)
    with pytest.raises(Overloaded):
        line.reserve(100)
    waiting = asyncio.create_task(line.wait_for_tokens())
    keys.entries["thrifty"] = ""
    keys.write(*keys.entries)
    await soon(waiting)
    assert line.reserve(100) is None


async def test_a_displaced_line_pays_once(lines):
    limits, key = lines.guard.limits, lines.guard.key_named("both")
    line = lines.begin_now("both")

    async def reserve() -> None:
        line.reserve(100)
        await for_ever()

    held = asyncio.create_task(line.hold(reserve))
    await asyncio.sleep(0)
    assert limits.headers(key)["x-ratelimit-remaining-tokens"] == "200"
    with limits.running(key), pytest.raises(Displaced):
        await soon(held)
    assert limits.headers(key)["x-ratelimit-remaining-tokens"] == "300"


async def test_few_lines_without_tokens_hold_a_place(lines):
    begun = [lines.begin_now("thrifty") for _ in range(MAX_UNFUNDED)]
    assert lines.begin_now("thrifty") is None
    waiting = asyncio.create_task(lines.begin("thrifty"))
    await asyncio.sleep(0)
    begun[0].reserve(1)
    await soon(waiting)
    assert lines.begin_now("thrifty") is None
    begun[1].end()
    assert lines.begin_now("thrifty") is not None


async def test_nobody_counts_for_keys_without_limits_and_for_what_no_key_made(lines):
    for name in ("team", ""):
        for _ in range(100):
            assert lines.begin_now(name).reserve(10**9) is None


async def test_a_key_that_is_not_there_any_more_is_refused_as_it_is_over_http(lines):
    for name in ("gone", "late"):
        assert isinstance(lines.begin_now(name).refusal, Unauthenticated)
    assert lines.begin_now("boss").refusal.reason == "INSUFFICIENT_SCOPE"
    assert lines.begin_now("team").refusal is None
