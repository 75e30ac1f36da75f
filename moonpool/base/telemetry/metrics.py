"""Metrics: numbers that a service reports over RPC (as `Gauge` messages) and to Prometheus.

Each service has a table of metrics, `..._METRICS`, which docs/metrics.md lists. A `MetricSet` joins tables with the
objects that their functions read.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from moonpool.base import world
from moonpool.v1 import kv_pb2

S = TypeVar("S")
_COUNTER_SUFFIX = "_total"


class MetricKind(Enum):
    """How a metric's value moves."""

    GAUGE = "gauge"
    """The value goes up and down."""
    COUNTER = "counter"
    """The value grows, and starts at 0 when the service starts."""


@dataclass(frozen=True, slots=True)
class Metric(Generic[S]):
    """One number that a service reports.

    Attributes:
        name: lower case, with the unit at the end; a counter's name ends in `_total`, a gauge's does not.
        help: meaning and unit in one sentence.
        read: returns the value, given the object that the table of the metric is joined with. Runs on the event loop.
        at_rest: value when no request is running; None = the metric may rest anywhere.
        kind: gauge or counter.
    """

    name: str
    help: str
    read: Callable[[S], float]
    at_rest: float | None = None
    kind: MetricKind = MetricKind.GAUGE

    def __post_init__(self) -> None:
        if self.name.endswith(_COUNTER_SUFFIX) != (self.kind is MetricKind.COUNTER):
            raise ValueError(f"metric {self.name!r}: names of counters, and no others, end in {_COUNTER_SUFFIX}")


def counter(name: str, text: str, read: Callable[[S], float]) -> Metric[S]:
    """A metric that only grows.

    Args:
        name: ends in `_total`.
        text: meaning and unit in one sentence.
        read: see `Metric.read`.
    """
    return Metric(name, text, read, kind=MetricKind.COUNTER)


class MetricSample(NamedTuple):
    """A metric with one source's labels and value."""

    metric: Metric[object]
    labels: Mapping[str, str]
    value: float


class MetricSet:
    """One process's metrics, each read on request."""

    def __init__(self) -> None:
        self._readers: dict[str, tuple[Metric[object], Mapping[str, str], Callable[[], float]]] = {}

    def add(self, metrics: Iterable[Metric[S]], source: S, /, **labels: str) -> MetricSet:
        """Add a table of metrics that are read from `source`; return the set.

        Args:
            metrics: the table.
            source: the object that the table's functions get.
            labels: Prometheus labels that tell this source's values from other sources' values in the table.

        Raises:
            ValueError: a metric with the same name and labels exists already.
        """
        for metric in metrics:
            name = _reported_name(metric.name, labels)
            if name in self._readers:
                raise ValueError(f"metric {name!r} exists already")
            self._readers[name] = metric, labels, partial(metric.read, source)  # type: ignore[assignment]
        return self

    def read(self) -> list[kv_pb2.Gauge]:
        """All metrics now, in the order of adding. A label is part of the name: `dram_bytes{tenant="a"}`."""
        return [
            kv_pb2.Gauge(name=name, value=read(), at_rest=metric.at_rest)
            for name, (metric, _, read) in self._readers.items()
        ]

    def samples(self) -> Iterator[MetricSample]:
        """All metrics now, in the order of adding."""
        for metric, labels, read in self._readers.values():
            yield MetricSample(metric, labels, read())


def _reported_name(name: str, labels: Mapping[str, str]) -> str:
    if not labels:
        return name
    return f"{name}{{{','.join(f'{key}={json.dumps(value, ensure_ascii=False)}' for key, value in labels.items())}}}"


PROCESS_METRICS: tuple[Metric[None], ...] = (
    Metric("tasks", "Tasks on the event loop.", lambda _: len(asyncio.all_tasks())),
    Metric(
        "resident_bytes",
        "Resident memory of the process in bytes; 0 on systems other than Linux.",
        lambda _: world.CURRENT.get().usage.resident_bytes(),
    ),
    Metric(
        "open_files",
        "Open file descriptors of the process; 0 on systems other than Linux.",
        lambda _: world.CURRENT.get().usage.open_files(),
    ),
)
"""What every service process reports."""


def restless(gauges: Iterable[kv_pb2.Gauge]) -> dict[str, tuple[float, float]]:
    """The gauges that are not at rest: name -> (value, value at rest)."""
    return {g.name: (g.value, g.at_rest) for g in gauges if g.HasField("at_rest") and g.value != g.at_rest}
