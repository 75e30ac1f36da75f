"""`moonpool bench serve`: an open-loop benchmark of a running stack or OpenAI-compatible server."""

import asyncio
import contextlib
import dataclasses
import json
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moonpool.base.checkpoint import load_config
from moonpool.base.errors import ConfigError
from moonpool.cli.load_generator.chart import latency_chart
from moonpool.cli.load_generator.loops import RequestOutcome, SendRequest, open_loop, poisson_arrivals, trace_loop
from moonpool.cli.load_generator.prompts import PromptShape, PromptSource
from moonpool.cli.load_generator.senders import completion_body, http_sender, prompt_arguments, sdk_sender
from moonpool.cli.load_generator.summary import LoadSummary, summarize
from moonpool.client import AsyncClient, Slo
from moonpool.simulator.traces.mooncake import BLOCK_SIZE, Trace

SHOWN_LATENCIES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "E2E"}


@dataclasses.dataclass(frozen=True, slots=True)
class BenchPlan:
    """What is sent, and where to.

    Attributes:
        addresses: HOST:PORT of conductors, each next asked after the last is lost, or http://HOST:PORT of gateways,
            asked in turn.
        model: folder or file of the model that is served; the vocabulary makes the prompts.
        requests: how many; a trace's first requests, 0 = all.
        rate: requests per second, Poisson; 0 with a trace.
        trace: file with times and lengths; None = conversations at a rate.
        time_scale: trace seconds in one second.
        shape: lengths of prompts and answers.
        warmup: first requests that do not count.
        ttft_slo_s, tpot_slo_s: limits of goodput, seconds.
        seed: for arrivals and prompts.
        api_key: for a gateway that asks for one.
    """

    addresses: Sequence[str]
    model: Path
    requests: int
    rate: float
    trace: Path | None
    time_scale: float
    shape: PromptShape
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


async def send_load(plan: BenchPlan) -> list[RequestOutcome]:
    """Send each request when due: of a trace also after those that the request waits for."""
    vocabulary = load_config(plan.model).vocab_size
    if plan.trace is None:
        arrivals = poisson_arrivals(plan.rate, plan.requests, plan.seed)
        async with _sender(plan, PromptSource(plan.shape, (), plan.seed, vocabulary)) as send:
            return await open_loop(arrivals, send)
    source = Trace(plan.trace, plan.requests)
    wanted = list(source)
    prompts = PromptSource(plan.shape, wanted, plan.seed, vocabulary, source.block_size or BLOCK_SIZE)
    async with _sender(plan, prompts) as send:
        return await trace_loop(wanted, plan.time_scale, send)


@contextlib.asynccontextmanager
async def _sender(plan: BenchPlan, prompts: PromptSource) -> AsyncIterator[SendRequest]:
    """What sends a request: over HTTP if an address is a URL, else through the SDK."""
    slo = Slo(ttft_s=plan.ttft_slo_s if math.isfinite(plan.ttft_slo_s) else None)
    if any("://" in address for address in plan.addresses):

        def body(index: int) -> Mapping[str, Any]:
            return completion_body(prompts.tokens(index), prompts.output_tokens(index), slo)

        yield http_sender(plan.addresses, body, plan.api_key)
        return
    async with AsyncClient(plan.addresses) as client:
        yield sdk_sender(client, prompt_arguments(prompts, slo))


def json_report(plan: BenchPlan, summary: LoadSummary) -> dict[str, object]:
    """Return the JSON object of a run, without the key."""
    given = dataclasses.asdict(plan) | {"model": plan.model.name, "trace": plan.trace.name if plan.trace else None}
    del given["api_key"]
    flags = {name: None if value == math.inf else value for name, value in given.items()}
    return {"flags": flags, "summary": dataclasses.asdict(summary)}


def summary_table(summary: LoadSummary) -> str:
    """Write the summary for people."""
    lines = [
        f"{summary.requests} requests in {summary.duration_s:.2f} s, errors: {summary.errors or 'none'}",
        f"{summary.requests_per_s:.2f} requests/s, {summary.goodput_per_s:.2f} within the limits, "
        f"{summary.tokens_per_s:.1f} tokens/s",
        f"{'ms':6}" + "".join(f"{point:>12}" for point in ("mean", "p50", "p90", "p99")),
    ]
    for name, title in SHOWN_LATENCIES.items():
        values = getattr(summary, name)
        if values:
            lines.append(f"{title:6}" + "".join(f"{1e3 * value:12.2f}" for value in values.values()))
    return "\n".join(lines)


def exit_status(outcomes: Sequence[RequestOutcome]) -> int:
    """Return 0 if every request was answered or refused for overload, 1 if a request failed otherwise."""
    return int(any(outcome.error not in ("", "Overloaded") for outcome in outcomes))


def run_serve(plan: BenchPlan, *, as_json: bool, out: Path | None, picture_file: Path | None) -> int:
    """Send the load, print the summary, write the files; return the exit status.

    Raises:
        ConfigError: names the flag that is wrong.
        TraceError: the trace is wrong.
    """
    plan.check()
    outcomes = asyncio.run(send_load(plan))
    summary = summarize(outcomes, warmup=plan.warmup, ttft_slo_s=plan.ttft_slo_s, tpot_slo_s=plan.tpot_slo_s)
    result = json.dumps(json_report(plan, summary), indent=2)
    for path, text in (
        (out, result + "\n"),
        (picture_file, latency_chart(f"{', '.join(plan.addresses)} under load", outcomes)),
    ):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    print(result if as_json else summary_table(summary))
    return exit_status(outcomes)
