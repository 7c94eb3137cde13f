"""The GPU's runner against the CPU's: on the GPU if there is one, else its kernels in Triton's interpreter, with
streams and events that do nothing and graphs that launch again."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from services.common.config import ChosenWorkerConfig, WorkerConfig
from services.common.errors import InvalidRequest
from services.common.plan.types import Batch, Groups
from services.worker.boot.common import make_cache, make_limits
from services.worker.described import memory
from services.worker.described.ranks import Ranks
from services.worker.described.registry import read_model_config
from services.worker.layers.fp8 import FP8
from services.worker.layers.kernels import LayerKernels, TorchKernels
from services.worker.models.decoder import DecoderModel
from services.worker.models.weights import load_dummy
from services.worker.parallel.errors import ParallelError
from services.worker.parallel.exchange import ALONE, make_exchanges
from tests.worker.driver import NONE, Driver, admission, batch, budget
from tests.worker.interpreter import DEVICE, INTERPRETED, needs_triton
from tests.worker.no_streams import device_without_streams

__all__ = ["device_without_streams"]

pytestmark = [needs_triton, pytest.mark.usefixtures("triton_ready", "device_without_streams")]

PAGE = 4
CONFIG = {
    **{"architectures": ["LlamaForCausalLM"], "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"max_position_embeddings": 256, "tie_word_embeddings": True},
}
FLAGS = ChosenWorkerConfig(
    page_size=PAGE, kv_cache_num_tokens=128 * PAGE, max_tokens_per_forward=96, max_seqs_per_forward=80
)


def make_model(device: torch.device, config: dict = CONFIG, kernels: LayerKernels | None = None) -> DecoderModel:
    model = DecoderModel(read_model_config(config), torch.float32, torch.device("cpu"), kernels or TorchKernels())
    load_dummy(model, seed=1)
    for parameter in model.parameters():  # logits far enough apart that rounding does not choose
        if parameter.dim() == 2:
            parameter.data.mul_(8)
    model.rotaries[0].cos, model.rotaries[0].sin = model.rotaries[0].cos.to(device), model.rotaries[0].sin.to(device)
    model.device = device
    return model.to(device)


@pytest.fixture(scope="module")
def config() -> dict:
    """``config.json`` of the model that both runners have."""
    return CONFIG


@pytest.fixture(scope="module")
def plain(config):
    """The CPU's runner."""
    from services.worker.attention.plain import PlainAttention
    from services.worker.runner.runner import StepRunner
    from services.worker.runner.shards import ShardThreads

    model = make_model(torch.device("cpu"), config)
    cache = make_cache(FLAGS, model, FLAGS.page_count)
    limits = make_limits(FLAGS, model, FLAGS.page_count)
    return Driver(StepRunner(model, cache, PlainAttention(cache, model.attention_layers()), limits, ShardThreads(1)))


@pytest.fixture
def cuda(config):
    """``cuda(graphs=0)``: the GPU's runner, with graphs of up to ``graphs`` rows, and piecewise graphs of up to
    ``pieces`` tokens. ``flags`` replace ``FLAGS``."""

    def make(
        graphs: int = 0, flags: WorkerConfig = FLAGS, pieces: int = 0, has_experts: bool = False, seen=None
    ) -> Driver:
        from services.worker.attention.cuda import CudaAttention
        from services.worker.runner.cuda.runner import CudaRunner
        from services.worker.runner.cuda.state import DeviceState
        from services.worker.sampling.fused import FusedSampler

        model = make_model(DEVICE, config)
        cache = make_cache(flags, model, flags.page_count)
        limits = make_limits(flags, model, flags.page_count, hydragen=True)
        state = DeviceState.empty(limits, DEVICE)
        attention = CudaAttention(
            cache, 4, model.rotaries, dtype=model.embedding.dtype, layers=model.attention_layers()
        )
        sampler = FusedSampler(model.project, 96, DEVICE, cache.tokens, state.page_table)
        if seen is not None:
            model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
        runner = CudaRunner(model, cache, attention, sampler, state, limits)
        if graphs:
            runner.capture(graphs, pieces=pieces, has_experts=has_experts)
        return Driver(runner)

    return make


