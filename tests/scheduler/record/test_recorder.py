"""What goes into the recorder comes out of the reader, or the file says that it ends early."""

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from google.protobuf.message import Message
from structlog.testing import capture_logs

from services.common.errors import InvalidRequest
from services.common.packed import fill
from services.scheduler.record.message_sizes import message_size
from services.scheduler.record.reader import OPEN, TORN, Recording, RecordingError, find_recordings
from services.scheduler.record.recorder import Recorder
from tests.fakes.model import FakeModel
from tests.scheduler.record.loop import SHAPE, RecordedLoop, open_recordings, record_small_run
from tokasaurus.worker.v1 import plan_pb2


def admission(slot: int) -> plan_pb2.Admission:
    return plan_pb2.Admission(
        slot=slot, token_ids=[5, 6], pages=[slot], sampling=plan_pb2.SamplingSettings(parameters={})
    )


def record_three_plans(directory) -> list[plan_pb2.StepPlan]:
    recorder, model = Recorder(str(directory), "replica-0"), FakeModel(SHAPE)
    recorder.connected(SHAPE.worker_info("one"), 2)
    plans = [
        plan_pb2.StepPlan(step=1, admissions=[admission(0)], batch=plan_pb2.Batch(slots=[0], token_counts=[2])),
        plan_pb2.StepPlan(step=2, batch=plan_pb2.Batch(slots=[0])),
        plan_pb2.StepPlan(step=3, release_slots=[0], batch=plan_pb2.Batch()),
    ]
    for plan, admitted, released in zip(plans, (["a"], [], []), ([], [], ["a"]), strict=True):
        recorder.plan(plan, admitted, released)
        recorder.result(model.apply(plan))
    recorder.disconnected("enough")
    recorder.close()
    return plans


def test_plans_and_results_come_back_as_they_were(tmp_path):
    plans = record_three_plans(tmp_path)
    (recording,) = open_recordings(str(tmp_path))
    assert recording.info == SHAPE.worker_info("one")
    assert (recording.connected.plans_in_flight, recording.connected.scheduler_id) == (2, "replica-0")
    steps, model = list(recording.steps()), FakeModel(SHAPE)
    assert [step.plan.plan for step in steps] == plans
    assert [step.result.result for step in steps] == [model.apply(plan) for plan in plans]
    assert [list(step.plan.admitted_ids) for step in steps] == [["a"], [], []]
    assert [list(step.plan.released_ids) for step in steps] == [[], [], ["a"]]
    times = [time for step in steps for time in (step.plan.sent_ns, step.result.received_ns)]
    assert times == sorted(times)
    assert recording.ending == "disconnected: enough"


def test_each_connection_has_a_file_that_begins_at_step_1(tmp_path):
    loop = RecordedLoop(tmp_path)
    loop.submit("a", range(2, 12), 8)
    for _ in range(4):
        loop.step()
    loop.lose_worker("it died")
    loop.run()
    first, second = loop.close()
    assert [step.plan.plan.step for step in first.steps()][:2] == [1, 2]
    assert first.ending == "disconnected: it died"
    first_step, *_ = second.steps()
    assert list(first_step.plan.admitted_ids) == ["a"]
    assert second.ending == "disconnected: the scheduler stopped"
    assert all(path.name.startswith("plans-2") and path.suffix == ".tkrec" for path in (first.path, second.path))


def test_plans_at_the_end_may_be_without_an_answer(tmp_path):
    loop = RecordedLoop(tmp_path)
    loop.submit("a", range(2, 12), 8)
    loop.step()
    (recording,) = loop.close()
    assert [step.result is None for step in recording.steps()] == [False, True, True]


def test_everything_before_a_torn_tail_is_used(tmp_path):
    whole = record_small_run(tmp_path)
    steps, content = list(whole.steps()), whole.path.read_bytes()
    torn = tmp_path / "torn.tkrec"
    for size in (len(content) - 1, len(content) - 30, len(content) - 200, 700):
        torn.write_bytes(content[:size])
        recording = Recording(torn)
        found = list(recording.steps())
        assert recording.ending == TORN
        assert [step.plan for step in found] == [step.plan for step in steps[: len(found)]]
    torn.write_bytes(content[:20])
    with pytest.raises(RecordingError, match="does not begin with the connection"):
        Recording(torn)


def test_a_file_that_its_writer_never_ended_says_so(tmp_path):
    recorder = Recorder(str(tmp_path))
    recorder.connected(SHAPE.worker_info(), 2)
    recorder.plan(plan_pb2.StepPlan(step=1), [], [])
    recorder.close()
    path = next(tmp_path.iterdir())
    content = path.read_bytes()
    path.write_bytes(content[: content.rindex(b"the scheduler stopped") - 5])
    recording = Recording(path)
    assert len(list(recording.steps())) == 1
    assert recording.ending in (OPEN, TORN)


