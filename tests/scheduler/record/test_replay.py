"""`toka-replay`: the plans of a recording are checked, or given to a worker again."""

import asyncio
import json
import sys
from pathlib import Path

import grpc
import pytest

from services.common.config import SchedulerConfig, WorkerConfig
from services.common.process.service import Stop
from services.scheduler.record import replay
from services.scheduler.record.feeding import Unsuitable, feed
from services.scheduler.record.reader import RecordedStep, Recording
from services.scheduler.record.recorder import Recorder
from services.scheduler.server import SchedulerServer
from services.worker.server import serve
from tests.fakes.model import FakeShape
from tests.fakes.worker import FakeWorker
from tests.scheduler import service
from tests.scheduler.record.loop import SHAPE, RecordedLoop, open_recordings, record_small_run, rewrite
from tests.scheduler.test_weights import update
from tokasaurus.scheduler.v1 import generate_pb2


def command(monkeypatch, capsys, *arguments: str) -> tuple[int, list[str], str]:
    """(exit status, lines on stdout, stderr) of ``toka-replay``."""
    monkeypatch.setattr(sys, "argv", ["toka-replay", *arguments])
    with pytest.raises(SystemExit) as ended:
        replay.main()
    seen = capsys.readouterr()
    return ended.value.code, seen.out.splitlines(), seen.err


@pytest.fixture
async def fake_worker():
    """``await fake_worker(shape)``: its address."""
    workers = []

    async def start(shape: FakeShape = SHAPE, **options) -> str:
        workers.append(FakeWorker(shape, **options))
        return await workers[-1].start()

    yield start
    for worker in workers:
        await worker.stop()


def test_the_plans_of_every_file_are_checked(tmp_path, monkeypatch, capsys):
    loop = RecordedLoop(tmp_path)
    loop.submit("a", range(2, 12), 8, n=2)
    for _ in range(4):
        loop.step()
    loop.lose_worker("it died")
    loop.run()
    loop.close()
    code, lines, _ = command(monkeypatch, capsys, f"record={tmp_path}")
    assert code == 0
    assert sum("every plan keeps the contract" in line for line in lines) == 2
    summary = json.loads(lines[-1])
    assert (summary["files"], summary["violations"], summary["sequences"]) == (2, [], 2)
    assert (summary["tokens"], summary["peak_pages"]) == (2 * 8, 8)


def test_a_plan_that_breaks_the_contract_is_named(tmp_path, monkeypatch, capsys):
    def mutate(step: RecordedStep) -> None:
        if step.plan.plan.step == 5:
            step.plan.plan.append_pages[1] = 23

    recording = rewrite(record_small_run(tmp_path / "good"), tmp_path / "bad", mutate)
    code, lines, _ = command(monkeypatch, capsys, f"record={recording.path}")
    assert code == 1
    (violation,) = json.loads(lines[-1])["violations"]
    assert violation.startswith("step 5, slot 2, page 23: ")
    assert violation.endswith("(many:4)")


def record_nothing(directory) -> Path:
    """The file of a connection that had no plans."""
    recorder = Recorder(str(directory))
    recorder.connected(SHAPE.worker_info(), 2)
    recorder.close()
    (recording,) = open_recordings(str(directory))
    return recording.path


def test_a_recording_without_plans_is_nothing_to_check(tmp_path, monkeypatch, capsys):
    path = record_nothing(tmp_path)
    code, lines, _ = command(monkeypatch, capsys, f"record={path}")
    assert code == 1
    assert "  nothing to check: it holds no plan" in lines
    assert not any("keeps the contract" in line for line in lines)
    summary = json.loads(lines[-1])
    assert (summary["files"], summary["plans"], summary["damaged"]) == (1, 0, 0)
    record_small_run(tmp_path / "other").path.rename(tmp_path / "plans-z.tkrec")
    code, lines, _ = command(monkeypatch, capsys, f"record={tmp_path}")
    assert (code, json.loads(lines[-1])["files"]) == (0, 2)  # beside another it is no fault


