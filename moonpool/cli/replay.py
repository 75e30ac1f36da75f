"""`moonpool replay`: sends a trace to a running stack and reports as the simulator does, beside a simulation."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from moonpool.base.checkpoint import load_config, resolve
from moonpool.base.errors import ConfigError
from moonpool.cli.addresses import addresses
from moonpool.cli.load_generator.loops import trace_loop
from moonpool.cli.load_generator.senders import greedy, sdk_sender
from moonpool.cli.models import chosen_model
from moonpool.cli.predict_options import ReplayOptions
from moonpool.cli.tables import RecordTable, stdout_console
from moonpool.cli.whole_words import say
from moonpool.client import AsyncClient, GenerateArguments, GenerateResult, Slo, TokenEvent
from moonpool.engine.emulated.profile import load_profile
from moonpool.simulator.clock import PS
from moonpool.simulator.cluster.config import ClusterConfig, SloTargets
from moonpool.simulator.cluster.requests import DONE, Answer, Request, TokenTimes
from moonpool.simulator.experiments.calibration import SIMULATIONS, Extras, Line, Times, compare, fit, serve
from moonpool.simulator.experiments.report import Collector, Summary
from moonpool.simulator.traces.mooncake import Trace, TraceRequest

DRAWS = 5
"""Simulations of the forecast: chance moves a hundred requests' slowest tenth by 15 % in one simulation."""
FIGURES = ("ttft_s", "tbt_s", "tpot_s", "e2e_s", "ttft_error")


@dataclass(frozen=True, slots=True)
class TraceReplay:
    """What is sent, and how.

    Attributes:
        requests: in order of time.
        block_size: tokens per trace block.
        time_scale: trace and report seconds that pass in one second.
        vocab_size: the served model's vocabulary.
        slo: for goodput.
        limits: what requests tell the stack to expect, seconds of the trace; None = not simulated.
    """

    requests: Sequence[TraceRequest]
    block_size: int
    time_scale: float
    vocab_size: int
    slo: SloTargets
    limits: Slo | None = None

    def told(self) -> Slo | None:
        """Return the limits in seconds on the stack's clock."""
        if self.limits is None:
            return None
        ttft_s, tbt_s = (limit and limit / self.time_scale for limit in (self.limits.ttft_s, self.limits.tbt_s))
        return Slo(ttft_s=ttft_s, tbt_s=tbt_s)


