"""Structured logs: one line of key=value pairs on a terminal, JSON elsewhere. Configured once, at the start."""

import logging
import os
import sys

import structlog

from services.common.config import LogFormat
from services.common.process.relay import set_drop_message

_CHATTY = ("httpx", "httpcore", "asyncio", "grpc", "huggingface_hub", "filelock", "numba")


def configure(service: str, level: str, log_format: LogFormat = "auto") -> None:
    """Route structlog and the standard library's loggers to stderr at ``level`` (a name of ``logging``).

    Lines contain the context variables of the calling task (``structlog.contextvars``), such as a request's id.
    """

    def name_service(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {**event, "service": service}  # a context variable would be set in one thread only

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        name_service,
        structlog.processors.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers(log_format)],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=level, force=True)
    for chatty in _CHATTY:
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLevelName(level)))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )

    def format_dropped(lines: int) -> bytes:
        message = "lines were dropped because the log consumer stalled"
        record = logging.LogRecord(__name__, logging.WARNING, "", 0, message, (), None)
        record.lines = lines
        return formatter.format(record).encode() + b"\n"

    set_drop_message(format_dropped)


def is_console(log_format: LogFormat) -> bool:
    """Return whether log lines are formatted for people. ``auto`` means yes on a terminal."""
    return log_format == "console" or (log_format == "auto" and sys.stderr.isatty())


def is_coloured() -> bool:
    """Return whether log lines for people are coloured: on a terminal, unless NO_COLOR or FORCE_COLOR is set."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or sys.stderr.isatty()


def _renderers(log_format: LogFormat) -> list[structlog.typing.Processor]:
    if is_console(log_format):
        # Rich tracebacks would show local variables: prompts, keys.
        plain = structlog.dev.plain_traceback
        return [structlog.dev.ConsoleRenderer(colors=is_coloured(), exception_formatter=plain)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
