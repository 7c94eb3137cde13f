"""Whether a plan keeps the contract. A plan is checked whole before any of it is applied.

``FailedPrecondition`` where scheduler and worker disagree about the state (steps, slots in use); ``InvalidRequest``
where the plan is wrong whatever the state.
"""

import numpy as np

from services.common.errors import FailedPrecondition, InvalidRequest
from services.worker.step.group_checks import check_groups
from services.worker.step.plan import Admission, Batch, Groups, Limits, Plan
from services.worker.step.slots import SlotTable

_State = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # used, known, computed, page counts


def check_plan(
    plan: Plan,
    previous_step: int,
    previous_batch: Batch,
    previous_groups: Groups,
    slots: SlotTable,
    limits: Limits,
    previous_cut: tuple[int, ...] = (),
) -> None:
    """Raises the first breach found, naming what was given and what was expected. ``previous_cut``: the
    micro-batches' rows that go with ``previous_batch``."""
    if plan.step != previous_step + 1:
        raise FailedPrecondition(f"step {plan.step} follows step {previous_step}: expected {previous_step + 1}")
    if plan.groups is not None and len(plan.groups) and not limits.hydragen:
        raise InvalidRequest("hydragen groups, but this worker's WorkerInfo.hydragen is false", field="plan.hydragen")
    _check_micro_batches(plan, limits)
    if not (plan.releases.size or plan.admissions or plan.append_slots.size or plan.append_pages.size):
        after: _State = slots.used, slots.known, slots.computed, slots.page_counts
    else:
        after = _after_changes(plan, slots, limits)
    _check_copies(plan, limits)
    batch = plan.batch or previous_batch
    _check_batch(batch, previous_batch, *after, limits)
    groups = previous_groups if plan.groups is None else plan.groups
    same = groups is previous_groups and batch is previous_batch and not plan.admissions
    if len(groups) and not same:
        check_groups(groups, batch, plan.admissions, after[2], slots, limits.page_size)
        _check_cut(groups, previous_cut if plan.batch is None else plan.micro_batch_rows)


def _check_micro_batches(plan: Plan, limits: Limits) -> None:
    rows, field = plan.micro_batch_rows, "plan.micro_batch_rows"
    most = limits.max_micro_batches
    if len(rows) > most:
        instead = "leave them out" if most == 1 else f"give at most {most}"
        raise InvalidRequest(
            f"{len(rows)} micro_batch_rows, but this worker's WorkerInfo.max_micro_batches is {most}: {instead}",
            field=field,
        )
    if rows and (plan.batch is None or sum(rows) != len(plan.batch.slots)):
        given = "no batch" if plan.batch is None else f"a batch of {len(plan.batch.slots)} rows"
        raise InvalidRequest(f"micro_batch_rows of {sum(rows)} rows beside {given}", field=field)


def _check_cut(groups: Groups, rows: tuple[int, ...]) -> None:
    """``groups`` were checked by themselves."""
    for end in np.cumsum(rows[:-1]).tolist():
        across = (groups.starts < end) & (end < groups.starts + groups.counts)
        if across.any():
            raise InvalidRequest(
                f"the group at row {groups.starts[across][0]} goes on behind row {end}, where a micro-batch ends: cut"
                " it into two groups",
                field="plan.hydragen.counts",
            )


def _after_changes(plan: Plan, slots: SlotTable, limits: Limits) -> _State:
    """Used, known, computed and page counts as releases, admissions and appends leave them; not to be written to."""
    used, known, computed, pages = slots.used, slots.known, slots.computed, slots.page_counts.copy()
    if plan.releases.size or plan.admissions:
        used, known, computed = used.copy(), known.copy(), computed.copy()

    _check_slots(plan.releases, used, "release_slots", limits)
    if plan.releases.size and len(np.unique(plan.releases)) != len(plan.releases):
        raise InvalidRequest("release_slots names a slot twice", field="plan.release_slots")
    used[plan.releases] = False

    for index, admission in enumerate(plan.admissions):
        field = f"plan.admissions[{index}]"
        _check_admission(admission, field, limits)
        if used[admission.slot]:
            raise FailedPrecondition(f"{field}: slot {admission.slot} is in use; release it first")
        used[admission.slot] = True
        known[admission.slot] = len(admission.token_ids)
        computed[admission.slot] = admission.cached_tokens
        pages[admission.slot] = len(admission.pages)

    if len(plan.append_slots) != len(plan.append_pages):
        raise InvalidRequest(
            f"{len(plan.append_slots)} append_slots and {len(plan.append_pages)} append_pages: they are parallel",
            field="plan.append_pages",
        )
    _check_slots(plan.append_slots, used, "append_slots", limits)
    _check_pages(plan.append_pages, "plan.append_pages", limits)
    np.add.at(pages, plan.append_slots, 1)
    if (pages[plan.append_slots] > limits.max_pages_per_slot).any():
        slot = plan.append_slots[pages[plan.append_slots] > limits.max_pages_per_slot][0]
        raise InvalidRequest(
            f"slot {slot} would have {pages[slot]} pages: at most {limits.max_pages_per_slot}"
            f" hold max_context_tokens={limits.max_context_tokens}",
            field="plan.append_slots",
        )
    return used, known, computed, pages


