"""Steps that are run before serving: everything gets compiled, and the largest step shows what memory it needs."""

from collections.abc import Iterator

import numpy as np

from services.worker.runner.plan import NO_GROUPS, Admission, Batch, Groups, Limits, Plan, SamplingSettings

_NONE = np.empty(0, np.int64)
PLAIN = SamplingSettings(0.0, 1.0, 0, 0.0, 0, 0, False, 0, _NONE, np.empty(0, np.float32))
WARM = SamplingSettings(0.7, 1.0, 0, 0.0, 1, 1, False, 0, _NONE, np.empty(0, np.float32))


def every_feature(limits: Limits) -> SamplingSettings:
    """All that a row can ask of the sampler at once."""
    top = min(limits.max_top_logprobs, limits.vocab_size)
    bias = np.zeros(1, np.int64), np.zeros(1, np.float32)
    return SamplingSettings(0.7, 0.9, 5, 0.05, 1, 1, True, top, *bias, 1.1, 0.1, 0.1)


def step(number: int, batch: Batch | None, admissions: tuple[Admission, ...] = (), groups: Groups = NO_GROUPS) -> Plan:
    """A plan without anything else."""
    return Plan(number, _NONE, admissions, _NONE, _NONE, _NONE, _NONE, batch, groups)


def decodes(limits: Limits, rows: int, settings: SamplingSettings, groups: bool = False) -> Iterator[Plan]:
    """A step of ``rows`` rows of one token each, from empty. They share pages: what they compute means nothing."""
    shared = limits.page_size
    pages = np.zeros(2 if groups else 1, np.int64)
    tokens = np.zeros(shared + 1 if groups else 1, np.int64)
    admissions = tuple(Admission(slot, tokens, shared if groups else 0, pages, settings) for slot in range(rows))
    together = Groups(*(np.array([value]) for value in (0, rows, 1))) if groups else NO_GROUPS
    yield step(1, Batch(np.arange(rows), np.ones(rows, np.int64)), admissions, together)
    if limits.page_size > 1:  # inputs are now what was sampled
        yield step(2, None, (), together)


def mixed(limits: Limits, rows: int, chunks: int, size: int, settings: SamplingSettings) -> Iterator[Plan]:
    """``rows`` rows of one token beside ``chunks`` rows of ``size`` tokens, in one step."""
    page = np.zeros(1, np.int64)
    long = np.zeros(-(-size // limits.page_size), np.int64)
    slots = np.arange(rows + chunks)
    admissions = tuple(
        Admission(slot, np.zeros(size if slot >= rows else 1, np.int64), 0, long if slot >= rows else page, settings)
        for slot in slots.tolist()
    )
    yield step(1, Batch(slots, np.where(slots < rows, 1, size)), admissions)


def largest(limits: Limits) -> Iterator[list[Plan]]:
    """The steps that need most memory: all rows and as many prompt tokens as fit beside them; and prompts alone."""
    features = every_feature(limits)
    rows = min(limits.max_slots, limits.max_tokens_per_step)
    yield list(decodes(limits, rows, features))
    room = limits.max_tokens_per_step
    size = min(room, limits.max_context_tokens)
    count = min(limits.max_slots, room // size)
    if size > 1:
        yield list(mixed(limits, 0, count, size, features))
    beside = min(limits.max_slots - 1, room // 2)
    if beside > 0 and room - beside > 1:
        yield list(mixed(limits, beside, 1, min(room - beside, limits.max_context_tokens), features))
