"""Which replica gets a prompt."""

from dataclasses import dataclass

import numpy as np

from services.gateway.engine.routing import BLOCK_TOKENS, MAX_BLOCKS, SLACK_TOKENS, PrefixRouter


@dataclass
class Target:
    address: str
    outstanding_tokens: int = 0


def prompt(first: int, tokens: int = 4 * BLOCK_TOKENS) -> np.ndarray:
    return np.arange(first, first + tokens, dtype=np.uint32)


def test_a_new_prompt_goes_where_the_least_is_to_do():
    router, busy, idle = PrefixRouter(), Target("a", 1000), Target("b", 10)
    assert router.choose([busy, idle], prompt(0)) is idle


def test_gateways_that_know_of_no_work_do_not_all_begin_with_the_same_replica():
    targets = [Target("a"), Target("b"), Target("c")]
    assert {PrefixRouter().choose(targets, prompt(0)).address for _ in range(200)} == {"a", "b", "c"}


def test_a_burst_over_several_gateways_is_dealt_out_evenly():
    """Each knows of its own requests alone, and they came to them as they liked."""
    requests = {"a": 0, "b": 0, "c": 0, "d": 0}
    for gateway, share in enumerate((7, 5, 6, 6)):
        router, targets = PrefixRouter(gateway), [Target(address) for address in requests]
        for number in range(share):
            chosen = router.choose(targets, prompt(1000 * gateway + 100 * number, 8 * BLOCK_TOKENS))
            chosen.outstanding_tokens += 1024 * 500 + 13 * number % 7
            requests[chosen.address] += 1
    assert set(requests.values()) == {6}


def test_a_known_prefix_goes_where_it_is_cached_though_another_has_less_to_do():
    router, first, second = PrefixRouter(), Target("a"), Target("b", 5)
    assert router.choose([first, second], prompt(0)) is first
    first.outstanding_tokens = 1000
    longer = np.concatenate([prompt(0), prompt(9000)])
    assert router.choose([first, second], longer) is first
    assert router.choose([first, second], prompt(5000)) is second


def test_a_cached_prefix_is_not_worth_any_wait():
    router, first, second = PrefixRouter(), Target("a"), Target("b", 5)
    router.choose([first, second], prompt(0))
    first.outstanding_tokens = SLACK_TOKENS + 100
    assert router.choose([first, second], prompt(0)) is second
    first.outstanding_tokens = 0
    assert router.choose([first, second], prompt(0)) is second  # it moved


def test_prefixes_of_another_salt_are_other_prefixes():
    router, first, second = PrefixRouter(), Target("a"), Target("b", 5)
    router.choose([first, second], prompt(0), "mine")
    first.outstanding_tokens = 50
    assert router.choose([first, second], prompt(0), "mine") is first
    assert router.choose([first, second], prompt(0), "yours") is second


def test_a_lost_replica_is_not_waited_for():
    router, first, second = PrefixRouter(), Target("a"), Target("b", 5)
    router.choose([first, second], prompt(0))
    assert router.choose([second, Target("c", 1)], prompt(0)).address == "c"


def test_the_last_of_many_prompts_is_remembered_in_as_much_memory_as_the_first():
    router, first, second = PrefixRouter(), Target("a"), Target("b", 5)
    size = router.nbytes
    for start in range(0, 3 * MAX_BLOCKS, 256):
        router.choose([first, second], prompt(start, 256 * BLOCK_TOKENS))
    assert router.nbytes == size
    first.outstanding_tokens = 1000
    assert router.choose([first, second], prompt(start, 256 * BLOCK_TOKENS)) is first


def test_the_longer_of_two_cached_prefixes_counts():
    router, first, second = PrefixRouter(), Target("a"), Target("b", 5)
    router.choose([first, second], prompt(0))
    longer = np.concatenate([prompt(0), prompt(9000)])
    first.outstanding_tokens = SLACK_TOKENS + 100
    assert router.choose([first, second], longer) is second  # and now it has the short one, too
    first.outstanding_tokens = 0
    router.choose([first, Target("c", 5)], prompt(0))
    assert router.choose([first, second], prompt(0)) is first
    assert router.choose([first, second], longer) is second
