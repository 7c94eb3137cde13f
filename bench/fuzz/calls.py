"""Calls over gRPC: valid messages, and invalid messages made from them."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from google.protobuf.message import Message

from bench.chaos.questions import MODEL
from bench.fuzz.canary import canary, random_of
from bench.fuzz.messages import damaged, fill, mutated
from tokasaurus.scheduler.v1 import generate_pb2, observe_pb2, session_pb2

_GRAMMARS = (
    {"regex": "[ab]{2}"},
    {"json_schema": '{"type": "object", "properties": {"a": {"enum": [1]}}}'},
    {"lark": 'start: "a" | "b"'},
    {"choices": {"texts": ["yes", "no"]}},
)


@dataclass(frozen=True)
class Call:
    """A call. ``data``: all messages, a single one if the method is unary."""

    number: int
    kind: str
    method: str
    data: tuple[bytes, ...]
    right: tuple[generate_pb2.GenerateRequest, ...] = ()  # its requests, if the call is valid
    mark: str = ""
    timeout_s: float | None = None
    ends: str = "closed"  # end of a session: closed, cancelled, or left open until the timeout


class Calls:
    """A generator of calls to a scheduler. Each is a function of the seed and its number."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._kinds: tuple[tuple[Callable[[Random, int], Call], int], ...] = (
            (self._right, 25),
            (self._right_session, 5),
            (self._generate, 30),
            (self._session, 12),
            (self._other, 25),
            (self._unknown, 3),
        )

    def make(self, number: int) -> Call:
        """Return call ``number``."""
        random = random_of(self._seed, "grpc", number)
        [(kind, _)] = random.choices(self._kinds, weights=[weight for _, weight in self._kinds])
        return kind(random, number)

    def _right(self, random: Random, number: int) -> Call:
        request = _plain(random, number)
        return Call(number, "right", "Generate", (request.SerializeToString(),), (request,), canary(number))

    def _right_session(self, random: Random, number: int) -> Call:
        requests = [_plain(random, number) for _ in range(random.choice((1, 5, 20)))]
        messages = [session_pb2.SessionRequest(open=session_pb2.SessionOpen(client_id="fuzz"))]
        handle = random.randrange(2**31)
        for request in requests:
            messages.append(_submit(handle, request))
            handle += request.n
        if random.random() < 0.5:
            messages[1:] = [_joined(messages[1:])]
        data = tuple(message.SerializeToString() for message in messages)
        return Call(number, "right session", "Session", data, tuple(requests), canary(number))

    def _generate(self, random: Random, number: int) -> Call:
        message: Message = _any(random, number)
        timeout = random.choice((0.001, 0.02, 0.2)) if random.random() < 0.1 else None
        return Call(number, "generate", "Generate", (_spoilt(random, message),), mark=canary(number), timeout_s=timeout)

    def _session(self, random: Random, number: int) -> Call:
        """Return a session of many valid and invalid messages, in random order."""
        messages: list[bytes] = []
        if random.random() < 0.95:
            messages.append(
                session_pb2.SessionRequest(open=session_pb2.SessionOpen(client_id="fuzz")).SerializeToString()
            )
        handles = [random.choice((0, 1, 2**32 - 1, random.randrange(2**32)))]
        for _ in range(random.choice((1, 5, 30))):
            message = session_pb2.SessionRequest()
            kind = random.randrange(10)
            if kind < 6:
                handles.append(random.choice((*handles, (handles[-1] + 1) % 2**32, random.randrange(2**32))))
                message = _submit(handles[-1], _any(random, number))
                if random.random() < 0.3:
                    message = _joined([message, _submit(random.choice(handles), _any(random, number))])
            elif kind < 8:
                message.cancel.handles.extend(random.choice((*handles, 7)) for _ in range(random.choice((0, 1, 9))))
            elif kind == 8:
                message.heartbeat.nonce = random.getrandbits(64)
            else:
                fill(random, message, 1)
            messages.append(_spoilt(random, message) if random.random() < 0.3 else message.SerializeToString())
        ends = random.choice(("closed", "closed", "cancelled", "left"))
        return Call(number, "session", "Session", tuple(messages), mark=canary(number), ends=ends)

    def _other(self, random: Random, number: int) -> Call:
        mark = canary(number)
        forecast = observe_pb2.ForecastRequest(request=_any(random, number), horizon_steps=random.choice((0, 10, 2000)))
        chat = generate_pb2.ChatPrompt(messages=[generate_pb2.ChatMessage(role="user", content=mark)])
        ids = [random.randrange(2048) for _ in range(random.choice((0, 1, 100)))]
        method, message = random.choice(
            (
                ("GetModel", observe_pb2.GetModelRequest(model=random.choice(("", MODEL)))),
                ("GetLoad", observe_pb2.GetLoadRequest()),
                ("Forecast", forecast),
                ("Forecast", observe_pb2.ForecastRequest(request_id=f"fuzz-{random.randrange(number + 1)}")),
                ("ListRequests", observe_pb2.ListRequestsRequest(horizon_steps=1000)),
                ("CancelRequest", observe_pb2.CancelRequestRequest(request_id=mark)),
                ("WatchPlans", observe_pb2.WatchPlansRequest()),
                ("Tokenize", observe_pb2.TokenizeRequest(text=f"{mark} é" * random.choice((1, 300)))),
                ("Tokenize", observe_pb2.TokenizeRequest(chat=chat)),
                ("Detokenize", observe_pb2.DetokenizeRequest(token_ids=ids)),
            )
        )
        return Call(number, "other", method, (_spoilt(random, message),), mark=mark)

    def _unknown(self, random: Random, number: int) -> Call:
        """Return a call of an unknown method, or with the message of another method."""
        method = random.choice(("Nothing", "generate", "", "Tokenize", "GetLoad", "Forecast", "Detokenize"))
        return Call(number, "unknown", method, (_any(random, number).SerializeToString(),), mark=canary(number))