def damage_files(directory, content: bytes) -> dict[str, str]:
    """Four files that cannot be read, or not to their ends -> what is wrong with each."""
    (directory / "plans-empty.tkrec").touch()
    (directory / "plans-text.tkrec").write_text("once upon a time there was a page")
    (directory / "plans-directory.tkrec").mkdir()
    half = directory / "plans-half.tkrec"
    half.write_bytes(content)
    steps = [step.plan.SerializeToString() for step in Recording(half).steps()]
    at = content.index(steps[6])
    half.write_bytes(content[:at] + b"\xff" * len(steps[6]) + content[at + len(steps[6]) :])
    return {
        "plans-empty.tkrec": "it does not begin with the connection to a worker",
        "plans-text.tkrec": "",
        "plans-directory.tkrec": "Is a directory",
        "plans-half.tkrec": "damaged, or no recording, at byte ",
    }


def test_a_damaged_file_is_named_and_counted_and_the_others_are_checked(tmp_path, monkeypatch, capsys):
    recording = record_small_run(tmp_path)
    wrong = damage_files(tmp_path, recording.path.read_bytes())
    code, lines, _ = command(monkeypatch, capsys, f"record={tmp_path}")
    assert code == 1
    assert lines[lines.index(f"{recording.path}: disconnected: the scheduler stopped") + 2].endswith("the contract")
    damaged = [line for line in lines if line.startswith("  DAMAGED ")]
    for name, reason in wrong.items():
        assert any(f"{tmp_path}/{name}: " in line and reason in line for line in damaged)
    summary = json.loads(lines[-1])
    assert (summary["files"], summary["damaged"], summary["violations"]) == (5, 4, [])
    assert 14 < summary["plans"] < 2 * 14  # the half file's, as far as they go
    assert summary["sequences"] == 7


async def test_the_fake_worker_answers_the_same_again(tmp_path, fake_worker):
    recording = record_small_run(tmp_path)
    outcome = await asyncio.to_thread(feed, recording, await fake_worker())
    assert outcome.same
    assert (outcome.steps, outcome.tokens) == (14, 5 * 9 + 6 + 3)
    again = await asyncio.to_thread(feed, recording, await fake_worker())
    assert again == outcome


async def test_a_larger_worker_will_do_and_a_smaller_one_will_not(tmp_path, fake_worker):
    recording = record_small_run(tmp_path)
    larger = FakeShape(vocab_size=64, page_size=4, page_count=100, max_slots=9)
    assert (await asyncio.to_thread(feed, recording, await fake_worker(larger))).same
    smaller = FakeShape(vocab_size=64, page_size=4, page_count=63)
    with pytest.raises(Unsuitable, match=r"page_count=63, recorded was page_count=64: .*kv_cache_num_tokens"):
        await asyncio.to_thread(feed, recording, await fake_worker(smaller))
    with pytest.raises(Unsuitable, match="page_size=16, recorded was page_size=4"):
        await asyncio.to_thread(feed, recording, await fake_worker(FakeShape(vocab_size=64)))
    with pytest.raises(Unsuitable, match="one of 2 ranks, which wait for one another: start one with tp_size=1"):
        await asyncio.to_thread(feed, recording, await fake_worker(FakeShape(vocab_size=64, page_size=4, tp_size=2)))


async def test_a_worker_that_refuses_a_plan_says_so(tmp_path, fake_worker):
    recording = record_small_run(tmp_path)
    no_groups = FakeShape(vocab_size=64, page_size=4, hydragen=False)
    with pytest.raises(grpc.RpcError, match=r"WorkerInfo\.hydragen is false"):
        await asyncio.to_thread(feed, recording, await fake_worker(no_groups))


