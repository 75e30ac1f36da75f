"""Replays a trace against emulated instances: `python -m tests.load.trace --prefill 8 --decode 8 --time-scale 4`.

The trace is `--trace`, or the environment's MOONPOOL_TRACE, in Mooncake's form; without either, a small one is
generated from `--seed`. Everything but compute is real. Answers are checked token by token, afterwards everything
reserved must have come back, and all times of the report are the profile's: this machine's times the time scale.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moonpool.base.bundled import model_dir
from moonpool.base.checkpoint import load_config
from moonpool.base.errors import Unavailable
from moonpool.cli.check import GaugeReading, wait_at_rest
from moonpool.cli.load_generator.loops import RequestOutcome, SendRequest, closed_loop, trace_loop
from moonpool.cli.load_generator.senders import greedy, sdk_sender
from moonpool.cli.load_generator.summary import LoadSummary, summarize
from moonpool.cli.stack import LocalStack, StackPlan
from moonpool.client import AsyncClient, GenerateArguments, GenerateResult, Slo
from moonpool.engine.emulated.kv import continuation
from moonpool.engine.emulated.profile import emulated_profile
from moonpool.simulator.traces.mooncake import TraceRequest, read_trace, reusable_share, trace_path
from moonpool.simulator.traces.workload import CHAT, Workload

REST_S = 30.0
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default="", help="trace file; default: MOONPOOL_TRACE, else a generated trace")
    parser.add_argument("--requests", type=int, default=200, help="first requests of the trace; 0 = all")
    parser.add_argument("--seed", type=int, default=0, help="of the generated trace")
    parser.add_argument("--rate", type=float, default=2.0, help="requests per profile second of the generated trace")
    parser.add_argument("--engine", default="emulated:llama-70b-a800")
    parser.add_argument("--time-scale", type=float, default=1.0, help="seconds of trace and profile in one second")
    parser.add_argument("--prefill", type=int, default=8)
    parser.add_argument("--decode", type=int, default=8)
    parser.add_argument("--kvstore", type=int, default=1)
    parser.add_argument("--block-size", type=int, default=512, help="tokens per KV block; traces have 512")
    parser.add_argument("--max-num-batched-tokens", type=int, default=4096, help="prompt tokens of one prefill step")
    parser.add_argument(
        "--kv-bytes", type=int, default=0, help="emulated bytes of each pool; 0 = what the hardware holds"
    )
    parser.add_argument("--dram-bytes", type=int, default=1 << 30, help="emulated bytes of each kvstore's DRAM")
    parser.add_argument("--ttft-slo-s", type=float, default=30.0, help="profile seconds, for goodput")
    parser.add_argument("--tpot-slo-s", type=float, default=0.1, help="profile seconds, for goodput")
    parser.add_argument("--refuse", action="store_true", help="let the conductor refuse what would miss the TTFT limit")
    parser.add_argument(
        "--max-concurrency", type=int, default=0, help="so many requests at once, not at the trace's times; 0 = those"
    )
    parser.add_argument("--warmup", type=int, default=0, help="first requests that do not count")
    parser.add_argument("--data-dir", default="", help="keeps store and logs; default: a temporary folder")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


def requests_of(options: argparse.Namespace) -> tuple[list[TraceRequest], str]:
    """The trace and its description."""
    path = trace_path(options.trace)
    if path is not None:
        return read_trace(path, limit=options.requests), path.name
    count = options.requests or 200
    return Workload(options.seed, dataclasses.replace(CHAT, rate_per_s=options.rate)).requests(
        count
    ), f"generated, seed {options.seed}"


def plan_of(options: argparse.Namespace, folder: Path) -> StackPlan:
    """The stack to be loaded."""
    return StackPlan(
        model=str(model_dir()),
        data_dir=folder,
        engine=options.engine,
        time_scale=options.time_scale,
        prefill=options.prefill,
        decode=options.decode,
        kvstore=options.kvstore,
        block_size=options.block_size,
        kv_cache_memory_bytes=options.kv_bytes,
        dram_bytes=options.dram_bytes,
        log_level="warning",
        extra={"prefill": ["--max-num-batched-tokens", str(options.max_num_batched_tokens)]},
    )


@dataclass(slots=True)
class Answers:
    """What came back, besides times."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    placed_anew: int = 0
    ttft_over_predicted: list[float] = field(default_factory=list)
    prefills: Counter[str] = field(default_factory=Counter)
    decodes: Counter[str] = field(default_factory=Counter)

    def take(self, result: GenerateResult, expected: Sequence[int]) -> None:
        """One whole answer, and what it should have been."""
        if result.token_ids != list(expected) or not result.placement.emulated:
            self.wrong.append(result.request_id)
        self.prompt_tokens += result.usage.prompt_tokens
        self.cached_tokens += result.usage.cached_tokens
        self.placed_anew += len(result.placements) - 1
        if result.placement.predicted_ttft_s:
            self.ttft_over_predicted.append(result.timing.ttft_s / result.placement.predicted_ttft_s)
        self.prefills[result.placement.prefill] += 1
        self.decodes[result.placement.decode or "none"] += 1


