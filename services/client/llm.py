"""The class ``LLM``, which is an engine as an object."""

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from numbers import Integral
from types import TracebackType
from typing import Any, Self, cast

import structlog

from services.client.engine import EngineProcess
from services.client.loop import LoopThread
from services.client.outputs import RequestOutput, StreamOutput
from services.client.params import SamplingParams
from services.client.progress import progress_bar
from services.client.request import ClientRequest, Conversation, Prompt
from services.client.runner import PARSERS, RequestRunner
from services.common.boundaries import undo_on_error
from services.common.config import GatewayConfig, GrpcFlags
from services.common.errors import InvalidRequest
from services.common.flags import FlagError, build
from services.common.rpc.channel import Dialer
from services.common.text.tokenizer import Tokenizer

_LINK_FLAGS = {*GrpcFlags.model_fields, "grpc_token_file"}

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """An engine, which it starts or connects to. Any thread may use it, even if the thread runs an event loop.

    ``close``, the end of a ``with`` block or the end of the process ends it.
    """

    def __init__(
        self,
        model: str = "builtin",
        *,
        tokenizer: str | None = None,
        address: str | None = None,
        patience_s: float = 600.0,
        **flags: Any,
    ) -> None:
        """Start an engine, or connect to a running one.

        Without ``address``, start ``model`` with ``flags`` of ``toka``, such as ``dp_size=2``. The environment
        variables ``TOKA_...`` have no effect. With ``address``, connect to running schedulers: ``host:port``, or
        several separated by commas. Then ``model`` names their tokenizer, and the only ``flags`` are ``grpc_ca``,
        ``grpc_cert``, ``grpc_key``, ``grpc_server_name`` and ``grpc_token_file``. ``patience_s``: seconds that a prompt
        waits for a scheduler.

        Raises ``InvalidRequest`` for a wrong flag, and ``Unavailable`` if the engine does not start.
        """
        addresses = None if address is None else _checked(address, flags)
        parsers = {name: flags.get(name) or default for name, default in PARSERS.items()}
        _log_warnings_only()
        self._loop = LoopThread()
        engine: EngineProcess | None = None
        runner: RequestRunner | None = None
        with undo_on_error(lambda: _shut_down(self._loop, runner, engine)):
            if addresses is None:
                engine = self._loop.run(EngineProcess.start(flags | {"model": model, "tokenizer": tokenizer}))
                addresses = engine.addresses
            self._runner = runner = RequestRunner(
                addresses,
                Tokenizer.load(tokenizer or model),
                engine,
                patience_s=patience_s,
                dialer=_dialer(flags),
                parsers=parsers,
            )
            self._facts = self._loop.run(runner.start())
        self._shut_down = weakref.finalize(self, _shut_down, self._loop, runner, engine)

    @property
    def model(self) -> str:
        """Id of the model."""
        return self._facts.id

    @property
    def max_context_tokens(self) -> int:
        """Maximum number of tokens of a prompt and its answer together."""
        return self._facts.max_context_tokens

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None, *, progress: bool = False
    ) -> list[RequestOutput]:
        """Continue each of ``prompts``, which are texts or token ids. Return their outputs in order.

        ``params``: for all prompts, or one for each. If a prompt fails, its output has the error, and the other prompts
        are answered. ``progress``: show a progress bar on stderr. Raises ``InvalidRequest`` for wrong parameters.
        """
        given: list[Prompt] = [prompts] if isinstance(prompts, str) else cast("list[Prompt]", list(prompts))
        if given and isinstance(given[0], Integral):
            given = [cast("list[int]", given)]
        each = self._params_of_each(params, len(given))
        return self._answer([ClientRequest(prompt, one) for prompt, one in zip(given, each, strict=True)], progress)

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        params: Params = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer each of ``conversations``, which are lists of messages in the form of the HTTP API.

        The text of an answer includes the model's reasoning and tool calls. Other parameters are fields of the HTTP
        API, or those of ``generate``.
        """
        given = cast("list[Conversation]", list(conversations))
        if given and isinstance(given[0], Mapping):
            given = [cast("Conversation", given)]
        template = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
            "tools": tools,
        }
        each = self._params_of_each(params, len(given))
        return self._answer(
            [ClientRequest(None, one, c, template) for c, one in zip(given, each, strict=True)], progress
        )

    def stream(self, prompt: Prompt | Conversation, params: SamplingParams | None = None) -> Iterator[StreamOutput]:
        """Yield the new parts of the samples of one prompt or conversation when they arrive. Raises ``TokaError``.

        Closing the iterator early cancels the request.
        """
        params = params or SamplingParams()
        if not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], Mapping):
            request = ClientRequest(None, params, cast("Conversation", prompt))
        else:
            request = ClientRequest(cast("Prompt", prompt), params)
        outputs = self._runner.stream(request)

        async def following() -> list[StreamOutput] | None:
            return await anext(outputs, None)

        try:
            while (some := self._loop.run(following())) is not None:
                yield from some
        finally:
            self._loop.begin(outputs.aclose())

    def close(self) -> None:
        """End the engine if this LLM started it, and all requests. Later calls do nothing."""
        self._shut_down()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def _params_of_each(params: Params, count: int) -> Sequence[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * count
        if len(params) != count:
            raise InvalidRequest(
                f"params: {len(params)} for {count} prompts; give one for all, or one for each", field="params"
            )
        return params

    def _answer(self, requests: list[ClientRequest], progress: bool) -> list[RequestOutput]:
        with progress_bar(len(requests)) if progress else nullcontext(lambda output: None) as on_done:
            return self._loop.run(self._runner.generate(requests, on_done))


def _log_warnings_only() -> None:
    """Send structlog's messages to ``logging``, which shows warnings, unless the caller has configured structlog.

    By default structlog prints every message.
    """
    if not structlog.is_configured():
        structlog.configure(
            processors=[
                structlog.stdlib.filter_by_level,
                structlog.stdlib.add_log_level,
                structlog.processors.format_exc_info,
                structlog.processors.KeyValueRenderer(key_order=["event"]),
            ],
            wrapper_class=structlog.stdlib.BoundLogger,
            logger_factory=structlog.stdlib.LoggerFactory(),
        )


def _checked(address: str, flags: Mapping[str, Any]) -> list[str]:
    """Return the addresses in ``address``. Raises ``InvalidRequest``, also for flags of an engine."""
    for name, value in flags.items():
        if name not in _LINK_FLAGS:
            raise InvalidRequest(
                f"flag {name}={value}: the engine at address={address} has its own; leave one of them out", field=name
            )
    if "://" in address:
        raise InvalidRequest(
            f"address={address}: expected the gRPC address of a scheduler, such as 127.0.0.1:10310; a gateway's URL is"
            " for HTTP clients",
            field="address",
        )
    return [part.strip() for part in address.split(",")]


def _dialer(flags: Mapping[str, Any]) -> Dialer:
    """Return the dialer for schedulers, with the flags of a gateway. Raises ``InvalidRequest``."""
    given = {name: str(value) for name, value in flags.items() if name in _LINK_FLAGS and value is not None}
    try:
        config = build(GatewayConfig, given)
    except FlagError as error:
        raise InvalidRequest(str(error)) from None
    return Dialer.of(config, config.grpc_token_file)


def _shut_down(loop: LoopThread, runner: RequestRunner | None, engine: EngineProcess | None) -> None:
    if loop.here:  # a garbage collection in the loop's thread, which must not wait for itself
        threading.Thread(target=_shut_down, args=(loop, runner, engine), name="tokasaurus-close").start()
        return
    if not loop.running:  # a copy in a forked process
        return
    try:
        if runner is not None:
            loop.run(runner.stop())
        if engine is not None:
            loop.run(engine.stop())
    finally:
        loop.stop()
