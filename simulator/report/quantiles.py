"""Quantiles of many values in bounded memory: counts per bucket, each bucket 0.2 % wide."""

import math
from dataclasses import dataclass, field

WIDTH = 1.002
_LOG = math.log(WIDTH)
LEAST = 1e-9
"""Smaller values count as this one."""


@dataclass(slots=True)
class Quantiles:
    """Values of at least 0. A quantile is that of nearest rank, exact to 0.1 %; the mean is exact."""

    count: int = 0
    total: float = 0.0
    most: float = 0.0
    _buckets: dict[int, int] = field(default_factory=dict)

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.most = max(self.most, value)
        bucket = math.floor(math.log(max(value, LEAST)) / _LOG)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1

    def at(self, share: float) -> float:
        """The value that a share of all are not above; 0 for no values."""
        rank, seen = max(1, math.ceil(share * self.count)), 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= rank:
                return min(self.most, float(WIDTH ** (bucket + 0.5)))
        return 0.0

    def summary(self) -> dict[str, float]:
        """Mean and percentiles, four digits; empty for no values."""
        if not self.count:
            return {}
        points = {f"p{share}": digits(self.at(share / 100)) for share in (50, 90, 99)}
        return {"mean": digits(self.total / self.count), **points}


def digits(value: float, count: int = 4) -> float:
    """Rounded to so many significant digits."""
    return float(f"{value:.{count}g}")
