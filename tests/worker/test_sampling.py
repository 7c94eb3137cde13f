"""What is drawn: distributions, truncation, bias, log-probabilities, and noise that depends on its counters alone."""

import dataclasses

import numpy as np
import pytest
import torch

from services.common.plan.types import WorkerLimits
from services.worker.sampling import sampler
from services.worker.sampling.draw import draw
from services.worker.sampling.sampler import sample
from services.worker.step.noise import NOISE_BLOCK, block_gumbel, gumbel, row_keys
from services.worker.step.slots import SlotTable
from tests.quick import quick_if
from tests.worker.driver import admission

VOCAB = 12
LOGITS = torch.linspace(2.0, -2.0, VOCAB).roll(5)  # the most likely token is 5


def table_of(rows: list[dict], vocab: int = VOCAB) -> SlotTable:
    """Slot i samples with ``rows[i]``."""
    limits = WorkerLimits(16, 8, len(rows), 64, 100, vocab, 20)
    table = SlotTable(limits, torch.device("cpu"))
    for slot, sampling in enumerate(rows):
        table.admit(admission(slot, [1], [0], **sampling))
    return table


def sampled(rows: list[dict], logits=LOGITS, positions=None):
    logits = logits.expand(len(rows), -1).clone() if logits.dim() == 1 else logits
    positions = np.zeros(len(rows), np.int64) if positions is None else positions
    table = table_of(rows, logits.shape[1])
    return sample(logits, torch.clone, np.arange(len(rows)), positions, table, logits.shape[1])


def draws(count: int, logits=LOGITS, **sampling) -> np.ndarray:
    """``count`` tokens at positions 0, 1, ... of one seed."""
    rows = [{"temperature": 1.0, "seed": 1234} | sampling] * count
    return sampled(rows, logits, np.arange(count)).token_ids


