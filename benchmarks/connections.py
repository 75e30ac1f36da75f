"""An hour of connections, memory of gateway and conductor, waits behind each 504: `python -m benchmarks.connections`.

Engines that compute nothing stand behind a conductor and a gateway (`benchmarks.conductor_engines`). Each connection
sends a request, reads the answer, waits, and sends the next one: whole answers, streams, clients that leave in the
middle of a stream and connect anew, and requests that are bad. Conversations grow turn by turn. Memory is sampled each
minute; a process is flat when the last quarter of the run holds no more than the second, by GROWTH or GROWTH_BYTES.
Timings are not measured, so that the run may share its machine.
"""

import argparse
import asyncio
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from benchmarks.frame import Progress, Row, bounded, run
from benchmarks.processes import Child
from benchmarks.requests import MODEL, WORDS, moonpool

KINDS = {"whole": 0.45, "streamed": 0.45, "left": 0.06, "bad": 0.04}
"""Shares of the requests."""
TURNS, TURN_WORDS, ANSWER_TOKENS = 8, (5, 120), (1, 64)
GROWTH, GROWTH_BYTES = 0.03, 4 << 20
MOST_SAMPLES = 60
ANSWER_S = 660.0
"""The gateway ends a request after 600 s."""
KEEP_ALIVE_S = 10.0
"""Below the gateway's 15 s, so that no request goes to a connection that is being closed."""
NAMES_ITS_WAIT = re.compile(r"waited for|slow to take|no conductor has taken")
Samples = list[list[int]]
"""Bytes of each watched process, sample by sample."""
_NUMBERS = re.compile(r"\d+(\.\d+)?")


@dataclass(slots=True)
class Load:
    """The requests of all connections.

    Attributes:
        until: time.monotonic() at which the load ends.
        pause_s: mean seconds between an answer and the next request of a connection.
        ends: how many requests ended how.
        late: how many 504 say what, numbers left out.
    """

    url: str
    until: float
    pause_s: float
    ends: Counter[str] = field(default_factory=Counter)
    late: Counter[str] = field(default_factory=Counter)

    async def connection(self, draws: random.Random) -> None:
        """Ask over one connection until the time is over."""
        said: list[str] = []
        connector = aiohttp.TCPConnector(limit=1, keepalive_timeout=KEEP_ALIVE_S)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(ANSWER_S)) as session:
            while True:
                await asyncio.sleep(min(draws.expovariate(1.0 / self.pause_s), self.until - time.monotonic()))
                if time.monotonic() >= self.until:
                    return
                said = said if len(said) < TURNS else [str(draws.random())]
                said.append(" ".join(draws.choices(WORDS, k=draws.randint(*TURN_WORDS))))
                (kind,) = draws.choices(list(KINDS), list(KINDS.values()))
                try:
                    self.ends[await self._ask(session, kind, " ".join(said), draws)] += 1
                except (aiohttp.ClientError, TimeoutError) as error:
                    self.ends[f"broken: {type(error).__name__}"] += 1

    async def _ask(self, session: aiohttp.ClientSession, kind: str, prompt: str, draws: random.Random) -> str:
        body = {
            "model": MODEL, "prompt": prompt, "temperature": -1 if kind == "bad" else 0,
            "max_tokens": draws.randint(*ANSWER_TOKENS), "stream": kind in ("streamed", "left"),
        }  # fmt: skip
        async with session.post(f"{self.url}/v1/completions", json=body) as response:
            if kind == "left" and response.status == 200:
                await response.content.readany()
                response.close()
                return kind
            answer = (await response.read()).decode()
        if response.status == 504:
            self.late[_NUMBERS.sub("N", answer)] += 1
        _, broken, why = answer.partition('"error"')
        if response.status == 200 and broken:
            return f"error in a stream: {_NUMBERS.sub('N', why[:200])}"
        return f"{kind} {response.status}"

    def faults(self) -> int:
        """Requests that ended as they should not, apart from 504s."""
        wanted = {"whole 200", "streamed 200", "left", "bad 400"}
        return sum(count for end, count in self.ends.items() if end not in wanted) - sum(self.late.values())

    def unexplained(self) -> int:
        """504s that do not say what the request waited for."""
        return sum(count for text, count in self.late.items() if not NAMES_ITS_WAIT.search(text))


async def load(url: str, watched: Sequence[Child], options: argparse.Namespace, tell: Progress) -> tuple[Load, Samples]:
    """Run all connections; sample the memory of the watched processes meanwhile."""
    seconds = 60.0 * options.minutes
    asking = Load(url, time.monotonic() + seconds, options.connections / options.rate)
    samples: Samples = []
    connections = [
        asyncio.create_task(asking.connection(random.Random(f"{options.seed} {number}")))
        for number in range(options.connections)
    ]
    pending = set(connections)
    while pending:
        _, pending = await asyncio.wait(pending, timeout=seconds / min(MOST_SAMPLES, max(8, int(options.minutes))))
        samples.append([process.resident_bytes() for process in watched])
        told = ", ".join([f"{nbytes >> 20}" for nbytes in samples[-1]])
        spent = ", ".join([f"{process.cpu_s():.0f}" for process in watched])
        tell(f"gateway, conductor: {told} MiB, {spent} s of processor; {dict(asking.ends)}; 504: {dict(asking.late)}")
    for connection in connections:
        connection.result()
    return asking, samples


def quarters(sizes: Sequence[int]) -> tuple[float, float]:
    """Medians of the second quarter and of the last."""
    quarter = max(1, len(sizes) // 4)
    return statistics.median(sizes[quarter : 2 * quarter] or sizes), statistics.median(sizes[-quarter:])


def rows(names: Sequence[str], samples: Samples, asked: Load) -> list[Row]:
    """Whether each process stayed flat, and how requests ended."""
    table = []
    for name, sizes in zip(names, zip(*samples, strict=True), strict=True):
        before, after = quarters(sizes)
        limit = before + max(GROWTH * before, GROWTH_BYTES)
        table.append(bounded(f"{name} in the last quarter", "MiB", [after / 2**20], "second quarter", limit / 2**20))
    table += [
        bounded("requests that ended otherwise than they should", "", [asked.faults()], "wanted", 0.0),
        bounded("504 that name no wait", "", [asked.unexplained()], f"wanted, of {sum(asked.late.values())}", 0.0),
    ]
    return table


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """All rows."""
    with moonpool(1, "--step-s", "0.1") as (url, watched):
        progress(f"{options.connections} connections, {options.rate:g} requests/s, seed {options.seed}")
        asked, samples = asyncio.run(load(url, watched, options, progress))
    return rows(("gateway", "conductor"), samples, asked)


def flags(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own flags."""
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--connections", type=int, default=250)
    parser.add_argument("--rate", type=float, default=25.0, help="requests a second, all connections together, at most")
    parser.add_argument("--seed", type=int, default=0)


if __name__ == "__main__":
    run("connections", measure, flags=flags)
