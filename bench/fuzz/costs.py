"""The search for the body that costs a gateway most: ``python -m bench.fuzz surface=costs requests=300``.

A body is a function of a few choices: where it is sent, which field is large, what the field holds, how deep, and in
how many bytes. A third of the bodies are new, and the others change one choice of the worst body so far. While
the gateway reads a body, another connection asks for ``/ping`` all the time: the longest answer shows how long the
event loop was blocked. The kernel tells the peak of the gateway's memory.
"""

import asyncio
import statistics
import sys
import time
from dataclasses import dataclass, replace
from itertools import islice, repeat
from pathlib import Path
from random import Random
from typing import Any

import httpx

from bench.fuzz.findings import Findings
from services.common.text.encoder import MAX_TEXT_BYTES

MAX_BODY_BYTES = 32 * 1024 * 1024
# Memory that any body may add, even a small one: a body of 60 KB has 15,000 prompts, and each takes 2 KB while it runs.
SMALL_BYTES = 64 * 1024 * 1024
_TOKENISING_FACTOR = 250  # bytes of memory for each byte of the longest text, while it is tokenised
_FACTOR = 4  # of its size, that a body may add to memory beside itself
_TRIES = 3  # measurements of a body that blocks the loop, since the machine may have been busy
_PING_S = 0.001
_KEPT = 8  # of the worst bodies, from which others are made

_MESSAGE = b'{"role":"user","content":%b}'
# Path, text before the large value, and text behind it.
_PLACES = (
    ("/v1/completions", b'{"prompt":', b"}"),
    ("/v1/completions", b'{"max_tokens":1,"stream":true,"prompt":', b"}"),
    ("/v1/completions", b'{"max_tokens":1,"prompt":"a","n":16384,"x":', b"}"),
    ("/v1/completions", b'{"prompt":"a","x":', b"}"),
    ("/v1/completions", b'{"prompt":"a","stop":', b"}"),
    ("/v1/completions", b'{"prompt":"a","metadata":', b"}"),
    ("/v1/completions", b'{"prompt":"a","logit_bias":', b"}"),
    ("/v1/completions", b'{"prompt":"a","guided_choice":', b"}"),
    ("/v1/completions", b'{"prompt":"a","response_format":{"type":"json_object","schema":', b"}}"),
    ("/v1/chat/completions", b'{"messages":', b"}"),
    ("/v1/chat/completions", b'{"messages":[{"role":"user","content":', b"}]}"),
    ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"a","x":', b"}]}"),
    ("/v1/chat/completions", b'{"messages":[{"role":"assistant","tool_calls":', b"}]}"),
    ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"a"}],"tools":', b"}"),
    ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"a"}],"documents":', b"}"),
    ("/v1/chat/completions", b'{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":', b"}"),
    ("/v1/chat/completions/batch", b"", b""),
    ("/v1/responses", b'{"input":', b"}"),
    ("/v1/responses", b'{"input":[{"role":"user","content":', b"}]}"),
    ("/v1/messages", b'{"max_tokens":1,"messages":', b"}"),
    ("/v1/messages", b'{"max_tokens":1,"messages":[{"role":"user","content":', b"}]}"),
    ("/v1/messages/count_tokens", b'{"messages":[{"role":"user","content":"a"}],"system":', b"}"),
    ("/v1/conversations", b'{"items":', b"}"),
    ("/v1/batches", b'{"metadata":', b"}"),
    ("/tokenize", b'{"prompt":', b"}"),
    ("/tokenize", b'{"messages":', b"}"),
    ("/detokenize", b'{"tokens":', b"}"),
)
# Items of a large list, or the characters of a large text.
_ITEMS = (
    b"1", b"5", b"77777", b"1e5", b"-1", b"true", b"null", b'""', b'"a"', b"[]", b"{}", b"[1]", b"[[]]", b'{"":0}',
    b'"\\u00e9"', b"[5,6,7]", _MESSAGE % b'""', _MESSAGE % b'"a"', _MESSAGE % b"[]", b'{"role":"user","x":{}}',
    _MESSAGE % b'[{"type":"text","text":""}]', b'{"type":"text","text":""}', b'{"type":"text","text":"","x":0}',
    b'{"type":"function","function":{"name":"","arguments":""}}', b'{"type":"function","function":{"name":"a"}}',
    b'{"messages":[{"role":"user","content":""}]}', b'{"type":"function_call_output","call_id":"","output":""}',
)  # fmt: skip
_CHARACTERS = (
    b"a",
    b"\\n",
    b"\\\\",
    b"\\u0041",
    b"\\u00e9",
    b"\\ud83d\\ude00",
    "é".encode(),
    "🙂".encode(),
    b"[",
    b",",
    b" ",
)
_SHAPES = ("list", "text", "texts", "object", "deep", "lists")
_SIZES = (64, 20_000, 60_000, 120_000, 400_000, 2_000_000, 14_000_000, MAX_BODY_BYTES - 1024)


