"""How far the simulator is from a real stack, calibrated on one slice of a trace and compared on the next one.

A stack of emulated instances (8 + 8) and one of the bundled model (1 + 1) get two slices of a trace each. The
simulator's extras (`moonpool.simulator.experiments.calibration`) are fitted to the first slice, the second is compared:
TTFT and TPOT at p50 within 15 %, at p90 within 25 %. The bundled model's profile is measured first, by `moonpool
calibrate`. All stacks are measured first, then the fits are searched for, on all cores. With three runs it takes about
eight minutes on two cores. `--picture FILE.svg` has the quantiles of the last run of each stack.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from benchmarks.emulated import at_rate
from benchmarks.frame import Progress, Row, Skipped, bounded, run
from moonpool.base.bundled import model_dir
from moonpool.base.checkpoint import load_config
from moonpool.cli.calibrate import run_calibrate
from moonpool.cli.replay import FittedSimulation, TraceReplay, cluster_like, cut_request, fit_and_compare, send_trace
from moonpool.cli.stack import LocalStack, StackPlan
from moonpool.engine.emulated.profile import load_profile
from moonpool.simulator.cluster.config import ClusterConfig, SloTargets
from moonpool.simulator.cluster.requests import Request
from moonpool.simulator.experiments.calibration import Times, charts, quantile
from moonpool.simulator.experiments.report import Chart
from moonpool.simulator.traces.mooncake import BLOCK_SIZE, Trace, TraceRequest, trace_path

GENERATED = Path(__file__).parent / "traces" / "generated.jsonl"
FIT_SIMULATIONS = 150
"""That each fit may take: twice as many came a twentieth nearer (docs/simulator.md), and take twice as long."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One of the stacks.

    Attributes:
        name: in rows.
        engine: of `StackPlan`; the profile that is simulated is the engine's, or measured for "real".
        prefill, decode: instances.
        shrink: lengths and blocks of the trace are so many times shorter.
        most_tokens: a prompt is cut to so many.
        least_answer: an answer has so many tokens at least. The time per token of one of two tokens is a single gap,
            in which the prompt's KV comes: where a tenth of the answers were so short, the p90 lay between such gaps
            and steps.
        max_num_batched_tokens: of a prefill step.
        host_slowdown: what `ClusterConfig.host_slowdown` begins with: above 1 where engines share the machine's cores.
        requests: of a slice.
        rate: requests per second.
    """

    name: str
    engine: str
    prefill: int
    decode: int
    shrink: int
    most_tokens: int
    least_answer: int
    max_num_batched_tokens: int
    host_slowdown: float
    requests: int
    rate: float

    @property
    def block_size(self) -> int:
        """Tokens of a block of the stack, and of the shrunk trace."""
        return BLOCK_SIZE // self.shrink


KINDS = {
    "emulated": Kind("emulated 8 + 8", "emulated:llama-70b-a800", 8, 8, 1, 32_000, 2, 4096, 1.0, 60, 4.0),
    "real": Kind("bundled model 1 + 1", "real", 1, 1, 16, 1400, 8, 512, 1.5, 200, 5.0),
}


def slices(trace: Sequence[TraceRequest], kind: Kind, number: int) -> list[TraceRequest]:
    """The `number`-th two slices of the trace, shrunk, at their rate, from its start again after its end.

    Raises:
        Skipped: the trace is too short.
    """
    count = 2 * kind.requests
    if len(trace) < count:
        raise Skipped(f"the trace has {len(trace)} requests, two slices are {count}")
    first = number % (len(trace) // count) * count
    return at_rate([shrunk(request, kind) for request in trace[first : first + count]], kind.rate)


def shrunk(request: TraceRequest, kind: Kind) -> TraceRequest:
    """A request with shorter prompt and answer; blocks that were equal stay so."""
    tokens = max(1, request.input_length // kind.shrink)
    answer = max(kind.least_answer, request.output_length // kind.shrink)
    return cut_request(replace(request, input_length=tokens, output_length=answer), min(tokens, kind.most_tokens), 0,
               kind.block_size)  # fmt: skip


class Measured(NamedTuple):
    """What one run of a stack has measured, and the configuration for its simulation."""

    config: ClusterConfig
    wanted: Sequence[TraceRequest]
    found: Sequence[Request]


def measured(kind: Kind, wanted: Sequence[TraceRequest], profile: str, folder: Path) -> Measured:
    """Start a stack and send it both slices."""
    plan = StackPlan(
        str(model_dir()), folder, engine=kind.engine, time_scale=0.0 if kind.engine == "real" else 1.0,
        prefill=kind.prefill, decode=kind.decode, block_size=kind.block_size, log_level="warning",
        extra={"prefill": ["--max-num-batched-tokens", str(kind.max_num_batched_tokens)]},
    )  # fmt: skip
    config = ClusterConfig(
        profile=load_profile(profile), block_size=kind.block_size,
        max_num_batched_tokens=kind.max_num_batched_tokens, host_slowdown=kind.host_slowdown,
    )  # fmt: skip
    vocab_size = load_config(model_dir()).vocab_size
    with LocalStack(plan) as stack:
        config = asyncio.run(cluster_like(stack.address, config))
        found = asyncio.run(
            send_trace(stack.address, TraceReplay(wanted, kind.block_size, 1.0, vocab_size, SloTargets()))
        )
    return Measured(config, wanted, found)


def runs_of(
    kind: Kind, trace: Sequence[TraceRequest], options: argparse.Namespace, progress: Progress
) -> list[Measured]:
    """All runs of one stack."""
    found: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        profile = kind.engine.removeprefix("emulated:")
        if kind.engine == "real":
            profile = options.profile or str(_calibrated(Path(folder)))
            progress(f"{kind.name}: calibrated")
        for number in range(options.runs):
            found.append(measured(kind, slices(trace, kind, number), profile, Path(folder) / str(number)))
            figures = Times.of(found[-1].found).figures
            medians = ", ".join(f"{name} {quantile(values, 0.5):.4f} s" for name, values in figures.items())
            progress(f"{kind.name}, run {number + 1}: measured, medians {medians}")
    return found


def said(kind: Kind, number: int, found: FittedSimulation) -> str:
    """A run in words."""
    lines = ", ".join(f"{line.figure} {line.ratio:.2f}" for line in found.lines)
    extras = ", ".join(f"{name} {value:.3g}" for name, value in found.extras.to_json().items())
    return f"{kind.name}, run {number + 1}: simulated / measured {lines}; fit {found.near:.3f}, {extras}"


def _calibrated(folder: Path) -> Path:
    """The bundled model's profile with all cores, as an engine of the stack has them while it computes alone."""
    out = folder / "profile.yaml"
    run_calibrate(
        str(model_dir()),
        out,
        name="bundled",
        hardware="this machine",
        dtype="auto",
        kv_cache_dtype="auto",
        threads=0,
        repeats=3,
    )
    return out