def cut_request(request: TraceRequest, prompt_tokens: int, output_tokens: int, block_size: int) -> TraceRequest:
    """Cut a request to so many tokens; 0 = as many as there are."""
    tokens = min(request.input_length, prompt_tokens or request.input_length)
    ids = request.hash_ids[: -(-tokens // block_size)]
    answer = min(request.output_length, output_tokens or request.output_length)
    return replace(request, input_length=tokens, output_length=answer, hash_ids=ids)


@dataclass(frozen=True, slots=True)
class FittedSimulation:
    """A simulation fitted to a replay's first requests, beside the other requests.

    Attributes:
        extras: the fitted numbers; `near`: how near the fit is, as a mean |ln ratio|.
        measured: the requests that the fit left out.
        simulated: the same in each simulation; these differ in what chance adds.
    """

    extras: Extras
    near: float
    measured: Sequence[Request]
    simulated: Sequence[Sequence[Request]]

    @property
    def times(self) -> Times:
        """The times of all simulations together."""
        return Times.of([request for requests in self.simulated for request in requests])

    @property
    def lines(self) -> list[Line]:
        """The comparison, quantile by quantile."""
        return compare(Times.of(self.measured), self.times)

    def to_json(self) -> dict[str, object]:
        """Return what was fitted, and the lines."""
        return {
            "extras": self.extras.to_json(),
            "near": self.near,
            "lines": [line.to_json() for line in self.lines],
        }


async def send_trace(address: str | Sequence[str], replay: TraceReplay) -> list[Request]:
    """Send each request when due, or after the requests waited for; return the requests in the trace's order."""
    slo = replay.told()
    sent = [
        Request(number, 0, wanted.input_length, wanted.output_length, (), choices=wanted.choices, tenant=wanted.tenant)
        for number, wanted in enumerate(replay.requests)
    ]

    def on_trace_clock(seconds: float) -> int:
        return round(seconds * replay.time_scale * PS)

    def arguments(index: int) -> GenerateArguments:
        wanted = replay.requests[index]
        prompt = wanted.tokens(replay.vocab_size, replay.block_size).tolist()
        sampling = replace(greedy(wanted.output_length), n=wanted.choices)
        return {"token_ids": prompt, "sampling": sampling, "tenant": wanted.tenant, "slo": slo}

    def on_event(index: int, event: TokenEvent, now: float) -> None:
        note_tokens(sent[index].answers[event.choice], len(event.token_ids), on_trace_clock(now))

    def on_result(index: int, result: GenerateResult) -> None:
        request = sent[index]
        request.outcome, request.reused = DONE, result.usage.cached_tokens
        request.predicted_ttft_s = result.placement.predicted_ttft_s * replay.time_scale

    async with AsyncClient(address) as client:
        send = sdk_sender(client, arguments, on_event=on_event, on_result=on_result)
        outcomes = await trace_loop(replay.requests, replay.time_scale, send)
    for request, outcome in zip(sent, outcomes, strict=True):
        request.arrived, request.ended_at = on_trace_clock(outcome.due), on_trace_clock(outcome.ended)
        request.outcome = outcome.error or request.outcome
    return sent


def summary_of(requests: Sequence[Request], slo: SloTargets) -> Summary:
    """Sum up ended requests."""
    collector = Collector(slo)
    for request in requests:
        collector.add(request)
    return collector.summary()


async def cluster_like(address: str | Sequence[str], config: ClusterConfig) -> ClusterConfig:
    """Describe a simulated cluster with as many instances, and pools as large, as the running cluster."""
    async with AsyncClient(address) as client:
        state = await client.cluster_state()
    count = Counter(instance.kind for instance in state.instances)
    tokens = min(instance.total_blocks for instance in state.instances if instance.total_blocks) * state.block_size
    return replace(
        config, prefill=count["prefill"], decode=count["decode"], kvstore=count["kvstore"],
        pool_blocks=max(1, tokens // config.block_size),
    )  # fmt: skip


def fit_and_compare(
    config: ClusterConfig,
    requests: Sequence[TraceRequest],
    measured: Sequence[Request],
    first: int,
    simulations: int = SIMULATIONS,
) -> FittedSimulation:
    """Fit the cluster to the first measured requests, and simulate all: the other requests show how good the fit is.

    Simulate them `DRAWS` times, with what chance adds drawn anew.
    """
    extras, near = fit(config, requests[:first], Times.of(measured[:first]), simulations=simulations)
    fitted = extras.applied(config)
    simulated = [serve(replace(fitted, seed=config.seed + draw), requests)[first:] for draw in range(DRAWS)]
    return FittedSimulation(extras, near, measured[first:], simulated)


def note_tokens(answer: Answer, tokens: int, now: int) -> None:
    """Note tokens that came together: they share the time since the last token."""
    if tokens:
        gap = (now - answer.last_at) // tokens if answer.made else 0
        answer.take(TokenTimes(answer.last_at + gap if answer.made else now, [gap] * (tokens - 1), now))


def print_summaries(columns: dict[str, Summary]) -> None:
    """Print the summaries side by side."""
    table = RecordTable("figure", *columns, right=[*columns])
    outcomes = ([f"{name} {count}" for name, count in summary.outcomes.items()] for summary in columns.values())
    table.add_row("outcomes", *map(", ".join, outcomes))
    for name in ("requests", "goodput_share", "reused_share", "tokens_per_s"):
        table.add_row(name, *(str(getattr(summary, name)) for summary in columns.values()))
    for figure in FIGURES:
        for point in ("mean", "p50", "p90", "p99"):
            values = (getattr(summary, figure).get(point) for summary in columns.values())
            table.add_row(f"{figure} {point}", *("-" if value is None else f"{value:g}" for value in values))
    stdout_console().print(table)


def print_fit(found: FittedSimulation) -> None:
    """Print what was fitted, and how far the simulation is from what was measured after that."""
    extras = (f"{name} {value:.4g}" for name, value in found.extras.to_json().items())
    say(f"\nfitted to the first requests: {', '.join(extras)}")
    table = RecordTable("the other requests", "measured", "simulated", "ratio", "wanted")
    for line in found.lines:
        met = "met" if line.error <= line.wanted else "missed"
        seconds = f"{line.measured_s:.4g}", f"{line.simulated_s:.4g}"
        table.add_row(line.figure, *seconds, f"{line.ratio:.3f}", f"within {line.wanted:.0%}: {met}")
    stdout_console().print(table)


def run_replay(options: ReplayOptions) -> int:
    """Replay, and simulate the same when a profile is given. Return 1 when a request failed.

    Raises:
        TraceError: the trace is wrong.
        ConfigError: the profile is missing, the time scale is not positive, or no request is left to compare.
    """
    calibrate_on, slo = options.calibrate_on, SloTargets(options.ttft_slo_s, options.tbt_slo_s)
    conductors, model = addresses(options.address), chosen_model(options.model)
    if options.time_scale <= 0:
        raise ConfigError("time_scale", f"must be positive, is {options.time_scale:g}")
    source = Trace(options.trace, options.requests)
    wanted = [
        cut_request(request, options.prompt_tokens, options.output_tokens, source.block_size) for request in source
    ]
    if calibrate_on and not options.simulate:
        raise ConfigError("calibrate_on", "needs a profile to simulate with")
    if calibrate_on >= len(wanted):
        raise ConfigError("calibrate_on", f"must be less than the {len(wanted)} requests, is {calibrate_on}")
    config = None
    if options.simulate:
        config = ClusterConfig(profile=load_profile(options.simulate), slo=slo, block_size=source.block_size,
                               max_num_batched_tokens=options.max_num_batched_tokens)  # fmt: skip
        config = asyncio.run(cluster_like(conductors, config))
    vocab_size = load_config(resolve(model)).vocab_size
    replay = TraceReplay(wanted, source.block_size, options.time_scale, vocab_size, slo)
    measured = asyncio.run(send_trace(conductors, replay))
    columns = {"measured": summary_of(measured[calibrate_on:], slo)}
    found = None
    if config is not None and calibrate_on:
        found = fit_and_compare(config, wanted, measured, calibrate_on)
        columns["simulated"] = summary_of(found.simulated[0], slo)
    elif config is not None:
        columns["simulated"] = summary_of(serve(config, wanted), slo)
    if options.as_json:
        report = {name: summary.to_json() for name, summary in columns.items()}
        print(json.dumps(report if found is None else report | found.to_json(), indent=1))
    else:
        print_summaries(columns)
        if found is not None:
            print_fit(found)
    return int(any(request.outcome != DONE for request in measured))
