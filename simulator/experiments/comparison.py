"""What was simulated beside what was measured, quantile by quantile."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from simulator.experiments.calibration import SHARES, Times, quantile
from simulator.report.charts import Chart

WANTED = {0.5: 0.15, 0.9: 0.25}
"""How far a simulated quantile may be from the measured one, as a share of it."""


@dataclass(frozen=True, slots=True)
class Line:
    """One quantile of one figure, seconds."""

    figure: str
    measured_s: float
    simulated_s: float
    wanted: float

    @property
    def ratio(self) -> float:
        """Simulated over measured."""
        return self.simulated_s / self.measured_s

    @property
    def error(self) -> float:
        """As a share of what was measured."""
        return abs(self.ratio - 1.0)

    def to_json(self) -> dict[str, object]:
        """By name."""
        return {**asdict(self), "ratio": self.ratio, "met": self.error <= self.wanted}


def compare(measured: Times, simulated: Times) -> list[Line]:
    """The quantiles for which there is a bound; of figures that were measured."""
    return [
        Line(f"{name} p{100 * share:.0f}", quantile(one, share), quantile(other, share), wanted)
        for name, one, other in _figures(measured, simulated)
        for share, wanted in WANTED.items()
    ]


def charts(measured: Times, simulated: Times) -> list[Chart]:
    """Nine quantiles of each figure."""
    return [
        Chart(
            f"{name}, measured and simulated",
            "percentile",
            "seconds",
            {
                kind: [(100 * share, quantile(values, share)) for share in SHARES]
                for kind, values in (("measured", one), ("simulated", other))
            },
        )
        for name, one, other in _figures(measured, simulated)
    ]


def _figures(measured: Times, simulated: Times) -> list[tuple[str, Sequence[float], Sequence[float]]]:
    others = simulated.figures
    return [(name, values, others[name]) for name, values in measured.figures.items() if values and others[name]]
