"""What goes into the recorder comes out of the reader, or the file says that it ends early."""

import threading

import pytest
from structlog.testing import capture_logs

from services.common.errors import InvalidRequest
from services.scheduler.record.reader import OPEN, TORN, Recording, RecordingError, open_recordings
from services.scheduler.record.recorder import Recorder
from tests.fakes.model import FakeModel
from tests.scheduler.record.loop import SHAPE, RecordedLoop, record_small_run
from tokasaurus.worker.v1 import plan_pb2


def admission(slot: int) -> plan_pb2.Admission:
    return plan_pb2.Admission(slot=slot, token_ids=[5, 6], pages=[slot], sampling=plan_pb2.SamplingSettings(top_p=1))


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

    def open(self, file) -> "SlowDisk":
        self._file = file
        return self

    def write(self, data: bytes) -> int:
        self.reached.set()
        self.goes_on.wait()
        return self._file.write(data)

    def __getattr__(self, name: str):
        return getattr(self._file, name)


@pytest.fixture
def slow_disk(monkeypatch):
    disk, open_file = SlowDisk(), Recorder._open
    monkeypatch.setattr(Recorder, "_open", lambda recorder: disk.open(open_file(recorder)))
    return disk


def test_a_disk_that_does_not_keep_up_cuts_the_recording_and_holds_nobody_up(tmp_path, slow_disk):
    recorder, model = Recorder(str(tmp_path), most_waiting=6), FakeModel(SHAPE)
    with capture_logs() as logs:
        recorder.connected(SHAPE.worker_info(), 2)
        slow_disk.reached.wait()  # the first entry is with the disk: six more may wait
        for step in range(1, 20):
            plan = plan_pb2.StepPlan(step=step)
            recorder.plan(plan, [], [])
            recorder.result(model.apply(plan))
        slow_disk.goes_on.set()
        recorder.connected(SHAPE.worker_info(), 2)  # too late: the recording has ended for good
        recorder.close()
    (recording,) = open_recordings(str(tmp_path))
    assert [step.plan.plan.step for step in recording.steps()] == [1, 2, 3]
    assert recording.ending == "cut short: the disk does not keep up: 6 entries wait for it"
    assert [log["event"] for log in logs if log["log_level"] == "error"] == ["the recording of plans ends here"]


def test_a_disk_that_is_full_ends_the_recording_and_nothing_else(tmp_path, monkeypatch):
    class FullFile:
        def write(self, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Recorder, "_open", lambda recorder: FullFile())
    with capture_logs() as logs:
        recorder = Recorder(str(tmp_path))
        recorder.connected(SHAPE.worker_info(), 2)
        recorder.plan(plan_pb2.StepPlan(step=1), [], [])
        recorder.close()
        recorder.plan(plan_pb2.StepPlan(step=2), [], [])
    (log,) = logs
    assert (log["log_level"], log["reason"]) == ("error", "[Errno 28] No space left on device")


def test_a_place_that_cannot_be_written_to_is_refused_at_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match=r"flag record_plans=.*file: .*name a directory"):
        Recorder(str(tmp_path / "file"))


def test_what_is_no_recording_is_refused(tmp_path):
    (tmp_path / "text.tkrec").write_text("once upon a time there was a page")
    with pytest.raises(RecordingError, match=r"text\.tkrec"):
        open_recordings(str(tmp_path))
    with pytest.raises(RecordingError, match="there is no such file or directory"):
        open_recordings(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecordingError, match="no recordings"):
        open_recordings(str(tmp_path / "empty"))
