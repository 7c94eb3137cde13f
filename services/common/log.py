"""Structured logs: one line of key=value pairs on a terminal, JSON elsewhere. Call once, at start."""

import logging
import sys

import structlog


def configure(service: str, level: str) -> None:
    """Route structlog and the standard library's loggers to stderr at ``level`` (a name of ``logging``)."""

    def name_service(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return event | {"service": service}  # not a context variable: those stay behind in the thread that set them

    shared = [
        name_service,
        structlog.processors.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if sys.stderr.isatty():
        # Rich tracebacks would show local variables: prompts, keys.
        renderers = [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    else:
        renderers = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    logging.basicConfig(handlers=[handler], level=level, force=True)
    for chatty in ("httpx", "httpcore", "asyncio", "grpc", "huggingface_hub", "filelock", "numba"):
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
