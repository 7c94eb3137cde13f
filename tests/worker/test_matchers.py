"""Grammars are compiled beside the steps, in bounds of stack and memory, and nobody waits for another's for long."""

import subprocess
import sys
import threading

import pytest

from services.common.text.grammar import Grammars
from services.worker.sampling import grammar_timeouts
from services.worker.sampling.matchers import Matchers
from tests.worker.driver import admission, batch
from tests.worker.grammars import OBJECTS, WORDS, ascii_grammars
from tests.worker.test_generation import prompt_of

DEEP = """
import resource
resource.setrlimit(resource.RLIMIT_STACK, (2 * 1024**2, resource.getrlimit(resource.RLIMIT_STACK)[1]))
from services.worker.sampling.matchers import Matchers
from tests.worker.grammars import ascii_grammars
chain = "start: T0\\n" + "\\n".join(f'T{i}: T{i + 1} "c"' for i in range(1000)) + '\\nT1000: "a"'
assert Matchers(ascii_grammars()).make(chain, []).result() is not None
"""


@pytest.fixture
def matchers():
    matchers = Matchers(ascii_grammars())
    yield matchers
    matchers.close()


class Blocked:
    """Grammars that start with "slow" are not compiled before it is over."""

    def __init__(self, monkeypatch) -> None:
        self.over, self.compiled = threading.Event(), []
        matcher = Grammars.matcher

        def when_over(grammars: Grammars, text: str):
            self.compiled.append(text)
            if text.startswith("// slow"):
                self.over.wait()
            return matcher(grammars, text)

        monkeypatch.setattr(Grammars, "matcher", when_over)


@pytest.fixture
def blocked(monkeypatch):
    blocked = Blocked(monkeypatch)
    yield blocked
    blocked.over.set()


def test_a_deep_grammar_is_compiled_whatever_stack_other_threads_have():
    subprocess.run([sys.executable, "-c", DEEP], check=True)


def test_a_grammar_that_is_there_does_not_wait_for_one_that_is_compiled(matchers, blocked):
    matchers.make(WORDS, []).result()
    slow = matchers.make("// slow\n" + WORDS, [])
    assert matchers.make(WORDS, []).result() is not None
    assert not slow.done()
    blocked.over.set()
    assert slow.result() is not None


def test_a_grammar_that_nobody_waits_for_is_not_compiled(matchers, blocked):
    slow = matchers.make("// slow\n" + WORDS, [])
    left = [matchers.make(OBJECTS, []) for _ in range(2)]
    for each in left:
        each.cancel()
    blocked.over.set()
    slow.result()
    assert matchers.make(WORDS, []).result() is not None
    assert OBJECTS not in blocked.compiled
    assert matchers.make(OBJECTS, []).result() is not None


def test_what_is_kept_is_bounded_by_its_text(matchers, blocked):
    grammars = [f'start: "{number}"\n//{"x" * 100_000}' for number in range(30)]
    for grammar in (*grammars, *grammars[20:]):  # the last ten are kept
        matchers.make(grammar, []).result()
    assert blocked.compiled == grammars
    matchers.make(grammars[19], []).result()
    assert blocked.compiled == [*grammars, grammars[19]]


def test_a_grammar_that_is_not_compiled_in_time_fails_its_slot_alone(runner_for, blocked, monkeypatch):
    monkeypatch.setattr(grammar_timeouts, "COMPILE_TIMEOUT_S", 0.05)
    driver = runner_for()
    driver.generate([prompt_of(9)], 1, grammar=OBJECTS)
    driver.reset()
    good, bad = (
        admission(slot, prompt_of(9), range(4 * slot, 4 * slot + 4), grammar=grammar)
        for slot, grammar in enumerate([OBJECTS, "// slow\n" + WORDS])
    )
    output = driver.run(admissions=(good, bad), batch=batch([0, 1], [9, 9]))
    assert output.sampled.finite.tolist() == [True, False]
    assert "not compiled in time" in output.failures[1].message
    blocked.over.set()
    assert driver.run(batch=batch([0, 1])).sampled.finite.tolist() == [True, False]
