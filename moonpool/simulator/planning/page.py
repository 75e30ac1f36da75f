"""A plan as one HTML file with charts inside."""

import html
from collections.abc import Iterable, Mapping, Sequence

from moonpool.simulator.experiments.report import Chart
from moonpool.simulator.planning.planner import CapacityPlan, InstanceMix

_STYLE = (
    "body{font-family:sans-serif;max-width:60em;margin:2em auto;color:#222}table{border-collapse:collapse;margin:1em 0}"
    "td,th{border:1px solid #ccc;padding:.25em .7em;text-align:left}"
)


def page(plan: CapacityPlan, facts: Mapping[str, object], goal: float) -> str:
    """The whole file."""
    summary = plan.summary
    figures = {
        "mix": plan.best,
        "cost an hour": f"{plan.cost_per_hour:g}",
        "goodput": f"{summary.goodput_share:.1%} of {summary.requests} requests, wanted {goal:.1%}",
        "TTFT": _points(summary.ttft_s),
        "TBT": _points(summary.tbt_s),
        "prompt tokens reused": f"{summary.reused_share:.1%}",
    }
    parts = [
        f"<h1>{html.escape(str(plan.best))}</h1>",
        _table(("figure", "value"), figures.items()),
        "<h2>Assumptions</h2>",
        _table(("what", "value"), facts.items()),
        "<h2>What it is sensitive to</h2>",
        _table(("change", "goodput"), ((name, f"{share:.1%}") for name, share in plan.sensitivity.items())),
        _prefill_chart(plan).svg(),
        _decode_chart(plan).svg(),
        "<h2>Mixes that were simulated</h2>",
        _table(("mix", "goodput"), ((mix, f"{share:.1%}") for mix, share in plan.tried.items())),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Plan</title><style>{_STYLE}</style>'
        "</head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _points(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g} s" for name, value in values.items())


def _table(head: Sequence[str], rows: Iterable[tuple[object, object]]) -> str:
    titles = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{titles}</tr>{lines}</table>"


def _prefill_chart(plan: CapacityPlan) -> Chart:
    best = plan.best
    points = [(m.prefill, share) for m, share in plan.tried.items() if _like(m, best, "prefill")]
    return _chart("Goodput by prefill instances", "prefill instances", points)


def _decode_chart(plan: CapacityPlan) -> Chart:
    best = plan.best
    points = [(m.decode, share) for m, share in plan.tried.items() if _like(m, best, "decode")]
    return _chart("Goodput by decode instances", "decode instances", points)


def _like(mix: InstanceMix, best: InstanceMix, but: str) -> bool:
    """Whether a mix differs from the best mix only in one number."""
    return all(getattr(mix, kind) == getattr(best, kind) for kind in ("prefill", "decode", "kvstore") if kind != but)


def _chart(title: str, label: str, points: Sequence[tuple[int, float]]) -> Chart:
    return Chart(title, label, "share", {"goodput": sorted((float(x), y) for x, y in points)})
