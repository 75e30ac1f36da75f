"""One engine for prompts and answers beside two: `python -m benchmarks.one_engine [--quick] [--json]`.

`moonpool serve --engines one` and `--engines split` with the same model. First each stack by itself, in turns:
processor time of its start, and its memory (PSS, all processes) after some answers. Then both run, and the same prompts
go to each in turns, while the other idles: one client with a request after the other, and several clients at once.
Prompts are fresh random tokens, so nothing is cached. Figures are the client's: TTFT, and TPOT as the mean time between
an answer's tokens.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.frame import Absent, Progress, Row, Skipped, paired, run
from moonpool.base.checkpoint.named_models import cache_folder, cached_model
from moonpool.cli.load_generator.senders import greedy
from moonpool.client import AsyncClient

KINDS = ("one", "split")
COPIES = "copies"
"""`split`, where each engine has a copy of the weights."""
BESIDE = "two engines"
NAMES = {"split": "two with one copy of the weights", COPIES: "two with a copy each"}
MEMORY, START = 0.62, 0.65
"""Wanted of two engines' memory, and of their processor time at the start, where each has a copy of the weights."""
ALONE, TOGETHER_TPOT, TOGETHER_TTFT = 1.0, 1.5, 1.2
"""Wanted of two engines' times: one client's, and several clients' 90th percentiles."""
CLIENTS, EACH, PROMPT, ANSWER = 4, 4, 512, 48
"""Clients at once, requests of each, and tokens."""
LONE_REQUESTS, LONE_PROMPT, LONE_ANSWER = 6, 128, 48
FIRST_ANSWERS = 4
"""Answers before memory is read."""
STOP_S = 60.0
SERVING = ("--id conductor", "--id prefill", "--id decode", "--id engine", "moonpool.engine.worker")
"""Words of the command lines of conductor and engines. Besides, a stack has a kvstore, a gateway, `moonpool serve`
itself, and what it starts services with."""
SEED = 1


@dataclass(frozen=True, slots=True)
class Times:
    """An answer's seconds: to the first token, and between tokens."""

    ttft_s: float
    tpot_s: float


class Stack:
    """`moonpool serve` as a child process, with all its processes."""

    def __init__(self, model: Path, engines: str, settings: Sequence[str], folder: Path) -> None:
        command = [sys.executable, "-m", "moonpool.cli.main", "serve", str(model), "--port", "0"]
        command += ["--engines", "split" if engines == COPIES else engines]
        command += ["--json", "--log-level", "warning", "--data-dir", str(folder)]
        command += [part for setting in settings for part in ("--set", setting)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if address := json.loads(line).get("ready", ""):
                self.address = str(address)
                return
        raise Skipped(f"a stack with --engines {engines} did not start; its logs are gone with its folder")

    def processes(self) -> list[int]:
        """The stack's processes."""
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                    children.setdefault(parent, []).append(int(entry.name))
        found, open_ = [], [self._process.pid]
        while open_:
            found.append(open_.pop())
            open_ += children.get(found[-1], [])
        return found

    def cpu_s(self) -> float:
        """Processor seconds that all processes have taken, those that ended included."""
        ticks = 0
        for pid in self.processes():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += sum(int(field) for field in fields[11:15])
        return ticks / os.sysconf("SC_CLK_TCK")

    def pss_bytes(self, *kinds: str, serving: bool = False) -> int:
        """Memory of all processes; what several of them share counts once.

        Args:
            kinds: kinds of pages that count, by Linux's names; all if none is named.
            serving: of conductor and engines only.
        """
        counted = tuple(f"{kind}:" for kind in kinds or ("Pss",))
        total = 0
        for pid in self.processes():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                if serving and not any(word in command for word in SERVING):
                    continue
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) for line in lines if line.startswith(counted)) << 10
        return total

    def stop(self) -> None:
        """Drain, and wait for the end."""
        self._process.send_signal(signal.SIGTERM)
        assert self._process.stdout is not None
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


@contextlib.contextmanager
def stack(model: Path, engines: str, settings: Sequence[str]) -> Iterator[Stack]:
    """A stack for as long as the body runs."""
    with tempfile.TemporaryDirectory(prefix="moonpool-one-engine-") as folder:
        started = Stack(model, engines, settings, Path(folder))
        try:
            yield started
        finally:
            started.stop()


async def ask(client: AsyncClient, prompt: list[int], answer_tokens: int) -> Times:
    """Send one request."""
    began = time.perf_counter()
    first = last = 0.0
    tokens = 0
    async for event in client.stream(token_ids=prompt, sampling=greedy(answer_tokens)):
        last = time.perf_counter()
        first = first or last
        tokens += len(event.token_ids)
    assert tokens == answer_tokens
    return Times(first - began, (last - first) / (tokens - 1))


async def ask_all(address: str, clients: Sequence[Sequence[list[int]]], answer_tokens: int) -> list[Times]:
    """Send each client's prompts, a request after the other; all clients at once."""

    async def ask_in_turn(client: AsyncClient, prompts: Sequence[list[int]]) -> list[Times]:
        return [await ask(client, prompt, answer_tokens) for prompt in prompts]

    async with AsyncClient(address) as client:
        found = await asyncio.gather(*(ask_in_turn(client, prompts) for prompts in clients))
    return [times for several in found for times in several]


def fresh_prompts(source: random.Random, tokens: int, clients: int, each: int) -> list[list[list[int]]]:
    """Random ordinary token ids: each client's prompts."""
    return [[[source.randrange(300, 4000) for _ in range(tokens)] for _ in range(each)] for _ in range(clients)]


def p90(values: Sequence[float]) -> float:
    """The 90th percentile."""
    return statistics.quantiles(values, n=10, method="inclusive")[-1]


