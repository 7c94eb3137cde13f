"""Steps that run before the first request. They compile every kernel and measure the memory of the largest step.

An admission takes the host tens of microseconds, and several times that with a grammar. So only greedy decode steps and
the steps that measure memory have the largest number of rows, and few rows have a grammar. The memory of grammars does
not depend on the number of rows.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from services.common.plan.types import NO_GROUPS, Admission, Batch, Groups, Plan, SamplingSettings, WorkerLimits
from tokasaurus.common.v1.sampling_pb2 import Sampling, ThinkingBudget

PLAIN = SamplingSettings(Sampling(temperature=0))
_ANYTHING = "start: /(.|\\n)*/"  # a grammar that allows every text
# Steps with more rows than this use the same kernels.
_MANY = 512
# Rows with a grammar in the largest steps: more than the sampler copies at once.
_GUIDED = 96
WARM = SamplingSettings(Sampling(temperature=0.7, seed=1))


def unadjusted(limits: WorkerLimits) -> SamplingSettings:
    """Return settings with every feature that does not change logits."""
    parameters = Sampling(temperature=0.7, top_p=0.9, top_k=5, min_p=0.05, seed=1)
    return SamplingSettings(parameters, logprobs=True, top_logprobs=limits.most_top_logprobs)


def adjusted(limits: WorkerLimits) -> SamplingSettings:
    """Return settings with every feature but a grammar. The sampler copies the logits, and the prompt is scored."""
    settings = _adjusted(unadjusted(limits))
    return settings._replace(prompt_logprobs=settings.top_logprobs)


def every_feature(limits: WorkerLimits) -> SamplingSettings:
    """Return settings with every feature that ``limits`` allow."""
    return _guided(adjusted(limits), limits)


def adjusted_only(limits: WorkerLimits) -> SamplingSettings:
    """Return settings with a bias, penalties and processed log-probabilities, and without truncation."""
    return _adjusted(_processed(WARM._replace(top_logprobs=unadjusted(limits).top_logprobs)))


def processed(limits: WorkerLimits) -> SamplingSettings:
    """Return settings with truncation and processed log-probabilities. Only forced tokens change the logits."""
    return _processed(unadjusted(limits))


def _processed(settings: SamplingSettings) -> SamplingSettings:
    """Return ``settings`` with processed log-probabilities and a thinking budget of 0 tokens."""
    budget = Sampling(thinking=ThinkingBudget(tokens=0, end_token_id=0, opened=True))
    return _with(settings, budget)._replace(logprobs=True, processed_logprobs=True)


def _guided(settings: SamplingSettings, limits: WorkerLimits) -> SamplingSettings:
    """Return ``settings`` with a grammar, if ``limits`` allow grammars."""
    return settings._replace(grammar=_ANYTHING) if limits.grammars else settings


def _adjusted(settings: SamplingSettings) -> SamplingSettings:
    """Return ``settings`` with a bias and penalties, which change logits."""
    added = Sampling(
        logit_bias_token_ids=[0],
        logit_bias_values=[0],
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        presence_penalty=0.1,
    )
    return _with(settings, added)


def _with(settings: SamplingSettings, added: Sampling) -> SamplingSettings:
    """Return ``settings`` with the parameters that are set in ``added``."""
    parameters = Sampling()
    if settings.parameters is not None:
        parameters.CopyFrom(settings.parameters)
    parameters.MergeFrom(added)
    return settings._replace(parameters=parameters)


def decodes(
    limits: WorkerLimits, rows: int, settings: SamplingSettings, groups: bool = False, context: int = 1
) -> Iterator[Plan]:
    """Yield one or two steps of ``rows`` rows of one token each. All slots must be free.

    The rows share pages, so their results are undefined. ``groups``: the rows share a prefix of one page. ``context``:
    tokens that each row attends to, at least one more than the shared prefix.
    """
    admissions = tuple(_decode(limits, slot, settings, groups, context) for slot in range(rows))
    shared = _one_group(rows) if groups else NO_GROUPS
    batch = Batch(np.arange(rows), np.ones(rows, np.int64))
    yield Plan(1, admissions=admissions, batch=batch, groups=shared)
    known = len(admissions[0].token_ids)
    if known < limits.max_context_tokens and known % limits.page_size:  # the sampled tokens need no further page
        yield Plan(2, groups=shared)


def mixed(
    limits: WorkerLimits,
    rows: int,
    chunks: int,
    size: int,
    settings: SamplingSettings,
    groups: bool = False,
    context: int = 1,
) -> Iterator[Plan]:
    """Yield a step of ``rows`` rows as in ``decodes`` and ``chunks`` rows of ``size`` tokens."""
    slots, tokens = np.arange(rows + chunks), np.zeros(size, np.int64)
    pages = np.zeros(-(-size // limits.page_size), np.int64)
    admissions = (
        *(_decode(limits, slot, settings, groups, context) for slot in range(rows)),
        *(_admission(limits, slot, tokens, 0, pages, settings) for slot in range(rows, rows + chunks)),
    )
    batch = Batch(slots, np.where(slots < rows, 1, size))
    yield Plan(1, admissions=admissions, batch=batch, groups=_one_group(rows) if groups else NO_GROUPS)


def _decode(limits: WorkerLimits, slot: int, settings: SamplingSettings, grouped: bool, context: int) -> Admission:
    """Return an admission whose tokens but the last are cached."""
    known = max(context, limits.page_size + 1) if grouped else context
    pages = np.zeros(-(-known // limits.page_size), np.int64)
    return _admission(limits, slot, np.zeros(known, np.int64), known - 1, pages, settings)


def _admission(
    limits: WorkerLimits, slot: int, tokens: np.ndarray, cached: int, pages: np.ndarray, settings: SamplingSettings
) -> Admission:
    """Return an admission. If it asks for log-probabilities, it also asks for the experts of its uncached tokens."""
    routed = cached if settings.wants_logprobs and limits.routed_experts is not None else None
    return Admission(slot, tokens, cached, pages, settings, routed_start=routed)


def _one_group(rows: int) -> Groups:
    """Return a group of the first ``rows`` rows, which share their first page."""
    return Groups(*(np.array([value]) for value in (0, rows, 1)))


def every_kind(limits: WorkerLimits) -> Iterator[Iterator[Plan]]:
    """Yield series of plans that use every kernel of the model, the attention and the sampler.

    All slots must be free at the start of each series.
    """
    most = min(limits.max_slots, limits.max_tokens_per_step)
    longest = limits.max_context_tokens
    # Groups need room for a token after a prefix of one page.
    grouped = {False, limits.hydragen and limits.page_size < longest}
    size = min(longest, limits.max_tokens_per_step // 2, 3 * limits.page_size + 1)
    beside = min(3, limits.max_slots - 1, limits.max_tokens_per_step - size)
    sizes, few = {1, min(9, most), min(_MANY, most)}, {1, min(9, most), min(_GUIDED, most)}
    kinds = [(PLAIN, sizes | {most}), *((each, sizes) for each in (WARM, unadjusted(limits), adjusted_only(limits)))]
    kinds += [(processed(limits), few), (adjusted(limits), sizes)]
    if limits.grammars:
        kinds += [(_guided(PLAIN, limits), few), (every_feature(limits), few)]
    for settings, counts in kinds:
        for rows in sorted(counts):
            for groups in grouped if rows > 1 else {False}:
                yield decodes(limits, rows, settings, groups)
        for rows in {0, beside} if size > 1 else ():
            yield mixed(limits, rows, 1, size, settings)
    # With few rows, several programs share a long context. A chunk prevents padding to more rows.
    for groups in grouped:
        yield decodes(limits, 1, PLAIN, groups, longest)
        if size > 1 and beside > 0:
            yield mixed(limits, 1, 1, size, PLAIN, groups, longest)


def around(limits: WorkerLimits, tokens: int, grain: int) -> Iterator[Iterator[Plan]]:
    """Yield series of plans on both sides of ``tokens``, where the exchange strategy or the kernels change.

    Each series has the fewest tokens, the most that are fewer than ``tokens`` after padding to a multiple of ``grain``,
    or exactly ``tokens``. Some sample from all tokens, others from few. Leaves out steps that exceed ``limits``.
    """
    most = min(limits.max_slots, limits.max_tokens_per_step)
    below = (tokens - 1) // grain * grain
    for rows in (1, below, tokens):
        if 0 < rows <= most:
            yield decodes(limits, rows, PLAIN)
    for total in (2, below, tokens):
        chunks = -(-total // limits.max_context_tokens)
        size = -(-total // chunks) if total == tokens else total // max(1, chunks)
        if size > 1 and chunks <= limits.max_slots and chunks * size <= limits.max_tokens_per_step:
            yield mixed(limits, 0, chunks, size, PLAIN)


def largest(limits: WorkerLimits) -> Iterator[list[Plan]]:
    """Yield the series of plans that need most memory: decodes, prompts, and prompts beside the largest decode batch.

    All rows have every feature but a grammar; the first rows also have a grammar.
    """
    features = adjusted(limits)
    rows = min(limits.max_slots, limits.max_tokens_per_step)
    yield [_guide_first_rows(plan, limits) for plan in decodes(limits, rows, features)]
    room = limits.max_tokens_per_step
    size = min(room, limits.max_context_tokens)
    count = min(limits.max_slots, room // size)
    if size > 1:
        yield [_guide_first_rows(plan, limits) for plan in mixed(limits, 0, count, size, features)]
    beside = min(limits.max_slots - 1, room // 2)
    if beside > 0 and room - beside > 1:
        size = min(room - beside, limits.max_context_tokens)
        yield [_guide_first_rows(plan, limits) for plan in mixed(limits, beside, 1, size, features)]


def _guide_first_rows(plan: Plan, limits: WorkerLimits) -> Plan:
    """Return ``plan`` with a grammar for the first rows that it admits, if the limits allow grammars."""
    guided = (replace(each, sampling=_guided(each.sampling, limits)) for each in plan.admissions[:_GUIDED])
    return replace(plan, admissions=(*guided, *plan.admissions[_GUIDED:]))
