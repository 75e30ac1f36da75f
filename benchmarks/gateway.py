"""What the gateway costs beside the SDK alone: `python -m benchmarks.gateway --json`.

A stack of emulated engines, sped up so far that they are not what limits. One core has nothing but the process that is
measured, once the SDK's (64 streams), once the gateway's (64 streams over HTTP, from a client on the other cores); both
have the conductor and the engines on the other cores. Where these are few, they may limit both rates and hide a
difference: so processor time per token, which does not depend on them, stands there too. Then a chat of ten turns
through a gateway, on a real engine: which share of the prompts was cached, and what that does to TTFT.
"""

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx2

from benchmarks.frame import Progress, Row, paired, run, spread_of
from benchmarks.gateway_load import Found
from benchmarks.processes import cpu_s_of
from moonpool.base.bundled import model_dir
from moonpool.cli.models import chosen_model
from moonpool.cli.stack import GATEWAY_ID, LocalStack, StackPlan

ENGINE = "emulated:llama-70b-a800"
TIME_SCALE = 200.0
RATIO = 0.7
CACHED = 0.85
TURNS = 10
WORDS = tuple("the tide of a moon pool turns when ships lie still and every rope hangs down".split())  # noqa: SIM905


@dataclass(frozen=True, slots=True)
class Pair:
    """One round: through the gateway, through the SDK; processor seconds of the measured process."""

    gateway: Found
    gateway_cpu_s: float
    sdk: Found


@contextlib.contextmanager
def stack(options: argparse.Namespace, engine: str, model: str, cores: Sequence[int]) -> Iterator[LocalStack]:
    """A stack with a gateway; everything runs on the given cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        with tempfile.TemporaryDirectory() as folder:
            plan = StackPlan(
                model=model, data_dir=Path(folder), engine=engine, http_port=0, log_level="warning",
                time_scale=options.time_scale if engine != "real" else 0.0,
            )  # fmt: skip
            with LocalStack(plan) as running:
                yield running
    finally:
        os.sched_setaffinity(0, before)


def pin(pid: int, cores: Sequence[int]) -> None:
    """Have all threads of a process run on these cores."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)


def load(kind: str, address: str, options: argparse.Namespace, streams: int, cores: Sequence[int], seed: int) -> Found:
    """One run with clients in a separate process."""
    requests = options.requests if streams > 1 else max(8, options.requests // 8)
    flags = {"streams": streams, "requests": requests, "seed": seed}
    flags |= {"prompt-tokens": options.prompt_tokens, "answer-tokens": options.answer_tokens}
    command = [sys.executable, "-m", "benchmarks.gateway_load", kind, address, "--cores", *map(str, cores)]
    for name, value in flags.items():
        command += [f"--{name}", str(value)]
    return Found(**json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout))


def rounds(options: argparse.Namespace, streams: int, progress: Progress) -> list[Pair]:
    """Rounds of both, in turn."""
    measured, *others = sorted(os.sched_getaffinity(0))
    rest, found, seeds = others or [measured], [], itertools.count(options.seed)
    with stack(options, ENGINE, str(model_dir()), rest) as running:
        gateway = running.services[GATEWAY_ID].pid
        pin(gateway, [measured])
        for number in range(options.runs):
            sdk = load("sdk", running.address, options, streams, [measured], next(seeds))
            before = cpu_s_of(gateway)
            through = load("http", running.http_address, options, streams, rest, next(seeds))
            found.append(Pair(through, cpu_s_of(gateway) - before, sdk))
            rates = f"{through.tokens / through.seconds:.0f} of {sdk.tokens / sdk.seconds:.0f} tokens/s"
            progress(f"round {number + 1} of {options.runs}, {streams} streams: {rates}")
    return found


def rates(found: Sequence[Pair], streams: int) -> list[Row]:
    """Requests and tokens per second, and processor time per token."""
    beside, rows = "the SDK alone, one core", []
    for unit, name in (("requests/s", "requests"), ("tokens/s", "tokens")):
        pairs = [
            (getattr(pair.gateway, name) / pair.gateway.seconds, getattr(pair.sdk, name) / pair.sdk.seconds)
            for pair in found
        ]
        rows.append(paired(f"{name} through the gateway, {streams} streams", unit, pairs, beside, target=RATIO))
    costs = [
        # The first request of each client, which is not among those counted, costs the gateway too.
        (1e6 * pair.gateway_cpu_s / (pair.gateway.tokens * (1 + streams / pair.gateway.requests)),
         1e6 * pair.sdk.cpu_s / pair.sdk.tokens)
        for pair in found
    ]  # fmt: skip
    rows.append(paired("processor time per token of the gateway", "us", costs, beside, less_is_better=True))
    return rows


