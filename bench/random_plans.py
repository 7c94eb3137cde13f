"""Random valid plans for the limits of a worker, and the expected results."""

from dataclasses import dataclass

import numpy as np

from bench.random_groups import random_groups
from bench.random_sampling import random_settings
from services.common.plan.types import NO_GROUPS, NO_ROWS, Admission, Batch, Groups, Plan, WorkerLimits

_POOLED_TOKENS = 1 << 16
_SETTINGS = 2048
_MOST_ADMISSIONS = 64  # of most plans
_LONGEST_PROMPT = 2048  # of most prompts


@dataclass(frozen=True)
class Expected:
    """The expected properties of a result."""

    step: int
    slots: np.ndarray  # [samples] int64, in batch order
    logprobs: np.ndarray  # beside slots, bool
    top_logprobs: np.ndarray  # beside slots, int64


class RandomPlans:
    """A generator of plans, with its own state of slots and pages. No plan writes to a page that two sequences share.

    The number of running sequences varies between 1 and all slots, and most batches have few of them.
    """

    def __init__(self, limits: WorkerLimits, seed: int) -> None:
        self._limits, self._random = limits, np.random.default_rng(seed)
        self._tokens = self._random.integers(0, limits.vocab_size, _POOLED_TOKENS)
        self._settings = [random_settings(self._random, limits) for _ in range(_SETTINGS)]
        self._fair = limits.page_count * limits.page_size // limits.max_slots // 2  # tokens of a sequence
        self._width = min(limits.max_pages_per_slot, limits.page_count)
        self.reset()

    def reset(self) -> None:
        """Free every slot and page, as a reset of the runner does."""
        limits = self._limits
        self._step, self._target = 0, 1
        self._used = np.zeros(limits.max_slots, bool)
        self._known, self._computed, self._given, self._owned = np.zeros((4, limits.max_slots), np.int64)
        self._asked, self._top = np.zeros((2, limits.max_slots), np.int64)
        self._prompts: dict[int, np.ndarray] = {}
        self._table = np.zeros((limits.max_slots, self._width), np.int32)  # the first `_owned` pages of each slot
        self._users = np.zeros(limits.page_count, np.int32)  # number of sequences with each page
        self._free = self._random.permutation(limits.page_count)  # the first `_left` of them are free
        self._left = limits.page_count
        self._batch, self._groups = NO_ROWS, NO_GROUPS

    def next(self) -> tuple[Plan, Expected]:
        """Return the next plan, and update the state as if it had run."""
        random = self._random
        self._step += 1
        if random.random() < 0.01 or self._step == 1:
            most = self._limits.max_slots
            self._target = most if random.random() < 0.5 else self._log_uniform(most)
        releases = self._release()
        admissions, forks = self._admit()
        previous = self._previous_batch()
        batch = self._choose_batch() if previous is None else previous
        append_slots, append_pages, batch = self._append(batch)
        sources, targets = self._copies(forks, append_pages)
        groups: Groups | None = self._groups
        if batch is previous:
            sent_batch, sent_groups = None, None
        else:
            sent_batch = batch
            groups = random_groups(random, batch, self._table, self._computed, self._owned, self._limits)
            sent_groups = None if not len(groups) and not len(self._groups) and random.random() < 0.5 else groups
        plan = Plan(
            self._step, releases, admissions, append_slots, append_pages, sources, targets, sent_batch, sent_groups
        )
        self._batch, self._groups = batch, groups
        return plan, self._advance(batch)

    @property
    def rows_in_batch(self) -> int:
        """The number of rows of the last plan's batch, sent or left out."""
        return len(self._batch.slots)

    @property
    def tokens_in_batch(self) -> int:
        """The number of tokens of the last plan's batch, sent or left out."""
        return int(self._batch.token_counts.sum())

    @property
    def groups(self) -> Groups:
        """The groups of the last plan's batch, sent or left out."""
        return self._groups

    def _release(self) -> np.ndarray:
        """Return slots to release: of sequences at their limit, of surplus sequences, and a few random ones."""
        random, used = self._random, np.flatnonzero(self._used)
        gone = self._computed[used] >= self._limits.max_context_tokens
        excess = len(used) - self._target if random.random() < 0.2 else 0
        if self._left < self._limits.page_count // 16:
            excess = max(excess, 1 + len(used) // 4)
        if excess > 0:
            gone[random.permutation(len(used))[: self._log_uniform(excess)]] = True
        gone |= random.random(len(used)) < 0.3 / max(8, len(used))
        slots = random.permutation(used[gone])
        if not len(slots):
            return slots
        owned = self._owned[slots]
        widest = int(owned.max())
        pages = self._table[slots, :widest][np.arange(widest) < owned[:, None]]
        np.subtract.at(self._users, pages, 1)
        self._give_back(np.unique(pages[self._users[pages] == 0]))
        self._used[slots] = False
        self._owned[slots] = self._known[slots] = self._computed[slots] = 0
        for slot in slots.tolist():
            self._prompts.pop(slot, None)
        return slots

    def _admit(self) -> tuple[tuple[Admission, ...], list[tuple[int, int]]]:
        """Return admissions, and the copies of pages (source, target) that some need."""
        random = self._random
        # Only sequences of earlier plans can be shared with, since their tokens are computed or in flight.
        donors = np.flatnonzero(self._used & (self._computed > 1))
        missing = min(self._target - int(self._used.sum()), int((~self._used).sum()))
        if missing <= 0 or random.random() < 0.4:
            return (), []
        count = self._log_uniform(min(missing, _MOST_ADMISSIONS))
        if random.random() < 0.06:
            count = int(random.integers(1, missing + 1))
        slots = random.permutation(np.flatnonzero(~self._used))[:count]
        made, forks = [], []
        # Admit several with a common prefix, so that groups are possible.
        donor = int(random.choice(donors)) if len(donors) and random.random() < 0.7 else None
        for slot in slots.tolist():
            if donor is not None and random.random() < 0.1:
                donor = int(random.choice(donors))
            admission, fork = self._admission(slot, donor)
            if admission is None:
                break
            made.append(admission)
            forks += fork
        return tuple(made), forks

    def _admission(self, slot: int, donor: int | None) -> tuple[Admission | None, list[tuple[int, int]]]:
        random, limits, size = self._random, self._limits, self._limits.page_size
        shared, fork, head = 0, [], self._tokens[:0]
        if donor is not None:
            cached = min(int(self._computed[donor]), len(self._prompts[donor]), limits.max_context_tokens - 1)
            if random.random() < 0.7:
                cached = cached // size * size
            shared, head = cached // size, self._prompts[donor][:cached]
        longest = limits.max_context_tokens - len(head)
        if random.random() < 0.99:
            longest = min(longest, _LONGEST_PROMPT)
        if random.random() < 0.9:  # leave room for all slots
            longest = max(1, min(longest, self._fair - len(head)))
        count = min(self._log_uniform(longest), _POOLED_TOKENS // 2)
        start = int(random.integers(0, _POOLED_TOKENS // 2))
        token_ids = np.concatenate((head, self._tokens[start : start + count]))
        partial = len(head) % size > 0
        all_pages = -(-len(token_ids) // size)
        fresh = int(random.integers(int(partial), all_pages - shared + 1))
        if fresh > self._left or shared + fresh > self._width:
            return None, []
        pages = np.concatenate((self._table[donor, :shared] if shared else self._table[0, :0], self._take(fresh)))
        if partial:
            fork = [(int(self._table[donor, shared]), int(pages[shared]))]
        np.add.at(self._users, pages[:shared], 1)
        settings = self._settings[int(random.integers(0, _SETTINGS))]
        self._used[slot] = True
        self._known[slot] = self._given[slot] = len(token_ids)
        self._computed[slot], self._owned[slot] = len(head), len(pages)
        self._table[slot, : len(pages)] = pages
        self._asked[slot], self._top[slot] = settings.logprobs or settings.top_logprobs > 0, settings.top_logprobs
        self._prompts[slot] = token_ids
        prompt = int(random.integers(1, len(token_ids) + 1)) if random.random() < 0.2 else 0
        sample = int(random.integers(0, 65536))
        return Admission(slot, token_ids, len(head), pages.astype(np.int64), settings, prompt, sample), fork

    def _previous_batch(self) -> Batch | None:
        """Return the previous batch if this plan may leave it out, or None."""
        slots, counts = self._batch.slots, self._batch.token_counts
        ends = self._computed[slots] + counts
        fits = self._used[slots].all() and (ends <= self._most_of(slots)).all()
        # An admission into a slot of the batch would change the groups.
        same = not len(self._groups) or (self._known[slots] > self._given[slots]).all()
        return self._batch if fits and same and len(slots) and self._random.random() < 0.5 else None

    def _choose_batch(self) -> Batch:
        random, limits = self._random, self._limits
        ready = np.flatnonzero(self._used & (self._computed < self._limits.max_context_tokens))
        if not len(ready) or random.random() < 0.01:
            return NO_ROWS
        most = random.choice([8, 64, 1024, len(ready)], p=[0.35, 0.35, 0.2, 0.1])
        count = self._log_uniform(min(len(ready), int(most)))
        if most == len(ready) and random.random() < 0.5:
            count = len(ready)
        rows = random.permutation(ready)[:count]
        if random.random() < 0.5:  # neighbours share prefixes
            rows = rows[np.argsort(self._table[rows, 0], kind="stable")]
        room = self._most_of(rows) - self._computed[rows]
        counts = np.minimum(room, 1 + (random.random(len(rows)) ** 3 * room).astype(np.int64))
        if random.random() < 0.5:
            counts = room.copy()
        elif random.random() < 0.3:
            counts[:] = 1
        # Most small batches have few tokens.
        budget = (
            limits.max_tokens_per_step if random.random() < 0.1 else min(limits.max_tokens_per_step, 4 * count + 64)
        )
        if random.random() < 0.02:  # a single chunk of the largest size
            longest = int(np.argmax(room))
            rows, counts, budget = rows[longest : longest + 1], room[longest : longest + 1], limits.max_tokens_per_step
        before = np.cumsum(counts) - counts
        counts = np.minimum(counts, budget - before)
        fit = counts > 0
        return Batch(rows[fit], counts[fit])

    def _append(self, batch: Batch) -> tuple[np.ndarray, np.ndarray, Batch]:
        """Return the pages that the batch needs, and the part of the batch for which there are enough pages."""
        slots = batch.slots
        needed = self._needed(batch)
        fit = np.cumsum(needed) <= self._left
        if not fit.all():
            batch = Batch(batch.slots[fit], batch.token_counts[fit])
            slots, needed = batch.slots, needed[fit]
        growing = np.flatnonzero(needed)
        append_slots = np.repeat(slots[growing], needed[growing])
        pages = self._take(len(append_slots))
        places = self._owned[append_slots] + _within(needed[growing])
        self._table[append_slots, places] = pages
        self._owned[slots] += needed
        if (
            len(append_slots) > 1 and self._random.random() < 0.3
        ):  # interleave slots, but keep the order of each slot's pages
            order = np.argsort(_within(needed[growing]), kind="stable")
            append_slots, pages = append_slots[order], pages[order]
        return append_slots, pages.astype(np.int64), batch

    def _needed(self, batch: Batch) -> np.ndarray:
        ends = self._computed[batch.slots] + batch.token_counts
        return np.maximum(0, -(-ends // self._limits.page_size) - self._owned[batch.slots])

    def _copies(self, forks: list[tuple[int, int]], appended: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the copies of ``forks``, and sometimes copies to appended pages, which are written later."""
        random = self._random
        pairs = np.array(forks, np.int64).reshape(-1, 2)
        if len(appended) and random.random() < 0.1:
            sources = random.integers(0, self._limits.page_count, len(appended))
            apart = ~np.isin(sources, np.concatenate((appended, pairs[:, 1])))
            pairs = np.concatenate((pairs, np.stack((sources, appended), axis=1)[apart]))
        return pairs[:, 0].copy(), pairs[:, 1].copy()

    def _advance(self, batch: Batch) -> Expected:
        slots = batch.slots
        self._computed[slots] += batch.token_counts
        sampled = slots[self._computed[slots] == self._known[slots]]
        self._known[sampled] += 1
        return Expected(self._step, sampled, self._asked[sampled] > 0, self._top[sampled])

    def _most_of(self, slots: np.ndarray) -> np.ndarray:
        """Return how many tokens of each of ``slots`` can be computed."""
        return np.minimum(self._known[slots], self._limits.max_context_tokens)

    def _take(self, count: int) -> np.ndarray:
        """Take ``count`` free pages, and count one user for each."""
        self._left -= count
        pages = self._free[self._left : self._left + count].copy()
        self._users[pages] = 1
        return pages

    def _give_back(self, pages: np.ndarray) -> None:
        self._free[self._left : self._left + len(pages)] = pages
        self._left += len(pages)

    def _log_uniform(self, most: int) -> int:
        """Return a number from 1 to ``most`` with a log-uniform distribution."""
        return min(most, int(np.exp(self._random.random() * np.log(most + 1))))


def _within(counts: np.ndarray) -> np.ndarray:
    """Return the concatenation of ``arange(count)`` over ``counts [n]``."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
