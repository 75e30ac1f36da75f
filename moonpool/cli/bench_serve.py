"""`moonpool bench serve`: an open-loop benchmark of a running stack or OpenAI-compatible server."""

import asyncio
import contextlib
import dataclasses
import json
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moonpool.base.checkpoint import load_config, resolve
from moonpool.base.errors import ConfigError
from moonpool.cli.addresses import addresses
from moonpool.cli.load_generator.chart import latency_chart
from moonpool.cli.load_generator.loops import RequestOutcome, SendRequest, open_loop, poisson_arrivals, trace_loop
from moonpool.cli.load_generator.prompts import PromptShape, PromptSource
from moonpool.cli.load_generator.senders import completion_body, http_sender, prompt_arguments, sdk_sender
from moonpool.cli.load_generator.summary import LoadSummary, summarize
from moonpool.cli.models import chosen_model
from moonpool.cli.predict_options import BenchServeOptions
from moonpool.client import AsyncClient, Slo
from moonpool.simulator.traces.mooncake import BLOCK_SIZE, Trace

SHOWN_LATENCIES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "E2E"}


def check_options(options: BenchServeOptions) -> None:
    """Check what flags alone do not.

    Raises:
        ConfigError: names the flag that is wrong.
    """
    if (options.rate > 0) == (options.trace is not None):
        raise ConfigError("rate", "give --rate, or --trace for the times of a trace")
    if options.time_scale <= 0:
        raise ConfigError("time_scale", f"must be positive, is {options.time_scale:g}")
    if options.trace is None and not options.shared_tokens < options.prompt_tokens:
        raise ConfigError("shared_tokens", "must be less than --prompt-tokens")
    if options.trace is None and not (options.requests and options.output_tokens):
        raise ConfigError("requests", "--requests and --output-tokens must be above 0 without a trace")


async def send_load(options: BenchServeOptions, model: Path) -> list[RequestOutcome]:
    """Send each request when due: of a trace also after those that the request waits for.

    `model` is the model that is served; its vocabulary makes the prompts.
    """
    vocabulary, shape = load_config(model).vocab_size, shape_of(options)
    if options.trace is None:
        arrivals = poisson_arrivals(options.rate, options.requests, options.seed)
        async with _sender(options, PromptSource(shape, (), options.seed, vocabulary)) as send:
            return await open_loop(arrivals, send)
    source = Trace(options.trace, options.requests)
    wanted = list(source)
    prompts = PromptSource(shape, wanted, options.seed, vocabulary, source.block_size or BLOCK_SIZE)
    async with _sender(options, prompts) as send:
        return await trace_loop(wanted, options.time_scale, send)


def shape_of(options: BenchServeOptions) -> PromptShape:
    """Return the lengths of prompts and answers."""
    return PromptShape(options.prompt_tokens, options.shared_tokens, options.conversations, options.output_tokens)


@contextlib.asynccontextmanager
async def _sender(options: BenchServeOptions, prompts: PromptSource) -> AsyncIterator[SendRequest]:
    """What sends a request: over HTTP if an address is a URL, else through the SDK."""
    slo = Slo(ttft_s=options.ttft_slo_s if math.isfinite(options.ttft_slo_s) else None)
    asked = addresses(options.address)
    if any("://" in address for address in asked):

        def body(index: int) -> Mapping[str, Any]:
            return completion_body(prompts.tokens(index), prompts.output_tokens(index), slo)

        yield http_sender(asked, body, options.api_key)
        return
    async with AsyncClient(asked) as client:
        yield sdk_sender(client, prompt_arguments(prompts, slo))


def json_report(options: BenchServeOptions, model: Path, summary: LoadSummary) -> dict[str, object]:
    """Return the JSON object of a run, without the key."""
    given: dict[str, object] = {
        "addresses": addresses(options.address),
        "model": model.name,
        "requests": options.requests,
        "rate": options.rate,
        "trace": options.trace.name if options.trace else None,
        "time_scale": options.time_scale,
        "shape": dataclasses.asdict(shape_of(options)),
        "warmup": options.warmup,
        "ttft_slo_s": options.ttft_slo_s,
        "tpot_slo_s": options.tpot_slo_s,
        "seed": options.seed,
    }
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


def run_serve(options: BenchServeOptions) -> int:
    """Send the load, print the summary, write the files; return the exit status.

    Raises:
        ConfigError: names the flag that is wrong.
        TraceError: the trace is wrong.
    """
    check_options(options)
    model = resolve(chosen_model(options.model))
    outcomes = asyncio.run(send_load(options, model))
    summary = summarize(outcomes, warmup=options.warmup, ttft_slo_s=options.ttft_slo_s, tpot_slo_s=options.tpot_slo_s)
    result = json.dumps(json_report(options, model, summary), indent=2)
    title = f"{', '.join(addresses(options.address))} under load"
    for path, text in ((options.out, result + "\n"), (options.picture, latency_chart(title, outcomes))):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    print(result if options.as_json else summary_table(summary))
    return exit_status(outcomes)