def _check_admission(admission: Admission, field: str, limits: Limits) -> None:
    tokens, pages = admission.token_ids, admission.pages
    if admission.slot >= limits.max_slots:
        raise InvalidRequest(f"{field}: slot {admission.slot} of max_slots={limits.max_slots}", field=f"{field}.slot")
    if not 0 < len(tokens) <= limits.max_context_tokens:
        raise InvalidRequest(
            f"{field}: {len(tokens)} tokens, expected 1 to max_context_tokens={limits.max_context_tokens}",
            field=f"{field}.token_ids",
        )
    _check_tokens(tokens, f"{field}.token_ids", limits)
    if admission.cached_tokens >= len(tokens):
        raise InvalidRequest(
            f"{field}: cached_tokens={admission.cached_tokens} must be less than the {len(tokens)} tokens known",
            field=f"{field}.cached_tokens",
        )
    if admission.prompt_tokens > len(tokens):
        raise InvalidRequest(
            f"{field}: prompt_tokens={admission.prompt_tokens}: expected at most the {len(tokens)} tokens known",
            field=f"{field}.prompt_tokens",
        )
    _check_pages(pages, f"{field}.pages", limits)
    if len(pages) > limits.max_pages_per_slot:
        raise InvalidRequest(
            f"{field}: {len(pages)} pages, at most {limits.max_pages_per_slot} hold"
            f" max_context_tokens={limits.max_context_tokens}",
            field=f"{field}.pages",
        )
    if admission.cached_tokens > len(pages) * limits.page_size:
        raise InvalidRequest(
            f"{field}: cached_tokens={admission.cached_tokens} do not fit into {len(pages)} pages of"
            f" {limits.page_size} tokens",
            field=f"{field}.pages",
        )
    _check_sampling(admission, f"{field}.sampling", limits)


def _check_sampling(admission: Admission, field: str, limits: Limits) -> None:
    settings = admission.sampling
    ranges = (
        ("temperature", settings.temperature, 0 <= settings.temperature < float("inf"), "0 or more"),
        ("top_p", settings.top_p, 0 < settings.top_p <= 1, "more than 0, at most 1"),
        ("min_p", settings.min_p, 0 <= settings.min_p <= 1, "0 to 1"),
        (
            "repetition_penalty",
            settings.repetition_penalty,
            0 < settings.repetition_penalty < float("inf"),
            "more than 0",
        ),
        ("frequency_penalty", settings.frequency_penalty, -2 <= settings.frequency_penalty <= 2, "-2 to 2"),
        ("presence_penalty", settings.presence_penalty, -2 <= settings.presence_penalty <= 2, "-2 to 2"),
        (
            "top_logprobs",
            settings.top_logprobs,
            settings.top_logprobs <= min(limits.max_top_logprobs, limits.vocab_size),
            f"at most {min(limits.max_top_logprobs, limits.vocab_size)}",
        ),
    )
    for name, value, good, expected in ranges:
        if not good:
            raise InvalidRequest(f"{field}.{name}={value}: expected {expected}", field=f"{field}.{name}")
    scored = settings.prompt_logprobs
    if scored is not None and scored > (most := min(limits.max_top_logprobs, limits.vocab_size)):
        raise InvalidRequest(
            f"{field}.prompt_logprobs={scored}: expected at most {most}", field=f"{field}.prompt_logprobs"
        )
    length = admission.prompt_tokens or len(admission.token_ids)
    if scored is not None and settings.prompt_logprobs_start >= length:
        raise InvalidRequest(
            f"{field}.prompt_logprobs_start={settings.prompt_logprobs_start}: expected less than the {length} tokens of"
            " the prompt",
            field=f"{field}.prompt_logprobs_start",
        )
    if settings.thinking is not None:
        for name in ("end_token_id", "begin_token_id"):
            token = getattr(settings.thinking, name)
            _check_tokens(np.array([] if token is None else [token], np.int64), f"{field}.thinking.{name}", limits)
    if settings.grammar and not limits.grammars:
        raise InvalidRequest(
            f"{field}.grammar, but this worker's WorkerInfo.grammars is false: leave it empty", field=f"{field}.grammar"
        )
    if len(settings.bias_token_ids) != len(settings.bias_values):
        raise InvalidRequest(
            f"{field}: {len(settings.bias_token_ids)} logit_bias_token_ids and {len(settings.bias_values)}"
            " logit_bias_values: they are parallel",
            field=f"{field}.logit_bias_values",
        )
    _check_tokens(settings.bias_token_ids, f"{field}.logit_bias_token_ids", limits)
    if not np.isfinite(settings.bias_values).all():
        raise InvalidRequest(
            f"{field}.logit_bias_values holds a value that is not finite", field=f"{field}.logit_bias_values"
        )