def _plain(random: Random, number: int) -> generate_pb2.GenerateRequest:
    """Return a request whose answer is known."""
    prompt = [random.randrange(16, 2048) for _ in range(random.choice((1, 4, 40)))]
    request = generate_pb2.GenerateRequest(
        tokens=generate_pb2.TokenPrompt(token_ids=prompt), n=random.choice((1, 1, 3))
    )
    request.sampling.temperature, request.sampling.seed = random.choice((0.0, 0.7)), random.getrandbits(60)
    request.stopping.max_tokens = random.choice((1, 3, 8))
    return request


def _any(random: Random, number: int) -> generate_pb2.GenerateRequest:
    """Return a valid request with further fields."""
    request, mark = _plain(random, number), canary(number)
    for more in random.sample(range(9), random.randrange(4)):
        match more:
            case 0:
                request.text = f"{mark} and more"
            case 1:
                request.chat.messages.add(role="user", content=mark)
            case 2:
                request.sampling.grammar.MergeFrom(generate_pb2.Grammar(**random.choice(_GRAMMARS)))
            case 3:
                request.stopping.strings.extend(("a", mark))
                request.stopping.token_ids.append(30)
            case 4:
                request.output.logprobs, request.output.top_logprobs = True, random.choice((0, 2))
            case 5:
                request.output.prompt_logprobs = 1
            case 6:
                request.sampling.logit_bias_token_ids.extend((20, 30))
                request.sampling.logit_bias_values.extend((1, -1))
            case 7:
                request.request_id = f"fuzz-{number}"
                request.deadline_unix_ms = random.choice((0, 1, 2**63, 4 * 10**12))
            case 8:
                request.resume.generated_tokens = random.choice((0, 1, len(request.tokens.token_ids)))
                request.resume.sample_index = random.choice((0, 5))
    return request


def _submit(handle: int, request: generate_pb2.GenerateRequest) -> session_pb2.SessionRequest:
    return session_pb2.SessionRequest(submit=session_pb2.Submit(handle=handle, request=request))


def _joined(messages: list[session_pb2.SessionRequest]) -> session_pb2.SessionRequest:
    """Merge ``messages``, each with one request, into one message."""
    submits = [message.submit for message in messages]
    return session_pb2.SessionRequest(submits=session_pb2.Submits(submits=submits))


def _spoilt(random: Random, message: Message) -> bytes:
    """Return ``message``, usually with a mutation."""
    for _ in range(random.choice((0, 1, 1, 2, 4))):
        message = mutated(random, message)
    data = message.SerializeToString()
    return damaged(random, data) if random.random() < 0.1 else data
