"""`moonpool simulate EXPERIMENT` and `moonpool plan`: experiments in virtual time, and capacity planning."""

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from moonpool.base.errors import ConfigError
from moonpool.base.kv.layout import DEFAULT_BLOCK_SIZE
from moonpool.base.settings import default_of
from moonpool.cli.options import verb
from moonpool.cli.predict_options import PlanOptions
from moonpool.cli.tables import RecordTable, stdout_console
from moonpool.cli.whole_words import say
from moonpool.conductor.core.routing import RoutingConfig
from moonpool.conductor.placement.decode_policies import DEFAULT_DECODE_POLICY
from moonpool.conductor.placement.policies import DEFAULT_POLICY, POLICIES
from moonpool.engine.emulated.profile import load_profile
from moonpool.simulator.cluster.config import GB, ChunkSteps, ClusterConfig, SloTargets
from moonpool.simulator.experiments import engines as engines_experiment
from moonpool.simulator.experiments import faults as conductors_experiment
from moonpool.simulator.experiments import memory as memory_experiment
from moonpool.simulator.experiments import pipeline as pipeline_experiment
from moonpool.simulator.experiments import prefix_caching as cache_experiment
from moonpool.simulator.experiments import race as race_experiment
from moonpool.simulator.experiments import replay as replay_experiment
from moonpool.simulator.experiments import scaling as scaling_experiment
from moonpool.simulator.experiments import serving
from moonpool.simulator.experiments.frame import Progress, RequestSource, Result, simulate
from moonpool.simulator.experiments.report import Summary
from moonpool.simulator.planning.page import page
from moonpool.simulator.planning.planner import PlanSearch, check_possible, load_hardware, parse_slo
from moonpool.simulator.traces.workload import CHAT, WorkloadMix

app = typer.Typer()
Trace = Annotated[
    Path | None,
    typer.Option(help="Trace file, Mooncake's form or a recording.", envvar="MOONPOOL_TRACE", show_envvar=True),
]
Requests = Annotated[int, typer.Option(min=0, help="First requests only; 0 = all of a trace, 1000 generated ones.")]
Sessions = Annotated[
    int, typer.Option(min=0, help="Sessions of coding agents to generate if there is no trace; 0 = other requests.")
]
Seed = Annotated[int, typer.Option(help="Seed of generated requests, of calls' delays and of random choices.")]
Profile = Annotated[str, typer.Option(help="Hardware and model: a bundled profile's name, or a path.")]
Prefill = Annotated[int, typer.Option(min=1, help="Prefill instances.")]
Decode = Annotated[int, typer.Option(min=1, help="Decode instances.")]
Kvstore = Annotated[int, typer.Option(min=0, help="kvstores.")]
Rate = Annotated[float, typer.Option(min=0.001, help="Requests come so many times as fast as in the trace.")]
StoreGb = Annotated[float, typer.Option(min=0.001, help="DRAM of each kvstore, GB.")]
TtftSlo = Annotated[float, typer.Option(min=0.0, help="TTFT limit of goodput, seconds.")]
TbtSlo = Annotated[float, typer.Option(min=0.0, help="TBT limit of goodput (mean of a request's longest 10 %), s.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object: virtual results only.")]
Picture = Annotated[Path | None, typer.Option(help="Draw the result into this SVG file.")]
DEFAULT_PROFILE = "llama-70b-a800"
GC_THRESHOLD = 50_000
"""New objects until the collector looks for cycles among them (Python's own is 700).

Hardly any object is in a cycle, as requests and events leave no cycles behind, and live objects are scanned again and
again: 3 % of a run's time.
"""


def _run_and_print(run: Callable[[Progress], Result], *, as_json: bool, picture: Path | None) -> None:
    """Run an experiment and print the result; the wall-clock goes to standard error."""
    begun, cpu = time.perf_counter(), time.process_time()
    with _less_garbage_collection():
        result = run(lambda line: say(line, err=True))
    elapsed, cpu = time.perf_counter() - begun, time.process_time() - cpu
    say(f"{result.experiment}: {elapsed:.2f} s of wall-clock, {cpu:.2f} s of one core", err=True)
    if picture is not None:
        picture.write_text(result.chart.svg(), encoding="utf-8")
    if as_json:
        print(result.to_json())
        return
    width = max(map(len, result.assumptions), default=0) + 2
    for name, fact in result.assumptions.items():
        told = " ".join(fact) if isinstance(fact, list) else fact
        say(f"{name + ':':{width}}{told}", indent=" " * width)
    print()
    stdout_console().print(_result_table(result))


