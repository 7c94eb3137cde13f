"""Models with a window in every layer give transformers' tokens while pages behind the window have other contents.

The scheduler's core plans for a runner. Before each step, all pages that are free are filled with NaN.
"""

import numpy as np
import pytest
import torch

from services.common.config import ChosenWorkerConfig
from services.common.plan.codec import decode_plan, encode_plan
from services.scheduler.core.policy import Policy
from services.scheduler.core.request import AdmissionMode, Priority, Request
from services.scheduler.core.scheduler import Scheduler
from services.worker.boot.common import make_limits
from services.worker.described.ranks import Ranks
from services.worker.runner.runner import StepRunner
from tests.worker.driver import settings
from tests.worker.small_models import small_config, small_model
from tests.worker.test_generation import prompt_of

MODELS = {
    "mistral": {"sliding_window": 40},
    "phi3": {"sliding_window": 23},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 0},
}
SINK = 1
PAGE = 16
FLAGS = {"page_size": PAGE, "kv_cache_num_tokens": 24 * PAGE, "max_seqs_per_forward": 4, "max_tokens_per_forward": 64}


class Served:
    """A core with requests, and a runner that computes its plans."""

    def __init__(self, runner: StepRunner, **policy) -> None:
        self.runner, limits = runner, runner.limits
        policy = Policy(**{"mode": AdmissionMode.GUARANTEED, "steps_ahead": 3} | policy)
        self.core = Scheduler([b"a"] * limits.vocab_size, limits.vocab_size, policy)
        self.core.open_sink(SINK)
        self.core.attach(limits)
        self.next_handle = 0
        self.answers: dict[int, tuple[list[int], list[float]]] = {}  # tokens and their log-probabilities, by handle
        self.most_pages = 0  # of all page tables together

    def submit(self, prompt: list[int], max_tokens: int, n: int = 1, **fields) -> int:
        """Queue a greedy request. Return its handle."""
        handle, self.next_handle = self.next_handle, self.next_handle + n
        self.answers |= {handle + index: ([], []) for index in range(n)}
        request = Request(
            str(handle), np.array(prompt, np.uint32), settings(logprobs=True), max_tokens, sink=SINK, handle=handle,
            n=n, **fields,
        )  # fmt: skip
        self.core.submit(request, now_ns=1)
        return handle

    def step(self) -> None:
        """Build the plans that may be in flight and compute them, then take the results."""
        results = []
        while (plan := self.core.plan(now_ns=1)) is not None:
            pool, cache = self.core.state.pool, self.runner.cache
            free = torch.from_numpy(pool.pages.free_pages.astype(np.int64))
            cache.all_keys[:, free] = cache.all_values[:, free] = torch.nan
            self.most_pages = max(self.most_pages, int(pool.slots.page_count[pool.slots.running_slots()].sum()))
            results.append(self.runner.run(decode_plan(encode_plan(plan))).to_result())
        for result in results:
            assert not result.failures
            self.core.take(result, now_ns=1)
        for _, delta in self.core.take_output():
            for index, handle in enumerate(delta.handles.tolist()):
                tokens, logprobs = self.answers[handle]
                tokens.append(int(delta.tokens[index]))
                logprobs.append(float(delta.logprobs[index]))

    def run(self) -> None:
        """Run steps until all requests are finished."""
        while self.core.live(SINK):
            self.step()

    def check(self, model: torch.nn.Module, handle: int, prompt: list[int]) -> None:
        """Compare an answer with transformers'."""
        tokens, logprobs = self.answers[handle]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double()
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(chosen, logits.amax(-1), atol=1e-4, rtol=0)  # some of 300 tokens are nearly ties
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs).double(), expected, atol=1e-4, rtol=0)


@pytest.fixture(params=[*((name, "native") for name in MODELS), ("mistral", "transformers")], ids="-".join)
def served(request, checkpoint, reference, runner_for):
    """``served(field=value, ...)``: a core with this policy and a fresh runner, and the model of transformers."""
    architecture, model_impl = request.param
    directory = checkpoint(architecture, **MODELS[architecture])

    def make(**policy) -> tuple[Served, torch.nn.Module]:
        return Served(runner_for(directory, **FLAGS, model_impl=model_impl).runner, **policy), reference(directory)

    return make


def test_the_worker_reports_the_window(served):
    server, _ = served()
    assert server.runner.limits.window_tokens in (23, 33, 40)


def test_sequences_of_300_tokens_share_a_cache_of_384(served):
    server, model = served(prefix_caching=False)
    prompts = [prompt_of(30 + 35 * seed, seed) for seed in range(4)]
    handles = [server.submit(prompt, 300 - len(prompt)) for prompt in prompts]
    server.run()
    assert server.most_pages > 2 * server.runner.limits.page_count
    for handle, prompt in zip(handles, prompts, strict=True):
        server.check(model, handle, prompt)


def test_samples_share_a_prompt_longer_than_the_window_and_later_requests_find_it(served):
    server, model = served()
    prompt = prompt_of(150)
    shared = server.submit(prompt, 100, n=3)
    for _ in range(12):
        server.step()
    later = server.submit(prompt[:140], 60)
    server.run()
    assert server.core.state.queue.counters.cached_prompt_tokens >= 2 * 149 + 128
    for handle in range(shared, shared + 3):
        server.check(model, handle, prompt)
    server.check(model, later, prompt[:140])


def test_preempted_sequences_go_on_beyond_their_window(served):
    server, model = served(mode=AdmissionMode.PREDICTED)
    prompts = [prompt_of(40 + seed, seed) for seed in range(8)]
    for prompt in prompts[:4]:
        server.submit(prompt, 120, priority=Priority.LOW)
    for _ in range(30):
        server.step()
    for prompt in prompts[4:]:
        server.submit(prompt, 40)
    server.run()
    assert server.core.state.queue.counters.yields
    for handle, prompt in enumerate(prompts):
        server.check(model, handle, prompt)


def test_a_model_with_full_attention_in_a_layer_reports_no_window(checkpoint, runner_for):
    directory = checkpoint("qwen2", use_sliding_window=True, sliding_window=20, max_window_layers=2)
    assert runner_for(directory).runner.limits.window_tokens == 0


@pytest.mark.parametrize(("windows", "reported"), [((None, 20, 20), 0), ((20, 30, 20), 30)])
def test_all_stages_of_a_pipeline_report_the_window_of_the_whole_model(windows, reported):
    for rank, layers in enumerate((range(1), range(1, 3))):
        model = small_model(small_config(windows=windows), ranks=Ranks(pp_rank=rank, pp_size=2), layers=layers)
        config = ChosenWorkerConfig(kv_cache_num_tokens=16 * PAGE, page_size=PAGE)
        assert make_limits(config, model, 16, hydragen=True).window_tokens == reported
        assert make_limits(config, model, 16, hydragen=True).hydragen is (not reported)