@dataclass(frozen=True)
class Choices:
    """The choices that make a body, as indices into the tables above."""

    place: int
    shape: int
    item: int
    character: int
    size: int
    odd: int  # what stands at the end: nothing, a wide character, or an item of another kind

    @classmethod
    def drawn(cls, draw: Random) -> "Choices":
        """Return choices that are all drawn."""
        lengths = (_PLACES, _SHAPES, _ITEMS, _CHARACTERS, _SIZES, range(3))
        return cls(*(draw.randrange(len(each)) for each in lengths))

    def changed(self, draw: Random) -> "Choices":
        """Return the same choices but for one."""
        name = draw.choice([*self.__dataclass_fields__])
        return replace(self, **{name: getattr(Choices.drawn(draw), name)})

    @property
    def text_bytes(self) -> int:
        """Number of bytes of the longest text that is tokenised."""
        return min(_SIZES[self.size], MAX_TEXT_BYTES) if _SHAPES[self.shape] in ("text", "texts") else 0

    def body(self) -> tuple[str, bytes]:
        """Return the path and the body."""
        path, before, behind = _PLACES[self.place]
        return path, before + self._value(_SIZES[self.size] - len(before) - len(behind)) + behind

    def _value(self, size: int) -> bytes:
        item, character = _ITEMS[self.item], _CHARACTERS[self.character]
        end = (b"", "🙂".encode(), b"")[self.odd]
        match _SHAPES[self.shape]:
            case "list":
                return b"[%b%b]" % (_filled(item, size), b',{"odd":[]}' if self.odd == 2 else b"")
            case "text":
                return b'"%b%b"' % (character * (size // len(character)), end)
            case "texts":
                text = b'"%b%b"' % (character * (4_000_000 // len(character)), end)
                return b"[%b]" % b",".join(repeat(text, max(1, size // len(text))))
            case "object":
                return b"{%b}" % b",".join(b'"%x":%b' % (n, item) for n in range(max(1, size // (len(item) + 9))))
            case "deep":
                depth = min(size // 2, 900)
                return b"[" * depth + _filled(item, size - 2 * depth) + b"]" * depth
        return b"[%b]" % _filled(b"[%b]" % _filled(item, 4096), size)


def _filled(item: bytes, size: int) -> bytes:
    return b",".join(repeat(item, max(1, size // (len(item) + 1))))


_TINY = Choices(0, 0, 0, 0, 0, 0)
# The first bodies: as many prompts as one request may have, as token ids and as texts; and a long text to tokenise.
_KNOWN = (
    *(
        Choices(place, _SHAPES.index("list"), _ITEMS.index(item), 0, _SIZES.index(60_000), 0)
        for place in (0, 1)
        for item in (b"[1]", b'"a"')
    ),
    Choices([path for path, *_ in _PLACES].index("/tokenize"), _SHAPES.index("text"), 0, 0, _SIZES.index(2_000_000), 0),
)


@dataclass(frozen=True)
class Cost:
    """The cost of a body: seconds without an answer to a ping, beyond those of a tiny body, and bytes of memory beside
    the body."""

    blocked_s: float
    added: int
    size: int
    status: int
    text_bytes: int

    @property
    def memory_bound(self) -> int:
        """Number of bytes that a body of this size may add, with those for its text if that was tokenised."""
        tokenised = self.text_bytes if self.status == httpx.codes.OK else 0
        return max(_FACTOR * self.size, SMALL_BYTES) + _TOKENISING_FACTOR * tokenised

    def badness(self, blocked_s: float) -> float:
        """Return the larger share of what is allowed, of time and of memory."""
        return max(self.blocked_s / blocked_s, self.added / self.memory_bound)


class CostFuzzer:
    """The search. ``pid``: of the gateway at ``url``."""

    def __init__(self, url: str, pid: int, findings: Findings, *, seed: int, blocked_s: float) -> None:
        self._url, self._pid, self._findings = url, pid, findings
        self._seed, self._blocked_s = seed, blocked_s
        self._idle_s = 0.0  # the longest answer to a ping while the gateway reads a tiny body
        self._worst: list[tuple[float, Choices]] = []
        self._sender = httpx.Client(base_url=url, timeout=120, trust_env=False, verify=False)

    async def run(self, first: int, count: int) -> dict[str, Any]:
        """Send ``count`` bodies. Returns the worst costs."""
        costs: list[Cost] = []
        client = httpx.AsyncClient(base_url=self._url, timeout=120, trust_env=False, verify=False)
        async with client:
            self._idle_s = statistics.median([(await self._cost(client, _TINY)).blocked_s for _ in range(9)])
            for number in range(first, first + count):
                choices = _KNOWN[number] if number < len(_KNOWN) else self._choose(Random(f"{self._seed} {number}"))
                cost = await self._cost(client, choices)
                for _ in range(_TRIES - 1):
                    if cost.blocked_s <= self._blocked_s:
                        break
                    cost = min(cost, await self._cost(client, choices), key=lambda each: each.blocked_s)
                costs.append(cost)
                self._judge(number, choices, cost)
                self._worst.append((cost.badness(self._blocked_s), choices))
                self._worst.sort(key=lambda each: -each[0])
                del self._worst[_KEPT:]
                print(f"{number}: {cost} {choices}", file=sys.stderr, flush=True)
        return {
            "bodies": count,
            "blocked_ms_when_idle": round(1e3 * self._idle_s, 1),
            "worst_blocked_ms": round(1e3 * max(each.blocked_s for each in costs), 1),
            "worst_added_mb": round(max(each.added for each in costs) / 1e6, 1),
            "worst_share_of_memory": round(max(each.added / each.memory_bound for each in costs), 2),
            "worst_body": str(self._worst[0][1]),
        }

    def _choose(self, draw: Random) -> Choices:
        if not self._worst or draw.random() < 1 / 3:
            return Choices.drawn(draw)
        return draw.choice(self._worst)[1].changed(draw)

    def _judge(self, number: int, choices: Choices, cost: Cost) -> None:
        path, body = choices.body()
        told = f"{path}: {choices} of {cost.size} bytes"
        if cost.blocked_s > self._blocked_s:
            self._findings.add("costs", number, "blocked", f"{told}: {cost.blocked_s * 1e3:.0f} ms", body)
        if cost.added > cost.memory_bound:
            self._findings.add("costs", number, "memory", f"{told}: {cost.added / 1e6:.0f} MB added", body)
        if cost.status >= 500:
            self._findings.add("costs", number, "status", f"{told}: {cost.status}", body)

    async def _cost(self, client: httpx.AsyncClient, choices: Choices) -> Cost:
        path, body = choices.body()
        before = self._begin_peak()
        sent = asyncio.create_task(asyncio.to_thread(self._send, path, body))  # which would hold up the pings
        blocked_s = 0.0
        while not sent.done():
            asked_at = time.perf_counter()
            await client.get("/ping")
            blocked_s = max(blocked_s, time.perf_counter() - asked_at)
            await asyncio.sleep(_PING_S)
        status = await sent
        blocked_s = max(0.0, blocked_s - self._idle_s)
        return Cost(blocked_s, self._memory("VmHWM") - before - len(body), len(body), status, choices.text_bytes)

    def _send(self, path: str, body: bytes) -> int:
        """Return the status of the answer to ``body``."""
        headers = {"content-type": "application/json"}
        return self._sender.post(path, content=body, headers=headers).status_code

    def _begin_peak(self) -> int:
        """Reset the peak of the gateway's memory; return its memory now, in bytes."""
        Path(f"/proc/{self._pid}/clear_refs").write_text("5")
        return self._memory("VmRSS")

    def _memory(self, name: str) -> int:
        lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
        [line] = islice((line for line in lines if line.startswith(f"{name}:")), 1)
        return int(line.split()[1]) * 1024
