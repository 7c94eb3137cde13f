"""``LLM``: the engine as an object."""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from numbers import Integral
from types import TracebackType
from typing import Any, Self, cast

import structlog

from services.client.engine import Engine
from services.client.loop import LoopThread
from services.client.outputs import RequestOutput, StreamOutput
from services.client.params import SamplingParams
from services.client.progress import NoProgress, Progress
from services.client.request import Conversation, Prompt, Request
from services.client.runner import PARSERS, Runner
from services.common.config import GatewayConfig, GrpcFlags
from services.common.errors import InvalidRequest
from services.common.flags import FlagError, build
from services.common.rpc.channel import Dialer
from services.common.text.tokenizer import Tokenizer

_LINK_FLAGS = {*GrpcFlags.model_fields, "grpc_token_file"}

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """An engine of its own, or one that runs. Any thread may use it, with or without an event loop of its own.

    ``close`` ends it, as do leaving a ``with`` block and the end of the process.
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
        """Start ``model`` with ``flags`` of ``toka``, such as ``dp_size=2`` (``TOKA_...`` of the environment do not
        count); or, with ``address``, connect to schedulers that run: ``host:port``, several separated by commas.
        ``model`` then says whose tokenizer they have, and ``flags`` are those of certificates and token, if any:
        ``grpc_ca``, ``grpc_cert``, ``grpc_key``, ``grpc_server_name``, ``grpc_token_file``. ``patience_s``: how long a
        prompt waits for a scheduler.

        Raises ``InvalidRequest`` for a wrong flag, and ``Unavailable`` when the engine does not start.
        """
        addresses = None if address is None else _checked(address, flags)
        parsers = {name: flags.get(name) or usual for name, usual in PARSERS.items()}
        _keep_logs_quiet()
        self._loop = LoopThread()
        engine = runner = None
        try:
            if addresses is None:
                engine = self._loop.run(Engine.start(flags | {"model": model, "tokenizer": tokenizer}))
                addresses = engine.addresses
            self._runner = runner = Runner(
                addresses,
                Tokenizer.load(tokenizer or model),
                engine,
                patience_s=patience_s,
                dialer=_dialer(flags),
                parsers=parsers,
            )
            self._facts = self._loop.run(runner.start())
        except BaseException:
            _shut_down(self._loop, runner, engine)
            raise
        self._shut_down = weakref.finalize(self, _shut_down, self._loop, runner, engine)

    @property
    def model(self) -> str:
        """The model's id."""
        return self._facts.id

    @property
    def max_context_tokens(self) -> int:
        """Of a prompt and its answer together."""
        return self._facts.max_context_tokens

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None, *, progress: bool = False
    ) -> list[RequestOutput]:
        """Continue each of ``prompts``, texts or token ids, all at once; outputs are in their order.

        ``params``: of all, or of each. A prompt that cannot be answered has its error in its output, and the others
        have their answers. Wrong parameters raise ``InvalidRequest``. ``progress``: a bar, on stderr.
        """
        asked: list[Prompt] = [prompts] if isinstance(prompts, str) else cast("list[Prompt]", list(prompts))
        if asked and isinstance(asked[0], Integral):
            asked = [cast("list[int]", asked)]
        each = self._each(params, len(asked))
        requests = [Request(prompt, one) for prompt, one in zip(asked, each, strict=True)]
        return self._answer(requests, progress)

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
        """Answer each of ``conversations``, lists of messages as over HTTP, as ``generate`` does. The text of an answer
        is all that the model wrote, thoughts and calls included."""
        asked = cast("list[Conversation]", list(conversations))
        if asked and isinstance(asked[0], Mapping):
            asked = [cast("Conversation", asked)]
        template = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
            "tools": tools,
        }
        each = self._each(params, len(asked))
        return self._answer([Request(None, one, c, template) for c, one in zip(asked, each, strict=True)], progress)

    def stream(self, prompt: Prompt | Conversation, params: SamplingParams | None = None) -> Iterator[StreamOutput]:
        """What is new in the samples of one prompt or conversation, as it comes. Raises ``TokaError``. Whoever stops
        early cancels the rest."""
        params = params or SamplingParams()
        if not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], Mapping):
            request = Request(None, params, cast("Conversation", prompt))
        else:
            request = Request(cast("Prompt", prompt), params)
        news = self._runner.stream(request)

        async def following() -> list[StreamOutput] | None:
            return await anext(news, None)

        try:
            while (some := self._loop.run(following())) is not None:
                yield from some
        finally:
            self._loop.begin(news.aclose())

    def close(self) -> None:
        """End everything that was started. Idempotent."""
        self._shut_down()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def _each(params: Params, count: int) -> Sequence[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * count
        if len(params) != count:
            raise InvalidRequest(
                f"params: {len(params)} for {count} prompts; give one for all, or one for each", field="params"
            )
        return params

    def _answer(self, requests: list[Request], progress: bool) -> list[RequestOutput]:
        bar: AbstractContextManager[Callable[[RequestOutput], None]] = (
            Progress(len(requests)) if progress else NoProgress()
        )
        with bar as on_done:
            return self._loop.run(self._runner.generate(requests, on_done))


def _keep_logs_quiet() -> None:
    """Warnings through ``logging``, for a caller that has not set up structlog: by default it prints everything."""
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
    for name, value in flags.items():
        if name in _LINK_FLAGS:
            continue
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
    """The link to schedulers, as a gateway has it. Raises ``InvalidRequest``."""
    given = {name: str(value) for name, value in flags.items() if name in _LINK_FLAGS and value is not None}
    try:
        config = build(GatewayConfig, given)
    except FlagError as error:
        raise InvalidRequest(str(error)) from None
    return Dialer.of(config, config.grpc_token_file)


def _shut_down(loop: LoopThread, runner: Runner | None, engine: Engine | None) -> None:
    if loop.here:  # as the LLM was garbage: nobody waits
        threading.Thread(target=_shut_down, args=(loop, runner, engine), name="tokasaurus-close").start()
        return
    if not loop.running:  # a fork's copy
        return
    try:
        if runner is not None:
            loop.run(runner.stop())
        if engine is not None:
            loop.run(engine.stop())
    finally:
        loop.stop()
