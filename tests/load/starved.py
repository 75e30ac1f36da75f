"""A stack on a machine with too much to do: no instance may be declared lost. `python -m tests.load.starved`.

The bundled model's stack runs beside processes that never wait, by default twenty for each processor, all of them at
the priority of `--nice`. Requests come all the time. The kernel tells how long the services' main threads ran, and how
long they were ready to run and did not: the ratio is the oversubscription that they met.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from moonpool.base.bundled import model_dir
from moonpool.base.errors import MoonpoolError
from moonpool.base.sampling_params import SamplingParams
from moonpool.cli.load_generator.loops import RequestOutcome, SendRequest, closed_loop, numbers_until
from moonpool.cli.stack import LocalStack, StackPlan
from moonpool.client import AsyncClient

CONCURRENCY = 4
TIMEOUT_S = 120.0
SAY_S = 60.0
LOST, NOTICED, JOINED = "] lost [", "] an instance gets no processor [", "] joined ["
"""Events in the conductor's log. Each instance joins once."""


@contextmanager
def spinning(count: int, nice: int) -> Iterator[None]:
    """So many processes that never wait."""
    work = f"import os; os.nice({nice})\nwhile True: pass"
    spinners = [subprocess.Popen([sys.executable, "-c", work]) for _ in range(count)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
        for spinner in spinners:
            spinner.wait()


def ran_and_waited(stack: LocalStack) -> dict[str, tuple[float, float]]:
    """Seconds that each service's main thread ran, and waited for a processor."""
    found = {}
    for name, service in stack.services.items():
        ran, waited, _ = Path(f"/proc/{service.pid}/schedstat").read_text(encoding="utf-8").split()
        found[name] = int(ran) / 1e9, int(waited) / 1e9
    return found


def told(folder: Path, what: str) -> int:
    """Lines with an event in the conductor's log."""
    logs = [path.read_text(encoding="utf-8", errors="replace") for path in folder.rglob("conductor*.log")]
    assert logs, "a conductor has a log"
    return sum(log.count(what) for log in logs)


async def asking(address: str, until: float) -> tuple[int, int]:
    """Ask until a time. Returns how many requests were answered, and how many failed."""
    answered = failed = 0

    def sender(client: AsyncClient) -> SendRequest:
        sampling = SamplingParams(max_tokens=4, temperature=0.0)

        async def send(index: int, outcome: RequestOutcome, clock: Callable[[], float]) -> None:
            nonlocal answered, failed
            prompt = f"{index + CONCURRENCY} is a number"
            try:
                await client.generate(prompt=prompt, sampling=sampling, timeout_s=TIMEOUT_S)
                answered += 1
            except MoonpoolError as error:
                failed += 1
                print(f"failed: {error}", flush=True)

        return send

    async def say() -> None:
        while time.monotonic() < until:
            await asyncio.sleep(min(SAY_S, max(0.0, until - time.monotonic())))
            print(f"{answered} answered, {failed} failed", flush=True)

    async with AsyncClient(address, timeout_s=TIMEOUT_S) as client:
        numbers = numbers_until(lambda: time.monotonic() >= until)
        await asyncio.gather(say(), closed_loop(CONCURRENCY, numbers, sender(client)))
    return answered, failed


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long")
    parser.add_argument("--times", type=int, default=20, help="processes that never wait, for each processor")
    parser.add_argument("--nice", type=int, default=0, help="priority of the stack and of these processes")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        plan = StackPlan(model=str(model_dir()), data_dir=Path(scratch), kv_cache_memory_bytes=64 << 20)
        with LocalStack(plan) as stack, spinning(options.times * (os.cpu_count() or 1), options.nice):
            for service in stack.services.values():
                os.setpriority(os.PRIO_PGRP, os.getpgid(service.pid), options.nice)
            before = ran_and_waited(stack)
            answered, failed = asyncio.run(asking(stack.address, time.monotonic() + options.seconds))
            after = ran_and_waited(stack)
            lost, noticed, joined = (told(Path(scratch), event) for event in (LOST, NOTICED, JOINED))
    for name, (ran, waited) in after.items():
        ran, waited = ran - before[name][0], waited - before[name][1]
        print(f"{name}: ran {ran:.1f} s, waited {waited:.1f} s: {(ran + waited) / max(ran, 1e-9):.1f} times too slow")
    print(f"{answered} answered, {failed} failed, {noticed} silences explained, {lost} instances lost")
    return 1 if lost or joined != len(after) - 1 or not answered else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
