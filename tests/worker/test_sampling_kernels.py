"""The GPU's sampling gives what the CPU's does: from equal logits, equal tokens and log-probabilities."""

import numpy as np
import pytest
import torch

from services.common.plan.types import WorkerLimits
from services.worker.sampling.grammars import RowMasks
from services.worker.sampling.sampler import sample
from services.worker.step.noise import gumbel, row_keys
from services.worker.step.output import Sampled
from services.worker.step.slots import SlotTable
from tests.quick import quick_if
from tests.worker.driver import admission
from tests.worker.interpreter import DEVICE, needs_triton

pytestmark = [needs_triton, pytest.mark.usefixtures("triton_ready")]

VOCAB = 2600  # three blocks, the last one short
PAGE = 8


class Case:
    """Slot i has ``rows[i]``, eight prompt tokens and five generated ones; slots are sampled in another order."""

    def __init__(self, rows: list[dict], vocab: int = VOCAB, seed: int = 0, spread: float = 3.0) -> None:
        count, generator = len(rows), torch.Generator().manual_seed(seed)
        self.vocab = vocab
        self.table = SlotTable(WorkerLimits(PAGE, 3 * count, count, 64, 24, vocab, 20), torch.device("cpu"))
        for slot, sampling in enumerate(rows):
            self.table.admit(admission(slot, range(8), [3 * slot + 2, 3 * slot], **sampling))
        self.tokens = torch.randint(vocab, (3 * count, PAGE), generator=generator, dtype=torch.int32)
        self.tokens[:, 1] = self.tokens[:, 2]  # a token that comes twice
        self.slots = np.random.default_rng(seed).permutation(count)
        self.positions = np.full(count, 13)
        self.logits = (spread * torch.randn(count, vocab, generator=generator)).bfloat16()
        self.bits = np.full((count, -(-vocab // 32)), -1, np.int32)  # of each slot: what its grammar allows

    def on_cpu(self) -> Sampled:
        logits, masked = self.logits.float(), np.flatnonzero(self.table.masked[self.slots])
        masks = RowMasks(masked, self.bits[self.slots[masked]]) if len(masked) else None
        return sample(logits, torch.clone, self.slots, self.positions, self.table, self.vocab, self.tokens, masks)

    def fused(self, padding: int = 0, dtype=torch.bfloat16, **sizes) -> Sampled:
        from services.worker.sampling.fused import FusedSampler
        from services.worker.sampling.outcome import SampledOnDevice, collect

        page_table = torch.from_numpy(self.table.page_table).to(DEVICE)
        sizes |= {"mask_shape": self.bits.shape}
        sampler = FusedSampler(
            torch.clone, self.vocab, DEVICE, tokens=self.tokens.to(DEVICE), page_table=page_table, **sizes
        )
        count = len(self.slots)

        def put(array: np.ndarray) -> torch.Tensor:
            assert array.dtype in (np.int32, np.float32, np.uint8)
            return torch.from_numpy(array.copy()).to(DEVICE)

        rows = sampler.prepare(self.table, self.slots, self.positions, put, padded=count + padding)
        sampler.masks[: len(rows.masked)] = torch.from_numpy(self.bits[self.slots[rows.masked]])
        garbage = torch.full((padding, self.vocab), torch.nan)
        found = sampler.run(torch.cat((self.logits.to(dtype), garbage.to(dtype))).to(DEVICE), rows)
        found = SampledOnDevice(*(None if tensor is None else tensor.cpu() for tensor in found))
        token_ids, finite = found.token_ids[:count].numpy(), found.finite[:count].numpy() != 0
        return collect(self.slots, token_ids, finite & ~self.table.failed[self.slots], rows, *found[2:])


def assert_same(found: Sampled, expected: Sampled) -> None:
    assert found.slots.tolist() == expected.slots.tolist()
    assert found.finite.tolist() == expected.finite.tolist()
    good = expected.finite
    assert found.token_ids[good].tolist() == expected.token_ids[good].tolist()
    assert not found.token_ids[~good].any()
    assert (found.logprobs is None, found.top is None) == (expected.logprobs is None, expected.top is None)
    if expected.logprobs is not None:
        np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=2e-5)
    if expected.top is not None:
        assert found.top.counts.tolist() == expected.top.counts.tolist()
        np.testing.assert_allclose(found.top.logprobs, expected.top.logprobs, atol=2e-5)
        apart = told_apart(expected)
        assert found.top.token_ids[apart].tolist() == expected.top.token_ids[apart].tolist()


def told_apart(sampled: Sampled) -> np.ndarray:
    """Which of the most likely tokens have neighbours of other log-probabilities: equal ones come in any order, and
    which of them is a row's last is anybody's choice."""
    logprobs, ends = sampled.top.logprobs, np.cumsum(sampled.top.counts)[sampled.top.counts > 0]
    apart = np.abs(np.diff(logprobs)) > 1e-4
    apart[ends[:-1] - 1] = True
    found = np.concatenate(([True], apart)) & np.concatenate((apart, [True]))
    found[ends - 1] = False
    return found


def hot(count: int, **sampling) -> list[dict]:
    return [{"temperature": 0.5 + seed / count, "seed": seed, "sample_index": seed % 3} | sampling
            for seed in range(count)]  # fmt: skip


def test_the_noise_is_the_same():
    from tests.worker.noise_kernel import write_noise

    seeds = np.arange(30, dtype=np.uint64)
    keys = torch.from_numpy(row_keys(seeds, seeds * 0, seeds * 7))
    ids = torch.arange(-2048, 2048, dtype=torch.int32)
    for key in keys:
        out = torch.empty(4096, device=DEVICE)
        write_noise[(1,)](key.to(DEVICE), ids.to(DEVICE), out, SIZE=4096)
        torch.testing.assert_close(out.cpu(), gumbel(key, ids), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("vocab", quick_if(lambda vocab: vocab in {400, VOCAB}, [400, 1024, VOCAB, 4096]))
def test_plain_rows_of_any_mixture(vocab):
    rows = [{} if row % 3 == 0 else sampling for row, sampling in enumerate(hot(40))]
    case = Case(rows, vocab)
    expected = case.on_cpu()
    assert_same(case.fused(), expected)
    for dtype in (torch.float32, torch.float16):  # both hold these logits exactly
        assert_same(case.fused(dtype=dtype), expected)
    assert len(set((expected.token_ids // 1024).tolist())) == -(-vocab // 1024)


def test_padding_and_slices_change_nothing():
    rows = hot(37, top_k=20, logprobs=True, top_logprobs=2)
    rows[5] = rows[30] = {"logit_bias_token_ids": np.array([7]), "logit_bias_values": np.array([50], np.float32)}
    case = Case(rows)
    assert_same(case.fused(padding=11, slice_elements=16 * VOCAB, chunk_rows=1), case.on_cpu())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_numbers_are_seen(bad):
    case = Case([{}, *hot(3), {}, *hot(2, top_p=0.8), *hot(2, frequency_penalty=1.0)])
    case.logits[[0, 2, 5, 7], [2599, 0, 1024, 300]] = bad
    case.logits[4] = bad
    expected = case.on_cpu()
    assert expected.finite.tolist() == [False, True, False, True, False, False, True, False, True]
    assert_same(case.fused(), expected)


def test_a_sequence_known_to_be_spoilt_is_reported():
    case = Case(hot(3))
    case.table.failed[case.slots[1]] = True
    assert case.fused().finite.tolist() == [True, False, True]


def test_equal_logits_are_drawn_by_noise_and_greedily_lowest_first():
    case = Case([{}, *hot(20)])
    case.logits[:] = 1.5
    result = case.fused()
    assert_same(result, case.on_cpu())
    assert result.token_ids[case.slots == 0] == [0]


TRUNCATIONS = {
    "top_k": {"top_k": 5},
    "top_k of one": {"top_k": 1},
    "top_k beyond the blocks": {"top_k": 700},
    "top_k beyond the vocabulary": {"top_k": 10_000},
    "top_p": {"top_p": 0.7},
    "tiny top_p": {"top_p": 1e-6},
    "top_p of nearly all": {"top_p": 0.9999},
    "min_p": {"min_p": 0.05},
    "all": {"top_k": 80, "top_p": 0.8, "min_p": 0.02},
}


def test_many_rows_share_programs_and_few_do_not():
    """So few programs as that would go through all blocks of one row one after the other."""
    from services.worker.sampling.triton_blocks import blocks_per_program

    assert [blocks_per_program(rows, 126) for rows in (1, 16, 64, 512, 8192)] == [1, 1, 3, 16, 16]


@pytest.mark.parametrize("per_program", [1, 2, 5])
def test_blocks_are_summarised_alike_however_programs_share_them(monkeypatch, per_program):
    from services.worker.sampling import fused

    case = Case([{}, *hot(5), *hot(3, top_k=7)])
    expected = case.on_cpu()
    monkeypatch.setattr(fused, "blocks_per_program", lambda rows, blocks: per_program)
    assert_same(case.fused(), expected)


@pytest.mark.parametrize("spread", [pytest.param(0.3, marks=pytest.mark.slow), 4.0])
@pytest.mark.parametrize("sampling", TRUNCATIONS.values(), ids=TRUNCATIONS)
def test_truncation_leaves_the_same_tokens(sampling, spread):
    rows = [*hot(7, **sampling), {}, {"temperature": 1.0}, {"top_k": 3}]
    case = Case(rows, spread=spread)
    assert_same(case.fused(), case.on_cpu())


@pytest.mark.parametrize("sampling", TRUNCATIONS.values(), ids=TRUNCATIONS)
@pytest.mark.parametrize(
    "dtype", quick_if(lambda dtype: dtype == torch.bfloat16, [torch.bfloat16, torch.float16, torch.float32])
)
def test_thresholds_are_those_of_a_sort(sampling, dtype):
    from services.worker.sampling.fused import EMPTY_BITS
    from services.worker.sampling.triton_blocks import summarise
    from services.worker.sampling.triton_truncation import find_lowest
    from services.worker.sampling.truncation import thresholds

    count = 6
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(count, VOCAB, generator=generator) - 1).to(dtype)
    logits[1] = logits[1].abs() * -0.01  # no positive ones, and many near zero
    logits[2, 5:900] = logits[2].max()  # many equals
    logits[3] *= 10
    scales = torch.linspace(0.7, 1.5, count)
    top_k, top_p, min_p = (sampling.get(name, off) for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)))
    expected = thresholds(
        logits.float() * scales.unsqueeze(1),
        torch.full((count,), top_k) if top_k else None,
        torch.full((count,), top_p) if top_p < 1 else None,
        torch.full((count,), min_p) if min_p else None,
    ).squeeze(1)
    values, scales_ = logits.to(DEVICE), scales.to(DEVICE)
    peaks, sums = (torch.empty(count, 3, device=DEVICE) for _ in range(2))
    summarise[(count, 2)](
        values, None, scales_, None, peaks, sums, VOCAB, VOCAB, 3, 2,
        MAPPED=False, TRUNCATED=False, UNSCALED=False,
    )  # fmt: skip
    found, by_row = (torch.empty(count, device=DEVICE) for _ in range(2))
    find_lowest[(count,)](
        values, torch.arange(count, dtype=torch.int32, device=DEVICE), scales_,
        torch.full((count,), top_k, dtype=torch.int32, device=DEVICE),
        torch.full((count,), top_p, device=DEVICE),
        torch.full((count,), min_p, device=DEVICE).log(),
        peaks, sums, found, by_row, VOCAB, VOCAB, 3, WIDTH=4, SHIFT=EMPTY_BITS[dtype],
    )  # fmt: skip
    scaled = logits.float() * scales.unsqueeze(1)
    torch.testing.assert_close(by_row, found)
    kept = (scaled >= found.cpu().unsqueeze(1)).sum(1)
    wanted = (scaled >= expected.unsqueeze(1)).sum(1)
    if top_p < 1:  # sums in another order may differ by a token at the very edge
        assert ((kept - wanted).abs() <= 1 + wanted // 500).all(), (kept, wanted)
    else:
        assert kept.tolist() == wanted.tolist()


def test_logprobs_are_the_models_own():
    rows = hot(6, top_k=4)
    rows[1] |= {"logprobs": True}
    rows[2] |= {"top_logprobs": 5}
    rows[4] |= {"logprobs": True, "top_logprobs": 2}
    rows += [{"logprobs": True}, {"top_logprobs": 20, "frequency_penalty": 1.5}]
    case = Case(rows)
    case.logits += (torch.arange(VOCAB) % 97 / 16).bfloat16()
    noise = torch.rand(case.logits.shape, generator=torch.Generator().manual_seed(9))
    case.logits = (case.logits.float() + noise).bfloat16()
    for row in range(len(rows)):  # top tokens in one order only
        best = case.logits[row].float().topk(40)
        case.logits[row, best.indices] = torch.linspace(40, 30, 40).bfloat16()
    result = case.fused()
    assert_same(result, case.on_cpu())
    assert sorted(result.top.counts.tolist()) == [0, 0, 0, 0, 0, 2, 5, 20]


def test_nothing_is_reported_that_nobody_asked_for():
    result = Case([{}, {"temperature": 1.0}]).fused()
    assert result.logprobs is result.top is None


def test_bias_and_penalties_change_the_same_logits():
    bias = {"logit_bias_token_ids": np.array([3, 1500, 3]), "logit_bias_values": np.array([4, -3, 5.25], np.float32)}
    rows = [bias, {"temperature": 1.0} | bias, *hot(4, repetition_penalty=1.7), *hot(3, **bias, presence_penalty=-1.5)]
    rows += [*hot(3, frequency_penalty=1.25, top_p=0.9), *hot(2), {"repetition_penalty": 0.5, "top_k": 4}]
    rows = [row | {"logprobs": True} for row in rows]
    case = Case(rows)
    generated = torch.tensor([[3 * slot, 3 * slot + 2] for slot in case.slots])
    for row, (second, first) in enumerate(generated.tolist()):  # what was said matters for what is likely
        said = torch.cat((case.tokens[first], case.tokens[second, :5])).long()
        case.logits[row, said] = 12 - (torch.arange(13) / 8).bfloat16()
    expected = case.on_cpu()
    assert_same(case.fused(), expected)
    assert_same(case.fused(chunk_rows=3), expected)


@pytest.mark.parametrize(
    ("sampling", "plain"),
    [
        ({"temperature": 1.0}, True),
        ({"top_k": 3}, True),  # greedy, so there is nothing to cut
        ({"temperature": 1.0, "top_k": 3}, False),
        ({"logprobs": True}, False),
        ({"presence_penalty": 0.5}, False),
    ],
)
def test_only_rows_without_more_settings_are_plain(sampling, plain):
    """Then two uploads whose sizes the padding decides are all there is: a CUDA graph can hold the launches."""
    from services.worker.sampling.fused import FusedSampler

    case, shapes = Case([{}, sampling]), []
    sampler = FusedSampler(torch.clone, VOCAB, DEVICE, case.tokens, torch.from_numpy(case.table.page_table))

    def put(array: np.ndarray) -> torch.Tensor:
        shapes.append(array.shape)
        return torch.from_numpy(array)

    rows = sampler.prepare(case.table, case.slots, case.positions, put, padded=16)
    assert rows.plain is plain
    assert shapes[:2] == [(16,), (16, 2)]
    assert (len(shapes) == 2) is plain
