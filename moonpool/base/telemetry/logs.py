"""Structured logs on standard error.

All records pass through the standard library's logging. So a program that embeds the SDK keeps the program's own
handlers, and only a service process (`configure`) gets ours.

The style of all logs: a module's logger is `log = get_logger(__name__)`. An event is a short phrase in lower case, in
the present or past tense, and always the same phrase ("index does not match the segments; rebuilding it"). What varies
goes into fields: `log.warning("write-back failed", store=store.id, blocks=3, reason=str(error))`. `error` and `reason`
are texts, `exc_info` is for defects only. `error` ends a service or a request, `warning` reports a loss or asks for a
look, `info` happens a few times in a process' life, `debug` is the rest.

Whoever reads the logs may be slow, and a request may cause lines: an event has a bounded number of lines a second, and
a field a bounded length.
"""

import logging
import sys
from collections import Counter
from collections.abc import MutableMapping
from typing import Any, cast

import structlog
from structlog.typing import Processor

from moonpool.base.remedies import remedy

MAX_LINES_S = 50
"""Lines of one event in a second; `left_out` of the next line says how many were dropped."""
_MAX_LINES_S: dict[str, int] = {}
"""The same for loggers that have a limit of their own, by name."""
MAX_FIELD_CHARS = 2000
"""Characters of a field that are written."""
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

# Run for our own lines and for those of libraries alike.
_SHARED: list[Processor] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_logger_name,
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]
_OURS: list[Processor] = [
    structlog.stdlib.filter_by_level,
    *_SHARED,
    structlog.processors.StackInfoRenderer(),
    structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
]


class LineLimit(logging.Filter):
    """Lets a bounded number of lines per second pass for each event."""

    def __init__(self) -> None:
        super().__init__()
        self._second = 0
        self._lines: Counter[tuple[str, object]] = Counter()
        self._left_out: Counter[tuple[str, object]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written."""
        second = int(record.created)
        if second != self._second:
            self._second = second
            self._lines.clear()
        fields = record.msg if isinstance(record.msg, dict) else {"event": record.msg}
        event = record.name, fields["event"]
        self._lines[event] += 1
        if self._lines[event] > _MAX_LINES_S.get(record.name, MAX_LINES_S):
            self._left_out[event] += 1
            return False
        if left_out := self._left_out.pop(event, 0):
            fields["left_out"] = left_out
        return True


def cut_fields(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Cut long texts."""
    for name, value in event.items():
        if isinstance(value, str) and len(value) > MAX_FIELD_CHARS and name not in ("exception", "stack"):
            event[name] = f"{value[:MAX_FIELD_CHARS]}... ({len(value)} characters)"
    return event


def add_help(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Name the place of docs/errors.md that tells of a warning or an error, as `help`, if there is one."""
    if event.get("level") in ("warning", "error", "critical"):
        said = "\n".join(str(event[name]) for name in ("event", "error", "reason") if name in event)
        if place := remedy(said):
            event.setdefault("help", place)
    return event


def get_logger(name: str, max_lines_s: int = MAX_LINES_S) -> structlog.stdlib.BoundLogger:
    """A logger that takes an event name and key-value pairs: `log.info("joined", conductor=address)`.

    `max_lines_s`: lines of one event in a second.
    """
    _MAX_LINES_S[name] = max_lines_s
    logger = structlog.wrap_logger(
        logging.getLogger(name), processors=_OURS, wrapper_class=structlog.stdlib.BoundLogger, context_class=dict
    )
    return cast("structlog.stdlib.BoundLogger", logger)


def configure(level: str, service: str, json: bool) -> None:
    """Send this process's logs to standard error.

    Args:
        level: "debug", "info", "warning" or "error"; less is dropped.
        service: the instance's name, put into every line.
        json: one JSON object per line instead of text for people.

    Raises:
        ValueError: an unknown level.
    """
    if level not in _LEVELS:
        raise ValueError(f"unknown log level {level!r}; known: {', '.join(_LEVELS)}")

    def add_service(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event.setdefault("service", service)
        return event

    tail: list[Processor]
    if json:
        # Never the locals of a frame: they hold prompts.
        tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        tail = [structlog.processors.ExceptionRenderer(tracebacks), structlog.processors.JSONRenderer(default=str)]
    else:
        tail = [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback, pad_event_to=0
            )
        ]
    ours: list[Processor] = [add_service, cut_fields, add_help]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_SHARED,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *ours, *tail],
        )
    )
    handler.addFilter(LineLimit())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(_LEVELS[level])
    structlog.configure(
        processors=_OURS,
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
