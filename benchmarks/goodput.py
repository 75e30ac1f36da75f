"""Goodput of emulated instances beside the simulator's: `python -m benchmarks.goodput`.

Every policy of placement serves the beginning of a trace without limits, every way of admission the same with limits
and more quickly; each on a stack of its own (8 + 8), and in the simulator. Goodput is the share of the requests that
keep both limits. Nothing is fitted: the simulator knows the profile alone, so what the stack's processes take on the
machine is part of the difference. `--time-scale 0.5` gives them two seconds for each of the profile's.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.frame import Progress, Row, Skipped, bounded, paired, run
from moonpool.bundled import model_dir
from moonpool.checkpoint import load_config
from moonpool.cli.replay import Replay, cut, drive, served, summary_of
from moonpool.cli.stack import LocalStack, StackPlan
from moonpool.client import Slo as Limits
from moonpool.engine.emulated.profile import load_profile
from services.conductor.core.admission import Admission
from services.conductor.core.policies import DEFAULT, POLICIES
from simulator.cluster.config import ClusterConfig, Slo
from simulator.cluster.entrance import SERVICES, slo_of
from simulator.experiments.frame import simulate
from simulator.report.collector import Summary
from simulator.traces.mooncake import Trace, TraceRequest, trace_path

GENERATED = Path(__file__).parent / "traces" / "generated.jsonl"
WANTED = 15.0
"""Per cent that the simulator's goodput may be off."""
STEP_TOKENS, MOST_TOKENS = 4096, 32_000
STORE_BYTES = 1 << 30
"""DRAM of a stack's kvstore: all emulated KV of a run."""


@dataclass(frozen=True, slots=True)
class Mode:
    """How requests are placed or let in.

    Attributes:
        name: in rows.
        policy, admission: the conductor's flags.
        limited: requests tell their limits.
    """

    name: str
    policy: str
    admission: Admission
    limited: bool

    def simulated(self, config: ClusterConfig) -> ClusterConfig:
        """The cluster whose conductor has these flags."""
        return replace(config, policy=self.policy, admission=SERVICES[self.admission] if self.limited else "all")


MODES = {
    mode.name: mode
    for mode in (
        *(Mode(f"policy {name}", name, Admission.NONE, limited=False) for name in POLICIES),
        *(Mode(f"admission {way.value}", DEFAULT, way, limited=True) for way in Admission),
    )
}


@dataclass(frozen=True, slots=True)
class Figures:
    """One run: per cent of the requests that kept both limits; and what became of them, for people."""

    stack: float
    simulated: float
    told: str = ""

    @property
    def off(self) -> float:
        """Per cent that the simulator is off."""
        return 100 * abs(self.simulated - self.stack) / (self.stack or self.simulated or 1.0)


def arrivals(trace: Sequence[TraceRequest], requests: int, rate: float) -> list[TraceRequest]:
    """The first requests of a trace, cut to `MOST_TOKENS`, so many per second on the average.

    Raises:
        Skipped: the trace is too short.
    """
    if len(trace) < requests:
        raise Skipped(f"the trace has {len(trace)} requests, {requests} are wanted")
    found = [cut(one, MOST_TOKENS, 0, STEP_TOKENS // 8) for one in trace[:requests]]
    begin, span = found[0].timestamp, found[-1].timestamp - found[0].timestamp
    faster = span / 1000 * rate / (requests - 1)
    return [replace(one, timestamp=(one.timestamp - begin) / faster) for one in found]


def one_run(mode: Mode, wanted: Sequence[TraceRequest], options: argparse.Namespace) -> Figures:
    """A fresh stack and a simulated cluster get the same requests."""
    slo = Slo(options.ttft_slo_s, options.tbt_slo_s)
    config = ClusterConfig(profile=load_profile(options.profile), slo=slo, step_tokens=STEP_TOKENS)
    config = mode.simulated(config)
    expected, vocab_size = slo_of(config), load_config(model_dir()).vocab_size
    limits = Limits(ttft_s=expected.ttft_s, tbt_s=expected.tbt_s) if mode.limited else None
    with tempfile.TemporaryDirectory() as folder, LocalStack(plan_of(mode, options, Path(folder))) as stack:
        config = asyncio.run(served(stack.address, config))
        replay = Replay(wanted, config.block_tokens, options.time_scale, vocab_size, slo, limits)
        measured = summary_of(asyncio.run(drive(stack.address, replay)), slo)
    simulated, _ = simulate(config, wanted)
    told = f"stack {described(measured)}; simulated {described(simulated)}"
    return Figures(100 * measured.goodput_share, 100 * simulated.goodput_share, told)


def described(summary: Summary) -> str:
    """A line on a run, by which one sees what its goodput comes from."""
    outcomes = ", ".join(f"{count} {name}" for name, count in summary.outcomes.items())
    ttft_s, tbt_s = summary.ttft_s.get("p90", 0.0), summary.tbt_s.get("p90", 0.0)
    return f"{summary.goodput_share:.1%} ({outcomes}, p90 of TTFT {ttft_s:.3g} s, of TBT {tbt_s:.3g} s)"


def plan_of(mode: Mode, options: argparse.Namespace, folder: Path) -> StackPlan:
    """The stack whose conductor has a mode's flags."""
    conductor = ["--policy", mode.policy, "--admission", mode.admission.value]
    return StackPlan(
        str(model_dir()), folder, engine=f"emulated:{options.profile}", time_scale=options.time_scale,
        prefill=options.prefill, decode=options.decode, block_tokens=STEP_TOKENS // 8, dram_bytes=STORE_BYTES,
        log_level="warning", extra={"conductor": conductor, "prefill": ["--step-tokens", str(STEP_TOKENS)]},
    )  # fmt: skip


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """All rows."""
    trace = list(Trace(options.trace or trace_path("") or GENERATED))
    found: list[Row] = []
    for mode in (MODES[name] for name in options.only.split(",")):
        wanted = arrivals(trace, options.requests, options.overload_rate if mode.limited else options.rate)
        figures = []
        for number in range(options.runs):
            figures.append(one_run(mode, wanted, options))
            progress(f"{mode.name}, run {number + 1} of {options.runs}: {figures[-1].told}")
        found += rows(mode.name, figures)
    return found


def rows(name: str, figures: Sequence[Figures]) -> Iterator[Row]:
    """Both goodputs, and how far the simulator is off."""
    yield paired(f"{name}: requests within both limits", "%", [(it.stack, it.simulated) for it in figures], "simulated")
    yield bounded(f"{name}: simulation off by", "%", [it.off for it in figures], "wanted at most", WANTED)


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--only", default=",".join(MODES), help="some modes, comma-separated (default: %(default)s)")
    add("--trace", type=Path, help="Mooncake's form (default: $MOONPOOL_TRACE, or the generated one)")
    add("--profile", default="llama-70b-a800", help="of the emulated instances (default %(default)s)")
    add("--time-scale", type=float, default=0.5, help="seconds of the profile in one second (default 0.5)")
    add("--prefill", type=int, default=8, help="instances (default 8)")
    add("--decode", type=int, default=8, help="instances (default 8)")
    add("--requests", type=int, default=240, help="of the trace (default 240)")
    add("--rate", type=float, default=5.0, help="per second, where policies are compared (default 5)")
    add("--overload-rate", type=float, default=10.0, help="per second, where limits are told (default 10)")
    add("--ttft-slo-s", type=float, default=6.0, help="limit of goodput, seconds of the profile (default 6)")
    add("--tbt-slo-s", type=float, default=0.06, help="the same of the time between tokens (default 0.06)")


if __name__ == "__main__":
    run("goodput", measure, flags=flags)
