"""`toka-inspect`: a step, the life of a sequence, the life of a page."""

import sys
from collections.abc import Sequence

import pytest

from services.scheduler.record import inspection
from services.scheduler.record.reader import Recording
from services.scheduler.record.recorder import Recorder
from tests.fakes.model import FakeModel
from tests.scheduler.record.loop import SHAPE, record_small_run, rewrite
from tokasaurus.worker.v1 import plan_pb2


@pytest.fixture
def inspect(monkeypatch, capsys):
    """``inspect(recording, "step=4")``: (exit status, rows as lists of cells, all of stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, list[list[str]], str, str]:
        monkeypatch.setattr(sys, "argv", ["toka-inspect", *arguments])
        with pytest.raises(SystemExit) as ended:
            inspection.main()
        seen = capsys.readouterr()
        rows = [
            [cell.strip() for cell in line.strip("│").split("│")]
            for line in seen.out.splitlines()
            if line.startswith("│")
        ]
        return ended.value.code, rows, seen.out, seen.err

    return run


@pytest.fixture
def recording(tmp_path) -> Recording:
    """See `test_checker.steps`."""
    return record_small_run(tmp_path / "plans")


def test_a_step_shows_its_plan_its_batch_and_its_result(recording, inspect):
    code, rows, text, _ = inspect(f"record={recording.path}", "step=4")
    assert code == 0
    assert "step 4, sent 20" in text
    assert ["0", "long:0", "19"] in rows  # page 19 appended
    assert ["0-2", "3", "3"] in rows  # a Hydragen group
    assert "batch (this plan's): 6 rows, 6 tokens, 2 parts" in text
    result = next(step.result.result for step in recording.steps() if step.plan.plan.step == 4)
    token = dict(zip(result.slots, result.token_ids, strict=True))[5]
    assert ["4", "1", "5", "many:1", "1", "16", str(token)] in rows
    _, rows, text, _ = inspect(f"record={recording.path}", "step=5")
    assert "batch (as before): 6 rows" in text
    assert "Hydragen groups (as before)" in text
    _, rows, text, _ = inspect(f"record={recording.path}", "step=12")
    assert ["4", "many:2"] in rows  # released
    assert ["5", "again:0", "17", "12", "13 12 11 27 26"] in rows  # admitted
    _, rows, text, _ = inspect(f"record={recording.path}", "step=3")
    assert ["10", "18"] in rows  # copied


def test_the_life_of_a_sequence_has_its_pages_tokens_and_end(recording, inspect):
    code, rows, text, _ = inspect(f"record={recording.path}", "sequence=many:1")
    assert code == 0
    assert rows[0] == ["3", "admitted", "slot 5, 15 tokens, 14 cached, pages 13 12 11 18"]
    assert ["5", "page", "20 appended"] in rows
    assert rows[-1] == ["12", "released", "slot 5"]
    tokens = [int(token) for row in rows if row[1] == "tokens" for token in row[2].split(": ")[1].split()]
    sampled = []
    for step in recording.steps():
        if 3 <= step.plan.plan.step < 12:
            result = step.result.result
            sampled += [t for slot, t in zip(result.slots, result.token_ids, strict=True) if slot == 5]
    assert tokens == sampled
    assert len(tokens) == 9
    _, _, text, _ = inspect(f"record={recording.path}", "sequence=many")
    assert all(f"sequence many:{sample}" in text for sample in range(5))


def test_a_preempted_sequence_comes_back_in_the_same_life(tmp_path, inspect):
    recorder, model = Recorder(str(tmp_path)), FakeModel(SHAPE)
    recorder.connected(SHAPE.worker_info(), 1)
    known = [5, 6]

    def run(admitted: Sequence[str] = (), released: Sequence[str] = (), **parts) -> None:
        plan = plan_pb2.StepPlan(step=model.checker.last.step + 1, **parts)
        recorder.plan(plan, admitted, released)
        result = model.apply(plan)
        recorder.result(result)
        known.extend(result.token_ids)

    def admission(slot: int) -> plan_pb2.Admission:
        sampling = plan_pb2.SamplingSettings(parameters={}, sample_index=3)
        return plan_pb2.Admission(slot=slot, token_ids=known, pages=[slot, slot + 8], sampling=sampling)

    run(["r"], admissions=[admission(0)], batch=plan_pb2.Batch(slots=[0], token_counts=[2]))
    run(batch=plan_pb2.Batch(slots=[0]))
    run([], ["r"], release_slots=[0], batch=plan_pb2.Batch())
    run(["r"], admissions=[admission(1)], batch=plan_pb2.Batch(slots=[1], token_counts=[4]))
    run([], ["r"], release_slots=[1], batch=plan_pb2.Batch())
    recorder.close()
    _, rows, _, _ = inspect(f"record={tmp_path}", "sequence=r:3")
    assert rows == [
        ["1", "admitted", "slot 0, 2 tokens, 0 cached, pages 0 8"],
        ["1-2", "tokens", f"2: {known[2]} {known[3]}"],
        ["3", "preempted", "slot 0"],
        ["4", "admitted again", "slot 1, 4 tokens, 0 cached, pages 1 9"],
        ["4", "tokens", f"1: {known[4]}"],
        ["5", "released", "slot 1"],
    ]


def test_the_life_of_a_page_has_its_holders_copies_and_tokens(recording, inspect):
    code, rows, _, _ = inspect(f"record={recording.path}", "page=13")
    assert code == 0
    assert rows[0] == ["1", "12", "many:0", "1", "0", "new", "2 3 4 5"]
    assert ["3", "12", "many:1", "5", "0", "4 tokens cached", "2 3 4 5"] in rows
    assert rows[-1] == ["12", "-", "again:0", "5", "0", "4 tokens cached", "2 3 4 5"]
    _, rows, _, _ = inspect(f"record={recording.path}", "page=18")
    assert rows[0][:6] == ["3", "12", "many:1", "5", "3", "2 tokens cached"]
    assert rows[0][6].startswith("14 15 16 ")
    assert ["3", "10", "18"] in rows
    _, rows, _, _ = inspect(f"record={recording.path}", "page=26")
    assert [row[2] for row in rows] == ["many:1", "again:0"]
    assert rows[0][5] == "appended"


def test_inspection_ends_at_a_plan_that_breaks_the_contract_and_shows_it(recording, tmp_path, inspect):
    def mutate(step) -> None:
        if step.plan.plan.step == 12:
            step.plan.plan.admissions[0].pages[0] = 3

    bad = rewrite(recording, tmp_path / "bad", mutate)
    code, rows, text, _ = inspect(f"record={bad.path}", "step=12")
    assert code == 1
    assert ["5", "again:0", "17", "12", "3 12 11 27 26"] in rows
    assert "the rest of the recording cannot be shown: step 12, slot 5, page 3: it does not hold the token at 0" in text


def test_a_title_that_is_wider_than_its_table_stays_in_one_line(recording, inspect):
    _, _, text, _ = inspect(f"record={recording.path}", "page=18")
    assert "copies from and onto page 18" in text.splitlines()
    _, _, text, _ = inspect(f"record={recording.path}", "step=3")
    assert "pages copied" in text.splitlines()


def test_a_damaged_file_is_named_and_the_others_are_shown(recording, inspect):
    damaged = recording.path.with_name(f"plans-{'x' * 100}.tkrec")  # longer than a line
    damaged.touch()
    code, rows, text, _ = inspect(f"record={recording.path.parent}", "page=18")
    assert code == 1
    assert f"DAMAGED {damaged}: no recording: it does not begin with the connection to a worker" in text
    assert ["3", "10", "18"] in rows


def test_inspection_ends_where_a_file_is_damaged(recording, inspect):
    content, steps = recording.path.read_bytes(), list(recording.steps())
    broken = steps[8].plan.SerializeToString()
    recording.path.write_bytes(content.replace(broken, b"\xff" * len(broken)))
    code, rows, text, _ = inspect(f"record={recording.path}", "page=18")
    assert (code, ["3", "10", "18"] in rows) == (1, True)
    assert "cannot be shown" in text
    assert "damaged, or no recording, at byte" in text


def test_an_answer_with_fewer_tokens_than_slots_ends_the_inspection_and_no_more(recording, tmp_path, inspect):
    def mutate(step) -> None:
        if step.plan.plan.step == 6:
            step.result.result.token_ids.pop()

    bad = rewrite(recording, tmp_path / "bad", mutate)
    code, rows, text, _ = inspect(f"record={bad.path}", "sequence=many:1")
    assert (code, rows[0][1]) == (1, "admitted")
    assert "the rest of the recording cannot be shown: step 6: 5 tokens for 6 slots" in text


def test_what_is_not_in_the_recording_is_said_to_be_missing(recording, inspect):
    for question in ("step=99", "sequence=nobody", "page=63"):
        code, rows, _, error = inspect(f"record={recording.path}", question)
        assert (code, rows) == (1, [])
        assert "the recording has no such step, sequence or page holder" in error


def test_one_question_at_a_time(recording, inspect):
    for questions in ([], ["step=1", "page=1"]):
        code, _, _, error = inspect(f"record={recording.path}", *questions)
        assert (code, "give one of step=N" in error) == (2, True)
    assert inspect("step=1")[0] == 2