PROMPTS = [[5, 6, 7], list(range(8, 19)), [70] * PAGE, [9]]


@pytest.mark.parametrize(
    ("graphs", "pieces", "kept"),
    [
        (0, 0, 0),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in [(8, 0, 0), (8, 16, 96), (8, 96, 96), (8, 96, 8)]),
    ],
)
@pytest.mark.parametrize("chunk", [pytest.param(None, marks=pytest.mark.slow), 3])
def test_the_same_tokens_as_on_the_cpu(plain, cuda, graphs, pieces, kept, chunk, monkeypatch):
    """16: the step that has all prompts at once is larger. ``kept``: how many go on behind the last attention."""
    from services.worker.runner.cuda import pieces as of_pieces

    monkeypatch.setattr(of_pieces, "kept_in_piece", lambda size: min(size, kept))
    driver = cuda(graphs, pieces=pieces)
    for sampling in ({"logprobs": True}, {"temperature": 0.8, "seed": 3}):
        plain.reset()
        driver.reset()
        expected = plain.generate(PROMPTS, 6, chunk=chunk, **sampling)
        assert driver.generate(PROMPTS, 6, chunk=chunk, **sampling) == expected
        for slot, values in plain.logprobs.items():
            assert driver.logprobs[slot] == pytest.approx(values, abs=1e-4)


@pytest.mark.slow
def test_a_model_is_called_with_tensors_of_one_kind_however_steps_are_launched(cuda, monkeypatch):
    """Inference tensors, and of those which are there for some tokens only, none at the begin of its memory: compilers
    make a model anew for another kind."""
    seen = []

    def called(model, inputs, positions, attention, keep=None, exchange=ALONE):
        given = (inputs, positions) if keep is None else (inputs, positions, keep)
        seen.append([(each.is_inference(), each.storage_offset() > 0, each.dtype) for each in given])
        return forward(model, inputs, positions, attention, keep, exchange)

    forward = DecoderModel.forward
    monkeypatch.setattr(DecoderModel, "forward", called)
    monkeypatch.setattr(memory, "_MIN_TRIMMED_PIECE", 16)
    for driver in (cuda(), cuda(8), cuda(8, pieces=24)):
        driver.reset()
        driver.generate(PROMPTS, 4, chunk=3)
    inputs, positions = (True, False, torch.int32), (True, True, torch.int32)
    assert {len(each) for each in seen} == {2, 3}
    assert [each for each in seen if each != [inputs, positions, positions][: len(each)]] == []


@pytest.mark.slow
@pytest.mark.parametrize(("graphs", "chunk"), [(0, 3), (8, None), (8, 3)])
def test_a_cache_of_fp8_gives_the_same_tokens_however_steps_are_cut_and_launched(cuda, graphs, chunk):
    flags = FLAGS.model_copy(update={"kv_cache_dtype": "fp8"})
    one, other = cuda(0, flags), cuda(graphs, flags)
    assert one.runner.cache.all_keys.dtype == FP8
    for sampling in ({"logprobs": True}, {"temperature": 0.8, "seed": 3}):
        one.reset()
        other.reset()
        assert one.generate(PROMPTS, 6, **sampling) == other.generate(PROMPTS, 6, chunk=chunk, **sampling)
        for slot, values in one.logprobs.items():
            assert other.logprobs[slot] == pytest.approx(values, abs=1e-4)


