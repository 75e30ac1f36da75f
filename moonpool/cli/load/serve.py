"""`moonpool bench serve`: an open loop against a running stack or server, and what came of it."""

import asyncio
import contextlib
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

from moonpool.checkpoint import load_config
from moonpool.cli.load.frame import (
    Outcome,
    Send,
    Summary,
    open_loop,
    poisson_arrivals,
    summarize,
    trace_arrivals,
)
from moonpool.cli.load.picture import picture
from moonpool.cli.load.prompts import Prompts, Shape
from moonpool.cli.load.targets import conductor, gateways
from moonpool.errors import ConfigError
from simulator.traces.mooncake import BLOCK_TOKENS, Trace

FIGURES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "E2E"}


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What is sent, and where to.

    Attributes:
        addresses: HOST:PORT of conductors, of which the next one is asked when one is lost, or http://HOST:PORT of
            gateways, which are asked in turn.
        model: folder or file of the model that is served; its vocabulary makes the prompts.
        requests: how many; of a trace its first ones, 0 = all.
        rate: requests per second, Poisson; 0 with a trace.
        trace: file with times and lengths; None = conversations at a rate.
        time_scale: seconds of the trace in one second.
        shape: lengths of prompts and answers.
        warmup: first requests that do not count.
        ttft_slo_s, tpot_slo_s: limits of goodput, seconds.
        seed: of arrivals and prompts.
        api_key: for a gateway that asks for one.
    """

    addresses: Sequence[str]
    model: Path
    requests: int
    rate: float
    trace: Path | None
    time_scale: float
    shape: Shape
    warmup: int
    ttft_slo_s: float
    tpot_slo_s: float
    seed: int
    api_key: str = ""

    def check(self) -> None:
        """Check what flags alone do not.

        Raises:
            ConfigError: names the flag that is wrong.
        """
        if (self.rate > 0) == (self.trace is not None):
            raise ConfigError("rate", "give --rate, or --trace for the times of a trace")
        if self.time_scale <= 0:
            raise ConfigError("time_scale", f"must be positive, is {self.time_scale:g}")
        if self.trace is None and not self.shape.shared_tokens < self.shape.prompt_tokens:
            raise ConfigError("shared_tokens", "must be less than --prompt-tokens")
        if self.trace is None and not (self.requests and self.shape.output_tokens):
            raise ConfigError("requests", "--requests and --output-tokens must be above 0 without a trace")


async def drive(plan: Plan) -> list[Outcome]:
    """Sends each request when it is due, whatever the others do."""
    vocabulary = load_config(plan.model).vocab_size
    if plan.trace is None:
        prompts = Prompts(plan.shape, (), plan.seed, vocabulary)
        arrivals = poisson_arrivals(plan.rate, plan.requests, plan.seed)
    else:
        source = Trace(plan.trace, plan.requests)
        wanted = list(source)
        prompts = Prompts(plan.shape, wanted, plan.seed, vocabulary, source.block_tokens or BLOCK_TOKENS)
        arrivals = trace_arrivals([request.timestamp / 1000 for request in wanted], plan.time_scale)
    async with _target(plan, prompts) as send:
        return await open_loop(arrivals, send)


def _target(plan: Plan, prompts: Prompts) -> contextlib.AbstractAsyncContextManager[Send]:
    if any("://" in address for address in plan.addresses):
        return gateways(plan.addresses, prompts, plan.ttft_slo_s, plan.api_key)
    return conductor(plan.addresses, prompts, plan.ttft_slo_s)


def report(plan: Plan, summary: Summary) -> dict[str, object]:
    """The JSON object of one run, without the key."""
    given = dataclasses.asdict(plan) | {"model": plan.model.name, "trace": plan.trace.name if plan.trace else None}
    del given["api_key"]
    flags = {name: None if value == math.inf else value for name, value in given.items()}
    return {"flags": flags, "summary": dataclasses.asdict(summary)}


def table(summary: Summary) -> str:
    """The summary for people."""
    lines = [
        f"{summary.requests} requests in {summary.duration_s:.2f} s, errors: {summary.errors or 'none'}",
        f"{summary.requests_per_s:.2f} requests/s, {summary.goodput_per_s:.2f} within the limits, "
        f"{summary.tokens_per_s:.1f} tokens/s",
        f"{'ms':6}" + "".join(f"{point:>12}" for point in ("mean", "p50", "p90", "p99")),
    ]
    for name, title in FIGURES.items():
        values = getattr(summary, name)
        if values:
            lines.append(f"{title:6}" + "".join(f"{1e3 * value:12.2f}" for value in values.values()))
    return "\n".join(lines)


def exit_status(outcomes: Sequence[Outcome]) -> int:
    """0 = every request was answered or refused for overload, 1 = another one failed."""
    return int(any(outcome.error not in ("", "Overloaded") for outcome in outcomes))


def run_serve(plan: Plan, *, as_json: bool, out: Path | None, picture_file: Path | None) -> int:
    """Sends the load, prints the summary, writes the files; returns the exit status.

    Raises:
        ConfigError: names the flag that is wrong.
        TraceError: the trace is wrong.
    """
    plan.check()
    outcomes = asyncio.run(drive(plan))
    summary = summarize(outcomes, warmup=plan.warmup, ttft_slo_s=plan.ttft_slo_s, tpot_slo_s=plan.tpot_slo_s)
    result = json.dumps(report(plan, summary), indent=2)
    for path, text in (
        (out, result + "\n"),
        (picture_file, picture(f"{', '.join(plan.addresses)} under load", outcomes)),
    ):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    print(result if as_json else table(summary))
    return exit_status(outcomes)