def _check_copies(plan: Plan, limits: Limits) -> None:
    if not (plan.copy_sources.size or plan.copy_targets.size):
        return
    if len(plan.copy_sources) != len(plan.copy_targets):
        raise InvalidRequest(
            f"{len(plan.copy_sources)} copy_source_pages and {len(plan.copy_targets)} copy_target_pages:"
            " they are parallel",
            field="plan.copy_target_pages",
        )
    _check_pages(plan.copy_sources, "plan.copy_source_pages", limits)
    _check_pages(plan.copy_targets, "plan.copy_target_pages", limits)
    if len(np.unique(plan.copy_targets)) != len(plan.copy_targets):
        raise InvalidRequest("copy_target_pages names a page twice", field="plan.copy_target_pages")
    both = np.intersect1d(plan.copy_sources, plan.copy_targets)
    if len(both):
        raise InvalidRequest(f"page {both[0]} is copied from and onto in one plan", field="plan.copy_target_pages")


def _check_batch(
    batch: Batch,
    previous_batch: Batch,
    used: np.ndarray,
    known: np.ndarray,
    computed: np.ndarray,
    pages: np.ndarray,
    limits: Limits,
) -> None:
    rows, counts = batch.slots, batch.token_counts
    if batch is not previous_batch:
        if len(counts) != len(rows):
            raise InvalidRequest(
                f"{len(rows)} slots and {len(counts)} token_counts: they are parallel", field="plan.batch.token_counts"
            )
        if len(np.unique(rows)) != len(rows):
            raise InvalidRequest("batch.slots names a slot twice", field="plan.batch.slots")
        if counts.size and counts.min() < 1:
            raise InvalidRequest("batch.token_counts holds a 0: expected 1 or more", field="plan.batch.token_counts")
        total = int(counts.sum())
        if total > limits.max_tokens_per_step:
            raise InvalidRequest(
                f"a batch of {total} tokens: at most max_tokens_per_step={limits.max_tokens_per_step}",
                field="plan.batch.token_counts",
            )
    _check_slots(rows, used, "batch.slots", limits)
    ends = computed[rows] + counts
    if (ends <= np.minimum(np.minimum(known[rows], pages[rows] * limits.page_size), limits.max_context_tokens)).all():
        return
    beyond = ends > known[rows]
    if beyond.any():
        slot, count = int(rows[beyond][0]), int(counts[beyond][0])
        raise InvalidRequest(
            f"slot {slot}: {count} tokens to compute, but only {known[slot] - computed[slot]} of its {known[slot]}"
            " known tokens are not computed yet",
            field="plan.batch.token_counts",
        )
    if (ends > limits.max_context_tokens).any():
        slot = int(rows[ends > limits.max_context_tokens][0])
        raise InvalidRequest(
            f"slot {slot} would pass max_context_tokens={limits.max_context_tokens}; release it",
            field="plan.batch.slots",
        )
    short = ends > pages[rows] * limits.page_size
    if short.any():
        slot = int(rows[short][0])
        raise InvalidRequest(
            f"slot {slot}: its page table of {pages[slot]} pages of {limits.page_size} tokens is too short for"
            f" {int(ends[short][0])} tokens; append pages first",
            field="plan.append_slots",
        )


def _check_slots(slots: np.ndarray, used: np.ndarray, name: str, limits: Limits) -> None:
    if slots.size == 0:
        return
    if slots.max() >= limits.max_slots:
        raise InvalidRequest(
            f"{name}: slot {slots.max()} is out of range, max_slots={limits.max_slots}", field=f"plan.{name}"
        )
    if not used[slots].all():
        raise FailedPrecondition(f"{name}: slot {slots[~used[slots]][0]} is not in use; admit a sequence first")


def _check_pages(pages: np.ndarray, field: str, limits: Limits) -> None:
    if pages.size and pages.max() >= limits.page_count:
        raise InvalidRequest(
            f"{field}: page {pages.max()} is out of range, page_count={limits.page_count}", field=field
        )


def _check_tokens(tokens: np.ndarray, field: str, limits: Limits) -> None:
    if tokens.size and tokens.max() >= limits.vocab_size:
        raise InvalidRequest(
            f"{field}: token {tokens.max()} is out of range, vocab_size={limits.vocab_size}", field=field
        )
