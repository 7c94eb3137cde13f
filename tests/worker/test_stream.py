"""What one RunSteps stream sends, and when."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.common.errors import InvalidRequest
from services.worker.api import stream as module
from services.worker.api.stream import Stream
from tokasaurus.worker.v1 import plan_pb2, worker_pb2


def stream(together: bool = True, plans_in_flight: int = 4) -> Stream:
    return Stream(worker_pb2.Hello(plans_in_flight=plans_in_flight, takes_results_together=together))


def answer(stream: Stream, *steps: int) -> None:
    for step in steps:
        stream.answer(plan_pb2.StepResult(step=step))


def steps_of(message: worker_pb2.RunStepsResponse) -> list[int]:
    if message.WhichOneof("payload") == "result":
        return [message.result.step]
    return [result.step for result in message.results.results]


def plans(*steps: int) -> worker_pb2.RunStepsRequest:
    together = [plan_pb2.StepPlan(step=step) for step in steps]
    return worker_pb2.RunStepsRequest(plans=worker_pb2.StepPlans(plans=together))


def test_answers_that_are_there_go_in_one_message():
    sender = stream()
    answer(sender, 1, 2, 3)
    assert steps_of(sender.next_message()) == [1, 2, 3]
    answer(sender, 4)
    assert sender.next_message().WhichOneof("payload") == "result"


def test_a_result_waits_for_the_next_one():
    sender = stream()
    for step, with_next in ((1, True), (2, True), (3, False), (4, True)):
        sender.answer(plan_pb2.StepResult(step=step), with_next=with_next)
    assert steps_of(sender.next_message()) == [1, 2, 3]
    sender.fail(InvalidRequest("wrong"))
    assert steps_of(sender.next_message()) == [4]
    with pytest.raises(InvalidRequest, match="wrong"):
        sender.next_message()


class ReadAtOnce(queue.Queue):
    """A queue whose reader takes what is put, and asks for more, before the writer goes on."""

    def __init__(self) -> None:
        super().__init__()
        self._found_empty, self._asked = 0, threading.Condition()

    def get(self, block=True, timeout=None):
        with self._asked:
            self._found_empty += self.empty()
            self._asked.notify()
        return super().get(block, timeout)

    def put(self, item, block=True, timeout=None):
        with self._asked:
            before = self._found_empty
            super().put(item)
            self._asked.wait_for(lambda: self._found_empty > before, timeout=5)  # the reader stops after a message


def test_a_waiting_result_is_never_sent_alone(monkeypatch):
    sender = stream()
    monkeypatch.setattr(sender, "_outbox", ReadAtOnce())
    with ThreadPoolExecutor() as threads:
        message = threads.submit(sender.next_message)
        sender.answer(plan_pb2.StepResult(step=1), with_next=True)
        answer(sender, 2)
        assert steps_of(message.result()) == [1, 2]


@pytest.mark.parametrize("with_next", [False, True])
def test_an_older_scheduler_gets_them_one_by_one(with_next):
    sender = stream(together=False)
    sender.answer(plan_pb2.StepResult(step=1), with_next=with_next)
    answer(sender, 2)
    sender.finish()
    messages = [sender.next_message() for _ in range(2)]
    assert [message.result.step for message in messages] == [1, 2]
    assert sender.next_message() is None


@pytest.mark.parametrize("with_next", [False, True])
def test_a_large_answer_ends_its_message(monkeypatch, with_next):
    monkeypatch.setattr(module, "_LARGE_BYTES", 100)
    sender = stream()
    for step, tokens in ((1, 1), (2, 50), (3, 1)):
        sender.answer(plan_pb2.StepResult(step=step, token_ids=range(tokens)), with_next=with_next)
    answer(sender, 4)
    sender.finish()
    assert [steps_of(sender.next_message()) for _ in range(2)] == [[1, 2], [3, 4]]
    assert sender.next_message() is None


@pytest.mark.parametrize("error", [None, InvalidRequest("wrong")])
def test_the_end_comes_behind_the_answers(error):
    sender = stream()
    answer(sender, 1, 2)
    sender.finish() if error is None else sender.fail(error)
    assert steps_of(sender.next_message()) == [1, 2]
    for _ in range(2):
        if error is None:
            assert sender.next_message() is None
        else:
            with pytest.raises(InvalidRequest, match="wrong"):
                sender.next_message()


def test_plans_are_counted_one_by_one():
    receiver = stream(plans_in_flight=4)
    assert [plan.step for plan in receiver.plans_of(plans(1, 2, 3))] == [1, 2, 3]
    assert [plan.step for plan in receiver.plans_of(worker_pb2.RunStepsRequest(plan=plan_pb2.StepPlan(step=4)))] == [4]
    answer(receiver, 1, 2)
    receiver.next_message()
    receiver.plans_of(plans(5, 6))
    with pytest.raises(InvalidRequest, match="more plans unanswered than the hello's plans_in_flight=4"):
        receiver.plans_of(plans(7))


@pytest.mark.parametrize(
    "message", [worker_pb2.RunStepsRequest(), worker_pb2.RunStepsRequest(hello=worker_pb2.Hello())]
)
def test_only_plans_follow_the_hello(message):
    with pytest.raises(InvalidRequest, match="every message must be a plan"):
        stream().plans_of(message)
