"""`moonpool replay`: sends a trace to a running stack and reports as the simulator does, beside a simulation."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moonpool.checkpoint import load_config
from moonpool.client import AsyncClient, SamplingParams
from moonpool.engine.emulated.profile import load_profile
from moonpool.errors import ConfigError, MoonpoolError
from simulator.cluster.conductor import DONE
from simulator.cluster.config import ClusterConfig, Slo
from simulator.cluster.requests import Request
from simulator.experiments.frame import simulate
from simulator.kernel.clock import PS
from simulator.report.collector import Collector, Summary
from simulator.traces.mooncake import Trace, TraceRequest

FIGURES = ("ttft_s", "tbt_s", "tpot_s", "e2e_s", "ttft_error")


@dataclass(frozen=True, slots=True)
class Replay:
    """What is sent, and how.

    Attributes:
        requests: in order of time.
        block_tokens: of the trace's blocks.
        time_scale: seconds of the trace, and of the report, that pass in one second.
        vocab_size: of the model that is served.
        slo: for goodput.
    """

    requests: Sequence[TraceRequest]
    block_tokens: int
    time_scale: float
    vocab_size: int
    slo: Slo


def cut(request: TraceRequest, prompt_tokens: int, output_tokens: int, block_tokens: int) -> TraceRequest:
    """A request with at most so many tokens; 0 = as many as there are."""
    tokens = min(request.input_length, prompt_tokens or request.input_length)
    ids = request.hash_ids[: -(-tokens // block_tokens)]
    answer = min(request.output_length, output_tokens or request.output_length)
    return replace(request, input_length=tokens, output_length=answer, hash_ids=ids)


async def drive(address: str, replay: Replay) -> Summary:
    """Sends each request when it is due, whatever the others do."""
    collector, loop = Collector(replay.slo), asyncio.get_running_loop()
    begin = loop.time()

    def now() -> int:
        return round((loop.time() - begin) * replay.time_scale * PS)

    async def one(client: AsyncClient, number: int, wanted: TraceRequest) -> None:
        due_s = wanted.timestamp / 1000
        await asyncio.sleep(max(0.0, due_s / replay.time_scale + begin - loop.time()))
        request = Request(number, round(due_s * PS), wanted.input_length, wanted.output_length, ())
        prompt = wanted.tokens(replay.vocab_size, replay.block_tokens).tolist()
        sampling = SamplingParams(max_tokens=wanted.output_length, temperature=0.0, ignore_eos=True)
        stream = client.stream(token_ids=prompt, sampling=sampling)
        try:
            async for event in stream:
                note_tokens(request, len(event.token_ids), now())
        except MoonpoolError as error:
            request.outcome = type(error).__name__
        else:
            result = stream.result
            assert result is not None, "the stream has ended"
            request.outcome, request.reused = DONE, result.usage.cached_tokens
            request.predicted_ttft_s = result.placement.predicted_ttft_s * replay.time_scale
        request.ended_at = now()
        collector.add(request)

    async with AsyncClient(address) as client, asyncio.TaskGroup() as group:
        for number, wanted in enumerate(replay.requests):
            group.create_task(one(client, number, wanted))
    return collector.summary()


def note_tokens(request: Request, tokens: int, now: int) -> None:
    """Tokens have come together: the time since the last one is shared among them."""
    if tokens and not request.made:
        request.first_at = request.last_at = now
        request.made, tokens = 1, tokens - 1
    if tokens:
        request.intervals += [(now - request.last_at) // tokens] * tokens
        request.made += tokens
        request.last_at = now


def show(columns: dict[str, Summary]) -> None:
    """The summaries side by side."""
    lines = [("", *columns)]
    for name in ("requests", "outcomes", "goodput_share", "reused_share", "tokens_per_s"):
        lines.append((name, *(str(getattr(summary, name)) for summary in columns.values())))
    for figure in FIGURES:
        for point in ("mean", "p50", "p90", "p99"):
            values = (getattr(summary, figure).get(point) for summary in columns.values())
            lines.append((f"{figure} {point}", *("-" if value is None else f"{value:g}" for value in values)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def run_replay(
    trace: Path,
    address: str,
    *,
    model: str,
    requests: int,
    time_scale: float,
    prompt_tokens: int,
    output_tokens: int,
    slo: Slo,
    profile: str,
    instances: tuple[int, int, int],
    as_json: bool,
) -> int:
    """Replays, and simulates the same when a profile is given. Returns 1 when a request failed.

    Raises:
        TraceError: the trace is wrong.
        ConfigError: there is no such profile, or the time scale is not positive.
    """
    if time_scale <= 0:
        raise ConfigError("time_scale", f"must be positive, is {time_scale:g}")
    source = Trace(trace, requests)
    wanted = [cut(request, prompt_tokens, output_tokens, source.block_tokens) for request in source]
    columns: dict[str, Summary] = {}
    if profile:
        prefill, decode, kvstore = instances
        config = ClusterConfig(profile=load_profile(profile), prefill=prefill, decode=decode, kvstore=kvstore, slo=slo,
                               block_tokens=source.block_tokens)  # fmt: skip
        columns["simulated"] = simulate(config, wanted)[0]
    vocab_size = load_config(Path(model)).vocab_size
    replay = Replay(wanted, source.block_tokens, time_scale, vocab_size, slo)
    columns = {"measured": asyncio.run(drive(address, replay)), **columns}
    if as_json:
        print(json.dumps({name: summary.to_json() for name, summary in columns.items()}, indent=1))
    else:
        show(columns)
    return int(set(columns["measured"].outcomes) != {DONE})