@contextmanager
def _less_garbage_collection() -> Iterator[None]:
    """What is here already, modules for the most part, is not looked at by the garbage collector; the rest seldom."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _result_table(result: Result) -> RecordTable:
    """Rows as lines; a single row as a list of figures."""
    if len(result.rows) == 1:
        table = RecordTable("figure", "value")
        for name, value in result.rows[0].items():
            table.add_row(name, _cell_text(value))
        return table
    table = RecordTable(*result.rows[0])
    for row in result.rows:
        table.add_row(*map(_cell_text, row.values()))
    return table


def _cell_text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell_text(part)}" for name, part in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, kw_only=True)
class Printed:
    """Options of every experiment."""

    seed: Seed = 1
    as_json: Json = False
    picture: Picture = None

    def print(self, run: Callable[[Progress], Result]) -> None:
        """Run an experiment and print the result."""
        _run_and_print(run, as_json=self.as_json, picture=self.picture)


@dataclass(frozen=True, kw_only=True)
class Traced(Printed):
    """Options of experiments that read a trace, or requests that are generated."""

    trace: Trace = None
    requests: Requests = 0
    sessions: Sessions = 0

    def source(self) -> RequestSource:
        return RequestSource(self.trace, self.requests, self.seed, sessions=self.sessions)


@dataclass(frozen=True, kw_only=True)
class MachineOptions(Printed):
    """Options of experiments with a cluster."""

    profile: Profile = DEFAULT_PROFILE
    kvstore: Kvstore = 8
    store_gb: StoreGb = 1000.0
    ttft_slo_s: TtftSlo = 30.0
    tbt_slo_s: TbtSlo = 0.1

    def machines(self, prefill: int, decode: int, rate: float) -> ClusterConfig:
        """Return a cluster of so many instances; requests come `rate` times as fast as in the trace."""
        return ClusterConfig(
            profile=load_profile(self.profile), prefill=prefill, decode=decode, kvstore=self.kvstore, rate=rate,
            store_bytes=round(self.store_gb * GB), slo=SloTargets(self.ttft_slo_s, self.tbt_slo_s), seed=self.seed,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(Traced, MachineOptions):
    """Options of experiments that serve a trace with a cluster."""

    prefill: Prefill = 8
    decode: Decode = 8
    rate: Rate = 1.0

    def config(self) -> ClusterConfig:
        return self.machines(self.prefill, self.decode, self.rate)


@dataclass(frozen=True, kw_only=True)
class CacheOptions(Traced):
    """Options of `cache`."""

    policies: Annotated[str, typer.Option(help="Eviction policies, comma-separated; empty = all.")] = ""
    capacities: Annotated[str, typer.Option(help="Blocks, comma-separated; inf = no bound.")] = ""
    blocks: Annotated[str, typer.Option(help="full: full blocks only, as stores hold; all: as published.")] = "all"


@app.command()
@verb
def cache(options: CacheOptions) -> None:
    """Hit shares of eviction policies in one global pool, beside Belady's optimum."""
    named, sized = options.policies, options.capacities
    names = named.split(",") if named else (*cache_experiment.COMPARED, cache_experiment.OPTIMUM)
    sizes = [_parse_capacity(part) for part in sized.split(",")] if sized else cache_experiment.CAPACITIES
    options.print(lambda say: cache_experiment.cache(options.source(), say, names, sizes, options.blocks))


def _parse_capacity(text: str) -> int:
    if text == cache_experiment.UNBOUNDED:
        return 0
    if not text.isdecimal() or int(text) == 0:
        raise typer.BadParameter(f"a capacity is a positive whole number or inf, not {text!r}")
    return int(text)