def percentile(values: Sequence[float], share: float) -> float:
    """By nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def added_ttft(found: Sequence[Pair], streams: int) -> list[Row]:
    """How much later the first token comes than without a gateway."""
    rows = []
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        pairs = [
            (1e3 * percentile(pair.gateway.ttft_s, share), 1e3 * percentile(pair.sdk.ttft_s, share)) for pair in found
        ]
        added = [ours - theirs for ours, theirs in pairs]
        limit, ratio = statistics.median(p[1] for p in pairs), statistics.median(p[1] / p[0] for p in pairs)
        title = f"added TTFT {name}, {streams} stream{'s' if streams > 1 else ''}"
        value = statistics.median(added)
        rows.append(Row(title, value, "ms", spread_of(added), f"TTFT {name} of the SDK alone", limit, ratio))
    return rows


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn in a chat."""

    prompt_tokens: int
    cached_tokens: int
    ttft_s: float


def ask(client: httpx2.Client, messages: list[Mapping[str, str]], answer_tokens: int) -> tuple[str, Turn]:
    """Send a conversation; return the answer, streamed, and what the turn was like."""
    body = {"messages": messages, "max_tokens": answer_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    began, first, text, used = time.perf_counter(), 0.0, "", None
    with client.stream(
        "POST", "/v1/chat/completions", json={**body, "stream_options": {"include_usage": True}}
    ) as stream:
        for line in stream.iter_lines():
            first = first or time.perf_counter() - began
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                used = event["usage"]
                text += "".join(choice["delta"].get("content", "") for choice in event["choices"])
    assert used is not None, "the last chunk has the usage"
    return text, Turn(used["prompt_tokens"], used["prompt_tokens_details"]["cached_tokens"], first)


def chat(client: httpx2.Client, name: str, words: int, answer_tokens: int) -> list[Turn]:
    """A chat of ten turns; chats of different names have no beginning in common."""
    messages: list[Mapping[str, str]] = []
    turns = []
    for number in range(TURNS):
        said = (WORDS[(number + at) % len(WORDS)] for at in range(words))
        messages.append({"role": "user", "content": f"{name} {number}: {' '.join(said)}"})
        text, turn = ask(client, messages, answer_tokens)
        messages.append({"role": "assistant", "content": text})
        turns.append(turn)
    return turns


def cold(client: httpx2.Client, name: str, tokens: int) -> Turn:
    """An unknown prompt with about that many tokens."""
    told = client.post("/tokenize", json={"prompt": " ".join(WORDS), "add_special_tokens": False}).json()["count"]
    content = f"{name} {' '.join(WORDS * max(1, round(tokens / told)))}"
    return ask(client, [{"role": "user", "content": content}], 1)[1]


def _client(running: LocalStack) -> httpx2.Client:
    return httpx2.Client(base_url=f"http://{running.http_address}", timeout=600)


def chat_rows(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """The cached share from the second turn on, and TTFT for the last turn beside an equally long new prompt's."""
    shares: list[float] = []
    pairs: list[tuple[float, float]] = []
    model = chosen_model(options.model)
    with stack(options, "real", model, sorted(os.sched_getaffinity(0))) as running, _client(running) as client:
        for number in range(options.seed, options.seed + options.runs):
            turns = chat(client, f"chat {number}", options.turn_words, options.turn_tokens)
            shares.append(statistics.mean(turn.cached_tokens / turn.prompt_tokens for turn in turns[1:]))
            new = cold(client, f"new {number}", turns[-1].prompt_tokens)
            pairs.append((1e3 * turns[-1].ttft_s, 1e3 * new.ttft_s))
            told = f"{turns[-1].prompt_tokens} tokens, {new.prompt_tokens} cold"
            progress(f"chat {len(pairs)} of {options.runs}: {shares[-1]:.1%} cached; {told}")
    share = statistics.median(shares)
    name = f"cached share of the prompts of turns 2 to {TURNS}"
    return [
        Row(name, share, "", spread_of(shares), "wanted", CACHED, share / CACHED, 1.0),
        paired(f"TTFT of turn {TURNS}", "ms", pairs, "a new prompt, as long", less_is_better=True),
    ]


def flags(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own flags."""
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=512, help="of each run")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--answer-tokens", type=int, default=64)
    parser.add_argument("--time-scale", type=float, default=TIME_SCALE, help="emulated seconds per second")
    parser.add_argument("--model", default="", help="of the chat, as of `moonpool serve`; default: the bundled model")
    parser.add_argument("--turn-words", type=int, default=24, help="of each turn of the chat")
    parser.add_argument("--turn-tokens", type=int, default=128, help="of each answer of the chat")
    parser.add_argument("--seed", type=int, default=0)


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """All figures."""
    many, alone = rounds(options, options.streams, progress), rounds(options, 1, progress)
    rows = [*rates(many, options.streams), *added_ttft(many, options.streams), *added_ttft(alone, 1)]
    return [*rows, *chat_rows(options, progress)]


if __name__ == "__main__":
    run("gateway", measure, flags=flags)
