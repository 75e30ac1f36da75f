"""Whether a machine is large enough for emulated instances: by how much their steps came late."""

from collections.abc import Sequence

from benchmarks.frame import Row, bounded
from moonpool.cli.check import GaugeReading

LATE = 5.0
"""Per cent of the emulated steps' time by which the machine may be late: beyond that figures are rather its own."""


def grown(name: str, before: Sequence[GaugeReading], after: Sequence[GaugeReading]) -> float:
    """By how much a gauge of all instances together has grown between two readings."""
    return sum(it.value for it in after if it.name == name) - sum(it.value for it in before if it.name == name)


def late(before: Sequence[GaugeReading], after: Sequence[GaugeReading]) -> float:
    """Per cent of the steps' time by which the machine was late between two readings."""
    seconds = grown("emulated_late_seconds_total", before, after), grown("emulated_step_seconds_total", before, after)
    return 100 * seconds[0] / (seconds[1] or 1.0)


def lateness(values: Sequence[float]) -> Row:
    """The row that says whether the machine was large enough."""
    return bounded("emulated steps: late by", "%", values, "wanted at most", LATE)
