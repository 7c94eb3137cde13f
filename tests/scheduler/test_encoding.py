"""The core's words and the contract's are the same: nothing is lost on the way in or out."""

import dataclasses

import numpy as np
import pytest

from services.common.model.files import read_card
from services.common.plan.types import WorkerLimits
from services.common.text.tokenizer import Tokenizer
from services.scheduler.api.encoding import encode_plan_event
from services.scheduler.api.mailbox import merged
from services.scheduler.api.model import ServedModel
from services.scheduler.api.validation import read_request
from services.scheduler.core.counters import Counters
from services.scheduler.core.output import Delta
from services.scheduler.core.plan import PlannedStep
from services.scheduler.core.request import AdmissionMode, Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.engine.events import PlanEvent
from services.scheduler.engine.load import read_load
from tokasaurus.scheduler.v1 import generate_pb2, observe_pb2


@pytest.fixture(scope="module")
def model():
    served = ServedModel(read_card("builtin"), Tokenizer.load("builtin"), max_samples=8)
    served.set_shape(WorkerLimits(16, 64, 4, 64, 1024, 2048))
    return served


def read(model: ServedModel, **fields) -> Request:
    return read_request(generate_pb2.GenerateRequest(**fields), np.array([7], np.uint32), model, sink=0, handle=0)


def test_a_request_says_how_it_is_admitted_and_whom_it_is_for(model):
    request = read(
        model,
        admission=generate_pb2.ADMISSION_MODE_GUARANTEED,
        length_class="é" * 64,
        fairness_key="team-a" * 40,
    )
    assert request.mode is AdmissionMode.GUARANTEED
    assert (request.length_class, request.fairness_key) == ("é" * 64, "team-a" * 40)
    assert read(model, admission=generate_pb2.ADMISSION_MODE_PREDICTED).mode is AdmissionMode.PREDICTED


def test_a_request_that_says_nothing_leaves_admission_to_the_scheduler(model):
    request = read(model)
    assert request.mode is None
    assert request.length_class == request.fairness_key == ""


def test_requests_without_a_seed_or_a_name_get_one_of_their_own(model):
    requests = [read(model) for _ in range(100)]
    assert len({request.sampling.parameters.seed for request in requests}) == 100
    assert len({request.request_id for request in requests}) == 100
    assert read(model, sampling=generate_pb2.Sampling(seed=0)).sampling.parameters.seed == 0


def test_deltas_that_pile_up_are_merged_by_handle():
    def delta(step, handles, tokens):
        return Delta(step, np.array(handles, np.uint32), np.array(tokens, np.uint32))

    both = merged([delta(1, [9, 2], [90, 20]), delta(2, [9, 2**32 - 1, 5], [91, 70, 50])])
    assert both.step == 2
    assert both.handles.tolist() == [2, 5, 9, 2**32 - 1]
    assert both.counts.tolist() == [1, 1, 2, 1]
    assert both.tokens.tolist() == [20, 50, 90, 91, 70]
    nothing = merged([Delta(1), Delta(2)])
    assert len(nothing.handles) == len(nothing.counts) == len(nothing.tokens) == 0


def test_the_contract_has_every_counter_under_its_name():
    assert {field.name for field in dataclasses.fields(Counters)} == set(observe_pb2.Counters.DESCRIPTOR.fields_by_name)


def test_every_counter_is_told():
    values = {field.name: number for number, field in enumerate(dataclasses.fields(Counters), 1)}
    core = Scheduler([], 16)
    core.state.queue.counters = Counters(**values)
    sent = read_load(core.state, not_ready_reason="", plans_in_flight=0, step_s=0.0, forecast=()).counters
    assert {name: getattr(sent, name) for name in values} == values


def test_a_watched_plan_shows_groups_micro_batches_preemptions_and_what_was_postponed():
    plan = PlannedStep(
        step=9,
        sequences=70,
        tokens=70,
        admitted_ids=["a"],
        released_ids=["b", "c"],
        preempted_ids=["c"],
        hydragen_groups=2,
        hydragen_rows=64,
        micro_batches=3,
        postponed=True,
    )
    sent = encode_plan_event(PlanEvent(plan, waiting_sequences=5, in_use_pages=40, plans_in_flight=2))
    assert (sent.step, sent.sequences, sent.hydragen_groups, sent.hydragen_rows, sent.micro_batches) == (
        9,
        70,
        2,
        64,
        3,
    )
    assert (list(sent.released_request_ids), list(sent.preempted_request_ids)) == (["b", "c"], ["c"])
    assert sent.postponed


def test_a_plain_plan_is_one_micro_batch():
    sent = encode_plan_event(PlanEvent(PlannedStep(step=1), waiting_sequences=0, in_use_pages=0, plans_in_flight=1))
    assert (sent.micro_batches, sent.hydragen_groups, sent.postponed) == (1, 0, False)
