"""Goodput of emulated instances beside the simulator's: `python -m benchmarks.goodput`.

Every policy of placement serves the beginning of a trace without limits, every way of admission the same with limits
and more quickly; on a stack (8 + 8), and in the simulator. Goodput is the share of the requests that keep both limits.
Nothing is fitted: the simulator knows the profile alone, so what the stack's processes take on the machine is part of
the difference, and they get two seconds for each of the profile's (`--time-scale`). The modes share the stack's
engines, of which each mode finds no KV, as its requests are another tenant's; the conductor begins anew, and so do
decode instances where they foresee by what they have served. The policies draw the same in stack and simulation.
"""

import argparse
import asyncio
import signal
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from benchmarks.emulated import at_rate, late, lateness
from benchmarks.frame import Progress, Row, Skipped, bounded, paired, run
from moonpool.base.bundled import model_dir
from moonpool.base.checkpoint import load_config
from moonpool.cli.check import wait_at_rest
from moonpool.cli.replay import TraceReplay, cluster_like, cut_request, send_trace, summary_of
from moonpool.cli.stack import CONDUCTOR, LocalStack, StackPlan
from moonpool.client import Slo
from moonpool.conductor.core.admission import AdmissionMode
from moonpool.conductor.placement.policies import DEFAULT_POLICY, POLICIES
from moonpool.engine.emulated.profile import load_profile
from moonpool.simulator.cluster.admission import SERVICES, slo_of
from moonpool.simulator.cluster.config import ClusterConfig, SloTargets
from moonpool.simulator.experiments.frame import simulate
from moonpool.simulator.experiments.report import Summary
from moonpool.simulator.traces.mooncake import Trace, TraceRequest, trace_path

GENERATED = Path(__file__).parent / "traces" / "generated.jsonl"
WANTED = 15.0
"""Per cent that the simulator's goodput may be off."""
STEP_TOKENS, MOST_TOKENS = 4096, 32_000
STORE_BYTES = 1 << 30
"""DRAM for a stack's kvstore: all a mode's emulated KV."""
POLICY_SEED = 0
"""Of the draws, in stack and simulation."""
WAIT_S = 120.0
"""For services to start, end and come to rest."""


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
    admission: AdmissionMode
    limited: bool

    @property
    def flags(self) -> list[str]:
        """The conductor's."""
        return ["--policy", self.policy, "--admission", self.admission.value, "--set", f"policy_seed={POLICY_SEED}"]

    def simulated(self, config: ClusterConfig) -> ClusterConfig:
        """The cluster for a conductor with these flags."""
        return replace(
            config, policy=self.policy, seed=POLICY_SEED, admission=SERVICES[self.admission] if self.limited else "all"
        )


MODES = {
    mode.name: mode
    for mode in (
        *(Mode(f"policy {name}", name, AdmissionMode.NONE, limited=False) for name in POLICIES),
        *(Mode(f"admission {way.value}", DEFAULT_POLICY, way, limited=True) for way in AdmissionMode),
    )
}


@dataclass(frozen=True, slots=True)
class Measured:
    """What a mode's requests went through on a stack, and what is to be simulated.

    Attributes:
        mode: the admission mode.
        config: the served cluster.
        requests: that came.
        summary: the requests' summary.
        late: per cent of the steps' time by which the machine was late.
    """

    mode: Mode
    config: ClusterConfig
    requests: Sequence[TraceRequest]
    summary: Summary
    late: float


@dataclass(frozen=True, slots=True)
class Figures:
    """One run in a mode: per cent of the requests that kept both limits."""

    stack: float
    simulated: float

    @property
    def off(self) -> float:
        """Per cent that the simulator is off."""
        return 100 * abs(self.simulated - self.stack) / (self.stack or self.simulated or 1.0)


