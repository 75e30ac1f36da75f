"""How long streams wait when an instance or a conductor is killed or stopped: `python -m benchmarks.failover`.

Two conductors, two prefill and two decode instances, a kvstore. In each round streams with contexts of all lengths
decode; then one process gets SIGKILL or SIGSTOP. The figure is the longest wait for a token from that moment on: of the
streams that a decode instance or a conductor had, and of all streams where it was a kvstore, a prefill instance or one
stage of its pipeline (real engines, in a stack of their own), which none of them needs any more. Tokens are compared
with an undisturbed run's (real engines compute in float32 with `deterministic=true`) or with the emulated engine's
rule; a wrong one ends the benchmark.
"""

import argparse
import asyncio
import itertools
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.frame import Progress, Row, bounded, run
from moonpool.base.bundled import model_dir
from moonpool.base.checkpoint import load_config
from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.stack import LocalStack, StackPlan
from moonpool.client import AsyncClient
from moonpool.engine.emulated.kv import continuation

UNDER_WAY = 8
"""Tokens after which a stream decodes."""
CONTEXTS = (200, 4000)
"""Tokens of the shortest and the longest prompt."""
VICTIMS = ("decode", "conductor", "prefill", "kvstore", "stage")
NEEDLESS = ("prefill", "kvstore", "stage")
"""Streams that decode do not need them."""
FAULTS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
WANTED_S = {"killed": 0.5, "stopped": 1.5}
UNTOUCHED_S = 0.1
"""Wanted where one is hit that streams do not need, or where nothing happens: they need not wait at all. Where streams
wait for longer when nothing happens, no longer than that is wanted, of the median and of the p99 each."""
GROWTH = 1.5
"""Longest wanted ratio of the longer contexts' median wait over the shorter ones'."""
ORDINARY_TOKENS = (300, 4000)
START_S = 120.0


@dataclass(slots=True)
class Stream:
    """One stream. Times are `time.monotonic()`.

    Attributes:
        prompt: token ids.
        tokens: that came; `times` when each message with some of them came.
        decode: the instance of the stream when the fault happened; `prefill` where its prompt was computed.
        faulted_at: when the fault happened.
    """

    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    decode: str = ""
    prefill: str = ""
    faulted_at: float = 0.0

    @property
    def wait_s(self) -> float:
        """Longest wait for a token from the fault on; the part of a wait that lies before it does not count."""
        return longest_wait_s(self.times, self.faulted_at)


def longest_wait_s(times: Sequence[float], since: float) -> float:
    """Longest of the waits between these times that end after `since`, from `since` on; 0 when none does."""
    waits = [after - max(before, since) for before, after in itertools.pairwise(times) if after > since]
    return max(waits, default=0.0)


async def follow(
    addresses: Sequence[str],
    prompts: Sequence[Sequence[int]],
    answer_tokens: int,
    fault: Callable[[Sequence[Stream]], None],
) -> list[Stream]:
    """Stream all answers at once; call `fault` in a thread once each has had first tokens."""
    streams = [Stream(prompt) for prompt in prompts]
    under_way = asyncio.Barrier(len(streams) + 1)
    async with AsyncClient(addresses) as client, asyncio.TaskGroup() as group:
        for stream in streams:
            group.create_task(_follow(client, stream, answer_tokens, under_way))
        await under_way.wait()
        now = time.monotonic()
        for stream in streams:
            stream.faulted_at = now
        await asyncio.to_thread(fault, streams)
    return streams


async def _follow(client: AsyncClient, stream: Stream, answer_tokens: int, under_way: asyncio.Barrier) -> None:
    sampling = SamplingParams(max_tokens=answer_tokens, temperature=0.0, ignore_eos=True)
    arriving: asyncio.Task[object] | None = None
    running = client.stream(token_ids=stream.prompt, sampling=sampling)
    async for event in running:
        stream.tokens += event.token_ids
        stream.times.append(time.monotonic())
        if arriving is None and len(stream.tokens) >= UNDER_WAY:
            assert running.placement is not None
            stream.decode, stream.prefill = running.placement.decode, running.placement.prefill
            arriving = asyncio.create_task(under_way.wait())  # the stream is read on
    assert arriving is not None, "an answer ended before all streams were under way: it is too short"
    await arriving


