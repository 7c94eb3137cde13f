"""This server against transformers' ``generate``: same model, dtype, prompts, lengths and machine, one after the other.

``python -m bench.serve_cpu [model=builtin] [sequences=64] [max_tokens=128] [repeats=3]``

transformers runs the prompts as one left-padded batch; the server gets them as concurrent HTTP requests through the
openai SDK. Both decode greedily to exactly ``max_tokens`` tokens, so neither wins by stopping early. Then, for one
request alone: time to the first token and time per token after it. Times are medians over ``repeats``.
"""

import asyncio
import statistics
import sys
import time

import openai
import torch
import transformers
from pydantic import Field

from bench.problems import read_problems
from bench.server import Server, report, serve
from services.common.flags import Config, Int, load
from services.common.model_files import resolve


class BenchConfig(Config):
    model: str = "builtin"
    sequences: Int = Field(64, ge=1)
    max_tokens: Int = Field(128, ge=2)
    repeats: Int = Field(3, ge=1)


def main() -> None:
    config = load(BenchConfig, sys.argv[1:], {})
    problems = read_problems()
    prompts = [problems[index % len(problems)].prompt for index in range(config.sequences)]
    total = config.sequences * config.max_tokens

    baseline_s, expected = run_transformers(config, prompts)
    print(f"transformers generate: {total / baseline_s:8.0f} tok/s")
    with serve(model=config.model, dtype="float32", max_seqs_per_forward=max(256, config.sequences)) as server:
        server_s, texts = asyncio.run(run_server(server, config, prompts))
        print(f"this server:           {total / server_s:8.0f} tok/s, {baseline_s / server_s:.2f} times transformers")
        first_s, per_token_s = measure_latency(server, config, prompts[0])
    print(f"one request alone:     {first_s * 1e3:.1f} ms to the first token, {per_token_s * 1e3:.2f} ms per token")
    equal = sum(a == b for a, b in zip(texts, expected, strict=True))
    print(f"equal greedy texts:    {equal} of {len(texts)}")
    report(
        {
            "model": config.model,
            "sequences": config.sequences,
            "max_tokens": config.max_tokens,
            "threads": torch.get_num_threads(),
            "transformers_tokens_per_second": total / baseline_s,
            "tokens_per_second": total / server_s,
            "ratio_to_transformers": baseline_s / server_s,
            "first_token_ms": first_s * 1e3,
            "per_token_ms": per_token_s * 1e3,
            "equal_greedy_texts": equal,
        }
    )


def run_transformers(config: BenchConfig, prompts: list[str]) -> tuple[float, list[str]]:
    """Median seconds for the whole batch (tokenising and decoding included), and the texts."""
    directory = resolve(config.model, weights=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # run to max_tokens, as ignore_eos does

    def generate() -> list[str]:
        batch = tokenizer(prompts, padding=True, return_tensors="pt")
        tokens = model.generate(**batch, do_sample=False, max_new_tokens=config.max_tokens)
        return tokenizer.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)

    generate()
    seconds = []
    for _ in range(config.repeats):
        start = time.perf_counter()
        texts = generate()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), texts


async def run_server(server: Server, config: BenchConfig, prompts: list[str]) -> tuple[float, list[str]]:
    """Median seconds until all concurrent requests are answered, and the texts."""
    model = server.model
    async with openai.AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0) as client:

        async def complete(prompt: str) -> str:
            answer = await client.completions.create(
                model=model,
                prompt=prompt,
                max_tokens=config.max_tokens,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            if answer.usage.completion_tokens != config.max_tokens:
                raise RuntimeError(f"{answer.usage.completion_tokens} tokens came back, not {config.max_tokens}")
            return answer.choices[0].text

        await asyncio.gather(*map(complete, prompts))
        seconds = []
        for _ in range(config.repeats):
            start = time.perf_counter()
            texts = await asyncio.gather(*map(complete, prompts))
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), texts


def measure_latency(server: Server, config: BenchConfig, prompt: str) -> tuple[float, float]:
    """Median seconds to the first streamed token, and per token after it, of one request with nothing beside it."""
    client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0)
    model, firsts, rests = server.model, [], []
    for repeat in range(config.repeats + 1):
        start = time.perf_counter()
        stream = client.completions.create(
            model=model,
            prompt=f"{repeat} {prompt}",  # another prefix each time: nothing of it is cached
            max_tokens=config.max_tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        first = None
        for _ in stream:
            first = first or time.perf_counter()
        firsts.append(first - start)
        rests.append((time.perf_counter() - first) / (config.max_tokens - 1))
    return statistics.median(firsts[1:]), statistics.median(rests[1:])


if __name__ == "__main__":
    main()
