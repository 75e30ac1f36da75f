"""Moonpool's conductor beside other routers in front of four servers: `python -m benchmarks.routers`.

The servers speak vLLM's HTTP and KV events, and their steps take the times of a profile (`benchmarks.emulated_vllm`).
Each router gets new servers and the same beginning of a trace, at the same times, as streamed completions over HTTP.
TTFT counts from when a request was due to its first text at the client, in the profile's seconds. The hit share is
what the servers had cached of all prompts' tokens. Answers are cut to `--answer-tokens`.

Moonpool is a gateway, a conductor and an adapter for each server, in Python; the other routers are one process in Rust.
Processor time that routers take counts `--time-scale` times in the profile's seconds.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import aiohttp
from tokenizers import Tokenizer

from benchmarks.emulated import LATE, at_rate
from benchmarks.emulated_vllm import BLOCK_SIZE, MAX_TOKENS, MODEL, words
from benchmarks.frame import Absent, Progress, Row, Skipped, bounded, paired, run
from benchmarks.peers import routers
from benchmarks.peers.engines import Environment
from benchmarks.processes import child
from moonpool.base.bundled import model_dir
from moonpool.client import Client
from moonpool.simulator.traces.mooncake import Trace, trace_path

GENERATED = Path(__file__).parent / "traces" / "generated.jsonl"
OURS, BESIDE = "Moonpool", routers.ROUTERS[0].name
JOIN_S = 60.0
LIMIT_S = 300.0
"""For one request."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request: when it is due, seconds, and what it asks for."""

    due_s: float
    tokens: list[int]
    text: str
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Figures:
    """What a router's requests went through: profile seconds to first tokens; shares of prompts and of steps' time."""

    ttft_s: list[float]
    hit: float
    late: float
    busiest: float

    def at(self, share: float) -> float:
        """A percentile of TTFT."""
        return statistics.quantiles(self.ttft_s, n=100, method="inclusive")[round(100 * share) - 1]