def test_a_cache_of_fp8_is_refused_on_a_device_that_does_not_convert_it(monkeypatch):
    from services.worker.boot.cuda import refuse_unsupported

    flags, model = FLAGS.model_copy(update={"kv_cache_dtype": "fp8"}), make_model(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(InvalidRequest, match="kv_cache_dtype=fp8: A100 does not convert fp8") as refused:
        refuse_unsupported(flags, model)
    assert refused.value.field == "kv_cache_dtype"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    refuse_unsupported(flags, model)


@pytest.mark.parametrize("pieces", [0, pytest.param(96, marks=pytest.mark.slow)])
def test_every_setting_at_once_in_one_batch(plain, cuda, pieces):
    rows = [
        {},
        {"temperature": 0.7, "top_p": 0.6, "seed": 5},
        {"temperature": 1.3, "top_k": 3, "logprobs": True, "top_logprobs": 4},
        {"temperature": 0.9, "min_p": 0.2, "frequency_penalty": 1.0, "repetition_penalty": 1.4},
        {"logit_bias_token_ids": np.array([3, 4]), "logit_bias_values": np.array([4.0, -9.0], np.float32)}
        | {"logprobs": True},
        {"temperature": 1.1, "top_k": 2, "logprobs": True, "top_logprobs": 3, "processed_logprobs": True},
        {"temperature": 0.8, "logprobs": True, "thinking": budget(1, 7)},
    ]
    outcomes = []
    for driver in (plain, cuda(8, pieces=pieces)):
        driver.reset()
        admissions = tuple(admission(slot, [11 + slot, 12, 13], [slot], **row) for slot, row in enumerate(rows))
        count = len(rows)
        steps = [driver.run(admissions=admissions, batch=batch(range(count), [3] * count))]
        appended = {"append_slots": list(range(count)), "append_pages": list(range(10, 10 + count))}
        steps += [driver.run(batch=batch(range(count)), **appended)]
        steps += [driver.run() for _ in range(2)]
        outcomes.append([step.sampled for step in steps])
    for expected, found in zip(*outcomes, strict=True):
        assert found.slots.tolist() == expected.slots.tolist()
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)
        assert found.top.counts.tolist() == expected.top.counts.tolist()
        assert found.top.token_ids.tolist() == expected.top.token_ids.tolist()
        np.testing.assert_allclose(found.top.logprobs, expected.top.logprobs, atol=1e-4)


@pytest.mark.parametrize(
    ("largest", "pieces", "apart"),
    [(0, 0, 0), (20, 0, 0), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in [(8, 32, 0), (20, 32, 1)])],
)
def test_groups_change_nothing(plain, cuda, largest, pieces, apart, monkeypatch):
    """``apart``: graphs cannot have prefixes, and pieces take the steps that do."""
    from services.worker.attention.cuda import CudaAttention
    from services.worker.runner.cuda import graphs

    prepare_groups(monkeypatch)
    if apart:
        monkeypatch.setattr(CudaAttention, "captures_groups", False)
        monkeypatch.setattr(graphs, "_READ_MEANWHILE", 0)
    assert grouped_tokens(cuda(largest, pieces=pieces), grouped=True) == grouped_tokens(plain, grouped=False)


def prepare_groups(monkeypatch) -> None:
    """Let few rows do as many would, quickly in the interpreter: tiles of 8 rows, and one graph that holds all."""
    from services.worker.attention import triton_spans
    from services.worker.runner.cuda import graphs

    monkeypatch.setattr(triton_spans, "span_options", lambda *_: triton_spans.SpanOptions(16, 32, 4, 1))
    monkeypatch.setattr(graphs, "_FEWEST_GROUPED", 8)
    monkeypatch.setattr(graphs, "sizes_up_to", lambda largest, smallest: [largest])