def chi_square_excess(observed: np.ndarray, probabilities: torch.Tensor) -> float:
    """By how many standard deviations chi-square exceeds its mean; below about 4 by chance alone."""
    expected = probabilities.double().numpy() * observed.sum()
    kept = expected > 0
    assert observed[~kept].sum() == 0
    freedom = kept.sum() - 1
    statistic = ((observed[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    return (statistic - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("temperature", quick_if(lambda temperature: temperature == 0.5, [0.5, 1.0, 2.0]))
def test_tokens_follow_the_softmax(temperature):
    counts = np.bincount(draws(40_000, temperature=temperature), minlength=VOCAB)
    assert chi_square_excess(counts, (LOGITS / temperature).softmax(-1)) < 4


@pytest.mark.parametrize("counter", ["seed", "sample_index", "position"])
def test_each_counter_alone_gives_independent_draws(counter):
    """Consecutive values of one counter: single tokens and pairs of neighbours are distributed as they should be."""
    logits, count = torch.zeros(8), 40_000
    values = np.arange(count)
    changing = [{counter: int(value)} if counter != "position" else {} for value in values]
    rows = [{"temperature": 1.0, "seed": 3, "sample_index": 4} | change for change in changing]
    tokens = sampled(rows, logits, values if counter == "position" else None).token_ids
    assert chi_square_excess(np.bincount(tokens, minlength=8), torch.full((8,), 1 / 8)) < 4
    pairs = np.bincount(tokens[:-1] * 8 + tokens[1:], minlength=64)
    assert chi_square_excess(pairs, torch.full((64,), 1 / 64)) < 4


def test_noise_is_gumbel_and_neither_rows_nor_tokens_are_correlated():
    numbers = np.arange(64, dtype=np.uint64)
    keys = torch.from_numpy(row_keys(numbers, np.zeros_like(numbers), np.zeros_like(numbers)))
    noise = gumbel(keys.unsqueeze(1), torch.arange(20_000, dtype=torch.int32)).double()
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.5772) < 0.01
    assert abs(noise.var() - np.pi**2 / 6) < 0.02
    rows = torch.corrcoef(noise) - torch.eye(64)
    assert rows.abs().max() < 5 / 20_000**0.5
    lagged = torch.corrcoef(torch.stack((noise[:, :-1].flatten(), noise[:, 1:].flatten())))[0, 1]
    assert abs(lagged) < 5 / noise.numel() ** 0.5
    # The tail decides what is drawn from a large vocabulary.
    for threshold in (6.0, 9.0):
        expected = noise.numel() * -np.expm1(-np.exp(-threshold))
        assert abs((noise > threshold).sum() - expected) < 5 * expected**0.5


def test_no_noise_rules_out_a_token_that_is_certain():
    """The hash of these counters is one of the few that, rounded, would be the whole interval's end."""
    seed, position, token = 0, 235_069, 137
    key = torch.from_numpy(row_keys(*(np.array([value], np.uint64) for value in (seed, 0, position))))
    assert gumbel(key.unsqueeze(1), torch.arange(256, dtype=torch.int32)).isfinite().all()
    logits = torch.zeros(256).index_fill(0, torch.tensor(token), 100.0)
    for cut in ({}, {"top_k": 1}, {"top_p": 0.5}):
        assert sampled([{"temperature": 1.0, "seed": seed} | cut], logits, np.array([position])).token_ids == [token]


def test_the_tail_of_a_large_vocabulary_is_fair():
    """Equal logits over 100,000 tokens: the draws cover all parts of the vocabulary alike."""
    tokens = draws(400, torch.zeros(100_000))
    assert chi_square_excess(np.bincount(tokens // 10_000, minlength=10), torch.full((10,), 0.1)) < 4
    assert len(np.unique(tokens)) > 390


def several_blocks() -> torch.Tensor:
    """Three blocks and a bit, of unlike mass, in which one token of each block is likely."""
    logits = torch.full((3 * NOISE_BLOCK + 100,), -2.0)
    logits[[5, NOISE_BLOCK + 1023, 2 * NOISE_BLOCK, 3 * NOISE_BLOCK + 99]] = torch.tensor([6.0, 7.0, 5.0, 7.5])
    return logits


@pytest.mark.slow
def test_blocks_and_the_tokens_within_follow_the_softmax():
    logits = several_blocks()
    tokens = draws(20_000, logits)
    mass = logits.softmax(-1)
    starts = range(0, len(logits), NOISE_BLOCK)
    blocks = torch.stack([mass[start : start + NOISE_BLOCK].sum() for start in starts])
    assert chi_square_excess(np.bincount(tokens // NOISE_BLOCK, minlength=4), blocks) < 4
    # In pieces of 50 tokens, the likely ones among them.
    pieces = torch.zeros(len(logits) // 50 + 1).index_add(0, torch.arange(len(logits)) // 50, mass)
    assert chi_square_excess(np.bincount(tokens // 50, minlength=len(pieces)), pieces) < 4


def test_the_token_within_a_block_does_not_depend_on_the_block():
    """Equal logits: the choice of a block says nothing about the place within."""
    tokens = draws(20_000, torch.zeros(4 * NOISE_BLOCK))
    pairs = tokens // NOISE_BLOCK * 4 + tokens % NOISE_BLOCK // 256
    assert chi_square_excess(np.bincount(pairs, minlength=16), torch.full((16,), 1 / 16)) < 4


def test_noise_of_blocks_and_of_tokens_is_not_correlated():
    numbers = np.arange(4000, dtype=np.uint64)
    keys = torch.from_numpy(row_keys(numbers, numbers * 0, numbers * 0))
    blocks, tokens = block_gumbel(keys, 8), gumbel(keys.unsqueeze(1), torch.arange(8, dtype=torch.int32))
    between = torch.corrcoef(torch.cat((blocks, tokens), dim=1).T) - torch.eye(16)
    assert between.abs().max() < 5 / 4000**0.5


def test_what_is_ruled_out_is_never_drawn_whole_blocks_included():
    logits = torch.full((3 * NOISE_BLOCK + 7,), -torch.inf)
    left = torch.tensor([2 * NOISE_BLOCK + 3, 3 * NOISE_BLOCK + 6])
    logits[left] = 0.0
    numbers = np.arange(2000, dtype=np.uint64)
    keys = torch.from_numpy(row_keys(numbers, numbers * 0, numbers * 0))
    tokens = draw(logits.expand(2000, -1), torch.ones(2000), None, keys)
    assert set(tokens.tolist()) == set(left.tolist())
    assert abs((tokens == left[0]).sum() - 1000) < 5 * 500**0.5


@pytest.mark.parametrize("token", [0, 3 * NOISE_BLOCK - 1, 3 * NOISE_BLOCK + 6])
def test_a_token_that_is_certain_is_drawn_wherever_it_is(token):
    logits = torch.zeros(3 * NOISE_BLOCK + 7).index_fill(0, torch.tensor(token), 60.0)
    assert set(draws(500, logits).tolist()) == {token}


def test_a_draw_does_not_depend_on_batch_slot_or_slice(monkeypatch):
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    rows = [
        {"temperature": 0.8, "seed": 5, "sample_index": 1},
        {"temperature": 0.0},
        {"temperature": 1.2, "seed": 2**64 - 1, "sample_index": 2**32 - 1, "top_p": 0.9},
        {"temperature": 1.0, "seed": 5, "top_k": 20},
        {"temperature": 1.0, "seed": 6, "min_p": 0.1, "logprobs": True},
        {"temperature": 1.0, "seed": 7, "top_logprobs": 3},
    ]
    positions = np.array([3, 50, 7, 0, 2**20, 9])
    together = sampled(rows, logits, positions)
    for row in range(6):
        alone = sampled([rows[row]], logits[row : row + 1], positions[row : row + 1])
        assert alone.token_ids[0] == together.token_ids[row]
    order = np.array([4, 2, 0, 5, 1, 3])
    shuffled = sampled([rows[row] for row in order], logits[order], positions[order])
    assert shuffled.token_ids.tolist() == together.token_ids[order].tolist()
    monkeypatch.setattr(sampler, "SLICE_ELEMENTS", 2 * 300)
    sliced = sampled(rows, logits, positions)
    assert sliced.token_ids.tolist() == together.token_ids.tolist()
    assert sliced.top.counts.tolist() == [0, 0, 0, 0, 0, 3]
    np.testing.assert_array_equal(sliced.logprobs, together.logprobs)
    np.testing.assert_array_equal(sliced.top.token_ids, together.top.token_ids)


TRUNCATIONS = {
    "top_k": {"top_k": 3},
    "top_k beyond the vocabulary": {"top_k": 10_000},
    "top_p": {"top_p": 0.7},
    "tiny top_p": {"top_p": 1e-6},
    "min_p": {"min_p": 0.2},
    "all": {"top_k": 8, "top_p": 0.8, "min_p": 0.15, "temperature": 1.5},
}


def truncated(logits: torch.Tensor, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> torch.Tensor:
    """The distribution that is meant, token by token."""
    probabilities = (logits / temperature).double().softmax(-1)
    if top_k:
        probabilities[probabilities.argsort(descending=True)[top_k:]] = 0
        probabilities /= probabilities.sum()
    order, mass = probabilities.argsort(descending=True), 0.0
    for token in order.tolist():
        probability = float(probabilities[token])
        if mass >= top_p:
            probabilities[token] = 0
        mass += probability
    probabilities[probabilities < min_p * probabilities.max()] = 0
    return probabilities / probabilities.sum()


@pytest.mark.parametrize("sampling", TRUNCATIONS.values(), ids=TRUNCATIONS)
def test_truncation_leaves_the_distribution_that_is_meant(sampling):
    expected = truncated(LOGITS, **sampling)
    counts = np.bincount(draws(20_000, **sampling), minlength=VOCAB)
    if (expected > 0).sum() == 1:
        assert counts[expected.argmax()] == 20_000
    else:
        assert chi_square_excess(counts, expected) < 4


@pytest.mark.parametrize("flatness", quick_if(lambda flatness: flatness == 1.0, [0.1, 1.0, 6.0]))
def test_a_large_vocabulary_is_cut_where_a_full_sort_would_cut_it(flatness):
    logits = flatness * torch.randn(20, 3000, generator=torch.Generator().manual_seed(0))
    for sampling in ({"top_p": 0.9}, {"top_k": 500}, {"top_k": 100, "top_p": 0.5}, {"top_p": 0.3, "min_p": 0.01}):
        rows = [{"temperature": 1.0, "seed": seed} | sampling for seed in range(20)]
        tokens = sampled(rows, logits).token_ids
        for row, token in enumerate(tokens):
            assert truncated(logits[row], **sampling)[token] > 0
        # The same noise without truncation decides among the tokens that are left.
        kept = torch.stack([truncated(row, **sampling) > 0 for row in logits])
        plain = sampled([{"temperature": 1.0, "seed": seed} for seed in range(20)], logits.masked_fill(~kept, -1e9))
        assert tokens.tolist() == plain.token_ids.tolist()


def test_rows_of_one_slice_keep_their_own_settings():
    rows = [{"temperature": 0.0}, {"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "top_p": 1e-6}]
    rows += [{"temperature": 5.0, "seed": seed} for seed in range(50)]
    tokens = sampled(rows).token_ids
    assert tokens[:3].tolist() == [5, 5, 5]
    assert len(set(tokens[3:].tolist())) > 6


@pytest.mark.parametrize("temperature", [1e-40, 1e-9])
def test_an_almost_cold_row_is_greedy(temperature):
    tokens = sampled([{"temperature": temperature, "seed": seed, "top_p": 0.9} for seed in range(20)]).token_ids
    assert set(tokens.tolist()) == {5}


def test_bias_counts_before_everything_else():
    biased = {"logit_bias_token_ids": np.array([2, 9]), "logit_bias_values": np.array([100, -100], np.float32)}
    result = sampled([{"logprobs": True, "top_logprobs": 2} | biased, {"logprobs": True}])
    assert result.token_ids.tolist() == [2, 5]
    expected = LOGITS + torch.zeros(VOCAB).index_put((torch.tensor([2, 9]),), torch.tensor([100.0, -100.0]))
    assert result.logprobs[0] == pytest.approx(float(expected.log_softmax(-1)[2]), abs=1e-6)
    assert result.logprobs[1] == pytest.approx(float(LOGITS.log_softmax(-1)[5]), abs=1e-6)
    assert result.top.token_ids.tolist() == [2, 5]


def test_logprobs_ignore_temperature_and_truncation():
    rows = [{"temperature": 3.0, "top_k": 2, "seed": 1, "logprobs": True, "top_logprobs": 4}, {}]
    result = sampled(rows)
    expected = LOGITS.log_softmax(-1)
    assert result.logprobs[0] == pytest.approx(float(expected[result.token_ids[0]]), abs=1e-6)
    assert np.isnan(result.logprobs[1])
    assert result.top.counts.tolist() == [4, 0]
    best = expected.topk(4)
    assert result.top.token_ids.tolist() == best.indices.tolist()
    np.testing.assert_allclose(result.top.logprobs, best.values.numpy(), atol=1e-6)


def test_nothing_is_reported_that_nobody_asked_for():
    result = sampled([{}, {"temperature": 1.0}])
    assert result.logprobs is result.top is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_seen(bad, temperature):
    logits = LOGITS.repeat(3, 1)
    logits[1, 4] = bad
    assert sampled([{"temperature": temperature}] * 3, logits).finite.tolist() == [True, False, True]


SAID = [4, 4, 9, 5, 5, 5, 2]  # tokens of a sequence
PENALTIES = {
    "repetition": {"repetition_penalty": 1.5},
    "repetition as a reward": {"repetition_penalty": 0.8},
    "frequency": {"frequency_penalty": 0.4},
    "presence": {"presence_penalty": 1.2},
    "all, after bias": {
        "repetition_penalty": 1.3,
        "frequency_penalty": -0.5,
        "presence_penalty": 0.7,
        "logit_bias_token_ids": np.array([5, 0]),
        "logit_bias_values": np.array([3.0, -4.0], np.float32),
    },
}


@pytest.mark.parametrize("prompt_tokens", [0, 2, 5])
@pytest.mark.parametrize("penalties", PENALTIES.values(), ids=PENALTIES)
def test_penalties_count_the_prompt_and_generated_tokens_as_they_should(penalties, prompt_tokens):
    """Seven tokens and one that was sampled since, in pages of four, as the cache keeps them."""
    table = SlotTable(WorkerLimits(4, 8, 2, 64, 32, VOCAB, 20), torch.device("cpu"))
    given = admission(1, SAID, [6, 3], logprobs=True, top_logprobs=VOCAB, **penalties)
    table.admit(dataclasses.replace(given, prompt_tokens=prompt_tokens))
    table.admit(admission(0, SAID, [6, 3], logprobs=True, top_logprobs=VOCAB))
    kept = torch.zeros(8, 4, dtype=torch.int32)
    kept[6], kept[3] = torch.tensor(SAID[:4]), torch.tensor([*SAID[4:], 9])
    found = sample(LOGITS.repeat(2, 1), torch.clone, np.array([1, 0]), np.full(2, 8), table, VOCAB, kept)

    expected = LOGITS.tolist()
    for token, value in zip(
        penalties.get("logit_bias_token_ids", ()), penalties.get("logit_bias_values", ()), strict=True
    ):
        expected[token] += float(value)
    generated = [*SAID, 9][prompt_tokens or len(SAID) :]
    for token in {*SAID, 9}:
        factor = penalties.get("repetition_penalty", 1.0)
        expected[token] = expected[token] / factor if expected[token] > 0 else expected[token] * factor
    for token in set(generated):
        expected[token] -= penalties.get("frequency_penalty", 0.0) * generated.count(token)
        expected[token] -= penalties.get("presence_penalty", 0.0)
    expected = torch.tensor(expected).log_softmax(-1)
    for row, wanted in ((0, expected), (1, LOGITS.log_softmax(-1))):
        top = slice(row * VOCAB, (row + 1) * VOCAB)
        values = torch.empty(VOCAB).index_copy(
            0, torch.from_numpy(found.top.token_ids[top]), torch.from_numpy(found.top.logprobs[top])
        )
        torch.testing.assert_close(values, wanted)
        assert found.token_ids[row] == wanted.argmax()


def test_penalties_apply_before_temperature_and_truncation():
    table = table_of([{"temperature": 1.0, "seed": seed, "presence_penalty": 2.0, "top_k": 1} for seed in range(20)])
    table.prompt_tokens[:] = 0  # so that the one token counts as generated
    kept = torch.full((8, 16), 5, dtype=torch.int32)
    tokens = sample(LOGITS.repeat(20, 1), torch.clone, np.arange(20), np.ones(20, np.int64), table, VOCAB, kept)
    assert set(tokens.token_ids.tolist()) == {6}
