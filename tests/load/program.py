"""What all load programs have in common: flags, the loop, the warm-up, JSON, the picture.

A program says how one request is sent (`Send`) and which service is loaded.
"""

import argparse
import asyncio
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path

from benchmarks.frame import machine, today, versions
from moonpool.cli.load_generator.chart import latency_chart
from moonpool.cli.load_generator.loops import (
    RequestOutcome,
    SendRequest,
    closed_loop,
    open_loop,
    poisson_arrivals,
    trace_loop,
)
from moonpool.cli.load_generator.summary import LoadSummary, summarize
from moonpool.simulator.traces.mooncake import TraceRequest, read_trace


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """One service's load test.

    Attributes:
        name: of the service.
        about: what it does, for `--help`.
        flags: adds its own flags.
        target: the address to load: the one given, or that of a service started for as long as the context lasts.
        sending: how a request is sent; takes the flags, the address and the trace (empty without one).
        generates: its tokens come one after the other; otherwise there is no time per token.
    """

    name: str
    about: str
    flags: Callable[[argparse.ArgumentParser], None]
    target: Callable[[argparse.Namespace], AbstractContextManager[str]]
    sending: Callable[[argparse.Namespace, str, Sequence[TraceRequest]], AbstractAsyncContextManager[SendRequest]]
    generates: bool = True


def parse(program: Program, argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags of a program."""
    parser = argparse.ArgumentParser(
        prog=f"tests.load.{program.name}",
        description=program.about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--address", default="", help="HOST:PORT of the service to load; default: one of its own")
    parser.add_argument("--requests", type=int, default=60, help="requests in all; of a trace, its first ones")
    parser.add_argument("--warmup", type=int, default=8, help="first requests that do not count")
    parser.add_argument("--request-rate", type=float, default=0.0, help="open loop, requests per second (Poisson)")
    parser.add_argument("--trace", default="", help="open loop by a trace in Mooncake's form: times and lengths")
    parser.add_argument("--time-scale", type=float, default=1.0, help="seconds of the trace in one second")
    parser.add_argument("--max-concurrency", type=int, default=4, help="closed loop when neither is given")
    parser.add_argument("--ttft-slo-s", type=float, default=math.inf, help="first answer within, for goodput")
    parser.add_argument("--tpot-slo-s", type=float, default=math.inf, help="time per further token, for goodput")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file")
    parser.add_argument("--picture", type=Path, help="also draw every request into this SVG file")
    program.flags(parser)
    return parser.parse_args(argv)


async def load(program: Program, options: argparse.Namespace, address: str) -> list[RequestOutcome]:
    """Sends all requests and waits for their ends."""
    trace = read_trace(Path(options.trace), limit=options.requests) if options.trace else []
    async with program.sending(options, address, trace) as send:
        if trace:
            return await trace_loop(trace, options.time_scale, send)
        if options.request_rate > 0:
            return await open_loop(poisson_arrivals(options.request_rate, options.requests, options.seed), send)
        return await closed_loop(options.max_concurrency, range(options.requests), send)


def report(program: Program, options: argparse.Namespace, summary: LoadSummary) -> dict[str, object]:
    """The JSON object of one run."""
    loop = "trace" if options.trace else "open" if options.request_rate > 0 else "closed"
    plain = {name: value for name, value in vars(options).items() if isinstance(value, int | float | str)}
    flags = {name: value if value != math.inf else None for name, value in plain.items()}
    return {
        "load": program.name,
        "date": today(),
        "machine": machine(),
        "versions": dict(versions()),
        "loop": loop,
        "flags": flags | {"trace": Path(options.trace).name, "address": "given" if options.address else "own"},
        "summary": dataclasses.asdict(summary),
    }


def main(program: Program, argv: Sequence[str] | None = None) -> int:
    """Entry point of a program; returns 1 when a request failed in another way than by being refused."""
    options = parse(program, argv)
    with program.target(options) as address:
        outcomes = asyncio.run(load(program, options, address))
    slos = {"ttft_slo_s": options.ttft_slo_s, "tpot_slo_s": options.tpot_slo_s}
    summary = summarize(outcomes, warmup=options.warmup, **slos)
    if not program.generates:
        summary = dataclasses.replace(summary, tpot_s={}, itl_s={})
    result = json.dumps(report(program, options, summary), indent=2)
    for path, text in (
        (options.out, result + "\n"),
        (options.picture, latency_chart(f"{program.name} under load", outcomes)),
    ):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    print(result if options.json else table(program, options, summary))
    return 1 if set(summary.errors) - {"Overloaded"} else 0


def table(program: Program, options: argparse.Namespace, summary: LoadSummary) -> str:
    """The summary for people."""
    lines = [f"{program.name}, seed {options.seed}: {summary.requests} requests in {summary.duration_s:.3f} s"]
    lines.append(f"errors    {summary.errors or 'none'}")
    rates = f"{summary.requests_per_s:.2f} requests/s, {summary.goodput_per_s:.2f} within limits"
    rates += f", {summary.tokens_per_s:.1f} tokens/s, {summary.bytes_per_s / 1e6:.1f} MB/s of KV"
    lines.append(f"rates     {rates}")
    for name, values in (
        ("first", summary.ttft_s),
        ("per token", summary.tpot_s),
        ("gap", summary.itl_s),
        ("end", summary.e2e_s),
    ):
        if values:
            points = (f"{point} {1e3 * value:.2f} ms" for point, value in values.items())
            lines.append(f"{name:9} " + "  ".join(points))
    return "\n".join(lines)
