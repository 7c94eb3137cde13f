"""The tokens that penalties count: kept beside keys and values, found through the page table."""

import dataclasses

import pytest

from tests.worker.driver import admission, batch

PROMPT = [7, 8, 9, 7, 8, 9, 7, 8, 9, 7, 8, 9, 7, 8, 9, 7, 8, 9, 7, 8]
PENALTIES = {"frequency_penalty": 2.0, "presence_penalty": 1.0, "repetition_penalty": 1.4}


def continued(driver, tokens, prompt_tokens, count, pages=(3, 1, 5, 2), cached_tokens=0):
    """``count`` more tokens of a sequence in slot 1."""
    given = admission(1, tokens, pages, cached_tokens=cached_tokens, **PENALTIES)
    parts = {"admissions": (dataclasses.replace(given, prompt_tokens=prompt_tokens),)}
    driver.tokens.pop(1, None)
    for step in range(count):
        driver.run(batch=batch([1], [1 if step else len(tokens) - cached_tokens]), **parts)
        parts = {}
    return driver.tokens[1]


def test_generated_tokens_are_counted_wherever_they_stand(runner_for):
    plain = runner_for().generate([PROMPT], 24)[0]
    driver = runner_for()
    whole = continued(driver, PROMPT, 0, 24)
    assert len(set(whole)) > len(set(plain))
    assert len(set(whole)) > 20


@pytest.mark.parametrize("cached_tokens", [0, 16])
def test_a_resumed_sequence_goes_on_as_if_it_had_not_stopped(runner_for, cached_tokens):
    driver = runner_for()
    whole = continued(driver, PROMPT, 0, 24)
    driver.run(releases=[1], batch=batch([]))
    rest = continued(driver, PROMPT + whole[:10], len(PROMPT), 14, cached_tokens=cached_tokens)
    assert rest == whole[10:]


def test_a_copied_page_brings_its_tokens(runner_for):
    driver = runner_for()
    whole = continued(driver, PROMPT, 0, 24)
    driver.run(releases=[1], copy_sources=[3, 1], copy_targets=[8, 9], batch=batch([]))
    rest = continued(driver, PROMPT + whole[:11], len(PROMPT), 13, pages=(8, 9, 4), cached_tokens=30)
    assert rest == whole[11:]