@dataclass(frozen=True, kw_only=True)
class ScaleOptions(ClusterOptions):
    """Options of `scale`."""

    kvstore: Kvstore = 1
    policy: Annotated[str, typer.Option(help=f"One of {', '.join(POLICIES)}; or another, as the conductor's flag.")] = (
        DEFAULT_POLICY
    )
    decode_prompt_tokens: Annotated[
        int, typer.Option(min=0, help="Decode may compute so many tokens of a prompt; 0 = none.")
    ] = default_of(RoutingConfig, "decode_prompt_tokens")


@app.command()
@verb
def scale(options: ScaleOptions) -> None:
    """Serve a trace with a cluster: latencies, goodput, how busy the parts were."""
    config = replace(options.config(), policy=options.policy, decode_prompt_tokens=options.decode_prompt_tokens)
    options.print(lambda say: serving.scale(config, options.source(), say))


@app.command()
@verb
def scheduling(options: ClusterOptions) -> None:
    """Time to first token by how prefill instances are chosen: random, by load, by own cache, by all KV there is."""
    options.print(lambda say: serving.scheduling(options.config(), options.source(), say))


@dataclass(frozen=True, kw_only=True)
class RaceOptions(Traced, MachineOptions):
    """Options of `race`."""

    policy: Annotated[
        str, typer.Option(help="Policies, comma-separated, named as in the conductor's flag; empty = all bundled.")
    ] = ""
    decode_policy: Annotated[
        str, typer.Option(help="Policies for decode, likewise: each races with each of --policy; empty = the default.")
    ] = ""
    speed: Annotated[
        str, typer.Option(help="Requests come so many times as fast as in the trace; several with commas.")
    ] = "1"
    link_gb: Annotated[
        str,
        typer.Option(help="GB per second that an instance loads over its link; 0 = own caches; several with commas."),
    ] = "100"
    jitter_seeds: Annotated[
        int, typer.Option(min=1, help="Runs of each policy; each moves arrivals within the grain of the trace's clock.")
    ] = 3
    prefill: Prefill = 8
    decode: Decode = 8


@app.command()
@verb
def race(options: RaceOptions) -> None:
    """Placement policies side by side: one trace, loads and speeds of links, several seeds of arrivals."""
    config = options.machines(options.prefill, options.decode, 1.0)
    decode = options.decode_policy.split(",") if options.decode_policy else [DEFAULT_DECODE_POLICY]
    racers = race_experiment.Racers(options.policy.split(",") if options.policy else list(POLICIES), decode)
    courses = race_experiment.Courses(
        _parse_numbers("speed", options.speed), _parse_numbers("link_gb", options.link_gb), options.jitter_seeds
    )
    options.print(lambda say: race_experiment.race(config, options.source(), racers, courses, say))


