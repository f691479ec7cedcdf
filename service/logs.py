"""Logs: one line an event, as text for people or as JSON for machines (DYNOTUNE_LOG), on stderr.

Nothing is printed before `show` is called, as for every library: a program decides for itself what its screen shows.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal, cast

import structlog

from service import tracing

Form = Literal["text", "json"]
Level = Literal["debug", "info", "warning"]
SHARED: tuple[structlog.typing.Processor, ...] = (
    structlog.contextvars.merge_contextvars,
    lambda _logger, _method, event: {**tracing.context(), **event},
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
)
structlog.configure(
    processors=[structlog.stdlib.filter_by_level, *SHARED, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
    wrapper_class=structlog.stdlib.BoundLogger,
    logger_factory=structlog.stdlib.LoggerFactory(),
    cache_logger_on_first_use=True,
)


def logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger whose events carry the context that is bound at the time, such as a request's or a task's id."""
    return cast(structlog.stdlib.BoundLogger, structlog.get_logger(name))


def bound(**context: Any) -> Any:
    """A context in which all events of this thread or task carry these values."""
    return structlog.contextvars.bound_contextvars(**context)


def show(form: Form, level: Level) -> None:
    """Print the log lines of this process from that level on, and the warnings of libraries."""
    colours = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(),
        exception_formatter=structlog.dev.plain_traceback,  # the other one prints variables, and keys with them
    )
    rendered: list[structlog.typing.Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if form == "json":
        rendered += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        rendered.append(colours)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=list(SHARED), processors=rendered))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    for name in ("dynotune", "uvicorn"):  # other libraries tell of what goes wrong only
        logging.getLogger(name).setLevel(level.upper())
