"""Unexpected JSON values, and invalid JSON texts."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

_DEEP = "@deep@"  # placeholder for a nesting that ``json`` cannot write
_NUMBERS = (
    0, -1, 1, 2, 7, 64, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63, 2**64, -(2**63), 10**30, 0.5, -0.0,
    1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
_TEXTS = (
    "", " ", "\x00", "\ud800", "\udfff\ud800", "é", "🙂" * 3, "\u202e", "<|endoftext|>", "<|begin|>", "null", "{}",
    "[]", "auto", "none", "required", "../../etc/passwd", "' OR 1=1 --", "{{ 7*7 }}", "%s%n", "\r\nX: y", "json_schema",
    "text", "a" * 5000, "\ufeff", "ÿ", "﷽" * 40,
)  # fmt: skip
_NO_UTF8 = (b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\x00", b"\xf4\x90\x80\x80")


def scalar(random: Random) -> Any:
    """Return a random value that is no list or object."""
    kind = random.randrange(8)
    if kind < 3:
        return random.choice(_NUMBERS)
    if kind < 6:
        return random.choice(_TEXTS)
    if kind == 6:
        return random.choice((None, True, False))
    return "".join(chr(random.choice((random.randrange(128), random.randrange(0x3000), 0x1F600))) for _ in range(6))


def value(random: Random, depth: int = 3) -> Any:
    """Return a random value."""
    kind = random.randrange(12)
    if depth and kind == 0:
        return [value(random, depth - 1) for _ in range(random.choice((0, 1, 3, 20)))]
    if depth and kind == 1:
        return {str(scalar(random)): value(random, depth - 1) for _ in range(random.choice((0, 1, 3)))}
    if kind == 2 and random.random() < 0.3:
        return random.choice((_DEEP, [1] * 3000, "x" * 40_000))
    return scalar(random)


def mutated(random: Random, document: Any) -> Any:
    """Return a copy of ``document`` with another value in one place."""
    document = json.loads(json.dumps(document))
    places = list(_places(document))
    if not places:
        return value(random)
    holder, key = random.choice(places)
    kind = random.randrange(10)
    if kind < 6:
        holder[key] = value(random)
    elif kind == 6:
        del holder[key]
    elif kind == 7:
        holder[key] = [holder[key]]
    elif kind == 8 and isinstance(holder, dict):
        other, other_key = random.choice(places)
        holder[key] = json.loads(json.dumps(other.get(other_key) if isinstance(other, dict) else other[other_key]))
    elif isinstance(holder, list):
        holder.extend([holder[key]] * random.choice((1, 5, 200)))
    else:
        holder[str(scalar(random))] = value(random)
    return document


def write(random: Random, document: Any) -> bytes:
    """Return ``document`` as JSON in a random format. Lone surrogates are sometimes not escaped, which is invalid."""
    if random.random() < 0.8:
        text = json.dumps(document).encode()
    else:
        text = json.dumps(document, ensure_ascii=False, indent=random.choice((None, 1))).encode(errors="surrogatepass")
    if _DEEP.encode() in text:
        depth = random.choice((50, 300, 990, 100_000))
        opened, closed = random.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"[", b"")))
        text = text.replace(b'"%s"' % _DEEP.encode(), opened * depth + b"1" + closed * depth, 1)
    return text


def broken(random: Random, text: bytes) -> bytes:
    """Return ``text`` with damaged bytes."""
    at = random.randrange(len(text) + 1)
    damages: tuple[Callable[[], bytes], ...] = (
        lambda: text[:at],
        lambda: text[at:],
        lambda: text[:at] + bytes([random.randrange(256)]) + text[at + 1 :],
        lambda: text[:at] + random.choice(_NO_UTF8) + text[at:],
        lambda: text + text,
        lambda: text.replace(b'":', b'": NaN, "x":', 1),
        lambda: text.replace(b"{", b'{"model": null, "prompt": "a", "prompt": 3, "messages": [], ', 1),
        lambda: b"\xef\xbb\xbf" + text,
        lambda: text.decode("latin-1").encode(random.choice(("utf-16", "utf-32", "utf-7"))),
        lambda: random.choice((b"", b"null", b"[]", b'"', b"1e999", b"-", b"{" * 2000, b"\x1f\x8b\x08" + text)),
    )  # fmt: skip
    return random.choice(damages)()


def _places(part: Any):
    """Yield every pair of a holder and a key in ``part``."""
    if isinstance(part, dict):
        for key in list(part):
            yield part, key
            yield from _places(part[key])
    elif isinstance(part, list):
        for key in range(len(part)):
            yield part, key
            yield from _places(part[key])
