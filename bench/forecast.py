"""Measure the time of the forecast: ``python -m bench.forecast sequences=8192``.

The pool is nearly full with ``sequences`` running sequences, so that every admission needs the whole curve. There are
two shapes, prompts shared by many samples and prompts of single samples, each with guaranteed lengths (limits thousands
of steps away) and with predicted lengths. The figures are milliseconds on one core: of a forecast, and of a decision
about the next candidates by bisection, with its forecast. The last line is one JSON object.
"""

import time

import numpy as np
from pydantic import Field

from bench.server import report
from services.common.config import from_command_line
from services.common.flags import Config, Int
from services.common.plan.types import SamplingSettings, WorkerLimits
from services.scheduler.core.future.admission import AdmissionControl, forecast_running
from services.scheduler.core.future.sequences import Sequences, running_sequences
from services.scheduler.core.policy import Policy
from services.scheduler.core.queue.lengths import MOST_CLASSES
from services.scheduler.core.request import AdmissionMode, Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.state import State

PAGE_SIZE, PROMPT_TOKENS, CANDIDATES = 16, 700, 256
STEPS_AHEAD = 4096  # steps from the age of the youngest sequence to that of the oldest, and from there to its limit


class BenchConfig(Config):
    """The flags."""

    sequences: Int = Field(8192, ge=CANDIDATES, description="running sequences")
    repeats: Int = Field(30, ge=1, description="measurements of each figure, which is their median")


def running_state(sequences: int, prompts: int, guaranteed: bool) -> State:
    """Return the state of a core in which all sequences run and have different ages."""
    pages = 4 * sequences * STEPS_AHEAD // PAGE_SIZE
    shape = WorkerLimits(PAGE_SIZE, pages, sequences, 4 * sequences, 16384, 2048, hydragen=True)
    mode = AdmissionMode.GUARANTEED if guaranteed else AdmissionMode.PREDICTED
    core = Scheduler([b"a"] * shape.vocab_size, shape.vocab_size, Policy(max_queued=10**9, mode=mode))
    core.open_sink(1)
    core.attach(shape)
    random, handle = np.random.default_rng(0), 0
    for number in range(prompts):
        tokens = random.integers(0, shape.vocab_size, PROMPT_TOKENS).astype(np.uint32)
        request = Request(f"r{number}", tokens, SamplingSettings(), 2 * STEPS_AHEAD, sink=1, handle=handle)
        request.n = sequences // prompts
        handle += request.n
        core.submit(request, 1)
    state = core.state
    lengths = random.geometric(1 / STEPS_AHEAD, 4096)
    classes = np.full(len(lengths), state.queue.lengths.class_of("", 2 * STEPS_AHEAD))
    state.queue.lengths.observe(classes, lengths, np.ones(len(lengths), bool), np.zeros(len(lengths), np.int64))
    state.queue.lengths.refresh(classes[:0], lengths[:0], lengths[:0])
    while state.queue.waiting:
        plan = core.plan(1)
        state.pool.slots.known[state.pool.slots.active] = np.maximum(
            state.pool.slots.known, state.pool.slots.scheduled
        )[state.pool.slots.active]
        core._pending.pop(plan.step)  # the plan will have no result
    ages = random.integers(0, STEPS_AHEAD, sequences)
    slots = state.pool.slots
    for values in (slots.scheduled, slots.known):
        values[:] = PROMPT_TOKENS + ages
    rest = slots.limit - slots.known if guaranteed else random.geometric(1 / STEPS_AHEAD, sequences)
    slots.end_step[:] = state.pool.step + np.minimum(rest, slots.limit - slots.known)
    return state


def candidates(state: State, guaranteed: bool) -> tuple[Sequences, np.ndarray]:
    """Return the next candidates, with new prompts, and their classes."""
    given = np.full(CANDIDATES, PROMPT_TOKENS)
    limit, none = given + 2 * STEPS_AHEAD, np.zeros(CANDIDATES, np.int64)
    classes = np.full(CANDIDATES, -1 if guaranteed else state.queue.lengths.class_of("", 2 * STEPS_AHEAD))
    drawn = state.queue.lengths.draw(np.maximum(classes, 0), none, (np.arange(CANDIDATES) + 0.5) / CANDIDATES)
    end = np.minimum(limit, given + np.minimum(drawn, limit)) - given if not guaranteed else limit - given
    pages = -(-given // PAGE_SIZE)
    return Sequences(given, limit, pages, none, none, end, none, none, none, none - 1), classes


def milliseconds(repeats: int, action) -> float:
    taken = []
    for _ in range(repeats):
        begun = time.perf_counter()
        action()
        taken.append(time.perf_counter() - begun)
    return 1000 * float(np.median(taken))


def measure(sequences: int, prompts: int, guaranteed: bool, repeats: int) -> dict[str, float]:
    state = running_state(sequences, prompts, guaranteed)
    horizon = int((state.pool.slots.end_step - state.pool.step).max()) + 1
    fresh, classes = candidates(state, guaranteed)

    def forecast() -> int:
        running = running_sequences(state.pool.slots, state.pool.step, state.queue.steps_ahead)
        return int(forecast_running(state, running, horizon).curve.max())

    def decide() -> int:
        return len(AdmissionControl(state, state.pool.step).select(fresh, classes))

    # Shrink the pool until half of the candidates fit, so that the bisection takes all of its steps.
    forecast_now = AdmissionControl(state, state.pool.step).forecast_for(fresh)
    peak = forecast_now.with_candidates(fresh.take(np.arange(CANDIDATES // 2))).max()
    counts = np.bincount(state.pool.slots.length_class[~state.pool.slots.guaranteed], minlength=MOST_CLASSES)
    if not guaranteed:
        counts += np.bincount(classes[: CANDIDATES // 2], minlength=MOST_CLASSES)
    state.pool.pages.size = int(peak + state.queue.lengths.deviation(counts) / PAGE_SIZE) + 1
    return {
        "forecast_ms": milliseconds(repeats, forecast),
        "admission_ms": milliseconds(repeats, decide),
        "steps_ahead": horizon,
        "admitted": decide(),
    }


def main() -> None:
    config = from_command_line(BenchConfig)
    figures = {}
    for shared, prompts in (("shared", 32), ("unshared", config.sequences)):
        for guaranteed in (True, False):
            name = f"{shared}_{'guaranteed' if guaranteed else 'predicted'}"
            found = measure(config.sequences, min(prompts, config.sequences), guaranteed, config.repeats)
            figures[name] = {key: round(value, 3) for key, value in found.items()}
            print(f"{name:>20} {figures[name]}")
    worst = {name: max(each[name] for each in figures.values()) for name in ("forecast_ms", "admission_ms")}
    report({"sequences": config.sequences, **worst, **figures})


if __name__ == "__main__":
    main()