def grouped_tokens(driver: Driver, *, grouped: bool) -> list:
    """Return the tokens of 15 rows over two prefixes, one of them more than a tile, two rows of no group, and one row
    that still reads its prompt."""
    prefixes = [list(range(20, 20 + 2 * PAGE)), list(range(40, 40 + 3 * PAGE))]
    groups = Groups(np.array([0, 10]), np.array([10, 5]), np.array([2, 3])) if grouped else None
    driver.reset()
    leaders = tuple(
        admission(slot, [*prefix, 1], [8 * slot, 8 * slot + 1, 8 * slot + 2, 8 * slot + 3])
        for slot, prefix in enumerate(prefixes)
    )
    driver.run(admissions=leaders, batch=batch([0, 1], [2 * PAGE + 1, 3 * PAGE + 1]))
    driver.run(releases=[0, 1], batch=batch([]))
    admissions = []
    for row in range(17):
        which = 0 if row < 10 else 1
        tokens, shared = prefixes[which], list(range(8 * which, 8 * which + 2 + which))
        admissions.append(admission(row, [*tokens, 50 + row % 40], [*shared, 20 + row], cached_tokens=len(tokens)))
    admissions.append(admission(70, range(60, 66), [100, 101]))
    rows = [*range(17), 70]
    steps = [driver.run(admissions=tuple(admissions), batch=batch(rows, [1] * 17 + [6]), groups=groups)]
    steps += [driver.run(batch=batch(rows)), driver.run(), driver.run(batch=batch(range(17)))]
    return [step.sampled.token_ids.tolist() for step in steps]


def test_pages_that_are_too_many_for_a_graph_get_into_the_table(plain, cuda):
    """Nine for rows of one token, in a graph of eight rows: the prompt is cached."""
    outcomes, prompt = [], [*range(20, 20 + 8 * PAGE), 1]
    for driver in (plain, cuda(8)):
        driver.reset()
        driver.run(admissions=(admission(0, prompt, range(10, 19)),), batch=batch([0], [len(prompt)]))
        cached = admission(1, prompt, [*range(10, 18), 40], cached_tokens=len(prompt) - 1, temperature=0.5)
        driver.run(releases=[0], admissions=(cached,), batch=batch([1]))
        for _ in range(3):
            driver.run()
        outcomes.append(driver.tokens)
    assert outcomes[0] == outcomes[1]


def test_steps_of_few_rows_are_not_padded_if_padding_has_a_cost(plain, cuda):
    outcomes, seen = [], []
    graphs = cuda(8, has_experts=True, seen=seen)
    assert set(seen) == {1, 2, 4, 8}
    for driver in (plain, graphs):
        driver.reset()
        admissions = tuple(
            admission(slot, range(20 + slot, 30 + slot), range(4 * slot, 4 * slot + 4)) for slot in range(3)
        )
        steps = [driver.run(admissions=admissions, batch=batch(range(3), [10] * 3))]
        for rows in (1, 3, 2, 1):
            steps.append(driver.run(batch=batch(range(rows))))
        outcomes.append([step.sampled.token_ids.tolist() for step in steps])
    assert outcomes[0] == outcomes[1]
    if INTERPRETED:  # graphs do not call the model again
        assert seen[-4:] == [1, 4, 2, 1]


def test_steps_in_flight_do_not_touch_each_others_results(plain, cuda):
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12]]
    pages = [[0, 1, 2], [3, 4, 5]]
    outcomes = []
    for driver, ahead in ((plain, 1), (cuda(8), 4)):
        driver.reset()
        admissions = tuple(
            admission(slot, prompt, [pages[slot][0]], temperature=0.9) for slot, prompt in enumerate(prompts)
        )
        driver.run(admissions=admissions, batch=batch([0, 1], [4, 4]))
        plans = [{"append_slots": [0, 1], "append_pages": [1, 4], "batch": batch([1, 0])}, {}, {"batch": batch([0])}]
        plans += [{"batch": batch([0, 1])}, {"append_slots": [1, 0], "append_pages": [5, 2]}, {}, {}, {}]
        found = []
        for start in range(0, len(plans), ahead):
            steps = []
            for parts in plans[start : start + ahead]:
                plan = driver.plan(**parts)
                steps.append(driver.runner.run(plan) if ahead == 1 else driver.runner.start(plan))
                driver.steps += 1
            outputs = steps if ahead == 1 else [step.result() for step in steps]
            found += [(output.sampled.slots.tolist(), output.sampled.token_ids.tolist()) for output in outputs]
        outcomes.append(found)
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("pieces", [0, 96])
def test_what_only_the_draws_need_is_prepared_while_the_device_computes(cuda, monkeypatch, pieces):
    from services.worker.runner.cuda.eager import EagerSteps
    from services.worker.runner.cuda.graphs import DecodeGraph
    from services.worker.runner.cuda.pieces import StepPieces
    from services.worker.sampling.fused import FusedSampler

    driver, seen = cuda(8, pieces=pieces), []
    for owner, name in ((EagerSteps, "run"), (StepPieces, "run"), (DecodeGraph, "run"), (FusedSampler, "prepare")):
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, call=call, name=name: (seen.append(name), call(*given))[1])
    driver.run(admissions=(admission(0, PROMPTS[0], [0], temperature=0.9, top_k=2),), batch=batch([0], [3]))
    driver.run(batch=batch([0]))
    assert seen == ["run", "prepare"] * 2


