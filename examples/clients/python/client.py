"""Streams, cancels, sets a deadline and reads errors: ``python client.py [HOST:PORT]``.

TOKA_API_KEY: a key. TOKA_GRPC_CA: TLS; with TOKA_GRPC_CERT and TOKA_GRPC_KEY, mTLS. All three name PEM files.
"""

import os
import sys
from pathlib import Path

import grpc
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from tokasaurus.scheduler.v1 import generate_pb2, observe_pb2, scheduler_pb2_grpc

PROMPT = "Question: Tom buys 3 books for $7 each and 4 pens for $2 each. How much does he pay?\nAnswer:"
PATIENCE_S = 60.0
OPTIONS = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
]


def open_channel(address: str) -> grpc.Channel:
    paths = [os.environ.get(name) for name in ("TOKA_GRPC_CA", "TOKA_GRPC_KEY", "TOKA_GRPC_CERT")]
    ca, key, cert = (Path(path).read_bytes() if path else None for path in paths)
    if ca is None:
        return grpc.insecure_channel(address, OPTIONS)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), OPTIONS)


class Client:
    """One scheduler, and what every call says about its caller."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        key = os.environ.get("TOKA_API_KEY")
        self._metadata = [("authorization", f"Bearer {key}")] if key else []

    def show_model(self) -> None:
        answer = self._stub.GetModel(observe_pb2.GetModelRequest(), metadata=self._metadata, timeout=PATIENCE_S)
        model = answer.model
        print(
            f"model: {model.id}, contract {model.contract_version}, {model.max_context_tokens} tokens of context",
            flush=True,
        )

    def stream(self) -> None:
        """Text as it comes. The first message accepts the request; the last of a sample has its finish."""
        sampling, stopping = generate_pb2.Sampling(temperature=0), generate_pb2.Stopping(max_tokens=100)
        for message in self._generate(sampling=sampling, stopping=stopping):
            if message.HasField("accepted"):
                print(f"accepted: {message.accepted.prompt_tokens} prompt tokens\nanswer:", end="", flush=True)
            for sample in message.outputs.samples:
                print(sample.text, end="", flush=True)
                if sample.HasField("finish"):
                    reason = generate_pb2.FinishReason.Name(sample.finish.reason)
                    print(f"\nfinish: {reason}, {sample.finish.usage.completion_tokens} tokens")
                    if sample.finish.HasField("error"):
                        report(sample.finish.error)

    def cancel(self) -> None:
        """Cancelling the call ends the request: its place in the batch goes to others at once."""
        call = self._generate(stopping=generate_pb2.Stopping(ignore_eos=True))
        tokens = 0
        try:
            for message in call:
                tokens += sum(len(sample.token_ids) for sample in message.outputs.samples)
                if tokens >= 5:
                    call.cancel()
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                raise
            print("cancelled: CANCELLED")

    def deadline(self) -> None:
        """Client and server both watch it: the sample ends with a finish, or the call with a status, or both."""
        ended = "never"
        try:
            for message in self._generate(0.5, stopping=generate_pb2.Stopping(ignore_eos=True)):
                for sample in message.outputs.samples:
                    if sample.HasField("finish"):
                        ended = generate_pb2.FinishReason.Name(sample.finish.reason)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            ended = error.code().name
        print(f"deadline: {ended}")

    def be_refused(self) -> None:
        try:
            for _ in self._generate(sampling=generate_pb2.Sampling(top_p=3)):
                pass
        except grpc.RpcError as error:
            report(status_of(error))

    def _generate(self, timeout_s: float = PATIENCE_S, **fields):
        request = generate_pb2.GenerateRequest(text=PROMPT, **fields)
        return self._stub.Generate(request, metadata=self._metadata, timeout=timeout_s)


def status_of(error: grpc.RpcError) -> status_pb2.Status:
    """The code, the message, and the details, where there are any, of a failed call."""
    bare = status_pb2.Status(code=error.code().value[0], message=error.details() or "")
    return rpc_status.from_call(error) or bare


def report(status: status_pb2.Status, to=sys.stdout) -> None:
    """What a failed call tells: a code, and details that say why, where, and when to come back."""
    reason, more = "no reason", []
    info, wrong, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    for detail in status.details:
        if detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(wrong):
            more += [f"field: {violation.field}" for violation in wrong.field_violations]
        elif detail.Unpack(retry):
            more.append(f"retry: after {retry.retry_delay.ToMilliseconds()} ms")
    code = next(code.name for code in grpc.StatusCode if code.value[0] == status.code)
    print(f"error: {code}, {reason}", f"message: {status.message}", *more, sep="\n", file=to)


def main() -> None:
    with open_channel(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:10310") as channel:
        client = Client(channel)
        try:
            client.show_model()
            client.stream()
            client.cancel()
            client.deadline()
            client.be_refused()
        except grpc.RpcError as error:
            report(status_of(error), sys.stderr)
            sys.exit(1)


if __name__ == "__main__":
    main()