@dataclass(frozen=True, slots=True)
class Kind:
    """An engine, and how many tokens the answers have: they outlast every fault."""

    engine: str
    answer_tokens: int
    stages: int = 1

    @property
    def name(self) -> str:
        """In figures."""
        stages = f", {self.stages} stages" if self.stages > 1 else ""
        return f"{'bundled model' if self.engine == 'real' else self.engine}{stages}"

    def victims(self, wanted: Sequence[str]) -> list[str]:
        """Which of these are hit: a stage where there are several, and nothing else there."""
        return [victim for victim in wanted if (victim == "stage") == (self.stages > 1)]


@dataclass(frozen=True, slots=True)
class Wait:
    """One stream's longest wait, seconds, and the context's tokens."""

    context: int
    seconds: float


class World:
    """A running stack, and the fault.

    Args:
        stack: runs.
        kind: the engines' kind.
        options: the benchmark's.
    """

    def __init__(self, stack: LocalStack, kind: Kind, options: argparse.Namespace) -> None:
        self._stack = stack
        self._kind = kind
        self._streams: int = options.streams
        self._random = random.Random(f"moonpool failover {options.seed}")

    def round(self, victim: str, fault: str) -> list[Wait]:
        """The waits of the streams that a fault concerns."""
        hit: list[str] = []
        pids: list[int] = []

        def strike(streams: Sequence[Stream]) -> None:
            hit.append(_busiest(streams, victim))
            own = self._stack.services[hit[0]].pid
            pids.append(a_stage(own) if victim == "stage" else own)
            os.kill(pids[0], FAULTS[fault])

        prompts = self._prompts()
        streams = asyncio.run(follow(self._stack.addresses, prompts, self._kind.answer_tokens, strike))
        self._heal(hit[0], pids[0], fault)
        for stream, right in zip(streams, self._right(prompts), strict=True):
            _check(stream.tokens, right)
        concerned = [stream for stream in streams if victim != "decode" or stream.decode == hit[0]]
        return [Wait(len(stream.prompt), stream.wait_s) for stream in concerned]

    def undisturbed(self) -> list[Wait]:
        """The waits of undisturbed streams."""
        streams = asyncio.run(
            follow(self._stack.addresses, self._prompts(), self._kind.answer_tokens, lambda streams: None)
        )
        return [Wait(len(stream.prompt), stream.wait_s) for stream in streams]

    def _prompts(self) -> list[list[int]]:
        """Fresh ones, from the shortest to the longest context in equal ratios."""
        least, most = CONTEXTS
        ratio = (most / least) ** (1 / max(1, self._streams - 1))
        lengths = [round(least * ratio**number) for number in range(self._streams)]
        return [[self._random.randrange(*ORDINARY_TOKENS) for _ in range(length)] for length in lengths]

    def _heal(self, name: str, pid: int, fault: str) -> None:
        if fault == "stopped":
            os.kill(pid, signal.SIGCONT)
        else:  # a lost stage ends the instance
            self._stack.services[name].wait(START_S)
            self._stack.spawn_again(name).wait_ready(START_S)
        self._stack.wait_joined(START_S)

    def _right(self, prompts: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """The right answers."""
        count = self._kind.answer_tokens
        if self._kind.engine == "real":
            calm = asyncio.run(follow(self._stack.addresses, prompts, count, lambda streams: None))
            return [stream.tokens for stream in calm]
        config = load_config(model_dir())
        return [continuation(prompt, count, config.vocab_size, config.eos_token_ids) for prompt in prompts]


def _check(tokens: Sequence[int], right: Sequence[int]) -> None:
    """Raise AssertionError when a token is not the right one."""
    for position, (token, wanted) in enumerate(zip(tokens, right, strict=True)):
        assert token == wanted, f"token {token} at position {position} should be {wanted}"


def _busiest(streams: Sequence[Stream], victim: str) -> str:
    """The instance that most streams run on; clients ask the first conductor."""
    if victim in ("conductor", "kvstore"):
        return {"conductor": "conductor", "kvstore": "kvstore-0"}[victim]
    names = [stream.decode if victim == "decode" else stream.prefill for stream in streams]
    return statistics.mode(names)


def a_stage(instance: int) -> int:
    """The process for a stage in a prefill instance's pipeline."""
    found = [path.read_text().split() for path in Path(f"/proc/{instance}/task").glob("*/children")]
    return min(int(child) for part in found for child in part)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-len(ordered) * share // 1) - 1)]


def rows_of(name: str, waits: Sequence[Wait], wanted_s: float, calm: Sequence[Wait] = ()) -> Iterator[Row]:
    """Median and p99 over all waits in a case; wanted is also what `calm` ones have of each."""
    for label, share in (("p50", 0.5), ("p99", 0.99)):
        found_s = quantile([wait.seconds for wait in waits], share)
        most_s = max(wanted_s, quantile([wait.seconds for wait in calm], share)) if calm else wanted_s
        yield bounded(f"{name}: longest wait for a token, {label}", "s", [found_s], "wanted at most", most_s)


def growth(name: str, rounds: Sequence[Sequence[Wait]]) -> Row:
    """How the wait grows with the context, in each round: the longer half's median over the shorter half's.

    Rounds are not compared: the machine, and how many streams were hit, differ. A single stream has no halves.
    """
    ratios = []
    for waits in rounds:
        if len(waits) < 2:
            continue
        ordered = sorted(waits, key=lambda wait: wait.context)
        short, long = ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :]
        ratios += [
            statistics.median(stream.seconds for stream in long) / statistics.median(stream.seconds for stream in short)
        ]
    return bounded(f"{name}: wait of the longer contexts over the shorter", "", ratios, "wanted at most", GROWTH)