def pair(seconds: Mapping[str, float]) -> tuple[float, float]:
    """Milliseconds of one engine and of two."""
    return 1e3 * seconds["one"], 1e3 * seconds["split"]


def measure_alone(model: Path, options: argparse.Namespace, progress: Progress) -> Iterator[Row]:
    """Memory and start of each stack by itself, in turns; also of two engines with a copy of the weights each."""
    kinds = (*KINDS, COPIES)
    whole, serving, cpu = ({kind: list[float]() for kind in kinds} for _ in range(3))
    for number in range(options.starts):
        for kind in kinds if number % 2 else reversed(kinds):
            with stack(model, kind, settings_of(kind, options)) as started:
                cpu[kind].append(started.cpu_s())
                prompts = fresh_prompts(random.Random(SEED), LONE_PROMPT, 1, FIRST_ANSWERS)
                asyncio.run(ask_all(started.address, prompts, LONE_ANSWER))
                whole[kind].append(started.pss_bytes() / 1e6)
                serving[kind].append(started.pss_bytes(serving=True) / 1e6)
            progress(f"start {number + 1}: {kind} took {cpu[kind][-1]:.1f} s of processor, {whole[kind][-1]:.0f} MB")
    engines = "memory, conductor and engines"
    for name, unit, found, beside, most in (
        (engines, "MB", serving, "split", None),
        (engines, "MB", serving, COPIES, MEMORY),
        ("memory, all processes", "MB", whole, "split", None),
        ("memory, all processes", "MB", whole, COPIES, None),
        ("processor time of the start", "s", cpu, "split", None),
        ("processor time of the start", "s", cpu, COPIES, START),
    ):
        pairs = list(zip(found["one"], found[beside], strict=True))
        target = None if most is None else 1 / most
        yield paired(f"{name}, {NAMES[beside]}", unit, pairs, BESIDE, less_is_better=True, target=target)


def measure_together(model: Path, options: argparse.Namespace, progress: Progress) -> Iterator[Row]:
    """Times of one client and of several; both stacks run, and serve in turns."""
    source = random.Random(SEED)
    lone_ttft, lone_tpot, ttft, tpot = (list[tuple[float, float]]() for _ in range(4))
    with contextlib.ExitStack() as running:
        stacks = {kind: running.enter_context(stack(model, kind, settings_of(kind, options))).address for kind in KINDS}
        for number in range(options.runs + 1):
            lone = fresh_prompts(source, LONE_PROMPT, 1, LONE_REQUESTS)
            several = fresh_prompts(source, options.prompt, CLIENTS, EACH)
            order = KINDS if number % 2 else KINDS[::-1]
            alone = {kind: asyncio.run(ask_all(stacks[kind], lone, LONE_ANSWER)) for kind in order}
            crowd = {kind: asyncio.run(ask_all(stacks[kind], several, ANSWER)) for kind in order}
            if number == 0:  # warms up
                continue
            lone_ttft.append(pair({kind: statistics.median(t.ttft_s for t in alone[kind]) for kind in KINDS}))
            lone_tpot.append(pair({kind: statistics.median(t.tpot_s for t in alone[kind]) for kind in KINDS}))
            ttft.append(pair({kind: p90([t.ttft_s for t in crowd[kind]]) for kind in KINDS}))
            tpot.append(pair({kind: p90([t.tpot_s for t in crowd[kind]]) for kind in KINDS}))
            texts = (f"{ours:.1f} beside {theirs:.1f} ms" for ours, theirs in (kept[-1] for kept in (ttft, tpot)))
            progress(f"round {number} of {options.runs}, {CLIENTS} clients: TTFT {', TPOT '.join(texts)}")
    crowd_name = f"{CLIENTS} clients, prompts of {options.prompt},"
    for name, pairs, most in (
        ("one client, TTFT", lone_ttft, ALONE),
        ("one client, TPOT", lone_tpot, ALONE),
        (f"{crowd_name} TPOT p90", tpot, TOGETHER_TPOT),
        (f"{crowd_name} TTFT p90", ttft, TOGETHER_TTFT),
    ):
        yield paired(name, "ms", pairs, BESIDE, less_is_better=True, target=1 / most)


def settings_of(kind: str, options: argparse.Namespace) -> list[str]:
    """Settings of a stack: those of both, and those of the one that is looked at."""
    own = {"one": options.one_set, COPIES: ["engine.mmap_weights=off"]}
    return [*options.all_set, *own.get(kind, ())]


def measure(options: argparse.Namespace, progress: Progress) -> list[Row | Absent]:
    """All rows."""
    model = Path(options.model) if options.model else cached_model("smollm2", cache_folder())
    if model is None:
        raise Skipped("`moonpool pull smollm2` fetches the model")
    if options.quick:
        options.runs, options.starts = 2, 1
    return [
        *(measure_alone(model, options, progress) if options.starts else ()),
        *(measure_together(model, options, progress) if options.runs else ()),
    ]


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    parser.add_argument("--model", default="", help="folder or GGUF file; default: SmolLM2, if it was fetched")
    parser.add_argument("--quick", action="store_true", help="one start and two rounds: less than three minutes")
    parser.add_argument("--starts", type=int, default=3, help="starts of each stack by itself; 0 = none")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of several clients' prompts")
    both = "SERVICE.NAME=VALUE, a setting of both stacks, as of `moonpool serve --set`; may be given again"
    parser.add_argument("--set", dest="all_set", action="append", default=[], metavar="SETTING", help=both)
    ours = "the same of the stack with one engine only, for example decode.chunked_prefill_size=128"
    parser.add_argument("--one-set", dest="one_set", action="append", default=[], metavar="SETTING", help=ours)


if __name__ == "__main__":
    run("one_engine", measure, flags=flags)
