"""Processes the result of one plan."""

import dataclasses

import numpy as np

from services.common.errors import Internal, InvalidRequest, TokaError
from services.common.plan.result import ScoredTokens, SlotFailure, StepResult
from services.common.plan.routed_experts import RoutedExperts
from services.scheduler.core.life.ending import Ending
from services.scheduler.core.life.lifecycle import Lifecycle
from services.scheduler.core.request import FinishReason, Request, Sample
from services.scheduler.core.state import State


class Results:
    """Advances sequences by the tokens that the worker returned. Owned by the core."""

    def __init__(self, state: State, lifecycle: Lifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle

    def take(self, result: StepResult, now_ns: int) -> None:
        """Advance the sequences that still run, and end those that are complete."""
        state, slots = self._state, self._state.pool.slots
        live = slots.active[result.slots] & (slots.admitted_step[result.slots] <= result.step)
        if np.count_nonzero(live) < len(live):
            state.queue.counters.wasted_tokens += int(len(live) - np.count_nonzero(live))
            state.queue.counters.wasted_steps += not live.any()
            result = select_rows(result, np.flatnonzero(live))
        self._take_scored(result)
        if result.routed is not None:
            self._take_routed(result.routed, result.step)
        self._fail(result)
        rows, tokens = result.slots, result.tokens
        if len(rows) == 0:
            return
        state.queue.counters.generated_tokens += len(rows)
        self._write(rows, tokens, now_ns)
        before = slots.stop_state[rows]
        matched = self._match_strings(rows, tokens, before) if state.queue.matcher.in_use else np.zeros(len(rows), bool)
        in_set = state.queue.stop_tokens.contain(slots.stop_set[rows], tokens)
        known = slots.known[rows]
        late_enough = known >= slots.min_known[rows]
        state.queue.outbox.tokens(result, slots.sink[rows], slots.handle[rows], state.queue.weights_version)
        for row in (matched & ~late_enough).nonzero()[0].tolist():
            try:
                self._pass_over(int(rows[row]), int(before[row]), int(tokens[row]))
            except Exception as error:
                state.queue.fail(slots.samples[rows[row]].request, error)
        by_token, by_string = in_set & late_enough, matched & late_enough
        endings = []
        for row in (by_token | by_string | (known >= slots.limit[rows])).nonzero()[0].tolist():
            sample, token = slots.samples[rows[row]], int(tokens[row])
            try:
                if by_token[row]:
                    endings.append(Ending(sample, FinishReason.STOP, stop_token_id=token))
                elif by_string[row]:
                    match = state.queue.matcher.first_match(sample.request.automaton, int(before[row]), token)
                    endings.append(Ending(sample, FinishReason.STOP, stop_string=match))
                else:
                    endings.append(Ending(sample, FinishReason.LENGTH))
            except Exception as error:
                state.queue.fail(sample.request, error)
        if endings:
            self._lifecycle.finish(endings)

    def _take_scored(self, result: StepResult) -> None:
        """Output log-probabilities of prompts. After a preemption some are computed again, and are not output again."""
        slots = self._state.pool.slots
        for scored in result.scored:
            slot = scored.slot
            if slots.active[slot] and slots.admitted_step[slot] <= result.step:
                request = slots.samples[slot].request
                try:
                    self._output_scores(request, scored)
                except Exception as error:
                    self._state.queue.fail(request, error)

    def _output_scores(self, request: Request, scored: ScoredTokens) -> None:
        sent = request.scored + 1 - scored.start  # number of the first tokens that were output before
        if 0 <= sent < len(scored.logprobs):
            request.scored += len(scored.logprobs) - sent
            self._state.queue.outbox.score(request.sink, request.handle, scored.behind(sent))

    def _take_routed(self, routed: RoutedExperts, step: int) -> None:
        """Output the experts of computed tokens. Those of a sequence that has left its slot are computed again."""
        slots = self._state.pool.slots
        live = routed.take(slots.active[routed.owners] & (slots.admitted_step[routed.owners] <= step))
        if live is not None:
            owners = live.owners
            slots.routed[owners] = live.starts + live.counts
            self._state.queue.outbox.route(live._replace(owners=slots.handle[owners]), slots.sink[owners])

    def _write(self, rows: np.ndarray, tokens: np.ndarray, now_ns: int) -> None:
        state, slots = self._state, self._state.pool.slots
        position = slots.known[rows]
        slots.known[rows] = position + 1
        slots.last_token[rows] = tokens
        index, offset = np.divmod(position, state.pool.shape.page_size)
        paged = index < slots.page_count[rows]  # otherwise it is written when its page is taken
        if state.pool.shape.window_tokens:
            slots.tokens[rows, position] = tokens
            paged &= index >= slots.left_behind[rows]
        if np.count_nonzero(paged) == len(paged):
            state.pool.pages.tokens[slots.table[rows, index], offset] = tokens
        else:
            pages = slots.table[rows[paged], index[paged]]
            state.pool.pages.tokens[pages, offset[paged]] = tokens[paged]
        first = rows[slots.first_token_ns[rows] == 0]
        if len(first):
            slots.first_token_ns[first] = now_ns
        slots.last_token_ns[rows] = now_ns

    def _match_strings(self, rows: np.ndarray, tokens: np.ndarray, states: np.ndarray) -> np.ndarray:
        """Return whether a stop string ended in the token: bool beside ``rows``."""
        matched = np.zeros(len(rows), bool)
        watched = np.flatnonzero(states >= 0)
        if len(watched):
            moved, matched[watched] = self._state.queue.matcher.advance(states[watched], tokens[watched])
            self._state.pool.slots.stop_state[rows[watched]] = moved
        return matched

    def _pass_over(self, slot: int, state_before: int, token: int) -> None:
        """Move the automaton past a stop string that does not count, because it ended before ``min_tokens``."""
        automaton = self._state.pool.slots.samples[slot].request.automaton
        self._state.pool.slots.stop_state[slot] = self._state.queue.matcher.pass_over(automaton, state_before, token)

    def _fail(self, result: StepResult) -> None:
        slots = self._state.pool.slots
        for failure in result.failures:
            if slots.active[failure.slot] and slots.admitted_step[failure.slot] <= result.step:
                sample = slots.samples[failure.slot]
                self._lifecycle.end([sample], FinishReason.ERROR, _error_of(failure, sample))


def _error_of(failure: SlotFailure, sample: Sample) -> TokaError:
    """Return the client's error if a grammar forbids its resumed tokens, and otherwise an internal error."""
    if failure.forbidden and sample.request.resumed_tokens and not len(sample.generated):
        return InvalidRequest(f"the sample cannot be resumed: {failure.message}", field="resume.generated_tokens")
    return Internal(f"the worker could not compute this sequence: {failure.message}")


def select_rows(result: StepResult, rows: np.ndarray) -> StepResult:
    """Return ``result`` with only these rows."""
    chosen = {"slots": result.slots[rows], "tokens": result.tokens[rows]}
    if len(result.logprobs):
        chosen["logprobs"] = result.logprobs[rows]
    return dataclasses.replace(result, top=None if result.top is None else result.top[rows], **chosen)
