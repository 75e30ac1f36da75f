"""Latencies, rates and goodput of a load."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from moonpool.cli.load_generator.loops import RequestOutcome


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """What a load test found. Times in seconds; percentiles over requests that succeeded after the warm-up."""

    requests: int
    errors: dict[str, int]
    duration_s: float
    tokens_per_s: float
    requests_per_s: float
    goodput_per_s: float
    ttft_s: dict[str, float] = field(default_factory=dict)
    tpot_s: dict[str, float] = field(default_factory=dict)
    itl_s: dict[str, float] = field(default_factory=dict)
    e2e_s: dict[str, float] = field(default_factory=dict)
    bytes_per_s: float = 0.0


def summarize(
    outcomes: Sequence[RequestOutcome], *, warmup: int = 0, ttft_slo_s: float = math.inf, tpot_slo_s: float = math.inf
) -> LoadSummary:
    """Sum up all but the first `warmup` requests by due time; goodput counts requests within both SLOs."""
    counted = sorted(outcomes, key=lambda outcome: outcome.due)[warmup:]
    good = [outcome for outcome in counted if not outcome.error and outcome.first is not None]
    duration = max((outcome.ended for outcome in counted), default=0.0) - min((o.due for o in counted), default=0.0)
    ttft = [outcome.first - outcome.due for outcome in good if outcome.first is not None]
    tpot = [(o.ended - o.first) / (o.tokens - 1) if o.tokens > 1 and o.first is not None else 0.0 for o in good]
    within = sum(a <= ttft_slo_s and b <= tpot_slo_s for a, b in zip(ttft, tpot, strict=True))
    per_second = 1 / duration if duration > 0 else 0.0
    return LoadSummary(
        requests=len(counted),
        errors=dict(Counter(outcome.error for outcome in counted if outcome.error)),
        duration_s=duration,
        tokens_per_s=sum(outcome.tokens for outcome in good) * per_second,
        requests_per_s=len(good) * per_second,
        goodput_per_s=within * per_second,
        ttft_s=percentiles(ttft),
        tpot_s=percentiles(tpot),
        itl_s=percentiles([gap for outcome in good for gap in outcome.gaps]),
        e2e_s=percentiles([outcome.ended - outcome.due for outcome in good]),
        bytes_per_s=sum(outcome.nbytes for outcome in good) * per_second,
    )


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Nearest-rank percentiles and the mean; empty for no values."""
    if not values:
        return {}
    ordered = sorted(values)
    ranks = {f"p{share}": ordered[max(0, math.ceil(len(ordered) * share / 100) - 1)] for share in (50, 90, 99)}
    return {"mean": sum(ordered) / len(ordered), **ranks}
