"""Jobs of ranks in tests of the GPU's runner: on CPUs, with its kernels in Triton's interpreter."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from services.common.config import ChosenWorkerConfig
from services.common.plan.types import Groups, Plan
from services.worker.boot.common import boot, make_cache, make_limits
from services.worker.described.ranks import Ranks
from services.worker.described.registry import read_model_config
from services.worker.described.stages import layers_of
from services.worker.layers.kernels import TorchKernels
from services.worker.models.decoder import DecoderModel
from services.worker.models.weights import load_dummy
from services.worker.parallel import exchange
from services.worker.parallel.group import RankGroup
from services.worker.sampling.grammars import SlotGrammars
from services.worker.step.output import StepOutput
from tests.worker.driver import NONE, admission, batch, budget
from tests.worker.grammars import ascii_grammars
from tests.worker.interpreter import interpreter_ready
from tests.worker.no_streams import do_without_streams
from tests.worker.scores import same_scores

CPU = torch.device("cpu")
PAGE, SLOTS, VOCABULARY = 4, 12, 96
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
FLAGS = ChosenWorkerConfig(
    page_size=PAGE, kv_cache_num_tokens=64 * PAGE, max_tokens_per_forward=64, max_seqs_per_forward=SLOTS
)


def make_model(ranks: Ranks) -> DecoderModel:
    """The same model on any ranks; logits are far enough apart that rounding does not choose."""
    described = read_model_config(CONFIG)
    layers = layers_of(described, ranks.pp_size, () if ranks.pp_size == 1 else (1,) * ranks.pp_size)[ranks.pp_rank]
    model = DecoderModel(described, torch.float32, CPU, TorchKernels(), ranks=ranks, layers=layers)
    load_dummy(model, seed=1)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(8)
    return model


def run_as_rank(
    ranks: Ranks,
    port: int,
    plans: Sequence[Plan],
    graphs: int,
    ahead: int,
    fewest_sharded: int,
    times: int = 1,
    pieces: int = 0,
    pads: bool = True,
) -> list[StepOutput]:
    """Return the outputs of ``plans``, with ``ahead`` of them in flight. This is a job.

    Graphs have up to ``graphs`` rows, and piecewise graphs up to ``pieces`` tokens. The plans run ``times`` times, with
    resets in between, and the outputs are those of the last time.
    """
    with pytest.MonkeyPatch.context() as patch, interpreter_ready(patch):
        do_without_streams(patch)
        from services.worker.attention import triton_spans
        from services.worker.attention.cuda import CudaAttention
        from services.worker.runner.cuda import graphs as of_graphs
        from services.worker.runner.cuda.runner import CudaRunner
        from services.worker.runner.cuda.state import DeviceState
        from services.worker.runner.peers import Peers
        from services.worker.sampling.fused import FusedSampler

        # Quick in the interpreter: small tiles, and few graphs.
        patch.setattr(triton_spans, "span_options", lambda *_: triton_spans.SpanOptions(16, 32, 4, 1))
        patch.setattr(of_graphs, "_FEWEST_GROUPED", 8)
        if pads:
            patch.setattr(of_graphs, "sizes_up_to", lambda largest, smallest: [largest])
        group = RankGroup(ranks, "127.0.0.1", port, CPU, {})
        model = make_model(ranks)
        cache = make_cache(FLAGS, model, FLAGS.page_count)
        parts = 4 if ranks.pp_size > 1 else 1
        more = {"hydragen": True, "max_micro_batches": parts, "grammars": True}
        limits = make_limits(FLAGS, model, FLAGS.page_count, **more)
        state, sampler, grammars = DeviceState.empty(limits, CPU), None, None
        exchange.fewest_sharded = lambda row_bytes: fewest_sharded
        exchanges = exchange.make_exchanges(ranks, 1)
        attention = CudaAttention(cache, model.local.heads, model.rotaries, dtype=torch.float32)
        if ranks.reports:
            grammars = SlotGrammars(ascii_grammars(), VOCABULARY)
        if model.last:
            of_rows = model.project, VOCABULARY, CPU, cache.tokens, state.page_table
            sampler = FusedSampler(*of_rows, mask_shape=(SLOTS, VOCABULARY // 32), total=exchanges.of(1).total)
        peers = Peers(group, exchanges, model.config.hidden_size, model.dtype)
        runner = CudaRunner(model, cache, attention, sampler, state, limits, peers, grammars)
        try:
            if graphs:
                runner.capture(graphs, pieces=pieces, has_experts=not pads)
            outputs = []
            for _ in range(times):
                runner.reset()
                outputs, running = [], []
                for plan in plans:
                    cut = plan if parts > 1 else replace(plan, micro_batch_rows=())
                    running.append(runner.start(cut))
                    if len(running) == ahead:
                        outputs += [step.result() for step in running]
                        running.clear()
                outputs += [step.result() for step in running]
            runner.reset()
            return outputs
        finally:
            runner.close()


def plain_outputs(plans: Sequence[Plan], config: ChosenWorkerConfig | None = None) -> list[StepOutput]:
    """Return the outputs of one CPU, without micro-batches and groups. ``config``: that of another model."""
    from services.worker.attention.plain import PlainAttention
    from services.worker.runner.runner import StepRunner
    from services.worker.runner.shards import ShardThreads

    if config is None:
        model = make_model(Ranks())
        cache = make_cache(FLAGS, model, FLAGS.page_count)
        limits = make_limits(FLAGS, model, FLAGS.page_count, grammars=True)
        grammars = SlotGrammars(ascii_grammars(), VOCABULARY)
        runner = StepRunner(model, cache, PlainAttention(cache), limits, ShardThreads(1), grammars=grammars)
    else:
        runner = boot(config).runner
        runner.reset()
    return [runner.run(replace(plan, groups=None, micro_batch_rows=())) for plan in plans]


SHARED = list(range(20, 20 + 2 * PAGE))


def groups(*triples: tuple[int, int, int]) -> Groups:
    """First row, rows, pages."""
    return Groups(*np.array(triples, np.int64).reshape(-1, 3).T)


def history() -> list[Plan]:
    """Chunks beside rows that decode; six rows over two pages; every kind of sampling; rows that pause, one that is
    cancelled and its slot used again at once; scored prompts; batches, groups and cuts that stay and that change."""
    leader = admission(0, [*SHARED, 1], [0, 1, 2], prompt_logprobs=0)
    kinds = (
        {},
        {"temperature": 0.8, "seed": 3},
        {"logprobs": True, "top_logprobs": 2},
        {"temperature": 1.1, "seed": 9, "top_k": 20, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 0.9, "top_k": 3, "logprobs": True, "top_logprobs": 2, "processed_logprobs": True},
        {"temperature": 0.6, "seed": 4, "thinking": budget(2, 7)},
    )
    members = tuple(
        admission(1 + row, [*SHARED, 50 + row], [0, 1, 10 + row], cached_tokens=len(SHARED), **kinds[row])
        for row in range(6)
    )
    chunked = admission(8, range(60, 75), [30, 31, 32, 33, 34], temperature=0.7, seed=5, prompt_logprobs=2)
    again = admission(4, [9, 8, 7], [50, 51], prompt_logprobs=4)
    everyone, together = [1, 2, 3, 4, 5, 6, 8], groups((0, 4, 2), (4, 2, 2))
    two = groups((0, 3, 2), (4, 3, 2))
    return [
        plan(1, admissions=(leader,), batch=batch([0], [2 * PAGE + 1])),
        plan(2, admissions=members, batch=batch(range(7)), groups=two, micro_batch_rows=(3, 4)),
        plan(
            3,
            releases=[0],
            admissions=(chunked,),
            batch=batch(everyone, [1] * 6 + [7]),
            groups=together,
            micro_batch_rows=(4, 0, 2, 1),
        ),
        plan(4, batch=batch(everyone, [1] * 6 + [8]), groups=together, micro_batch_rows=(4, 3)),
        plan(5, batch=batch(everyone), groups=together, micro_batch_rows=(4, 3)),
        plan(6, append_slots=[1, 2, 3, 4, 5, 6], append_pages=[40, 41, 42, 43, 44, 45]),
        plan(7, batch=batch([8, 2, 1]), groups=groups(), micro_batch_rows=(1, 2)),
        plan(8, releases=[4], admissions=(again,), batch=batch([3, 4, 5], [1, 3, 1])),
        plan(9, batch=batch(everyone), groups=groups((0, 3, 2)), micro_batch_rows=(4, 3)),
        plan(10, batch=batch([]), groups=groups()),
        plan(11, batch=batch([8, 4])),
    ]


def plan(step: int, **parts) -> Plan:
    """Return a plan in which parts that are not given are empty."""
    values = {"releases": NONE, "admissions": (), "append_slots": NONE, "append_pages": NONE}
    values |= {"copy_sources": NONE, "copy_targets": NONE, "batch": None}
    arrays = {name: np.asarray(value, np.int64) if isinstance(value, list) else value for name, value in parts.items()}
    return Plan(step=step, **values | arrays)


def same(expected: Sequence[StepOutput], found: Sequence[StepOutput], atol: float = 1e-4) -> None:
    """Fails unless tokens are equal, and log-probabilities up to ``atol``."""
    same_scores(expected, found, atol)
    for each, other in zip(expected, found, strict=True):
        wanted, given, step = each.sampled, other.sampled, f"step {each.step}"
        assert other.step == each.step
        assert given.slots.tolist() == wanted.slots.tolist(), step
        assert given.finite.all(), step
        assert given.token_ids.tolist() == wanted.token_ids.tolist(), step
        assert (given.logprobs is None) == (wanted.logprobs is None), step
        if wanted.logprobs is not None:
            np.testing.assert_allclose(given.logprobs, wanted.logprobs, atol=atol, err_msg=step)
        if wanted.top is not None:
            assert given.top.counts.tolist() == wanted.top.counts.tolist(), step
            assert given.top.token_ids.tolist() == wanted.top.token_ids.tolist(), step
