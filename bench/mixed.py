"""Measure a mixed workload on any OpenAI server: ``python -m bench.mixed [stream=T]``.

All requests are sent at once. Lengths are those of ``bench.traces.mix``: lognormal prompts of 198 tokens and answers of
215 tokens on average. Prompts share nothing, and every answer is as long as its limit. The last line is one JSON
object.
"""

from functools import partial
from typing import Any

from pydantic import Field

from bench.send import failures, send_all
from bench.server import report
from bench.target import Target, TargetConfig, measure_throughput, median_run
from bench.traces import LONGEST_ANSWER, LONGEST_PROMPT, VOCAB_SIZE, mix
from bench.watch import Watch, during, summary
from services.cli.bench.clients import makespan
from services.cli.bench.exchange import Reply
from services.common.config import from_command_line
from services.common.flags import Bool, Float, Int


class MixedConfig(TargetConfig):
    """The flags."""

    requests: Int = Field(8192, ge=1)
    stream: Bool = False
    longest_prompt: Int = Field(LONGEST_PROMPT, ge=1, description="tokens to which longer prompts are cut")
    longest_answer: Int = Field(LONGEST_ANSWER, ge=1)
    vocab_size: Int = Field(VOCAB_SIZE, ge=2, description="prompts are random token ids from 1 to this number less one")
    temperature: Float = Field(0.6, ge=0)
    repeats: Int = Field(1, ge=1)


def main() -> None:
    config = from_command_line(MixedConfig)
    report(measure_throughput(config, "mixed", partial(measure, config)))


def measure(config: MixedConfig, target: Target) -> dict[str, Any]:
    """Measure all repeats on one server. Return the figures of the median run."""
    runs = [measure_once(config, target, number) for number in range(config.repeats)]
    return median_run(runs)


def measure_once(config: MixedConfig, target: Target, number: int) -> dict[str, Any]:
    """Measure one run. ``number`` changes the prompts, so that none is cached."""
    url = f"{target.url}/v1/completions"
    asked = [
        {
            "model": target.model,
            "prompt": ((request.tokens[: config.longest_prompt] + number) % (config.vocab_size - 1) + 1).tolist(),
            "max_tokens": min(request.max_tokens, config.longest_answer),
            "ignore_eos": True,
            "temperature": config.temperature,
            **({"stream": True, "stream_options": {"include_usage": True}} if config.stream else {}),
        }
        for request in mix(config.requests).requests
    ]
    send_all(url, [asked[0] | {"max_tokens": 4}])  # warm up
    with Watch(target) as watch:
        replies = send_all(url, asked, config.clients, watch.look_in_time)
    seconds, failed = makespan(replies), failures(replies)
    wrong = sum(not _as_asked(reply, body) for reply, body in zip(replies, asked, strict=True) if not reply.error)
    if wrong:
        print(f"{wrong} answers do not have the requested length")
    output = sum(reply.completion_tokens for reply in replies)
    every = output + sum(reply.prompt_tokens for reply in replies)
    print(
        f"{target.name}: {config.requests} requests in {seconds:.2f} s: {output / seconds:.0f} output tok/s,"
        f" {every / seconds:.0f} with the prompts' tokens; {failed} failed"
    )
    return {
        "tokens_per_second": output / seconds,
        "all_tokens_per_second": every / seconds,
        "seconds": seconds,
        "tokens": output,
        "failures": failed,
        "wrong_lengths": wrong,
        "stream": config.stream,
        "whole": summary(during(watch.samples, replies)),
    }


def _as_asked(reply: Reply, body: dict[str, Any]) -> bool:
    return reply.completion_tokens == body["max_tokens"]


if __name__ == "__main__":
    main()
