"""Plans as a scheduler might send them, and worse: hypothesis draws them, whatever is sampled."""

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from services.common.plan.types import Plan, WorkerLimits
from tests.worker.driver import NONE, admission, batch, budget

SLOTS, PROMPT, STEPS, PARTS = 5, 40, 10, 4
SAMPLING = (
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "seed": 5, "top_p": 0.7, "logprobs": True},
    {"logprobs": True, "top_logprobs": 2},
    {"temperature": 1.2, "seed": 9, "top_k": 20, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 0.9, "top_k": 3, "logprobs": True, "top_logprobs": 4, "processed_logprobs": True},
    {"temperature": 0.7, "seed": 4, "thinking": budget(1, 7)},
)


@dataclass
class Sequence:
    known: int
    computed: int
    pages: list[int]


class Pages:
    """Hands out pages, of which there are always enough."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))

    def take(self, count: int) -> list[int]:
        return [self._free.pop(0) for _ in range(count)]

    def give(self, pages: list[int]) -> None:
        self._free += pages


@st.composite
def histories(draw, limits: WorkerLimits) -> list[Plan]:
    """Chunks of prompts that sample nothing, rows that decode beside them, in any order; sequences that move between
    micro-batches, pause, and are cancelled at any time; slots and pages that are used again at once; batches that stay
    as they were; micro-batches and steps without rows."""
    held, pages, plans, last = {}, Pages(limits.page_count), [], batch([])
    for number in range(1, draw(st.integers(2, STEPS)) + 1):
        releases = draw(st.lists(st.sampled_from(sorted(held)), unique=True, max_size=2)) if held else []
        if draw(st.integers(0, 2)):  # two of three steps end nothing
            releases = []
        for slot in releases:
            pages.give(held.pop(slot).pages)
        free = [slot for slot in range(SLOTS) if slot not in held]
        admissions = []
        for slot in draw(st.permutations(free))[: draw(st.integers(0, 2))]:
            length = draw(st.integers(1, PROMPT))
            tokens = np.random.default_rng(number * SLOTS + slot).integers(2, 390, length)
            held[slot] = Sequence(length, 0, pages.take(draw(st.integers(0, 1))))
            admissions.append(admission(slot, tokens, held[slot].pages, **draw(st.sampled_from(SAMPLING))))
        rows, counts, parts = _rows(draw, held)
        stays = draw(st.booleans()) and _fits(last, held)
        if stays:
            rows, counts, parts = last.slots.tolist(), last.token_counts.tolist(), ()
        appended = []
        for slot, count in zip(rows, counts, strict=True):
            sequence = held[slot]
            sequence.computed += count
            sequence.known += sequence.computed == sequence.known
            short = -(-sequence.computed // limits.page_size) - len(sequence.pages)
            more = pages.take(max(0, short))
            appended += [(slot, page) for page in more]
            sequence.pages = sequence.pages + more
        last = batch(rows, counts)
        plans.append(
            Plan(
                step=number,
                releases=np.array(releases, np.int64),
                admissions=tuple(admissions),
                append_slots=np.array([slot for slot, _ in appended], np.int64),
                append_pages=np.array([page for _, page in appended], np.int64),
                copy_sources=NONE,
                copy_targets=NONE,
                batch=None if stays else last,
                micro_batch_rows=parts,
            )
        )
    return plans


def _rows(draw, held: dict[int, Sequence]) -> tuple[list[int], list[int], tuple[int, ...]]:
    """Slots, token counts, and rows of each micro-batch."""
    order = draw(st.permutations(sorted(held)))
    rows = order[: draw(st.integers(0, len(order)))] if draw(st.integers(0, 3)) == 0 else order
    counts = []
    for slot in rows:
        missing = held[slot].known - held[slot].computed
        counts.append(missing if draw(st.booleans()) else draw(st.integers(1, missing)))
    cuts = sorted(draw(st.lists(st.integers(0, len(rows)), max_size=PARTS - 1)))
    return rows, counts, tuple(np.diff([0, *cuts, len(rows)]).tolist()) if cuts else ()


def _fits(last, held: dict[int, Sequence]) -> bool:
    """Whether the batch before can be run again."""
    return all(
        slot in held and held[slot].computed + count <= held[slot].known
        for slot, count in zip(last.slots.tolist(), last.token_counts.tolist(), strict=True)
    )
