"""Measure sleeps: ``python -m bench.sleep [server_flags='model=...'] [level=1]``.

The program sends a few prompts, puts the server to sleep, reads the memory of the devices, wakes the server and sends
the same prompts again. It fails if the tokens differ. The last line is one JSON object. Free memory counts that of all
programs on the devices, and is null without an NVIDIA driver. Times of a first sleep include the allocation of host
memory.
"""

import shlex
import statistics
import time
from typing import Any

import httpx
from pydantic import Field

from bench.gpus import Gpus
from bench.server import Server, report, serve
from services.common.config import from_command_line
from services.common.flags import Config, Int

TIMEOUT_S = 1800.0
PROMPTS = [[2 + 7 * number, *range(40, 140 + 50 * number)] for number in range(8)]


class SleepConfig(Config):
    """The flags."""

    server_flags: str = Field("", description="flags of the server, quoted as in a shell: 'model=... tp_size=2'")
    level: Int = Field(1, ge=1, le=2)
    sleeps: Int = Field(3, ge=1)
    output_tokens: Int = Field(32, ge=1)


def main() -> None:
    config = from_command_line(SleepConfig)
    flags = dict(flag.split("=", 1) for flag in shlex.split(config.server_flags))
    with serve(**flags) as server, httpx.Client(base_url=server.base_url, timeout=TIMEOUT_S, trust_env=False) as client:
        figures = measure(config, server, client)
    for name, value in figures.items():
        print(f"{name:>20} {value}")
    report(figures)
    if figures["wrong"]:
        raise SystemExit(f"{figures['wrong']} answers after a sleep differ from those before")


def measure(config: SleepConfig, server: Server, client: httpx.Client) -> dict[str, Any]:
    """Sleep and wake. Return the figures. Times are in seconds."""
    model, wrong, released = server.model, 0, 0
    sleeps, wakes, firsts, free = [], [], [], []
    expected, awake = [ask(client, model, prompt, config.output_tokens) for prompt in PROMPTS], free_share()
    for _ in range(config.sleeps):
        began = time.perf_counter()
        released = post(client, f"/sleep?level={config.level}")["released_bytes"]
        sleeps.append(time.perf_counter() - began)
        free.append(free_share())
        began = time.perf_counter()
        post(client, "/wake_up")
        wakes.append(time.perf_counter() - began)
        began = time.perf_counter()
        ask(client, model, PROMPTS[0], 1)
        firsts.append(time.perf_counter() - began)
        post(client, "/reset_prefix_cache")
        found = [ask(client, model, prompt, config.output_tokens) for prompt in PROMPTS]
        wrong += sum(one != other for one, other in zip(expected, found, strict=True))
    return {
        "level": config.level,
        "released_gib": round(released / 2**30, 2),
        "free_share_awake": awake,
        "free_share_asleep": None if None in free else min(free),
        "first_sleep_s": round(sleeps[0], 3),
        "sleep_s": round(statistics.median(sleeps[1:] or sleeps), 3),
        "wake_s": round(statistics.median(wakes), 3),
        "longest_wake_s": round(max(wakes), 3),
        "first_token_s": round(statistics.median(firsts), 3),
        "wrong": wrong,
    }


def ask(client: httpx.Client, model: str, prompt: list[int], tokens: int) -> list[int]:
    """Return a greedy answer as token ids."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    answer = client.post("/v1/completions", json=body | {"return_token_ids": True}).raise_for_status()
    return answer.json()["choices"][0]["token_ids"]


def post(client: httpx.Client, path: str) -> dict[str, Any]:
    return client.post(path).raise_for_status().json()


def free_share() -> float | None:
    """Return the smallest share of free memory of a visible GPU, or None without one."""
    gpus = Gpus.visible()
    return None if gpus is None else gpus.free_share()


if __name__ == "__main__":
    main()