def arrivals(trace: Sequence[TraceRequest], requests: int, rate: float) -> list[TraceRequest]:
    """The first requests of a trace, cut to `MOST_TOKENS`, so many per second on the average (`at_rate`).

    Raises:
        Skipped: the trace is too short.
    """
    if len(trace) < requests:
        raise Skipped(f"the trace has {len(trace)} requests, {requests} are wanted")
    return at_rate([cut_request(request, MOST_TOKENS, 0, STEP_TOKENS // 8) for request in trace[:requests]], rate)


def begin(stack: LocalStack, mode: Mode) -> None:
    """The conductor starts anew with a mode's flags; where limits are told, decode instances start anew as well."""
    wait_at_rest(stack.address, WAIT_S)
    conductor = stack.services[CONDUCTOR]
    engines = [name for name, service in stack.services.items() if mode.limited and service.kind == "decode"]
    for name in (CONDUCTOR, *engines):
        stack.services[name].signal(signal.SIGTERM)
    for name in (CONDUCTOR, *engines):
        stack.services[name].wait(WAIT_S)
    stack.spawn("conductor", CONDUCTOR, [*conductor.arguments, *mode.flags, "--listen", conductor.address])
    for name in engines:
        stack.spawn_again(name)
    for name in (CONDUCTOR, *engines):
        stack.services[name].wait_ready(WAIT_S)
    stack.wait_joined(WAIT_S)


def serve(stack: LocalStack, mode: Mode, wanted: Sequence[TraceRequest], options: argparse.Namespace) -> Measured:
    """A stack gets a mode's requests."""
    slo = SloTargets(options.ttft_slo_s, options.tbt_slo_s)
    config = ClusterConfig(profile=load_profile(options.profile), slo=slo, max_num_batched_tokens=STEP_TOKENS)
    config = asyncio.run(cluster_like(stack.address, mode.simulated(config)))
    expected, vocab_size = slo_of(config), load_config(model_dir()).vocab_size
    limits = Slo(ttft_s=expected.ttft_s, tbt_s=expected.tbt_s) if mode.limited else None
    own = [replace(request, tenant=mode.name) for request in wanted]
    replay = TraceReplay(own, config.block_size, options.time_scale, vocab_size, slo, limits)
    before = wait_at_rest(stack.address, WAIT_S)
    summary = summary_of(asyncio.run(send_trace(stack.address, replay)), slo)
    return Measured(mode, config, own, summary, late(before, wait_at_rest(stack.address, WAIT_S)))


def simulated(config: ClusterConfig, wanted: Sequence[TraceRequest]) -> Summary:
    """The same in virtual time."""
    return simulate(config, wanted)[0]


def described(summary: Summary) -> str:
    """A line about a run that shows where goodput comes from."""
    outcomes = ", ".join(f"{count} {name}" for name, count in summary.outcomes.items())
    ttft_s, tbt_s = summary.ttft_s.get("p90", 0.0), summary.tbt_s.get("p90", 0.0)
    return f"{summary.goodput_share:.1%} ({outcomes}, p90 of TTFT {ttft_s:.3g} s, of TBT {tbt_s:.3g} s)"


def plan_of(options: argparse.Namespace, folder: Path) -> StackPlan:
    """The stack that serves all modes."""
    return StackPlan(
        str(model_dir()), folder, engine=f"emulated:{options.profile}", time_scale=options.time_scale,
        prefill=options.prefill, decode=options.decode, block_size=STEP_TOKENS // 8, dram_bytes=STORE_BYTES,
        log_level="warning", extra={"prefill": ["--max-num-batched-tokens", str(STEP_TOKENS)]},
    )  # fmt: skip


def stacks(options: argparse.Namespace, progress: Progress) -> Iterator[Measured]:
    """All modes, as often as there are runs."""
    trace = list(Trace(options.trace or trace_path("") or GENERATED))
    modes = [MODES[name] for name in options.only.split(",")]
    rates = [options.overload_rate if mode.limited else options.rate for mode in modes]
    wanted = [arrivals(trace, options.requests, rate) for rate in rates]
    for number in range(options.runs):
        with tempfile.TemporaryDirectory() as folder, LocalStack(plan_of(options, Path(folder))) as stack:
            for mode, requests in zip(modes, wanted, strict=True):
                begin(stack, mode)
                found = serve(stack, mode, requests, options)
                told = f"stack {described(found.summary)}, late by {found.late:.1f} %"
                progress(f"run {number + 1} of {options.runs}, {mode.name}: {told}")
                yield found


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """All rows. What was measured is simulated afterwards, on all cores."""
    measured = list(stacks(options, progress))
    figures: dict[str, list[Figures]] = {}
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        summaries = pool.map(simulated, [run.config for run in measured], [run.requests for run in measured])
        for run, summary in zip(measured, summaries, strict=True):
            found = Figures(100 * run.summary.goodput_share, 100 * summary.goodput_share)
            figures.setdefault(run.mode.name, []).append(found)
            progress(f"{run.mode.name}: simulated {described(summary)}, off by {found.off:.1f} %")
    return [
        *(row for name, runs in figures.items() for row in rows(name, runs)),
        lateness([run.late for run in measured]),
    ]


def rows(name: str, figures: Sequence[Figures]) -> Iterator[Row]:
    """Both goodputs, and how far the simulator is off."""
    yield paired(
        f"{name}: requests within both limits",
        "%",
        [(figure.stack, figure.simulated) for figure in figures],
        "simulated",
    )
    yield bounded(f"{name}: simulation off by", "%", [figure.off for figure in figures], "wanted at most", WANTED)


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--only", default=",".join(MODES), help="some modes, comma-separated (default: %(default)s)")
    add("--trace", type=Path, help="Mooncake's form (default: $MOONPOOL_TRACE, or the generated one)")
    add("--profile", default="llama-70b-a800", help="of the emulated instances (default %(default)s)")
    add("--time-scale", type=float, default=0.5, help="seconds of the profile in one second (default 0.5)")
    add("--prefill", type=int, default=8, help="instances (default 8)")
    add("--decode", type=int, default=8, help="instances (default 8)")
    add("--requests", type=int, default=160, help="of the trace (default 160)")
    add("--rate", type=float, default=5.0, help="per second, where policies are compared (default 5)")
    add("--overload-rate", type=float, default=10.0, help="per second, where limits are told (default 10)")
    add("--ttft-slo-s", type=float, default=6.0, help="limit of goodput, seconds of the profile (default 6)")
    add("--tbt-slo-s", type=float, default=0.06, help="the same of the time between tokens (default 0.06)")


if __name__ == "__main__":
    run("goodput", measure, flags=flags)
