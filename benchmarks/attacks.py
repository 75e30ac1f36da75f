"""What a calm tenant notices when another is hostile: `python -m benchmarks.attacks`.

A calm tenant reads one streamed answer after the other from a local stack with the bundled model. The calm tenant runs
alone, then while a hostile tenant runs one attack, in turns. Compared are the p99 and the longest time between events
in the calm tenant's answers, and the p90 of the times to the first event. The hostile client runs in a separate
process, `benchmarks.attacks_hostile`. Beside `bodies` stands the gateway's memory. After each attack's end the services
must come to rest: `rest` is how long they work on.

All processes share this machine's processors, the hostile client with them. What that costs is measured as well: the
calm tenant runs beside processes that ask nothing (`benchmarks.attacks_load`). There is one for each process that the
attack kept busy, and each uses as much processor time. Ratios to that say what an attack costs on processors that are
as busy. The lines of the table of docs/measured/security.md come at the end.

    python -m benchmarks.attacks --runs 2 --seconds 6    # all attacks, 12 minutes
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.attacks_hostile import ATTACKS, CALM, HOSTILE, MIB, Gateway, chat
from benchmarks.fairness import quantile
from benchmarks.frame import Progress, Row, bounded, run
from moonpool.base.bundled import model_dir
from moonpool.base.rpc.api_keys import hash_key
from moonpool.cli.stack import GATEWAY_ID, LocalStack, StackPlan

P99_AT_MOST, LONGEST_AT_MOST, TTFT_AT_MOST = 2.0, 5.0, 1.3
"""Times between events, and p90 of the time to the first, while a hostile tenant attacks, over those alone."""
REST_AT_MOST_S = 2.0
"""Work of clients that have left."""
OVER = ", over "
PAUSE_S = 0.5
ANSWER_TOKENS = 400
LEAST_SHARE = 0.005
"""Of a processor: processes that used less beside an attack than this are not counted."""
LOOK_S, LONGEST_REST_S, BUSY_SHARE = 0.5, 20.0, 0.1
"""After an attack: how often the services are looked at, for how long, and what they use of a processor at rest."""
FIRST_TOKENS = 4
"""Of the answers by which the time to the first event is measured: short ones, so that there are many."""


@dataclass(frozen=True, slots=True)
class CalmTimes:
    """What a calm tenant sees: times between the events of long answers, and to the first event of short ones."""

    gaps: list[float]
    firsts: list[float]

    def __str__(self) -> str:
        p99, longest, first = quantile(self.gaps, 0.99), max(self.gaps), quantile(self.firsts, 0.9)
        return f"{1e3 * p99:.0f}/{1e3 * longest:.0f}/{1e3 * first:.0f} ms of {len(self.gaps)} and {len(self.firsts)}"


@contextmanager
def running(module: str, *arguments: str) -> Iterator[int]:
    """A process, by its id, until the body ends."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()  # the process has started
            yield process.pid
        finally:
            process.kill()


@contextmanager
def attacking(name: str, address: str, seconds: float) -> Iterator[int]:
    """A hostile process, by its id, until the body ends."""
    with running("attacks_hostile", name, address, str(seconds)) as hostile:
        time.sleep(PAUSE_S)
        yield hostile


@contextmanager
def computing(shares: Iterable[float]) -> Iterator[None]:
    """Processes that use these shares of a processor, until the body ends."""
    with ExitStack() as processes:
        for share in shares:
            processes.enter_context(running("attacks_load", str(share)))
        time.sleep(PAUSE_S)
        yield


async def calm_times(gateway: Gateway, seconds: float) -> CalmTimes:
    """What the calm tenant sees in so long: for two thirds of it long answers, then short ones."""
    gaps, _ = await answered(gateway, ANSWER_TOKENS, 2 * seconds / 3)
    _, firsts = await answered(gateway, FIRST_TOKENS, seconds / 3)
    return CalmTimes(gaps, firsts)