def sender(client: AsyncClient, trace: Sequence[TraceRequest], answers: Answers, slo: Slo) -> SendRequest:
    """Sends a request of the trace and checks its answer."""
    model = load_config(model_dir())

    def prompt(index: int) -> list[int]:
        return trace[index].tokens(model.vocab_size).tolist()

    def arguments(index: int) -> GenerateArguments:
        sampling = greedy(trace[index].output_length)
        return {"token_ids": prompt(index), "sampling": sampling, "slo": slo, "request_id": f"trace-{index}"}

    def check(index: int, result: GenerateResult) -> None:
        length = trace[index].output_length
        answers.take(result, continuation(prompt(index), length, model.vocab_size, model.eos_token_ids))

    return sdk_sender(client, arguments, on_result=check)


@dataclass(frozen=True, slots=True)
class Report:
    """What a replay found. Times and rates are in the profile's seconds."""

    emulated: str
    time_scale: float
    trace: str
    instances: str
    summary: LoadSummary
    goodput_share: float
    """Requests within both limits, of all."""
    hit_rate: float
    """Prompt tokens that were not computed anew, of all."""
    reusable_share: float
    """What an unlimited cache without delay would reach, in blocks of 512 tokens."""
    placed_anew: int
    ttft_over_predicted: float
    """Measured TTFT over the conductor's prediction, median."""
    late_share: float
    """Seconds that steps ended late, as a share of the seconds of all steps."""
    wrong_answers: int
    not_at_rest: str
    prefills: dict[str, int]
    decodes: dict[str, int]
    processes: int
    resident_mb: float
    cpu_s: dict[str, float]
    """Processor seconds by kind of service, their start included."""

    @property
    def ok(self) -> bool:
        """Every request ended with the right tokens, and everything reserved came back."""
        return not self.wrong_answers and not self.not_at_rest and not self.summary.errors


def scaled(summary: LoadSummary, scale: float) -> LoadSummary:
    """The summary in the profile's seconds."""
    return dataclasses.replace(
        summary,
        duration_s=summary.duration_s * scale,
        tokens_per_s=summary.tokens_per_s / scale,
        requests_per_s=summary.requests_per_s / scale,
        goodput_per_s=summary.goodput_per_s / scale,
        ttft_s={point: seconds * scale for point, seconds in summary.ttft_s.items()},
        tpot_s={point: seconds * scale for point, seconds in summary.tpot_s.items()},
        e2e_s={point: seconds * scale for point, seconds in summary.e2e_s.items()},
    )


async def load(
    address: str, trace: Sequence[TraceRequest], scale: float, slo: Slo, at_once: int
) -> tuple[list[RequestOutcome], Answers]:
    """Sends the trace at its times, or so many requests at once, in its order."""
    answers = Answers()
    async with AsyncClient(address) as client:
        send = sender(client, trace, answers, slo)
        if at_once:
            return await closed_loop(at_once, range(len(trace)), send), answers
        return await trace_loop(trace, scale, send), answers