def _rows(kind: Kind, found: Sequence[FittedSimulation]) -> Iterator[Row]:
    for lines in zip(*(simulation.lines for simulation in found), strict=True):
        errors = [100 * line.error for line in lines]
        yield bounded(f"{kind.name}: {lines[0].figure}, simulation off by", "%", errors, "wanted at most",
                      100 * lines[0].wanted)  # fmt: skip


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """All rows; writes the picture."""
    trace = list(Trace(options.trace or trace_path("") or GENERATED))
    rows: list[Row] = []
    pictures: list[Chart] = []
    kinds = [
        replace(KINDS[name], requests=options.requests or KINDS[name].requests) for name in options.only.split(",")
    ]
    runs = [(kind, runs_of(kind, trace, options, progress)) for kind in kinds]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        fits = [
            (kind, [pool.submit(fit_and_compare, *run, kind.requests, options.simulations) for run in found])
            for kind, found in runs
        ]
        for kind, futures in fits:
            found = []
            for number, future in enumerate(futures):
                found.append(future.result())
                progress(said(kind, number, found[-1]))
            rows += _rows(kind, found)
            drawn = charts(Times.of(found[-1].measured), found[-1].times)
            pictures += [replace(chart, title=f"{kind.name}: {chart.title}") for chart in drawn]
    path = options.picture or (options.out.with_suffix(".svg") if options.out else None)
    if path is not None:
        path.write_text(stacked(pictures), encoding="utf-8")
    return rows


def stacked(pictures: Sequence[Chart]) -> str:
    """One picture below the other."""
    heights = "".join(
        f'<g transform="translate(0 {360 * at})">{picture.svg()}</g>' for at, picture in enumerate(pictures)
    )
    size = f'width="720" height="{360 * len(pictures)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{heights}</svg>\n'


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--only", default=",".join(KINDS), help=f"some of {','.join(KINDS)} (default: all)")
    add("--trace", type=Path, help="Mooncake's form (default: $MOONPOOL_TRACE, or the generated one)")
    add("--requests", type=int, default=0, help="of each slice; 0 = as many as the stack's kind has")
    add("--simulations", type=int, default=FIT_SIMULATIONS, help="that a fit may take (default 150)")
    add("--profile", default="", help="of the bundled model; default: it is measured")
    add("--picture", type=Path, help="SVG file (default: beside --out)")


if __name__ == "__main__":
    run("simulated", measure, flags=flags)