def plan_of(kind: Kind, folder: Path) -> StackPlan:
    """The stack that is measured."""
    extra: dict[str, Sequence[str]] = {}
    if kind.engine == "real":
        extra = {"prefill": ["--set", "deterministic=true"], "decode": ["--set", "deterministic=true"]}
    return StackPlan(
        str(model_dir()),
        folder,
        dtype="float32" if kind.engine == "real" else "auto",
        conductors=2,
        prefill=2,
        decode=2,
        pipeline_parallel_size=kind.stages,
        engine=kind.engine,
        log_level="warning",
        extra=extra,
    )


def cases(kind: Kind, options: argparse.Namespace, progress: Progress) -> list[Row]:
    """One engine's rows. Cases take turns, so that what else the machine does falls on all of them."""
    chosen = [(victim, fault) for victim in kind.victims(options.only.split(",")) for fault in FAULTS]
    if not chosen:
        return []
    found: dict[tuple[str, str], list[list[Wait]]] = {case: [] for case in chosen}
    calm: list[Wait] = []
    with tempfile.TemporaryDirectory() as folder, LocalStack(plan_of(kind, Path(folder))) as stack:
        world = World(stack, kind, options)
        world.undisturbed()  # the first prompts teach the conductor how fast the instances are
        for number in range(options.runs):
            for victim, fault in chosen:
                waits = world.round(victim, fault)
                found[victim, fault].append(waits)
                longest_s = max(wait.seconds for wait in waits)
                told = f"{kind.name}, {victim} {fault}: {len(waits)} streams, at most {longest_s:.3f} s"
                progress(f"round {number + 1}, {told}")
            calm += world.undisturbed()
    rows = list(rows_of(f"{kind.name}, nothing happens", calm, UNTOUCHED_S))
    for (victim, fault), rounds in found.items():
        name, waits = f"{kind.name}, {victim} {fault}", [wait for times in rounds for wait in times]
        rows += rows_of(name, waits, UNTOUCHED_S, calm) if victim in NEEDLESS else rows_of(name, waits, WANTED_S[fault])
        if victim == "decode":
            rows.append(growth(name, rounds))
    return rows


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """All rows."""
    kinds = [Kind(engine, 500 if engine == "real" else 160) for engine in options.engines.split(",")]
    kinds += [Kind(kind.engine, kind.answer_tokens, stages=2) for kind in kinds if kind.engine == "real"]
    return [row for kind in kinds for row in cases(kind, options, progress)]


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--engines", default="real,emulated:llama-70b-a800", help="one stack after the other")
    add("--only", default=",".join(VICTIMS), help="what is hit")
    add("--streams", type=int, default=8, help="at once, with contexts of 200 to 4,000 tokens (default 8)")
    add("--seed", type=int, default=1, help="of the prompts (default 1)")


if __name__ == "__main__":
    run("failover", measure, flags=flags)
