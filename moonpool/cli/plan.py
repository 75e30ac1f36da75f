"""`moonpool plan`: the least-cost mix of instances that serves a trace within its limits."""

import json
import sys
from pathlib import Path

from moonpool.errors import ConfigError
from simulator.cluster.config import ClusterConfig
from simulator.experiments.frame import Source, simulate
from simulator.planning.hardware import load_hardware
from simulator.planning.limits import check_possible, parse_slo
from simulator.planning.page import page
from simulator.planning.search import Search
from simulator.report.collector import Summary


def run_plan(
    trace: Path,
    *,
    model: str,
    hardware: str,
    slo: str,
    goodput: float,
    rate: float,
    requests: int,
    bound: int,
    report: Path | None,
    as_json: bool,
) -> None:
    """Searches, prints the plan, writes the report.

    Raises:
        ConfigError: model, hardware or limits are unknown, wrong or cannot be kept.
        TraceError: the trace is wrong.
        NoPlan: no mix within the bound is good enough.
    """
    if not 0 < goodput <= 1:
        raise ConfigError("goodput", f"must be a share above 0 and at most 1, is {goodput:g}")
    machines, limits, source = load_hardware(hardware), parse_slo(slo), Source(trace, requests)
    profile = machines.profile(model)
    check_possible(profile, limits)
    base = ClusterConfig(
        profile=profile, slo=limits, rate=rate, block_tokens=source.block_tokens,
        store_bytes=machines.dram_bytes, disk_bytes=machines.disk_bytes,
    )  # fmt: skip

    def serve(config: ClusterConfig) -> Summary:
        return simulate(config, source.read())[0]

    plan = Search(base, machines, serve, goodput, bound, lambda line: print(line, file=sys.stderr)).plan()
    facts: dict[str, object] = {
        "trace": source.describe(), "rate": rate, "model": model, "hardware": machines.name,
        "profile": f"{profile.name}: {profile.hardware}", "limits": f"TTFT {limits.ttft_s:g} s, TBT {limits.tbt_s:g} s",
        "cost an hour": ", ".join(f"{kind} {cost:g}" for kind, cost in machines.cost_per_hour.items()),
    }  # fmt: skip
    if report is not None:
        report.write_text(page(plan, facts, goodput), encoding="utf-8")
    if as_json:
        mix = {"prefill": plan.best.prefill, "decode": plan.best.decode, "kvstore": plan.best.kvstore}
        print(
            json.dumps(
                {"mix": mix, "cost_per_hour": plan.cost_per_hour, "summary": plan.summary.to_json(),
                 "sensitivity": plan.sensitivity, "assumptions": facts},
                indent=1,
            )
        )  # fmt: skip
        return
    print(f"{plan.best}: cost {plan.cost_per_hour:g} an hour, goodput {plan.summary.goodput_share:.1%}")
    for name, share in plan.sensitivity.items():
        print(f"  {name:34} {share:.1%}")
