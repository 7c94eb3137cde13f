"""Plans that break the contract, made from valid plans."""

from collections.abc import Callable
from random import Random

from tokasaurus.worker.v1 import plan_pb2, worker_pb2

_BAD_SETTINGS = (
    {"temperature": -0.5}, {"temperature": float("nan")}, {"temperature": float("inf")}, {"top_p": 0.0},
    {"top_p": float("nan")}, {"top_p": 1.5}, {"min_p": -0.1}, {"min_p": 2.0}, {"repetition_penalty": -1.0},
    {"frequency_penalty": 2.5}, {"presence_penalty": float("nan")}, {"top_logprobs": 2**31}, {"prompt_logprobs": 99},
    {"logit_bias_token_ids": [1], "logit_bias_values": []}, {"logit_bias_token_ids": [2**31], "logit_bias_values": [1]},
    {"logit_bias_token_ids": [1], "logit_bias_values": [float("inf")]},
)  # fmt: skip

Spoil = Callable[[Random, plan_pb2.StepPlan, worker_pb2.WorkerInfo, list[int]], object]


def spoilt(
    random: Random, plan: plan_pb2.StepPlan, info: worker_pb2.WorkerInfo, used: list[int]
) -> tuple[str, plan_pb2.StepPlan]:
    """Return the kind of a breach, and a copy of ``plan`` with it. ``used``: slots in use before the plan."""
    name = random.choice(list(KINDS))
    changed = plan_pb2.StepPlan()
    changed.CopyFrom(plan)
    KINDS[name](random, changed, info, used)
    return name, changed


def _step(random: Random, plan: plan_pb2.StepPlan, info, used) -> None:
    plan.step = random.choice((0, plan.step - 1, plan.step + 1, 2**63, 2**64 - 1))


def _admitted(plan: plan_pb2.StepPlan, info: worker_pb2.WorkerInfo, used: list[int]) -> plan_pb2.Admission:
    """Add an admission to ``plan``, valid if a slot is free, and return it."""
    taken = {*used, *(each.slot for each in plan.admissions)} - set(plan.release_slots)
    free = [slot for slot in range(info.max_slots) if slot not in taken]
    sampling = plan_pb2.SamplingSettings(parameters={"temperature": 0})
    return plan.admissions.add(slot=free[0] if free else 0, token_ids=[5, 6, 7], pages=[0], sampling=sampling)


def _slot_twice(random: Random, plan: plan_pb2.StepPlan, info, used) -> None:
    first = _admitted(plan, info, used)
    second = plan.admissions.add()
    second.CopyFrom(first)


def _slot_range(random: Random, plan: plan_pb2.StepPlan, info, used) -> None:
    _admitted(plan, info, used).slot = random.choice((info.max_slots, 2**31, 2**32 - 1))


def _token_range(random: Random, plan: plan_pb2.StepPlan, info, used) -> None:
    _admitted(plan, info, used).token_ids[1] = random.choice((info.vocab_size, 2**31, 2**32 - 1))


def _page_range(random: Random, plan: plan_pb2.StepPlan, info, used) -> None:
    _admitted(plan, info, used).pages[0] = random.choice((info.page_count, 2**31, 2**32 - 1))


def _no_tokens(random: Random, plan: plan_pb2.StepPlan, info, used) -> None:
    del _admitted(plan, info, used).token_ids[:]


def _long(random: Random, plan: plan_pb2.StepPlan, info, used) -> None:
    _admitted(plan, info, used).token_ids.extend([5] * info.max_context_tokens)


def _cached(random: Random, plan: plan_pb2.StepPlan, info, used) -> None:
    _admitted(plan, info, used).cached_tokens = random.choice((3, 4, 2**31, 2**32 - 1))


def _prompt_tokens(random: Random, plan: plan_pb2.StepPlan, info, used) -> None:
    _admitted(plan, info, used).prompt_tokens = random.choice((4, 2**32 - 1))


