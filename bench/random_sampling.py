"""Random sampling settings with every feature, alone and combined."""

import numpy as np

from services.common.plan.types import SamplingSettings, WorkerLimits
from tokasaurus.common.v1.sampling_pb2 import Sampling

_MOST_BIASES = 300


def random_settings(random: np.random.Generator, limits: WorkerLimits) -> SamplingSettings:
    """Return random settings. Half of them are plain; the others have each feature with a probability of a third."""

    def on(chance: float = 0.33) -> bool:
        return random.random() < chance

    temperature = 0.0 if on(0.3) else float(random.choice([0.01, 0.6, 1.0, 5.0]))
    seed = int(random.integers(0, 2**64, dtype=np.uint64))
    if on(0.5):
        return SamplingSettings(Sampling(temperature=temperature, seed=seed))
    top = limits.most_top_logprobs
    biased = _biases(random, limits) if on(0.25) else ([], [])
    parameters = Sampling(
        temperature=temperature,
        top_p=float(random.choice([1e-6, 0.5, 0.95])) if on() else 1.0,
        top_k=int(random.choice([1, 2, 50, limits.vocab_size, 2 * limits.vocab_size])) if on() else 0,
        min_p=float(random.choice([1e-3, 0.05, 1.0])) if on() else 0.0,
        seed=seed,
        logit_bias_token_ids=biased[0],
        logit_bias_values=biased[1],
        repetition_penalty=float(random.choice([0.5, 1.1, 2.0])) if on(0.2) else 1.0,
        frequency_penalty=float(random.uniform(-2, 2)) if on(0.2) else 0.0,
        presence_penalty=float(random.uniform(-2, 2)) if on(0.2) else 0.0,
    )
    top_logprobs = int(random.integers(0, top + 1)) if on(0.2) else 0
    return SamplingSettings(parameters, logprobs=on(), top_logprobs=top_logprobs)


def _biases(random: np.random.Generator, limits: WorkerLimits) -> tuple[list[int], list[float]]:
    count = min(int(np.exp(random.random() * np.log(_MOST_BIASES + 1))), limits.vocab_size)
    token_ids = random.choice(limits.vocab_size, count, replace=False)
    return token_ids.tolist(), random.uniform(-100, 100, count).tolist()
