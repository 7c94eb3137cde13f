"""Valid and invalid HTTP requests, as bytes.

Each is a function of the seed and its number, except for the ids of files, batches and responses of earlier requests.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any
from urllib.parse import quote

from bench.fuzz import bodies
from bench.fuzz.canary import canary, random_of
from bench.fuzz.credentials import Credentials
from bench.fuzz.kept import Kept
from bench.fuzz.schema import Api
from bench.fuzz.values import broken, mutated, scalar, value, write

_METHODS = ("GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "get", "X" * 30)
_TYPES = ("application/json", "text/plain", "application/json; charset=utf-16", "multipart/form-data",
          "application/x-www-form-urlencoded", "\x7f", "")  # fmt: skip
FOREIGN_SITE = b"evil.example"  # a request from a web page of this site must be refused
_HEADS: tuple[bytes, ...] = (
    b"GET /v1/models HTTP/9.9\r\n\r\n",
    b"GET\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 40,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999999999999999999\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: abc\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: a\r\nx" + b": y\r\nx" * 5000 + b": y\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: a\r\n folded: x\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: a\r\nna\x00me: x\r\n\r\n",
    b"GET /v1/models HTTP/1.1\nhost: a\n\n",
    b"GET /v1/models HTTP/1.0\r\n\r\n",
    b"GET http://[::1 HTTP/1.1\r\nhost: a\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: a\r\nupgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-key: x\r\n\r\n",
    b"CONNECT evil:443 HTTP/1.1\r\nhost: evil\r\n\r\n",
    b"GET /console/state HTTP/1.1\r\nhost: " + FOREIGN_SITE + b"\r\n\r\n",
    b"GET /v1/files HTTP/1.1\r\nhost: localhost\r\nhost: " + FOREIGN_SITE + b"\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nhost: \xff\xfe.\xe9:\xb2\r\norigin: \xff\r\n\r\n",
    b"DELETE /console/requests?id=x HTTP/1.1\r\nhost: a\r\norigin: http://" + FOREIGN_SITE + b"\r\n\r\n",
    b"POST /v1/batches/batch_1/cancel HTTP/1.1\r\nhost: a\r\nsec-fetch-site: cross-site\r\ncontent-length: 0\r\n\r\n",
)  # fmt: skip


@dataclass(frozen=True)
class Ask:
    """An HTTP request with what its checks need."""

    number: int
    kind: str
    method: str
    path: str
    data: bytes  # all bytes of the request
    owner: str | None = ""  # owner of the API key; empty: no keys are in use; None: a wrong key, or none
    body: Any = None  # body of a valid request, to check the answer; None: do not check it
    leaves_after: int | None = None  # bytes of the answer after which the client disconnects
    stops: bool = False  # the request has no end
    is_http: bool = True  # False: the server may close the connection


class Asks:
    """A generator of requests."""

    def __init__(self, seed: int, api: Api, kept: Kept, credentials: Credentials) -> None:
        self._seed, self._api, self._kept, self._credentials = seed, api, kept, credentials
        self._kinds: Sequence[tuple[Callable[[Random, int], Ask], int]] = (
            (self._right, 30),
            (self._described, 18),
            (self._mutated, 30),
            (self._broken, 8),
            (self._misled, 8),
            (self._of_files, 3),
            (self._malformed, 2),
            (self._leaving, 2),
            (self._stopping, 0),
        )

    def make(self, number: int) -> Ask:
        """Return request ``number``."""
        random = random_of(self._seed, "http", number)
        if number % 500 == 499:  # rare, because each occupies a connection for seconds
            return self._stopping(random, number)
        [(kind, _)] = random.choices(self._kinds, weights=[weight for _, weight in self._kinds])
        return kind(random, number)

    def _right(self, random: Random, number: int) -> Ask:
        body = bodies.completion(random, canary(number))
        return self._post(random, number, "right", "/v1/completions", write(random, body), body=body)

    def _described(self, random: Random, number: int) -> Ask:
        operation = random.choice(self._api.operations)
        path = self._filled(random, operation.path)
        if operation.queries and random.random() < 0.5:
            given = (f"{name}={quote(str(scalar(random)), errors='replace')}" for name in operation.queries)
            path += "?" + "&".join(given)
        content = b""
        if operation.body is not None:
            content = write(random, self._api.make(random, operation.body, canary(number)))
        return self._send(random, number, "described", operation.method, path, content)

    def _mutated(self, random: Random, number: int) -> Ask:
        path, body = bodies.right(random, canary(number))
        document: Any = body
        for _ in range(random.choice((0, 1, 1, 2, 3))):
            document = mutated(random, document)
        return self._post(random, number, "mutated", path, write(random, document))

    def _broken(self, random: Random, number: int) -> Ask:
        path, body = bodies.right(random, canary(number))
        return self._post(random, number, "broken", path, broken(random, write(random, body)))

    def _misled(self, random: Random, number: int) -> Ask:
        """Return a request with a wrong path, method or content type."""
        path = self._filled(random, random.choice(self._api.operations).path)
        if random.random() < 0.3:
            at = random.randrange(len(path) + 1)
            path = path[:at] + quote(str(scalar(random)), safe="/?%:@", errors="replace")[:3000] + path[at:]
        _, body = bodies.right(random, canary(number))
        method = random.choice(_METHODS)
        content = write(random, random.choice((body, value(random)))) if method not in ("HEAD", "CONNECT") else b""
        return self._send(random, number, "misled", method, path, content, odd=True)

    def _of_files(self, random: Random, number: int) -> Ask:
        """Return an upload of a file, or a Batch job of one."""
        if random.random() < 0.5:
            content = bodies.lines(random, canary(number))
            if random.random() < 0.3:
                content = broken(random, content)
            boundary = random.choice(("b", "x" * 70))
            parts = b"".join(
                b'--%s\r\ncontent-disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
                % (boundary.encode(), name, more, text)
                for name, more, text in ((b"purpose", b"", b"batch"), (b"file", b'; filename="in.jsonl"', content))
            )  # fmt: skip
            parts += b"--%s--\r\n" % boundary.encode()
            if random.random() < 0.3:
                parts = broken(random, parts)
            kind = f"multipart/form-data; boundary={boundary}"
            return self._send(random, number, "file", "POST", "/v1/files", parts, kind=kind)
        file = self._kept.choose(random, "file-") or "file-0"
        body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        return self._post(random, number, "batch", "/v1/batches", write(random, body))

    def _malformed(self, random: Random, number: int) -> Ask:
        data = random.choice(_HEADS)
        if random.random() < 0.5:
            good = self._right(random, number).data
            data = broken(random, good[: good.index(b"\r\n\r\n")]) + good[good.index(b"\r\n\r\n") :]
        # The rest of the request is never sent.
        return Ask(number, "malformed", "GET", "", data, stops=True, is_http=False, owner=None)

    def _leaving(self, random: Random, number: int) -> Ask:
        body = bodies.completion(random, canary(number)) | {"stream": True, "max_tokens": 30, "n": 3}
        made = self._post(random, number, "leaving", "/v1/completions", write(random, body))
        data = made.data if random.random() < 0.7 else made.data[: random.randrange(len(made.data))]
        return Ask(number, "leaving", "POST", made.path, data, made.owner, leaves_after=random.choice((0, 1, 400)))

    def _stopping(self, random: Random, number: int) -> Ask:
        made = self._right(random, number)
        data = made.data[: random.randrange(1, len(made.data))]
        if random.random() < 0.5:
            head = made.data[: made.data.index(b"\r\ncontent-length")]
            data = (
                head
                + b"\r\ntransfer-encoding: chunked\r\n\r\n5\r\n"
                + random.choice((b"{", b'{"a":\r\n', b"{}   \r\n3"))
            )
        return Ask(number, "stopping", "POST", made.path, data, made.owner, stops=True)

    def _filled(self, random: Random, path: str) -> str:
        """Return ``path`` with existing or wrong ids in place of its parameters."""
        while "{" in path:
            before, _, rest = path.partition("{")
            name, _, after = rest.partition("}")
            prefix = {"file_id": "file-", "batch_id": "batch_", "response_id": "resp_"}.get(name, "")
            there = self._kept.choose(random, prefix) if prefix and random.random() < 0.7 else None
            wrong = random.choice((f"{prefix}{random.getrandbits(96):024x}", str(scalar(random)), "..", "a/b"))
            path = before + quote(there or wrong, errors="replace") + after
        return path

    def _post(
        self, random: Random, number: int, kind: str, path: str, content: bytes, *, body: dict[str, Any] | None = None
    ) -> Ask:
        return self._send(random, number, kind, "POST", path, content, body=body)

    def _send(
        self, random: Random, number: int, named: str, method: str, path: str, content: bytes,
        *, body: dict[str, Any] | None = None, kind: str = "application/json", odd: bool = False,
    ) -> Ask:  # fmt: skip
        owner, authorization = self._credentials.choose(random, right=body is not None)
        head = [f"{method} {path} HTTP/1.1", "host: fuzz"]
        head += [f"authorization: {authorization}"] if authorization else []
        if odd:
            kind = random.choice(_TYPES)
            odd_headers = (f"x-request-id: {'y' * random.choice((1, 300))}", "traceparent: 00-zz-zz-00",
                           "expect: 100-continue",
                           "accept-encoding: gzip", f"idempotency-key: {'k' * random.choice((1, 300))}", "cookie: a=b",
                           "content-encoding: gzip", "range: bytes=0-1", "x-forwarded-for: 1.2.3.4",
                           "connection: close")  # fmt: skip
            head += random.sample(odd_headers, random.randrange(3))
        if content or method == "POST":
            head += [f"content-type: {kind}"] if kind else []
            head += [f"content-length: {len(content)}"]
        data = "\r\n".join(head).encode("latin-1", "replace") + b"\r\n\r\n" + content
        return Ask(number, named, method, path, data, owner, body)