def _many_pages(random: Random, plan: plan_pb2.StepPlan, info, used) -> None:
    _admitted(plan, info, used).pages.extend([0] * (info.max_context_tokens // info.page_size + 1))


def _settings(random: Random, plan: plan_pb2.StepPlan, info, used) -> None:
    settings = _admitted(plan, info, used).sampling
    for name, value in random.choice(_BAD_SETTINGS).items():
        sampling = settings if name in settings.DESCRIPTOR.fields_by_name else settings.parameters
        if isinstance(value, list):
            getattr(sampling, name).extend(value)
        else:
            setattr(sampling, name, value)


def _release(random: Random, plan: plan_pb2.StepPlan, info, used) -> None:
    free = [slot for slot in range(info.max_slots) if slot not in used]
    plan.release_slots.append(random.choice((info.max_slots, 2**32 - 1, *free)))


def _release_twice(random: Random, plan: plan_pb2.StepPlan, info, used) -> None:
    plan.release_slots.extend([random.choice(used) if used else 0] * 2)


def _append_size(random: Random, plan: plan_pb2.StepPlan, info, used) -> None:
    plan.append_pages.extend([0] * random.choice((1, 50)))


def _append_slot(random: Random, plan: plan_pb2.StepPlan, info, used) -> None:
    plan.append_slots.append(random.choice((info.max_slots, 2**32 - 1)))
    plan.append_pages.append(0)


def _append_page(random: Random, plan: plan_pb2.StepPlan, info, used) -> None:
    plan.append_slots.append(_admitted(plan, info, used).slot)
    plan.append_pages.append(random.choice((info.page_count, 2**32 - 1)))


def _copy_size(random: Random, plan: plan_pb2.StepPlan, info, used) -> None:
    random.choice((plan.copy_source_pages, plan.copy_target_pages)).append(0)


def _copy_range(random: Random, plan: plan_pb2.StepPlan, info, used) -> None:
    pages = [0, random.choice((info.page_count, 2**32 - 1))]
    random.shuffle(pages)
    plan.copy_source_pages.append(pages[0])
    plan.copy_target_pages.append(pages[1])


def _copy_twice(random: Random, plan: plan_pb2.StepPlan, info, used) -> None:
    plan.copy_source_pages.extend((0, 1))
    plan.copy_target_pages.extend(random.choice(((2, 2), (1, 2))))


def _batch_slot(random: Random, plan: plan_pb2.StepPlan, info, used) -> None:
    taken = ({*used} - {*plan.release_slots}) | {each.slot for each in plan.admissions}
    free = [slot for slot in range(info.max_slots) if slot not in taken]
    plan.batch.slots.append(random.choice((info.max_slots, 2**32 - 1, *free)))
    plan.batch.token_counts.append(1)


def _batch_size(random: Random, plan: plan_pb2.StepPlan, info, used) -> None:
    plan.batch.token_counts.extend([1] * random.choice((1, 40)))
    if len(plan.batch.token_counts) == len(plan.batch.slots):  # they were left out
        plan.batch.token_counts.append(1)


def _batch_count(random: Random, plan: plan_pb2.StepPlan, info, used) -> None:
    slot = _admitted(plan, info, used).slot
    plan.batch.slots.append(slot)
    plan.batch.token_counts.append(random.choice((0, 4, info.max_tokens_per_step + 1, 2**31, 2**32 - 1)))


def _groups(random: Random, plan: plan_pb2.StepPlan, info, used) -> None:
    plan.hydragen.starts.append(random.choice((0, 2**31)))
    plan.hydragen.counts.append(random.choice((0, 1, 2**31)))
    plan.hydragen.prefix_pages.append(random.choice((0, 2**31)))


def _micro_batches(random: Random, plan: plan_pb2.StepPlan, info, used) -> None:
    plan.micro_batch_rows.extend(random.choice(((len(plan.batch.slots) + 1,), (1,) * 99, (2**32 - 1, 1))))


KINDS: dict[str, Spoil] = {
    "step out of order": _step, "slot taken twice": _slot_twice, "slot out of range": _slot_range,
    "token out of range": _token_range, "page out of range": _page_range, "no tokens": _no_tokens,
    "too many tokens": _long, "all is cached": _cached, "more prompt than tokens": _prompt_tokens,
    "too many pages": _many_pages, "settings out of range": _settings, "release of a free slot": _release,
    "release twice": _release_twice, "append of other sizes": _append_size, "append out of range": _append_slot,
    "appended page out of range": _append_page, "copy of other sizes": _copy_size, "copy out of range": _copy_range,
    "copy twice": _copy_twice, "batch of a free slot": _batch_slot, "batch of other sizes": _batch_size,
    "batch of other counts": _batch_count, "groups of nothing": _groups, "micro-batches of other rows": _micro_batches,
}  # fmt: skip