async def answered(gateway: Gateway, max_tokens: int, seconds: float) -> tuple[list[float], list[float]]:
    """Times between the events of one answer after the other, and to the first event of each, for so long."""
    body = json.dumps(chat(stream=True, max_tokens=max_tokens, ignore_eos=True)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {gateway.host}\r\nauthorization: Bearer {CALM}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    gaps, firsts = list[float](), list[float]()
    until = time.perf_counter() + seconds
    reader, writer = await asyncio.open_connection(gateway.host, gateway.port)
    while (now := time.perf_counter()) < until:
        writer.write(head.encode() + body)
        began, last = now, 0.0
        while (line := await reader.readline()) != b"data: [DONE]\n":
            if line.startswith(b"data:") and (last or b'"content":""' not in line):  # the first event may be the role
                now = time.perf_counter()
                (gaps if last else firsts).append(now - (last or began))
                last = now
        await reader.readuntil(b"0\r\n\r\n")
    writer.close()
    return gaps, firsts


def resident_bytes(pid: int) -> int:
    """Memory of a process now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def processor_s(pids: Iterable[int]) -> dict[int, float]:
    """Processor time so far of processes, and of their children that live; by process."""
    used = dict[int, float]()
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread or a child that ends meanwhile
                used |= processor_s(int(child) for child in (task / "children").read_text().split())
    return used


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the calm tenant: what it saw, and the processor time of each process meanwhile."""

    seen: CalmTimes
    used_s: dict[int, float]
    took_s: float


def turn(gateway: Gateway, seconds: float, pids: Sequence[int]) -> Turn:
    """Let the calm tenant run for so long, and look at the processes."""
    began, before = time.perf_counter(), processor_s(pids)
    seen = asyncio.run(calm_times(gateway, seconds))
    used = {pid: used - before.get(pid, 0.0) for pid, used in processor_s(pids).items()}
    return Turn(seen, used, time.perf_counter() - began)


def shares_of_attack(attacked: Turn, alone: Turn) -> list[float]:
    """The share of a processor that each process had for an attack: all of its use without the calm tenant's part."""
    calm, all_calm = attacked.seen, alone.seen
    part = (len(calm.gaps) / len(all_calm.gaps) + len(calm.firsts) / len(all_calm.firsts)) / 2
    uses = (used - part * alone.used_s.get(pid, 0.0) for pid, used in attacked.used_s.items())
    return [share for use in uses if (share := use / attacked.took_s) > LEAST_SHARE]


def rest_s(pids: Sequence[int]) -> float:
    """Wait until processes rest, or for `LONGEST_REST_S`; returns how long they worked on."""
    began, used = time.perf_counter(), sum(processor_s(pids).values())
    while (worked := time.perf_counter() - began) < LONGEST_REST_S:
        time.sleep(LOOK_S)
        before, used = used, sum(processor_s(pids).values())
        if used - before < BUSY_SHARE * LOOK_S:
            return worked
    return LONGEST_REST_S


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """Rows of each attack."""
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text("".join(f"sha256:{hash_key(name)} {name}\n" for name in (CALM, HOSTILE)))
        extra = {"gateway": ["--api-keys", str(keys), "--set", f"body_memory_bytes={options.body_mib * MIB}"]}
        plan = StackPlan(str(model_dir()), Path(folder), kvstore=0, http_port=0, log_level="warning", extra=extra)
        with LocalStack(plan) as stack:
            host, _, port = stack.http_address.rpartition(":")
            gateway, pid = Gateway(host, int(port)), stack.services[GATEWAY_ID].pid
            pids = [service.pid for service in stack.services.values()]
            asyncio.run(calm_times(gateway, options.seconds))
            for name in options.only or ATTACKS:
                turns, rests, memory = list[tuple[CalmTimes, CalmTimes, CalmTimes]](), list[float](), 0
                for number in range(options.runs):
                    alone = turn(gateway, options.seconds, pids)
                    before = resident_bytes(pid)
                    with attacking(name, stack.http_address, 3 * options.seconds) as hostile:
                        attacked = turn(gateway, options.seconds, [*pids, hostile])
                        memory = max(memory, resident_bytes(pid) - before)
                    rests.append(rest_s(pids))
                    shares = shares_of_attack(attacked, alone)
                    with computing(shares):
                        busy = turn(gateway, options.seconds, pids)
                    turns.append((attacked.seen, alone.seen, busy.seen))
                    told = f"p99/longest/first {attacked.seen}, alone {alone.seen}, beside as busy {busy.seen}"
                    used = f"{sum(shares):.2f} of a processor, {memory / MIB:.0f} MiB"
                    progress(f"{name}, run {number + 1}: {told}, {used}")
                found += rows(name, turns)
                found.append(bounded(f"rest after: {name}", "s", rests, "wanted at most", REST_AT_MOST_S))
                if name == "bodies":
                    limit = float(options.body_mib)
                    found.append(bounded("gateway's memory, 300 bodies of 4 MiB", "MiB", [memory / MIB], "set", limit))
            progress("\n".join(table(found)))
    return found


def table(found: Sequence[Row]) -> Iterator[str]:
    """The attacks as lines of a table in Markdown."""
    figures = dict[str, list[float]]()
    for row in found:
        if name := row.name.partition(": ")[2]:
            figures.setdefault(name.partition(OVER)[0], []).append(row.value)
    yield "| attack | p99 | longest | TTFT p90 | p99, as busy | longest | TTFT p90 | rest, s |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|"
    for name, values in figures.items():
        yield f"| {name} | {' | '.join(f'{value:.1f}' for value in values)} |"


def rows(name: str, turns: Sequence[tuple[CalmTimes, CalmTimes, CalmTimes]]) -> Iterator[Row]:
    """Ratios of what is measured in turns: attacked to alone, and attacked to processors that are as busy."""
    figures: tuple[tuple[str, Callable[[CalmTimes], float], float], ...] = (
        ("p99 time between events", lambda seen: quantile(seen.gaps, 0.99), P99_AT_MOST),
        ("longest time between events", lambda seen: max(seen.gaps), LONGEST_AT_MOST),
        ("p90 time to the first event", lambda seen: quantile(seen.firsts, 0.9), TTFT_AT_MOST),
    )
    for beside, over in enumerate(("alone", "processors as busy"), 1):
        for what, of, most in figures:
            ratios = [of(seen[0]) / of(seen[beside]) for seen in turns]
            yield bounded(f"{what}: {name}{OVER}{over}", "x", ratios, "wanted at most", most)


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each turn (default 8)")
    parser.add_argument(
        "--body-mib", type=int, default=256, help="the gateway's body_memory_bytes, in MiB (default 256)"
    )
    parser.add_argument("--only", nargs="+", choices=ATTACKS, help="these attacks (default all)")


if __name__ == "__main__":
    run("attacks", measure, flags=flags)