def test_a_step_that_fails_to_launch_gives_its_place_back(cuda, monkeypatch):
    driver = cuda(8)
    driver.run(admissions=(admission(0, [5, 6], [0]),), batch=batch([0], [2]))
    with monkeypatch.context() as broken:
        broken.setattr(type(driver.runner._graphs), "find", lambda *_: 1 / 0)
        for _ in range(5):  # more than there are places
            with pytest.raises(ZeroDivisionError):
                driver.runner.start(driver.plan(batch=batch([0])))
            driver.steps += 1
    driver.reset()
    assert driver.generate([[5, 6]], 3)


def test_a_step_that_fails_to_launch_is_the_end_of_several_ranks(cuda, monkeypatch):
    """And it does not wait for the device, which may wait for other ranks."""
    from services.worker.runner.cuda.ring import Place
    from services.worker.runner.peers import Peers

    driver, ranks = cuda(8), Ranks(1, 2)
    group = SimpleNamespace(ranks=ranks, tokens_in=None)
    monkeypatch.setattr(driver.runner, "_peers", Peers(group, make_exchanges(ranks, 1), 32, torch.float32))
    monkeypatch.setattr(type(driver.runner._graphs), "find", lambda *_: 1 / 0)
    monkeypatch.setattr(Place, "abandon", lambda _: pytest.fail("it waits"))
    with pytest.raises(ParallelError, match="step 1 failed on rank tp_rank=1 pp_rank=0: division by zero"):
        driver.run(admissions=(admission(0, [5], [0]),), batch=batch([0]))


def test_groups_that_do_not_share_are_refused(cuda):
    driver = cuda()
    pages = [[0, 1, 2], [4, 5, 6]]
    admissions = tuple(admission(slot, range(9), pages[slot], cached_tokens=8) for slot in (0, 1))
    with pytest.raises(InvalidRequest, match="differ in their first 2 pages"):
        driver.run(admissions=admissions, batch=batch([0, 1]), groups=Groups(*map(np.array, ([0], [2], [2]))))
    assert driver.runner.run(driver.plan(batch=Batch(NONE, NONE))).sampled.slots.tolist() == []


def test_pages_are_copied_with_their_tokens(plain, cuda):
    outcomes = []
    for driver in (plain, cuda()):
        driver.reset()
        driver.run(admissions=(admission(0, range(5, 11), [0, 1]),), batch=batch([0], [6]))
        forked = admission(1, range(5, 11), [0, 9], cached_tokens=5, frequency_penalty=2.0, temperature=0.5)
        driver.run(admissions=(forked,), copy_sources=[1], copy_targets=[9], batch=batch([0, 1]))
        driver.run(append_slots=[0], append_pages=[12])
        outcomes.append(driver.tokens)
    assert outcomes[0] == outcomes[1]


def test_a_slot_is_used_again(plain, cuda):
    outcomes = []
    for driver in (plain, cuda(8)):
        driver.reset()
        driver.run(admissions=(admission(0, [5, 6], [0]),), batch=batch([0], [2]))
        driver.run(releases=[0], admissions=(admission(0, [7, 8, 9], [1]),), batch=batch([0], [3]))
        driver.run(batch=batch([0]))
        outcomes.append(driver.tokens)
    assert outcomes[0] == outcomes[1]