def prompts(options: argparse.Namespace) -> list[Prompt]:
    """The beginning of the trace, as many times shorter and faster as the options say.

    Raises:
        Skipped: the trace is too short.
    """
    trace = Trace(trace_path(options.trace) or GENERATED, options.requests)
    found = at_rate(list(trace), options.rate)
    if len(found) < options.requests:
        raise Skipped(f"the trace has {len(found)} requests, {options.requests} are wanted")
    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    choice, scale = words(tokenizer), options.token_scale
    size = trace.block_size // scale
    if size != BLOCK_SIZE:
        raise Skipped(f"blocks of {trace.block_size} tokens are {BLOCK_SIZE} at another --token-scale")
    asked = []
    for request in found:
        body = list[int]()
        for hash_id in request.hash_ids:
            body += random.Random(hash_id).choices(choice, k=size)
        body = body[: max(1, min(request.input_length // scale, MAX_TOKENS - options.answer_tokens - 1))]
        text = tokenizer.decode(body)
        tokens = tokenizer.encode(text).ids
        count = max(1, min(request.output_length, options.answer_tokens))
        asked.append(Prompt(request.timestamp / 1000 / options.time_scale, tokens, text, count))
    return asked


@contextlib.contextmanager
def moonpool(engines: Sequence[str]) -> Iterator[str]:
    """A conductor, an adapter for each server and a gateway; gives the gateway's URL."""
    usual = ("--model", str(model_dir()), "--listen", "127.0.0.1:0", "--log-level", "warning")
    with contextlib.ExitStack() as stack:
        conductor = stack.enter_context(child("moonpool.conductor", *usual)).address
        for at, url in enumerate(engines):
            stack.enter_context(
                child(
                    "moonpool.interop.adapter", *usual, "--engine", url, "--conductor", conductor, "--id", f"vllm-{at}"
                )
            )
        with Client(conductor) as client:
            end = time.monotonic() + JOIN_S
            while len(client.cluster_state().instances) < 2 * len(engines):
                if time.monotonic() > end:
                    raise RuntimeError("the servers have not joined")
                time.sleep(0.1)
        flags = ("--conductor", conductor, "--served-model-name", MODEL)
        yield f"http://{stack.enter_context(child('moonpool.gateway', *usual, *flags)).address}"


async def ttft_s(session: aiohttp.ClientSession, url: str, prompt: Prompt, *, as_tokens: bool, due: float) -> float:
    """Seconds from a time to a request's first text.

    Raises:
        RuntimeError: the answer has no text, or is refused.
    """
    clock = asyncio.get_running_loop().time
    await asyncio.sleep(max(0.0, due - clock()))
    body = {
        "model": MODEL, "prompt": prompt.tokens if as_tokens else prompt.text, "max_tokens": prompt.answer_tokens,
        "temperature": 0, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    first = 0.0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {await response.text()}")
        async for line in response.content:
            if first or not line.startswith(b"data: {"):
                continue
            choices = json.loads(line[6:]).get("choices")
            if choices and choices[0]["text"]:
                first = clock() - due
    if not first:
        raise RuntimeError("an answer has no text")
    return first


async def counts(session: aiohttp.ClientSession, engines: Sequence[str]) -> list[dict[str, float]]:
    """What each server has counted."""
    found = []
    for url in engines:
        async with session.get(f"{url}/emulated") as response:
            found.append(await response.json())
    return found


async def ask(
    url: str, engines: Sequence[str], asked: Sequence[Prompt], options: argparse.Namespace, *, as_tokens: bool
) -> Figures:
    """Send all prompts when they are due."""
    limit = aiohttp.ClientTimeout(total=LIMIT_S)
    async with aiohttp.ClientSession(timeout=limit, connector=aiohttp.TCPConnector(limit=0)) as session:
        before = await counts(session, engines)
        begin = asyncio.get_running_loop().time() + 0.5
        waits = [ttft_s(session, url, request, as_tokens=as_tokens, due=begin + request.due_s) for request in asked]
        seconds = await asyncio.gather(*waits)
        after = await counts(session, engines)
    grown = [{name: new[name] - old[name] for name in new} for old, new in zip(before, after, strict=True)]
    whole = {name: sum([engine[name] for engine in grown]) for name in grown[0]}
    return Figures(
        ttft_s=[options.time_scale * second for second in seconds],
        hit=100 * whole["cached_tokens"] / whole["prompt_tokens"],
        late=100 * whole["late_s"] / whole["step_s"],
        busiest=len(engines) * max(run["step_s"] for run in grown) / whole["step_s"],
    )


def race(
    begin: Callable[[Sequence[str]], contextlib.AbstractContextManager[str]],
    asked: Sequence[Prompt],
    options: argparse.Namespace,
    *,
    as_tokens: bool,
) -> Figures:
    """One router's figures, with new servers."""
    names = ("engines", "profile", "time_scale", "token_scale", "blocks", "max_num_batched_tokens")
    shape = [part for name in names for part in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
    with child("benchmarks.emulated_vllm", *shape) as servers:
        engines: list[str] = json.loads(servers.address)
        with begin(engines) as url:
            return asyncio.run(ask(url, engines, asked, options, as_tokens=as_tokens))


def measure(options: argparse.Namespace, progress: Progress) -> list[Row | Absent]:
    """All rows."""
    asked, environment = prompts(options), Environment(options.peers, progress, routers.PACKAGES)
    gaps = statistics.mean([after.due_s - before.due_s for before, after in pairwise(asked)])
    progress(
        f"{len(asked)} requests, one each {gaps:.3f} s, {sum([len(request.tokens) for request in asked]):,} tokens"
    )
    found: dict[str, list[Figures]] = {OURS: []}
    absent: dict[str, str] = {}
    for number in range(options.runs):
        for router in (None, *routers.ROUTERS):
            name = router.name if router is not None else OURS
            if name in absent or (options.only and name != BESIDE and name not in options.only):
                continue
            try:
                begin = moonpool if router is None else partial(
                    routers.running, router, environment.python(router.package)
                )  # fmt: skip
                figures = race(begin, asked, options, as_tokens=router is not None and router.reads_tokens)
            except (Skipped, RuntimeError) as error:
                absent[name] = str(error)
                progress(f"{name}: {error}")
                continue
            found.setdefault(name, []).append(figures)
            progress(
                f"round {number + 1}, {name}: TTFT p50 {figures.at(0.5):.2f} s, p90 {figures.at(0.9):.2f} s, "
                f"hits {figures.hit:.1f} %, busiest server {figures.busiest:.2f} of the mean, late {figures.late:.1f} %"
            )
    return rows(found, absent)


def rows(found: dict[str, list[Figures]], absent: dict[str, str]) -> list[Row | Absent]:
    """Each router beside round robin, round by round."""
    table: list[Row | Absent] = [Absent(name, BESIDE, reason) for name, reason in absent.items()]
    base = found.get(BESIDE, [])
    for name, runs in found.items():
        pairs = list(zip(runs, base, strict=False))
        if name == BESIDE or not pairs:
            continue
        for title, share in (("TTFT p50", 0.5), ("TTFT p90", 0.9)):
            values = [(own.at(share), other.at(share)) for own, other in pairs]
            table.append(paired(f"{title}, {name}", "s", values, BESIDE, less_is_better=True))
        table.append(paired(f"hit share, {name}", "%", [(own.hit, other.hit) for own, other in pairs], BESIDE))
    every = [run.late for runs in found.values() for run in runs]
    return [*table, bounded("emulated steps: late by", "%", every, "wanted at most", LATE)]


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    parser.add_argument("--trace", default="", help="a trace in Mooncake's form (default: the generated one)")
    parser.add_argument("--requests", type=int, default=200, help="of the trace, from its beginning")
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second of the profile")
    parser.add_argument("--answer-tokens", type=int, default=16, help="longest answer")
    parser.add_argument("--engines", type=int, default=4, help="servers")
    parser.add_argument("--profile", default="llama-70b-a800")
    parser.add_argument("--time-scale", type=float, default=4.0, help="profile seconds that pass in one second")
    parser.add_argument("--token-scale", type=int, default=32, help="the profile's tokens for each token")
    parser.add_argument(
        "--blocks", type=int, default=500, help="KV blocks of a server; each has 512 tokens of the trace"
    )
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=8192, help="the profile's tokens of a step at most"
    )
    parser.add_argument("--peers", type=Path, default=Path(".peers"), help="folder that routers are installed in")
    parser.add_argument("--only", action="append", default=[], help="this router and round robin; may be repeated")


if __name__ == "__main__":
    run("routers", measure, flags=flags)