def replay(options: argparse.Namespace, plan: StackPlan, trace: Sequence[TraceRequest], source: str) -> Report:
    """Starts the stack, replays, checks, stops."""
    found = emulated_profile(plan.engine, plan.time_scale)
    assert found is not None, "only emulated engines follow a trace's time scale"
    profile, scale = found
    limits = {"ttft_slo_s": options.ttft_slo_s / scale, "tpot_slo_s": options.tpot_slo_s / scale}
    slo = Slo(ttft_s=limits["ttft_slo_s"]) if options.refuse else Slo()
    with LocalStack(plan) as stack:
        outcomes, answers = asyncio.run(load(stack.address, trace, scale, slo, options.max_concurrency))
        readings, held = _at_rest(stack.address)
        services = list(stack.services.values())
        resident = _resident_mb([service.pid for service in services])
        kinds = dict.fromkeys(service.kind for service in services)
        cpu = {kind: _cpu_s([service.pid for service in services if service.kind == kind]) for kind in kinds}
    summary = summarize(outcomes, warmup=options.warmup, **limits)
    steps = _total(readings, "emulated_step_seconds_total")
    return Report(
        emulated=f"{profile.name}: {profile.hardware}",
        time_scale=scale,
        trace=source,
        instances=f"{plan.prefill} prefill, {plan.decode} decode, {plan.kvstore} kvstore",
        summary=scaled(summary, scale),
        goodput_share=summary.goodput_per_s * summary.duration_s / max(1, summary.requests),
        hit_rate=answers.cached_tokens / max(1, answers.prompt_tokens),
        reusable_share=reusable_share(trace),
        placed_anew=answers.placed_anew,
        ttft_over_predicted=statistics.median(answers.ttft_over_predicted or [0.0]),
        late_share=_total(readings, "emulated_late_seconds_total") / steps if steps else 0.0,
        wrong_answers=len(answers.wrong),
        not_at_rest=held,
        prefills=dict(sorted(answers.prefills.items())),
        decodes=dict(sorted(answers.decodes.items())),
        processes=len(services),
        resident_mb=resident,
        cpu_s=cpu,
    )


def _at_rest(address: str) -> tuple[list[GaugeReading], str]:
    try:
        return wait_at_rest(address, REST_S), ""
    except Unavailable as error:
        return [], str(error)


def _total(readings: Sequence[GaugeReading], name: str) -> float:
    return sum(reading.value for reading in readings if reading.name == name)


def _resident_mb(pids: Sequence[int]) -> float:
    """Memory of all processes; what they share counts in each."""
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
    return sum(pages) * _PAGE / (1 << 20)


def _cpu_s(pids: Sequence[int]) -> float:
    """Processor seconds of all processes since they began."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in pids]
    return sum(int(field[11]) + int(field[12]) for field in fields) / _TICKS


def show(report: Report) -> None:
    """The report for people."""
    summary = report.summary
    print(f"EMULATED  {report.emulated}; time scale {report.time_scale:g}; times below are the profile's")
    print(f"trace     {report.trace}: {summary.requests} requests in {summary.duration_s:.1f} s; {report.instances}")
    for name, values in (("TTFT", summary.ttft_s), ("TPOT", summary.tpot_s), ("end", summary.e2e_s)):
        print(f"{name:9} " + "  ".join(f"{point} {value:.4f} s" for point, value in values.items()))
    print(f"goodput   {summary.goodput_per_s:.3f} requests/s, {report.goodput_share:.1%} of all")
    print(f"rate      {summary.requests_per_s:.3f} requests/s, {summary.tokens_per_s:.1f} tokens/s")
    print(f"hit rate  {report.hit_rate:.1%} of prompt tokens (unlimited cache {report.reusable_share:.1%})")
    print(f"errors    {summary.errors or 'none'}; placed anew {report.placed_anew}; wrong {report.wrong_answers}")
    print(f"TTFT      {report.ttft_over_predicted:.2f} of the predicted one at the median")
    print(f"late      {report.late_share:.1%} of the time of all steps")
    print(f"prefill   {report.prefills}\ndecode    {report.decodes}")
    used = ", ".join(f"{kind} {seconds:.1f}" for kind, seconds in report.cpu_s.items())
    print(f"machine   {report.processes} processes, {report.resident_mb:.0f} MB resident; CPU s: {used}")
    print(f"check     {report.not_at_rest or 'everything is at rest'}")


def run(options: argparse.Namespace) -> Report:
    """One replay as the flags say."""
    trace, source = requests_of(options)
    if options.data_dir:
        return replay(options, plan_of(options, Path(options.data_dir)), trace, source)
    with tempfile.TemporaryDirectory() as folder:
        return replay(options, plan_of(options, Path(folder)), trace, source)


def main(argv: list[str] | None = None) -> int:
    """Entry point; 1 when an answer was wrong or missing, or something was not given back."""
    options = parse(argv)
    report = run(options)
    if options.json:
        print(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        show(report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
