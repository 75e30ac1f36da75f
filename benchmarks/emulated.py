"""Traces for emulated instances: when requests come at a rate, and whether steps came late."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise

from benchmarks.frame import Row, bounded
from moonpool.cli.check import GaugeReading
from moonpool.simulator.traces.mooncake import TraceRequest


def at_rate(requests: Sequence[TraceRequest], rate: float) -> list[TraceRequest]:
    """A trace's requests from time 0 on, at least two, at a mean rate per second, as uneven as in the trace.

    Those of one instant come one after the other until the next one: a trace with times of three seconds says no more
    than that, and which of them a conductor hears first would be chance.
    """
    times = apart([request.timestamp for request in requests])
    faster = (times[-1] - times[0]) / 1000 * rate / (len(requests) - 1)
    return [replace(request, timestamp=(at - times[0]) / faster) for request, at in zip(requests, times, strict=True)]


def apart(times: Sequence[float]) -> list[float]:
    """Sorted times, equal ones spread until the next one; the last ones as far apart as those before, or over 1."""
    instants = [(at, len(list(same))) for at, same in groupby(times)]
    spans = [after - at for (at, _), (after, _) in pairwise(instants)]
    spans.append(spans[-1] if spans else 1.0)
    return [
        at + span * place / count for (at, count), span in zip(instants, spans, strict=True) for place in range(count)
    ]


LATE = 5.0
"""Per cent of the emulated steps' time by which the machine may be late: beyond that figures are rather its own."""


def grown(name: str, before: Sequence[GaugeReading], after: Sequence[GaugeReading]) -> float:
    """By how much a gauge of all instances together has grown between two readings."""
    return sum(reading.value for reading in after if reading.name == name) - sum(
        reading.value for reading in before if reading.name == name
    )


def late(before: Sequence[GaugeReading], after: Sequence[GaugeReading]) -> float:
    """Per cent of the steps' time by which the machine was late between two readings."""
    seconds = grown("emulated_late_seconds_total", before, after), grown("emulated_step_seconds_total", before, after)
    return 100 * seconds[0] / (seconds[1] or 1.0)


def lateness(values: Sequence[float]) -> Row:
    """The row that says whether the machine was large enough."""
    return bounded("emulated steps: late by", "%", values, "wanted at most", LATE)
