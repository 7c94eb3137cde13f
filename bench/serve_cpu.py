"""Compare the server with transformers' ``generate``, one after the other on the same machine.

``python -m bench.serve_cpu [model=builtin] [sequences=64] [dtype=float32] [max_tokens=256] [repeats=3]``

Both use the same model, dtype and prompts, and decode greedily. transformers runs the prompts as one left-padded batch.
The server receives them as concurrent HTTP requests through the openai SDK. There are two workloads:

* ``answers``: every sequence runs to its own end, at most ``max_tokens``, and only tokens of answers count. A batch of
  transformers lasts as long as its longest answer. The ratio is ``ratio_to_transformers``.
* ``fixed``: every sequence has exactly half of ``max_tokens``. The ratio is ``ratio_fixed_length``.

Then, for a single request, the time to the first token and the time per later token are measured. Times are medians
over ``repeats``.
"""

import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import openai
import torch
import transformers
from pydantic import Field

from bench.problems import read_problems
from bench.server import Server, report, serve
from services.common.config import from_command_line
from services.common.flags import Config, Int
from services.common.model.files import read_card


class BenchConfig(Config):
    model: str = "builtin"
    sequences: Int = Field(64, ge=1)
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_tokens: Int = Field(256, ge=4)
    repeats: Int = Field(3, ge=1)


@dataclass(frozen=True)
class Workload:
    """The requests to both servers."""

    prompts: list[str]
    max_tokens: int
    ignore_eos: bool


@dataclass(frozen=True)
class Outcome:
    """The median seconds for all sequences, from text to text, with their texts."""

    seconds: float
    tokens: int
    texts: list[str]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def main() -> None:
    config = from_command_line(BenchConfig)
    problems = read_problems()
    prompts = [problems[index % len(problems)].prompt for index in range(config.sequences)]
    workloads = {
        "answers": Workload(prompts, config.max_tokens, ignore_eos=False),
        "fixed": Workload(prompts, config.max_tokens // 2, ignore_eos=True),
    }
    baselines = measure_transformers(config, workloads)
    flags = {"model": config.model, "dtype": config.dtype, "max_seqs_per_forward": max(256, config.sequences)}
    # Without the prefix cache, a repeated prompt is computed again, as in transformers.
    with serve(**flags, prefix_caching="F") as server:
        outcomes = {name: asyncio.run(measure_server(server, config, work)) for name, work in workloads.items()}
        first_s, per_token_s = measure_latency(server, config, prompts[0])

    figures = {"model": config.model, "sequences": config.sequences, "dtype": config.dtype}
    figures["threads"] = torch.get_num_threads()
    for name, outcome in outcomes.items():
        baseline, ratio = baselines[name], outcome.rate / baselines[name].rate
        equal = sum(a == b for a, b in zip(outcome.texts, baseline.texts, strict=True))
        print(
            f"{name:8} transformers {baseline.rate:6.0f} tok/s, this server {outcome.rate:6.0f}: {ratio:.2f} times;"
            f" {equal} of {len(prompts)} texts equal"
        )
        figures["ratio_to_transformers" if name == "answers" else "ratio_fixed_length"] = ratio
        figures |= {f"{name}_tokens_per_second": outcome.rate, f"{name}_transformers": baseline.rate}
        figures[f"{name}_equal_texts"] = equal
    print(f"one request alone: {first_s * 1e3:.1f} ms to the first token, {per_token_s * 1e3:.2f} ms per token")
    report(figures | {"first_token_ms": first_s * 1e3, "per_token_ms": per_token_s * 1e3})


def measure_transformers(config: BenchConfig, workloads: dict[str, Workload]) -> dict[str, Outcome]:
    """Measure ``generate`` on one batch, including tokenisation and decoding of texts."""
    card = read_card(config.model, weights=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(card.directory, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    dtype = getattr(torch, config.dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(card.directory, dtype=dtype).eval()
    ends = torch.tensor(card.eos_token_ids)

    def generate(work: Workload) -> tuple[int, list[str]]:
        model.generation_config.eos_token_id = None if work.ignore_eos else list(card.eos_token_ids)
        batch = tokenizer(work.prompts, padding=True, return_tensors="pt")
        tokens = model.generate(**batch, do_sample=False, max_new_tokens=work.max_tokens)
        tokens = tokens[:, batch["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        # Tokens behind the end-of-sequence token are padding.
        behind_end = torch.isin(tokens, ends).int().cumsum(dim=1).roll(1, dims=1)
        behind_end[:, 0] = 0
        return tokens.numel() if work.ignore_eos else int((behind_end == 0).sum()), texts

    return {name: repeat(config, lambda work=work: generate(work)) for name, work in workloads.items()}


async def measure_server(server: Server, config: BenchConfig, work: Workload) -> Outcome:
    """Send all prompts at once, each as a request."""
    model = server.model
    async with openai.AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0) as client:

        async def complete(prompt: str) -> tuple[int, str]:
            answer = await client.completions.create(
                model=model,
                prompt=prompt,
                max_tokens=work.max_tokens,
                temperature=0,
                extra_body={"ignore_eos": work.ignore_eos},
            )
            return answer.usage.completion_tokens, answer.choices[0].text

        await asyncio.gather(*map(complete, work.prompts))
        seconds = []
        for _ in range(config.repeats):
            start = time.perf_counter()
            answers = await asyncio.gather(*map(complete, work.prompts))
            seconds.append(time.perf_counter() - start)
    tokens, texts = zip(*answers, strict=True)
    return Outcome(statistics.median(seconds), sum(tokens), list(texts))


def repeat(config: BenchConfig, run: Callable[[], tuple[int, list[str]]]) -> Outcome:
    """Call ``run`` once to warm up, and then measure ``repeats`` calls."""
    run()
    seconds = []
    for _ in range(config.repeats):
        start = time.perf_counter()
        tokens, texts = run()
        seconds.append(time.perf_counter() - start)
    return Outcome(statistics.median(seconds), tokens, texts)


def measure_latency(server: Server, config: BenchConfig, prompt: str) -> tuple[float, float]:
    """Return the median seconds to the first streamed token and per later token, for single requests."""
    client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0)
    model, tokens, firsts, rests = server.model, config.max_tokens // 2, [], []
    for number in range(config.repeats + 1):
        start = time.perf_counter()
        stream = client.completions.create(
            model=model,
            prompt=f"{number} {prompt}",  # a different prefix each time, so that none is cached
            max_tokens=tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        first = None
        for _ in stream:
            first = first or time.perf_counter()
        firsts.append(first - start)
        rests.append((time.perf_counter() - first) / (tokens - 1))
    return statistics.median(firsts[1:]), statistics.median(rests[1:])


if __name__ == "__main__":
    main()