class SlowDisk:
    """Takes nothing until it is told to."""

    def __init__(self) -> None:
        self.reached, self.goes_on = threading.Event(), threading.Event()
        self._file = None

    def open(self, path: Path) -> "SlowDisk":
        self._file = path.open("xb")
        return self

    def write(self, data: bytes) -> int:
        self.reached.set()
        self.goes_on.wait()
        return self._file.write(data)

    def __getattr__(self, name: str):
        return getattr(self._file, name)


def test_a_disk_that_does_not_keep_up_cuts_the_recording_and_holds_nobody_up(tmp_path):
    """Bytes count: three plans of 440 kB may wait for 1 MiB, however many entries that is."""
    slow_disk = SlowDisk()
    recorder = Recorder(str(tmp_path), most_waiting_bytes=1 << 20, open_file=slow_disk.open)
    with capture_logs() as logs:
        recorder.connected(SHAPE.worker_info(), 2)
        slow_disk.reached.wait()
        for step in range(1, 20):
            admission = plan_pb2.Admission(token_ids=range(110_000))
            recorder.plan(plan_pb2.StepPlan(step=step, admissions=[admission]), ["a"], [])
        slow_disk.goes_on.set()
        recorder.connected(SHAPE.worker_info(), 2)  # too late: the recording has ended for good
        recorder.close()
    (recording,) = open_recordings(str(tmp_path))
    assert [step.plan.plan.step for step in recording.steps()] == [1, 2, 3]
    reason = "the disk is too slow: 1.3 MiB of messages wait, and 1.0 MiB are allowed"
    assert recording.ending == f"cut short: {reason}"
    (error,) = (log for log in logs if log["log_level"] == "error")
    assert (error["event"], error["reason"]) == ("the recording of plans ends here", reason)


def test_small_entries_may_be_many_and_what_is_written_waits_no_more(tmp_path):
    """100 plans of a few bytes are far from 1 MiB, though nothing is written; and afterwards there is all the room."""
    slow_disk, steps = SlowDisk(), iter(range(1, 1000))
    recorder = Recorder(str(tmp_path), most_waiting_bytes=1 << 20, open_file=slow_disk.open)
    recorder.connected(SHAPE.worker_info(), 2)
    slow_disk.reached.wait()
    for _ in range(100):
        recorder.plan(plan_pb2.StepPlan(step=next(steps)), [], [])
    slow_disk.goes_on.set()
    recorder.close()
    (recording,) = open_recordings(str(tmp_path))
    assert len(list(recording.steps())) == 100
    assert recorder.waiting_bytes == 0


def filled(message: Message) -> Message:
    """Fill every array of numbers in ``message`` and in its messages with 1,000 elements."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None:
            inner = getattr(message, field.name)
            filled(inner.add() if field.is_repeated else inner)
        elif field.is_repeated and field.type != field.TYPE_STRING:  # no worker gets a list of choices
            fill(message, field.name, np.arange(1000))
    return message


def test_every_array_counts_for_what_waits():
    plan, result = filled(plan_pb2.StepPlan()), filled(plan_pb2.StepResult())
    assert 4 * 1000 * 15 < plan.ByteSize() <= message_size(plan) < plan.ByteSize() + 4096
    assert 4 * 1000 * 6 < result.ByteSize() <= message_size(result) < result.ByteSize() + 4096


def test_a_disk_that_is_full_ends_the_recording_and_nothing_else(tmp_path):
    class FullFile:
        def write(self, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            raise OSError(28, "No space left on device")

    with capture_logs() as logs:
        recorder = Recorder(str(tmp_path), open_file=lambda path: FullFile())
        recorder.connected(SHAPE.worker_info(), 2)
        recorder.plan(plan_pb2.StepPlan(step=1), [], [])
        recorder.close()
        recorder.plan(plan_pb2.StepPlan(step=2), [], [])
    (error,) = (log for log in logs if log["log_level"] == "error")
    assert error["reason"] == "[Errno 28] No space left on device"


def test_a_place_that_cannot_be_written_to_is_refused_at_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=r"flag record_plans=.*file: .*name a directory"):
        Recorder(str(tmp_path / "file"))


def test_what_is_no_recording_is_refused(tmp_path):
    (tmp_path / "text.tkrec").write_text("once upon a time there was a page")
    (found,) = find_recordings(str(tmp_path))
    with pytest.raises(RecordingError, match=r"text\.tkrec"):
        Recording(found)
    with pytest.raises(RecordingError, match="there is no such file or directory"):
        find_recordings(str(tmp_path / "nowhere"))
    for name in ("page_size", "page_count", "max_slots", "max_context_tokens"):
        recorder = Recorder(str(tmp_path / name))
        recorder.connected(replace(SHAPE, **{name: 0}).worker_info(), 1)
        recorder.close()
        with pytest.raises(RecordingError, match=f"damaged: it begins with a worker of {name}=0"):
            open_recordings(str(tmp_path / name))
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecordingError, match="no recordings"):
        find_recordings(str(tmp_path / "empty"))