async def test_the_first_differences_are_shown_with_who_they_happened_to(tmp_path, fake_worker, monkeypatch, capsys):
    def mutate(step: RecordedStep) -> None:
        result = step.result.result
        if result.step == 6:
            result.token_ids[1] += 1 if result.token_ids[1] < 63 else -1
            del result.slots[-1], result.token_ids[-1]
            result.failures.add(slot=0, message="logits")

    recording = rewrite(record_small_run(tmp_path / "good"), tmp_path / "other", mutate)
    address = await fake_worker()
    code, lines, _ = await asyncio.to_thread(
        command, monkeypatch, capsys, f"record={recording.path}", f"worker_address={address}"
    )
    assert code == 1
    first = next(line for line in lines if line.startswith("step"))
    assert first.startswith("step 6, slot 0 (long:0): recorded token None, now ")
    assert first.endswith(", and 2 more in this step")
    expected = {"steps": 14, "tokens": 53, "different_tokens": 2, "different_failures": 1, "different_steps": 1}
    assert json.loads(lines[-1]) == expected | {"mismatch": {}}


async def test_a_worker_of_another_model_dtype_or_device_is_named(tmp_path, fake_worker, monkeypatch, capsys):
    recording = record_small_run(tmp_path / "here")
    recording.info.model, recording.info.dtype, recording.info.device = "llama", "bfloat16", "cuda:0"
    elsewhere = rewrite(recording, tmp_path / "elsewhere", lambda step: None)
    address = await fake_worker()
    code, lines, _ = await asyncio.to_thread(
        command, monkeypatch, capsys, f"record={elsewhere.path}", f"worker_address={address}"
    )
    assert code == 0  # the tokens are the same all the same
    (warning,) = (line for line in lines if line.startswith("warning"))
    assert warning == (
        "warning: recorded with model='llama', dtype='bfloat16', device='cuda:0', and this worker has model='fake',"
        " dtype='float32', device='fake': its tokens may differ"
    )
    assert json.loads(lines[-1])["mismatch"] == {
        "model": {"recorded": "llama", "worker": "fake"},
        "dtype": {"recorded": "bfloat16", "worker": "float32"},
        "device": {"recorded": "cuda:0", "worker": "fake"},
    }


async def test_a_replay_without_an_answer_to_compare_is_no_success(tmp_path, fake_worker, monkeypatch, capsys):
    path, address = record_nothing(tmp_path), await fake_worker()
    code, lines, _ = await asyncio.to_thread(
        command, monkeypatch, capsys, f"record={path}", f"worker_address={address}"
    )
    assert (code, "nothing to compare: no plan in it was answered" in lines) == (1, True)
    assert json.loads(lines[-1])["steps"] == 0


async def test_a_replay_of_several_recordings_asks_for_one(tmp_path, fake_worker, monkeypatch, capsys):
    for _ in range(2):
        loop = RecordedLoop(tmp_path)
        loop.close()
    address = await fake_worker()
    code, _, error = await asyncio.to_thread(
        command, monkeypatch, capsys, f"record={tmp_path}", f"worker_address={address}"
    )
    assert (code, "choose one of" in error) == (1, True)


def test_wrong_flags_are_named(monkeypatch, capsys):
    code, _, error = command(monkeypatch, capsys, "recrod=x")
    assert (code, "did you mean record=?" in error) == (2, True)
    code, _, error = command(monkeypatch, capsys, "worker_address=x")
    assert (code, "flag record is missing: write record=VALUE" in error) == (2, True)
    assert command(monkeypatch, capsys, "record=/nowhere")[0] == 1


def test_the_worker_in_the_environment_is_left_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TOKA_WORKER_ADDRESS", "127.0.0.1:1")
    recording = record_small_run(tmp_path)
    assert command(monkeypatch, capsys, f"record={recording.path}")[0] == 0


