"""The situations in which a worker computes tokens, and the logits that transformers has for them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from services.common.model.json_object import read_json
from services.common.plan.types import Plan
from services.worker.attention.base import AttentionBatch
from services.worker.attention.factory import make_attention
from services.worker.attention.kv_cache import KvCache
from services.worker.described.registry import read_model_config
from services.worker.layers.factory import make_kernels
from services.worker.models import weights
from services.worker.models.decoder import DecoderModel
from services.worker.runner.runner import StepRunner
from services.worker.step.output import StepOutput
from tests.worker.driver import Driver, admission, batch
from tests.worker.parallel.jobs import Step, run_on
from tests.worker.parallel.replica import Replica, cut
from tests.worker.test_rope import step_by_step

CPU = torch.device("cpu")
PAGE = 16
TOKENS = 300
_SLOTS, _ANSWER = 66, 30
# Flags of a runner for ``run_situations``.
FLAGS = {"max_seqs_per_forward": _SLOTS, "max_tokens_per_forward": 256, "kv_cache_num_tokens": 420 * PAGE}
_LENGTHS = (1, PAGE, PAGE + 1, 5, 31, 33, 60)  # of 64 prompts in turn


def tokens_of(count: int, seed: int = 0) -> list[int]:
    """Return random tokens of every vocabulary."""
    return np.random.default_rng(seed).integers(2, 400, count).tolist()


# Scores of a router that differ by less may be in another order after rounding.
_LEAST_MARGIN = 1e-5


def margins(router: torch.nn.Module, logits: torch.Tensor) -> torch.Tensor:
    """Return the distance of each token's last chosen expert to the first one that is not chosen, ``[tokens]``.

    ``router`` is one of transformers, and ``logits [tokens, experts]`` are its own. Groups of experts count too.
    """
    correction, groups = getattr(router, "e_score_correction_bias", None), getattr(router, "num_group", 1)
    if correction is None:
        return _margin(logits, router.top_k)
    scores = logits.sigmoid() + correction
    if groups == 1:
        return _margin(scores, router.top_k)
    grouped = scores.unflatten(1, (groups, -1))
    best = grouped.topk(2, dim=-1).values.sum(dim=-1)
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(router.topk_group).indices, True)
    considered = grouped.masked_fill(~chosen.unsqueeze(-1), -torch.inf).flatten(1)
    return torch.minimum(_margin(best, router.topk_group), _margin(considered, router.top_k))


def _margin(scores: torch.Tensor, count: int) -> torch.Tensor:
    if count == scores.shape[1]:
        return torch.full(scores.shape[:1], torch.inf)
    ordered = scores.topk(count + 1).values
    return ordered[:, count - 1] - ordered[:, count]


class Expected:
    """The logits of transformers, in float32."""

    def __init__(self, directory: Path) -> None:
        config = transformers.AutoConfig.from_pretrained(directory)
        settings, length = config.rope_parameters, config.max_position_embeddings
        if settings.get("rope_type") == "longrope" and length > settings["original_max_position_embeddings"]:
            # Here, the long factors are for all positions, see ``Rotary``.
            settings["short_factor"] = settings["long_factor"]
        # The implementations without kernels, which round least.
        plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(directory, config=config, dtype=torch.float32, **plain).eval()
        # The rotation of longer sequences depends on their lengths.
        self._original = length if settings.get("rope_type") == "dynamic" else None
        self._routers = [each for each in self._model.modules() if type(each).__name__.lower().endswith("topkrouter")]
        self._margins: list[torch.Tensor] = []  # [tokens], of each router in each pass
        for router in self._routers:
            router.register_forward_hook(lambda router, _, output: self._margins.append(margins(router, output[0])))

    def of(self, token_ids: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the logits ``[sequences, tokens, vocab_size]`` of sequences of equal length.

        They are NaN from the first token on whose experts depend on rounding.
        """
        if self._original is None or len(token_ids[0]) <= self._original:
            with torch.inference_mode():
                logits = self._model(torch.tensor(token_ids)).logits
            return self._without_undecided(logits)
        # A shorter prompt brings back the rotation of shorter sequences.
        steps = (step_by_step(self._model, list(each), self._original - 1)[None] for each in token_ids)
        return torch.cat([self._without_undecided(each) for each in steps])

    def _without_undecided(self, logits: torch.Tensor) -> torch.Tensor:
        count, noted = len(self._routers), self._margins
        if not count:
            return logits
        passes = [torch.stack(noted[first : first + count]).amin(dim=0) for first in range(0, len(noted), count)]
        undecided = (torch.cat(passes) < _LEAST_MARGIN).view(logits.shape[:2]).cumsum(dim=1) > 0
        noted.clear()
        return logits.masked_fill(undecided.unsqueeze(2), torch.nan)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Fail unless ``found`` is ``expected``, to 1e-4, where ``expected`` is not NaN."""
    decided = ~expected.isnan()
    torch.testing.assert_close(found[decided], expected[decided], atol=1e-4, rtol=0)


def logits_in_chunks(directory: Path, token_ids: list[int], chunks: Sequence[int]) -> torch.Tensor:
    """Return the logits after every token of one sequence, ``[tokens, vocab_size]``, computed in ``chunks``."""
    config = read_model_config(read_json(directory / "config.json"))
    model = DecoderModel(config, torch.float32, CPU, make_kernels(CPU, torch.float32))
    weights.load(directory, model.targets(), config)
    pages = -(-len(token_ids) // PAGE)
    shape = {"layers": len(config.layers), "kv_heads": config.kv_heads, "head_dim": config.head_dim}
    cache = KvCache(page_count=pages, page_size=PAGE, dtype=torch.float32, device=CPU, **shape)
    attention, found, done = make_attention(cache, config.heads, model.attention_layers()), [], 0
    for count in chunks:
        step = AttentionBatch(
            token_slots=np.zeros(count, np.int64),
            positions=np.arange(done, done + count),
            row_slots=np.zeros(1, np.int64),
            row_starts=np.zeros(1, np.int64),
            row_counts=np.array([count]),
            page_table=np.arange(pages, dtype=np.int32)[None, ::-1].copy(),
        )
        with torch.inference_mode():
            tokens, positions = torch.tensor(token_ids[done : done + count]), torch.arange(done, done + count)
            found.append(model.logits(model(tokens, positions, attention.step(step, lambda: None))))
        done += count
    return torch.cat(found)


class Computed(NamedTuple):
    """Part of a sequence that a slot computed."""

    prompt: list[int]
    tokens: list[int]  # sampled
    logits: torch.Tensor  # [tokens, vocab_size], from which each was sampled


class _Recorder:
    """A runner for ``Driver`` that keeps the logits from which each token was sampled."""

    def __init__(self, runner: StepRunner | Replica) -> None:
        self.limits = runner.limits
        self._runner = runner
        self.logits: dict[int, list[torch.Tensor]] = defaultdict(list)  # by slot

    def run(self, plan: Plan) -> StepOutput:
        """Run a step."""
        output, logits = self._step(plan)
        for row, slot in enumerate(output.sampled.slots.tolist()):
            self.logits[slot].append(logits[row])
        return output

    def _step(self, plan: Plan) -> Step:
        if not isinstance(self._runner, Replica):
            return run_on(self._runner, [plan])[0]
        if plan.batch is not None:  # without effect on replicas of one stage
            plan = replace(plan, micro_batch_rows=cut(len(plan.batch.slots), 2))
        return self._runner.run_all([plan])[0]


class _Steps:
    """Steps in which prompts are computed in chunks beside rows that decode."""

    def __init__(self, runner: StepRunner | Replica) -> None:
        runner.reset()
        self._recorder = _Recorder(runner)
        self._driver = Driver(self._recorder)
        self._pages = iter(range(runner.limits.page_count))
        self._left: dict[int, int] = {}  # prompt tokens that are not computed, by slot
        self._parts: dict[str, Any] = {}  # of the next plan
        self._prompts: dict[int, list[int]] = {}

    def pages(self, tokens: int) -> list[int]:
        """Return free pages for ``tokens`` tokens."""
        return [next(self._pages) for _ in range(-(-tokens // PAGE))]

    def admit(self, entering: dict[int, tuple[list[int], list[int], int]], releases: Sequence[int] = ()) -> None:
        """Admit, by slot, a prompt with its pages and the number of its tokens that these have."""
        admissions = []
        for slot, (prompt, pages, cached) in entering.items():
            admissions.append(admission(slot, prompt, pages, cached_tokens=cached))
            self._left[slot], self._prompts[slot] = len(prompt) - cached, prompt
        for slot in releases:
            del self._left[slot]
        self._parts = {"admissions": tuple(admissions), "releases": np.array(releases, np.int64)}

    def advance(self, goals: dict[int, int], chunk: int) -> None:
        """Run steps until each slot has a number of tokens. Prompts are computed in chunks of ``chunk`` tokens."""
        while any(len(self.tokens(slot)) < goal for slot, goal in goals.items()):
            counts, budget = {}, self._recorder.limits.max_tokens_per_step
            for slot, goal in goals.items():
                count = min(self._left[slot] or 1, chunk, budget)
                if len(self.tokens(slot)) < goal and count:
                    counts[slot] = count
                    budget -= count
                    self._left[slot] = max(0, self._left[slot] - count)
            self._driver.run(batch=batch(list(counts), list(counts.values())), **self._parts)
            self._parts = {}

    def tokens(self, slot: int) -> list[int]:
        """Return the tokens that the slot has sampled."""
        return self._driver.tokens.get(slot, [])

    def computed(self) -> list[Computed]:
        """Return the parts of sequences that the slots have computed."""
        return [
            Computed(prompt, self.tokens(slot), torch.stack(self._recorder.logits[slot]))
            for slot, prompt in self._prompts.items()
        ]


def run_situations(runner: StepRunner | Replica) -> list[Computed]:
    """Compute sequences in all situations, with ``FLAGS``.

    The first is computed in chunks, decodes alone and beside 64 others, is preempted, and resumes in other pages until
    it has ``TOKENS`` tokens. Another takes over a prefix of its pages. Prompts of one token, of a page, and of a page
    and one are among the others.
    """
    steps, long = _Steps(runner), tokens_of(TOKENS - _ANSWER)
    pages = steps.pages(TOKENS)
    steps.admit({0: (long, pages, 0)})
    steps.advance({0: _ANSWER // 2}, chunk=70)
    shared = 4 * PAGE
    prefixed = long[:shared] + tokens_of(13, seed=1)
    others = {1: (prefixed, pages[:4] + steps.pages(PAGE + 13), shared)}
    for slot in range(2, _SLOTS - 1):
        prompt = tokens_of(_LENGTHS[slot % len(_LENGTHS)], slot)
        others[slot] = prompt, steps.pages(len(prompt) + PAGE), 0
    steps.admit(others)
    steps.advance(dict.fromkeys(others, 4) | {0: _ANSWER // 2 + 6}, chunk=40)
    known = long + steps.tokens(0)
    steps.admit({_SLOTS - 1: (known, steps.pages(TOKENS), 0)}, releases=[0])
    steps.advance({_SLOTS - 1: TOKENS - len(known), 1: 9, 2: 9}, chunk=100)
    return steps.computed()


def check(computed: Sequence[Computed], expected: Expected) -> None:
    """Fail unless the logits are those of transformers, to 1e-4."""
    by_length: dict[int, list[Computed]] = defaultdict(list)
    for each in computed:
        by_length[len(each.prompt) + len(each.tokens)].append(each)
    for some in by_length.values():
        logits = expected.of([each.prompt + each.tokens for each in some])
        for each, rows in zip(some, logits, strict=True):
            assert_near(each.logits, rows[len(each.prompt) - 1 : -1])