def _parse_numbers(field: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(field, f"is a number, or several with commas, not {text!r}") from error


@dataclass(frozen=True, kw_only=True)
class JournalReplayOptions(Printed):
    """Options of `replay`."""

    journal: Annotated[Path, typer.Option(help="A journal's file, or the folder that journal_dir names.")]
    policy: Annotated[
        str, typer.Option(help="Policies, comma-separated, named as in the conductor's flag; empty = all bundled.")
    ] = ""
    module: Annotated[
        str, typer.Option(help="Module of a recorded policy that is not built in; the module's code runs.")
    ] = ""


@app.command()
@verb
def replay(options: JournalReplayOptions) -> None:
    """Other placement policies on a conductor's journal: what each would have decided where the recorded one did."""
    named = options.policy.split(",") if options.policy else list(POLICIES)
    options.print(lambda say: replay_experiment.replay(options.journal, named, say, options.module))


@dataclass(frozen=True, kw_only=True)
class RatioOptions(Traced, MachineOptions):
    """Options of `ratio`."""

    instances: Annotated[int, typer.Option(min=3, help="Prefill and decode instances together.")] = 16
    first: Annotated[int, typer.Option(min=1, help="Prefill instances of the first division.")] = 1
    rate: Rate = 1.0


@app.command()
@verb
def ratio(options: RatioOptions) -> None:
    """Goodput by how the instances are divided into prefill and decode."""
    config = options.machines(1, options.instances - 1, options.rate)
    options.print(lambda say: serving.ratio(config, options.source(), say, options.first))


@dataclass(frozen=True, kw_only=True)
class OverloadOptions(ClusterOptions):
    """Options of `overload`."""

    rate: Rate = 3.0
    tbt_slo_s: TbtSlo = 0.033
    by_pool: Annotated[
        bool,
        typer.Option(
            "--by-pool/--by-request",
            help="The paper's ways decide by the load of the whole decode pool, or by what a request would add.",
        ),
    ] = True


@app.command()
@verb
def overload(options: OverloadOptions) -> None:
    """Requests refused, prefill wasted and the swinging of load, by how requests are let in."""
    config = replace(options.config(), by_pool=options.by_pool)
    options.print(lambda say: serving.overload(config, options.source(), say))


@dataclass(frozen=True, kw_only=True)
class PipelineOptions(Printed):
    """Options of `pipeline`."""

    requests: Annotated[int, typer.Option(min=1, help="Prompts of each length.")] = 60
    machines: Annotated[int, typer.Option(min=8, help="Machines to join to pipelines; a multiple of 8.")] = 8
    profile: Profile = DEFAULT_PROFILE


@app.command()
@verb
def pipeline(options: PipelineOptions) -> None:
    """Time to first token by prefill pipelines' width, prompt length and load."""
    config = ClusterConfig(profile=load_profile(options.profile), kvstore=0, seed=options.seed)
    options.print(lambda say: pipeline_experiment.pipeline(config, options.machines, options.requests, say))


@dataclass(frozen=True, kw_only=True)
class ScalingOptions(ClusterOptions):
    """Options of `scaling`."""

    kvstore: Kvstore = 1
    most: Annotated[int, typer.Option(min=1, help="Instances of each kind at most.")] = 16
    start_s: Annotated[float, typer.Option(min=0.0, help="Seconds that an instance's start takes.")] = 60.0
    counts: Annotated[
        str, typer.Option(help="Prompts and answers an instance of rules that count, as 2/16,4/32; empty = none.")
    ] = "2/16,4/32,8/64"


@app.command()
@verb
def scaling(options: ScalingOptions) -> None:
    """Goodput and instance hours of pools that scale by the forecast, or by counted requests, beside a fixed mix."""
    targets = [_pair(part) for part in options.counts.split(",") if part]
    bounds = scaling_experiment.Bounds(options.most, options.start_s)
    options.print(lambda say: scaling_experiment.scaling(options.config(), options.source(), bounds, targets, say))


def _pair(text: str) -> tuple[float, float]:
    try:
        prompts, answers = map(float, text.split("/"))
    except ValueError:
        raise typer.BadParameter(f"counts are pairs such as 4/32, not {text!r}") from None
    if not (prompts > 0 and answers > 0):
        raise typer.BadParameter(f"counts must be positive, not {text!r}")
    return prompts, answers


@dataclass(frozen=True, kw_only=True)
class RolesOptions(MachineOptions):
    """Options of `roles`."""

    instances: Annotated[int, typer.Option("--machines", min=4, help="Prefill and decode instances together.")] = 8
    kvstore: Kvstore = 2
    reading_per_s: Annotated[float, typer.Option(min=0.01, help="Arrivals per second while documents come.")] = 1.5
    talking_per_s: Annotated[float, typer.Option(min=0.01, help="Arrivals per second while answers are long.")] = 8.0
    part_s: Annotated[float, typer.Option(min=60, help="Seconds until the mix shifts.")] = 600.0
    parts: Annotated[int, typer.Option(min=2, help="Parts of the load: one mix and the other in turn.")] = 4
    ttft_slo_s: TtftSlo = 10.0
    tbt_slo_s: TbtSlo = 0.06


@app.command()
@verb
def roles(options: RolesOptions) -> None:
    """Goodput if the mix of requests shifts: fixed divisions of the machines, and machines that change roles."""
    prefill = options.instances // 2
    config = options.machines(prefill, options.instances - prefill, 1.0)
    shifts = serving.Shifts((options.reading_per_s, options.talking_per_s), options.part_s, options.parts, options.seed)
    options.print(lambda say: serving.roles(config, shifts, say))


@dataclass(frozen=True, kw_only=True)
class EnginesOptions(Traced, MachineOptions):
    """Options of `engines`."""

    instances: Annotated[int, typer.Option("--machines", min=1, help="Machines.")] = 1
    kvstore: Kvstore = 0
    rate: Rate = 1.0
    profile: Profile = "llama-8b-h100"
    chat: Annotated[bool, typer.Option(help="If there is no trace: short conversations only, or every kind.")] = True
    splits: Annotated[str, typer.Option(help="Prefill instances, of several machines; several with commas.")] = ""
    chunk_steps: Annotated[
        str, typer.Option(help=f"Fixed time of steps with prompts: {', '.join(ChunkSteps)}; several with commas.")
    ] = "captured,eager"
    chunks: Annotated[str, typer.Option(help="Tokens of prompts beside answers; several with commas.")] = "512,1024"
    continuous: Annotated[str, typer.Option(help="Steps of answers between them; several with commas.")] = "0,2"
    ttft_slo_s: TtftSlo = 2.0
    tbt_slo_s: TbtSlo = 0.05

    def compared(self) -> engines_experiment.Comparison:
        steps = [_parse_chunk_steps(part) for part in self.chunk_steps.split(",")]
        chunks, continuous = _parse_counts("chunks", self.chunks), _parse_counts("continuous", self.continuous)
        if min(chunks) < 1:
            raise ConfigError("chunks", f"must be at least 1, are {self.chunks}")
        splits = _parse_counts("splits", self.splits) if self.splits else range(1, self.instances)
        mixings = [
            engines_experiment.Mixing(step, chunk, between)
            for step in steps
            for chunk in chunks
            for between in continuous
        ]
        return engines_experiment.Comparison(self.instances, splits, mixings)


@app.command()
@verb
def engines(options: EnginesOptions) -> None:
    """One engine or two: instances that compute prompts beside answers, beside prefill and decode instances."""
    config, source = options.machines(1, 1, options.rate), options.source()
    source = replace(source, mix=CHAT if options.chat else WorkloadMix())
    options.print(lambda say: engines_experiment.engines(config, source, options.compared(), say))


def _parse_counts(field: str, text: str) -> list[int]:
    numbers = _parse_numbers(field, text)
    if any(number < 0 or number != int(number) for number in numbers):
        raise ConfigError(field, f"is a whole number, or several with commas, not {text!r}")
    return list(map(int, numbers))


def _parse_chunk_steps(text: str) -> ChunkSteps:
    if text not in set(ChunkSteps):
        raise ConfigError("chunk_steps", f"is one of {', '.join(ChunkSteps)}, not {text!r}")
    return ChunkSteps(text)


@dataclass(frozen=True, kw_only=True)
class ConductorsOptions(ClusterOptions):
    """Options of `conductors`."""

    kvstore: Kvstore = 2
    rate: Rate = 1.5
    crash_s: Annotated[float, typer.Option(min=0.1, help="When the first conductor is lost.")] = 100.0


@app.command()
@verb
def conductors(options: ConductorsOptions) -> None:
    """Latencies by the number of conductors side by side, and the cost of losing a conductor."""
    options.print(
        lambda say: conductors_experiment.conductors(options.config(), options.source(), options.crash_s, say)
    )


@app.command()
def transfer(profile: Profile = DEFAULT_PROFILE, as_json: Json = False, picture: Picture = None) -> None:
    """The bandwidth above which loading a prefix beats computing: the paper's line and the simulated truth."""
    chosen = load_profile(profile)
    _run_and_print(lambda say: cache_experiment.transfer(chosen, say), as_json=as_json, picture=picture)


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(Printed):
    """Options of `memory`."""

    profile: Profile = DEFAULT_PROFILE
    requests: Annotated[int, typer.Option(min=8, help="Requests, all at once.")] = 1000
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 200
    answer_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer, on average.")] = 200
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens that a request may ask for.")] = 4096
    pool_blocks: Annotated[int, typer.Option(min=1, help="Blocks of the pool.")] = 2000
    block_size: Annotated[int, typer.Option(min=4, help="Tokens of a block.")] = DEFAULT_BLOCK_SIZE


@app.command()
@verb
def memory(options: MemoryOptions) -> None:
    """Sequences that share a decode pool: preallocation, growing tables, shared prompts, preemption."""
    names = ("requests", "prompt_tokens", "answer_tokens", "max_tokens", "pool_blocks", "block_size", "seed")
    load = memory_experiment.MemoryLoad(**{name: getattr(options, name) for name in names})
    chosen = load_profile(options.profile)
    options.print(lambda say: memory_experiment.memory(chosen, load, say))


@dataclass(frozen=True, kw_only=True)
class HotOptions(Printed):
    """Options of `hot`."""

    requests: Annotated[int, typer.Option(min=1, help="Requests.")] = 2000
    request_rate: Annotated[float, typer.Option(min=0.001, help="Requests per second, Poisson.")] = 16.0
    prefixes: Annotated[int, typer.Option(min=1, help="Hot prefixes.")] = 10
    prefix_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each hot prefix.")] = 8192
    share: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the requests that begin with one.")] = 0.95
    question_tokens: Annotated[int, typer.Option(min=1, help="Tokens after the prefix.")] = 512
    profile: Profile = DEFAULT_PROFILE
    prefill: Prefill = 8
    decode: Decode = 8
    kvstore: Kvstore = 0


@app.command()
@verb
def hot(options: HotOptions) -> None:
    """Time to first token where most prompts share a few prefixes, by how these spread over the instances."""
    config = ClusterConfig(
        profile=load_profile(options.profile), prefill=options.prefill, decode=options.decode,
        kvstore=options.kvstore, seed=options.seed, store_bytes=round(1000.0 * GB), slo=SloTargets(),
    )  # fmt: skip
    names = ("requests", "prefixes", "prefix_tokens", "share", "question_tokens", "seed")
    load = cache_experiment.HotLoad(rate_per_s=options.request_rate, **{name: getattr(options, name) for name in names})
    options.print(lambda say: cache_experiment.hot(config, load, say))


@dataclass(frozen=True, kw_only=True)
class FaultsOptions(Traced):
    """Options of `faults`."""

    seeds: Annotated[int, typer.Option(min=1, help="Runs, each with different faults.")] = 300
    profile: Profile = DEFAULT_PROFILE
    prefill: Prefill = 3
    decode: Decode = 3
    kvstore: Kvstore = 2


@app.command()
@verb
def faults(options: FaultsOptions) -> None:
    """Lost and late messages and crashes, by seed: every request ends, everything comes back. 1 when not."""
    config = ClusterConfig(
        profile=load_profile(options.profile), prefill=options.prefill, decode=options.decode,
        kvstore=options.kvstore, seed=options.seed, store_bytes=round(1000.0 * GB), slo=SloTargets(),
    )  # fmt: skip
    try:
        options.print(
            lambda say: conductors_experiment.faults(config, options.seeds, options.seed, say, options.source())
        )
    except AssertionError as failure:
        print(f"moonpool simulate faults: {failure}", file=sys.stderr)
        raise typer.Exit(1) from failure


def run_plan(options: PlanOptions) -> None:
    """Search, print the plan, write the report.

    Raises:
        ConfigError: model, hardware or limits are unknown, wrong or cannot be kept.
        TraceError: the trace is wrong.
        NoPlan: no mix within the bound is good enough.
    """
    if not 0 < options.goodput <= 1:
        raise ConfigError("goodput", f"must be a share above 0 and at most 1, is {options.goodput:g}")
    machines, limits = load_hardware(options.hardware), parse_slo(options.slo)
    source = RequestSource(options.trace, options.requests)
    profile = machines.profile(options.model)
    check_possible(profile, limits)
    base = ClusterConfig(
        profile=profile, slo=limits, rate=options.rate, block_size=source.block_size,
        store_bytes=machines.dram_bytes, disk_bytes=machines.disk_bytes,
    )  # fmt: skip

    def serve(config: ClusterConfig) -> Summary:
        return simulate(config, source.read())[0]

    plan = PlanSearch(base, machines, serve, options.goodput, options.bound, lambda line: say(line, err=True)).plan()
    facts: dict[str, object] = {
        "trace": source.describe(), "rate": options.rate, "model": options.model, "hardware": machines.name,
        "profile": f"{profile.name}: {profile.hardware}", "limits": f"TTFT {limits.ttft_s:g} s, TBT {limits.tbt_s:g} s",
        "cost an hour": ", ".join(f"{kind} {cost:g}" for kind, cost in machines.cost_per_hour.items()),
    }  # fmt: skip
    if options.report is not None:
        options.report.write_text(page(plan, facts, options.goodput), encoding="utf-8")
    if options.as_json:
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