async def test_what_a_scheduler_recorded_with_its_worker_keeps_the_contract(tmp_path, monkeypatch, capsys):
    async with service.start(record_plans=str(tmp_path)) as running:
        tokens = generate_pb2.TokenPrompt(token_ids=service.PROMPT)
        stopping = generate_pb2.Stopping(max_tokens=20)
        await running.generate(tokens=tokens, stopping=stopping, n=3, request_id="three")
    code, lines, _ = command(monkeypatch, capsys, f"record={tmp_path}")
    summary = json.loads(lines[-1])
    assert (code, summary["sequences"], summary["violations"]) == (0, 3, [])
    assert summary["tokens"] >= 60


async def record_updates(directory: str) -> Recording:
    """Return a recording during which the weights are replaced twice."""
    async with service.start(record_plans=directory) as running, service.session(running) as client:
        tokens = generate_pb2.TokenPrompt(token_ids=service.PROMPT)
        stopping = generate_pb2.Stopping(max_tokens=60, ignore_eos=True)
        await running.begin(client, tokens=tokens, stopping=stopping, n=2)
        running.worker.on_commit = running.worker.hold
        for number in (1, 2):
            await running.pausing(update(running, number))
            await running.answer_five()
        running.release()
        await client.finished(0, 1)
    (recording,) = open_recordings(directory)
    return recording


async def test_a_replay_replaces_the_weights_where_the_scheduler_did(tmp_path, fake_worker):
    recording = await record_updates(str(tmp_path))
    replaced = [step.weights.version for step in recording.steps() if step.weights is not None]
    assert replaced == ["v1", "v2"]
    outcome = await asyncio.to_thread(feed, recording, await fake_worker(FakeShape()))
    assert (outcome.same, outcome.mismatch, outcome.tokens) == (True, {}, 120)


@pytest.mark.parametrize(("content", "reason"), [(None, "cannot load: .*model.norm.weight"), (7, "have changed")])
async def test_a_replay_without_the_recorded_weights_says_so(tmp_path, content, reason):
    recording = await record_updates(str(tmp_path))
    worker = FakeWorker(FakeShape())
    worker.disk["/weights/2"] = content
    address = await worker.start()
    try:
        with pytest.raises(Unsuitable, match=f"'v2'.*{reason}"):
            await asyncio.to_thread(feed, recording, address)
    finally:
        await worker.stop()


@pytest.fixture
async def cpu_worker(tmp_path):
    """The address of a real worker with the built-in model."""
    stop, listening = Stop(), asyncio.get_running_loop().create_future()
    config = WorkerConfig(
        worker_listen=f"unix:{tmp_path}/worker", kv_cache_num_tokens=16 * 128, max_seqs_per_forward=8,
        max_tokens_per_forward=32, torch_num_threads=1, device="cpu",
    )  # fmt: skip
    worker = asyncio.create_task(serve(config, stop, listening=listening))
    yield await listening
    stop.set()
    await worker


async def test_the_cpu_worker_answers_the_same_token_for_token(tmp_path, cpu_worker):
    """Sampling with noise; shared prefixes, forks and chunks in the plans."""
    plans = str(tmp_path / "plans")
    server = SchedulerServer(
        SchedulerConfig(worker_addresses=(cpu_worker,), scheduler_listen="127.0.0.1:0", record_plans=plans)
    )
    async with grpc.aio.insecure_channel(await server.start()) as channel:
        try:
            running = service.Service([], server, channel)
            await running.until_health(True)
            for prompt in (range(40, 83), range(40, 90)):
                tokens = generate_pb2.TokenPrompt(token_ids=prompt)
                await running.generate(tokens=tokens, stopping=generate_pb2.Stopping(max_tokens=12), n=4)
        finally:
            await server.stop()
    (recording,) = open_recordings(plans)
    outcome = await asyncio.to_thread(feed, recording, cpu_worker)
    assert outcome.same, outcome.differences
    assert outcome.mismatch == {}
    assert outcome.tokens >= 60
    assert any(step.plan.plan.copy_source_pages for step in recording.steps())
