"""A storm: faults by a seed against two of every service, with checked answers: `python -m tests.world.storm --seed 7`.

Prints a line of JSON for each storm. `--trace` shows its faults and errors, `--log FILE` writes all messages. What a
storm does and what the services meet both follow from the seed, so a failure comes again.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from moonpool.client import AsyncClient, SamplingParams
from moonpool.errors import MoonpoolError
from moonpool.rpc.tuning import tune_gc
from moonpool.telemetry import logs
from tests.world.cluster import Cluster, Service, Simulation, answer, leave
from tests.world.disk import Disk
from tests.world.loop import draws

FAULT_S = 2.5
"""Mean distance of faults."""
RATE = 4.0
"""Requests a second."""
LEAVING = 0.15
"""Share of clients that leave before their answer ends."""
TIMEOUT_S, HUNG_S = 120.0, 200.0
SKEW_S = 5.0
"""Wall clocks differ from the true time by so much at most."""
SERVED = ("conductor", "kvstore", "prefill", "decode")
KINDS = ("kill", "stop", "reset", "partition")
POWER = 0.5
"""Share of kills with which the machine loses its power, too."""
ENGINE = ("--block-size", "64")
FLAGS = {
    "kvstore": ["--dram-bytes", str(1 << 20), "--ssd-bytes", str(1 << 24)],
    "prefill": [*ENGINE, "--max-num-batched-tokens", "2048"],
    "decode": [*ENGINE, "--kv-cache-memory-bytes", str(1 << 21)],
}


class Storm:
    """One storm; `run` gives what happened."""

    def __init__(self, simulation: Simulation, seconds: float, folder: Path) -> None:
        """Take how long faults happen, and a folder for the disks of kvstores."""
        self._simulation = simulation
        self._seconds = seconds
        self._draws = draws(f"storm {simulation.seed}")
        self._loop = simulation.loop
        self._side: list[asyncio.Task[None]] = []
        self._cluster = Cluster(simulation, dict.fromkeys(SERVED, 2), FLAGS)
        for service in self._cluster.services.values():
            service.skew_s = self._draws.uniform(-SKEW_S, SKEW_S)
            if service.kind == "kvstore":
                service.disk = Disk(folder / service.name, f"{simulation.seed} {service.name}")
        self.story: list[str] = []
        self.bad: list[str] = []
        self.outcomes: Counter[str] = Counter()
        self.faults = 0
        self._answers: list[Any] = []

    async def run(self) -> dict[str, Any]:
        await self._cluster.start()
        self._begin = self._loop.time()
        async with AsyncClient(self._cluster.addresses, timeout_s=TIMEOUT_S) as client:
            self._beside(self._break_things())
            work = await self._ask_things(client)
            hung = (await asyncio.wait(work, timeout=HUNG_S))[1]
            await asyncio.gather(*self._side)
            self._simulation.network.heal()
            if hung:
                self.bad.append(f"{len(hung)} requests hang")
            for task in work:
                if task.done() and task.exception() is not None:
                    self.bad.append(repr(task.exception()))
            for service in self._cluster.services.values():
                if service.task.done():
                    self.bad.append(f"{service.node} has ended: {service.task.exception()!r}")
            log = self._simulation.log.digest  # some gauges of kvstores, which are asked next, tell the real memory
            try:
                await self._cluster.rest()
            except AssertionError as error:
                self.bad.append(str(error))
        answers = hashlib.sha256(repr(sorted(self._answers)).encode()).hexdigest()[:16]
        return {
            "seed": self._simulation.seed,
            "requests": len(work),
            "outcomes": dict(self.outcomes),
            "faults": self.faults,
            "bad": self.bad[:6],
            "virtual_s": self._now(),
            "answers": answers,
            "log": log,
        }

    def _now(self) -> float:
        return round(self._loop.time() - self._begin, 6)

    def _beside(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._side.append(self._loop.create_task(coroutine))

    async def _ask_things(self, client: AsyncClient) -> list[asyncio.Task[None]]:
        drawn, work = self._draws, list[asyncio.Task[None]]()
        prefixes = [[drawn.randrange(8, 200) for _ in range(1024)] for _ in range(4)]
        while self._now() < self._seconds:
            await asyncio.sleep(drawn.expovariate(RATE))
            prompt = drawn.choice(prefixes)[: drawn.randrange(64, 1024)]
            prompt = prompt + [drawn.randrange(8, 200) for _ in range(drawn.randrange(1, 700))]
            count = drawn.randrange(1, 60)
            leave_s = drawn.uniform(0.05, 3.0) if drawn.random() < LEAVING else None
            work.append(self._loop.create_task(self._ask(client, len(work), prompt, count, leave_s)))
        return work

    async def _ask(
        self, client: AsyncClient, number: int, prompt: list[int], count: int, leave_s: float | None
    ) -> None:
        came, tokens, times = self._now(), list[int](), list[float]()
        sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        stream = client.stream(token_ids=prompt, sampling=sampling, request_id=f"t-{number}")
        outcome = "done"
        try:
            async with asyncio.timeout(leave_s):
                async for event in stream:
                    tokens += event.token_ids
                    times.append(self._now())
        except TimeoutError:
            outcome = "left"
        except MoonpoolError as error:
            outcome = type(error).__name__
            self.story.append(f"{self._now()} t-{number} {error}")
        right = answer(prompt, count)
        if tokens != right[: len(tokens)] or (outcome == "done" and len(tokens) != count):
            self.bad.append(f"t-{number} ({outcome}): wrong tokens, {len(tokens)} of {count}")
        if outcome == "DeadlineExceeded" or self._now() - came > TIMEOUT_S + 1:
            self.bad.append(f"t-{number} ({outcome}) took {self._now() - came:.1f} s")
        self.outcomes[outcome] += 1
        self._answers.append((number, came, times, outcome, tokens))

    async def _break_things(self) -> None:
        drawn, services = self._draws, list(self._cluster.services.values())
        while True:
            await asyncio.sleep(drawn.expovariate(1 / FAULT_S))
            if self._now() >= self._seconds:
                return
            kind, one, other = drawn.choice(KINDS), drawn.choice(services), drawn.choice(services)
            seconds = drawn.uniform(0.3, 4.0)
            if one.node.dead or one.node.held is not None:
                continue
            self.faults += 1
            self.story.append(f"{self._now()} {kind} {one.node} ({other.node}, {seconds:.2f} s)")
            match kind:
                case "kill":
                    one.kill(power=drawn.random() < POWER)
                    self._beside(self._later(seconds, one))
                case "stop":
                    one.stop()
                    self._beside(self._later(seconds, one))
                case "reset":
                    self._simulation.network.reset(one.name, other.name)
                case "partition":
                    self._simulation.network.partition(one.name, other.name, seconds)

    async def _later(self, seconds: float, service: Service) -> None:
        """Bring a killed or stopped service back."""
        await asyncio.sleep(seconds)
        if service.node.dead:
            service.begin()
        elif service.node.held is not None:
            service.resume()


KEPT: list[object] = []
"""Storms that are over: what is destroyed would run code of the dead."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, action="append", help="may be given several times (default: 1)")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--trace", action="store_true", help="show faults and errors")
    parser.add_argument("--log", help="file for all messages, a line each")
    args = parser.parse_args()
    logs.configure("error", "world", False)
    tune_gc()
    failed = False
    for seed in args.seed or [1]:
        began = time.process_time()
        simulation = Simulation(seed, args.log)
        with tempfile.TemporaryDirectory(prefix="moonpool-storm-") as folder:
            storm = Storm(simulation, args.seconds, Path(folder))
            KEPT.append((simulation, storm))
            result = simulation.run(storm.run())
        print(json.dumps({**result, "cpu_s": round(time.process_time() - began, 2)}), flush=True)
        if args.trace:
            print(*storm.story, sep="\n", flush=True)
        if result["bad"]:
            failed = True
            print(f"repeat with: python -m tests.world.storm --seed {seed} --seconds {args.seconds:g}", file=sys.stderr)
    leave(1 if failed else 0)


if __name__ == "__main__":
    main()
