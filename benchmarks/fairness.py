"""What a tenant notices when another one floods the cluster: `python -m benchmarks.fairness`.

A calm tenant sends requests in an open loop at a quarter of what the prefill instances can compute. The calm tenant
runs alone, then while a second tenant sends three times as much as they can, and then while the same flood comes from
the calm
tenant too: the result without shares. Compared is the calm requests' TTFT. They have equal lengths and come at equal
times in all three rounds. The flood is cut off when the last calm request has ended. Beside it the same arrivals go
through prefill's core alone, in virtual time: what shares can give, without the noise of the machine.
"""

import argparse
import asyncio
import random
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice, takewhile
from pathlib import Path

from benchmarks.frame import Progress, Row, bounded, run
from moonpool.base.bundled import model_dir
from moonpool.base.errors import Overloaded
from moonpool.base.kv.keys import BlockKey
from moonpool.base.sampling_params import SamplingParams
from moonpool.base.scheduling.latency import Speeds, prefill_seconds
from moonpool.base.scheduling.request import EngineRequest
from moonpool.base.scheduling.state_machine import IoEnded
from moonpool.cli.check import wait_at_rest
from moonpool.cli.stack import LocalStack, StackPlan
from moonpool.client import AsyncClient
from moonpool.engine.emulated.profile import load_profile
from moonpool.engine.prefill.core.actions import Action, ReportFirstToken, RunStep
from moonpool.engine.prefill.core.events import AddRequest, IoResult, StepEnded
from moonpool.engine.prefill.core.scheduler import PrefillScheduler
from moonpool.engine.prefill.core.settings import PrefillSettings

BLOCK_SIZE = 64
SETTINGS = PrefillSettings(
    num_blocks=22_000, block_size=BLOCK_SIZE, layers=1, block_bytes=1, max_num_batched_tokens=512, max_queue=1_000_000
)
ANSWER_TOKENS = (4, 24)
AHEAD_S = 5.0
"""The flood begins so much earlier."""
WANTED = 1.3
"""TTFT p90 while another tenant floods, over that alone."""
REST_S = 30.0
PAUSE_S = 5.0
"""In virtual time the second round begins so long after the first one's last prompt came."""
VOCABULARY = 4096


@dataclass(frozen=True, slots=True, order=True)
class Coming:
    """A prompt: arrival in seconds, tokens and tenant."""

    at: float
    tokens: int
    tenant: str


def first_tokens(coming: Sequence[Coming], tenant: str, speeds: Speeds) -> list[float]:
    """TTFT for a tenant's prompts, seconds, in arrival order; they come sorted, and begin all unlike."""
    core = PrefillScheduler(SETTINGS, speeds)
    heap: list[tuple[float, int, AddRequest | IoEnded[IoResult]]] = [
        (prompt.at, number, _arrival(number, prompt)) for number, prompt in enumerate(coming, 1)
    ]
    heapify(heap)
    wanted = {number: prompt.at for number, prompt in enumerate(coming, 1) if prompt.tenant == tenant}
    found: dict[int, float] = {}
    while len(found) < len(wanted):
        now, order, event = heappop(heap)
        out: list[Action] = []
        core.handle(now, event, out)
        for action in out:
            match action:
                case RunStep(io=io):
                    seconds = _seconds(action, speeds)
                    ended: IoEnded[IoResult] = IoEnded(io, StepEnded(False, seconds))
                    heappush(heap, (now + seconds, order + len(coming), ended))
                case ReportFirstToken(id=number) if number in wanted:
                    found[number] = now - wanted[number]
    return [found[number] for number in wanted]


def _arrival(number: int, coming: Coming) -> AddRequest:
    keys = tuple(
        BlockKey(number.to_bytes(16, "big") + index.to_bytes(16, "big")) for index in range(coming.tokens // BLOCK_SIZE)
    )
    return AddRequest(number, EngineRequest(keys, coming.tokens, coming.tokens, tenant=coming.tenant), None)


def _seconds(step: RunStep, speeds: Speeds) -> float:
    chunks = [(chunk.end - chunk.start, chunk.start) for chunk in step.chunks]
    return speeds.prefill_base_s + sum(
        [prefill_seconds(speeds, new, start, steps=0, begins=not start) for new, start in chunks]
    )


CALM, FLOOD = "calm", "flood"
CALM_SHARE, FLOOD_SHARE = 0.25, 3.0
"""Requests per second, as shares of what the prefill instances can compute."""
PROMPT_TOKENS, SPREAD, MOST_TOKENS = 8000, 0.4, 24_000
"""Median and spread (of the logarithm) of prompts' lengths, and the longest: about as in the Mooncake paper's trace."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: seconds since its round began, prompt and length of the answer."""

    at: float
    prompt: Sequence[int]
    answer: int


def requests(seed: str, words: str, rate: float, vocabulary: int) -> Iterator[Asked]:
    """Requests without an end, so many per second on the average.

    Equal seeds give equal times and lengths; prompts begin alike only where `words` are equal too, so that no round
    finds the KV of the one before.
    """
    drawn, at = random.Random(f"moonpool fairness {seed}"), 0.0
    tokens_of = random.Random(f"moonpool fairness {seed} {words}")
    while True:
        at += drawn.expovariate(rate)
        tokens = min(round(PROMPT_TOKENS * drawn.lognormvariate(0.0, SPREAD)), MOST_TOKENS)
        prompt = [tokens_of.randrange(vocabulary // 2, vocabulary) for _ in range(tokens)]
        yield Asked(at, prompt, drawn.randint(*ANSWER_TOKENS))


async def ask(client: AsyncClient, asked: Asked, tenant: str, began: float) -> float:
    """Send a request when due; return the time to first token, seconds."""
    await asyncio.sleep(began + asked.at - asyncio.get_running_loop().time())
    sampling = SamplingParams(max_tokens=asked.answer, temperature=0.0, ignore_eos=True)
    result = await client.generate(token_ids=asked.prompt, sampling=sampling, tenant=tenant)
    return result.timing.ttft_s


@asynccontextmanager
async def flooding(client: AsyncClient, tenant: str, coming: Iterator[Asked]) -> AsyncIterator[None]:
    """One tenant's requests come one after the other, whatever the outcome, until the body ends."""

    async def send(asked: Asked, began: float) -> None:
        with suppress(Overloaded):  # as many are there as a tenant may have
            await ask(client, asked, tenant, began)

    async def all_of_them() -> None:
        began = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            for asked in coming:
                await asyncio.sleep(began + asked.at - asyncio.get_running_loop().time())
                group.create_task(send(asked, began))

    flood = asyncio.create_task(all_of_them())
    try:
        await asyncio.sleep(AHEAD_S)
        yield
    finally:
        flood.cancel()
        await asyncio.gather(flood, return_exceptions=True)


async def calm(client: AsyncClient, asked: Sequence[Asked]) -> list[float]:
    """TTFT for each of the calm tenant's requests."""
    began = asyncio.get_running_loop().time()
    return await asyncio.gather(*(ask(client, request, CALM, began) for request in asked))


async def measured(address: str, asked: Sequence[Asked], tenant: str, flood: Iterator[Asked]) -> list[float]:
    """The same while a tenant floods; "" = no flood."""
    async with AsyncClient(address) as client:
        if not tenant:
            return await calm(client, asked)
        async with flooding(client, tenant, flood):
            return await calm(client, asked)


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that so many are not above."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def rounds(runner: asyncio.Runner, address: str, options: argparse.Namespace, number: int) -> dict[str, list[float]]:
    """TTFT for the calm requests by the flooding tenant.

    The loop outlives calls that are cut off: gRPC tells their ends.
    """
    profile = load_profile(options.engine.removeprefix("emulated:"))
    scale = options.time_scale or profile.time_scale
    capacity = options.prefill * scale / prefill_seconds(profile.speeds, PROMPT_TOKENS, 0)
    found: dict[str, list[float]] = {}
    for tenant in ("", FLOOD, CALM):
        seed = f"{options.seed} {number}"
        stream = requests(f"calm {seed}", tenant, CALM_SHARE * capacity, VOCABULARY)
        asked = [next(stream) for _ in range(options.requests if tenant != CALM else options.without)]
        flood = requests(f"flood {seed}", tenant, FLOOD_SHARE * capacity, VOCABULARY)
        if asked:
            found[tenant] = runner.run(measured(address, asked, tenant, flood))
        wait_at_rest(address, REST_S)
    return found


def virtual(number: int, options: argparse.Namespace) -> float:
    """TTFT p90 while another tenant floods over that alone, of prefill's core in virtual time.

    One core has both rounds, one right after the other, as the stack has: the core remembers which tenants were served.
    """
    speeds = load_profile(options.engine.removeprefix("emulated:")).speeds
    capacity, seed = 1.0 / prefill_seconds(speeds, PROMPT_TOKENS, 0), f"{options.seed} {number}"
    asked = list(islice(requests(f"calm {seed}", "", CALM_SHARE * capacity, VOCABULARY), options.requests))
    again = asked[-1].at + PAUSE_S
    ours = [Coming(at + request.at, len(request.prompt), CALM) for at in (0.0, again + AHEAD_S) for request in asked]
    coming = requests(f"flood {seed}", "", FLOOD_SHARE * capacity, VOCABULARY)
    flood = takewhile(lambda request: request.at < again + AHEAD_S + REST_S, coming)
    theirs = [Coming(again + request.at, len(request.prompt), FLOOD) for request in flood]
    found = first_tokens(sorted(ours + theirs), CALM, speeds)
    return quantile(found[len(asked) :], 0.9) / quantile(found[: len(asked)], 0.9)


def plan_of(options: argparse.Namespace, folder: Path) -> StackPlan:
    """The stack that is flooded."""
    return StackPlan(
        str(model_dir()), folder, engine=options.engine, time_scale=options.time_scale, prefill=options.prefill,
        decode=options.decode, kvstore=0, log_level="warning",
    )  # fmt: skip


def measure(options: argparse.Namespace, progress: Progress) -> list[Row]:
    """All rows."""
    found: list[dict[str, list[float]]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalStack(plan_of(options, Path(folder))) as stack,
        asyncio.Runner() as runner,
    ):
        for number in range(options.runs):
            found.append(rounds(runner, stack.address, options, number))
            p90 = {tenant or "alone": quantile(seconds, 0.9) for tenant, seconds in found[-1].items()}
            told = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in p90.items())
            progress(f"run {number + 1} of {options.runs}, TTFT p90: {told}")
    ratios = [virtual(number, options) for number in range(options.runs)]
    return [bounded("prefill's core in virtual time: TTFT p90 in a flood, over alone", "x", ratios, "wanted at most",
                    WANTED), *rows(found)]  # fmt: skip


def rows(found: Sequence[dict[str, list[float]]]) -> Iterator[Row]:
    """The wanted ratio, and the ratio without shares."""
    for name, share in (("p50", 0.5), ("p90", 0.9)):
        alone = [quantile(seconds[""], share) for seconds in found]
        flooded = [quantile(seconds[FLOOD], share) for seconds in found]
        ratios = [ours / own for ours, own in zip(flooded, alone, strict=True)]
        yield bounded(f"TTFT {name} while another tenant floods, over alone", "x", ratios, "wanted at most", WANTED)
        yield bounded(f"TTFT {name} while another tenant floods", "s", flooded, "alone, 1.3 times",
                      WANTED * quantile(alone, 0.5))  # fmt: skip
        if all(CALM in seconds for seconds in found):
            own = [quantile(seconds[CALM], share) for seconds in found]
            yield bounded(f"TTFT {name} in a flood of its own tenant", "s", own, "alone, 1.3 times",
                          WANTED * quantile(alone, 0.5))  # fmt: skip


def flags(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--engine", default="emulated:llama-70b-a800", help="emulated:PROFILE (default emulated:llama-70b-a800)")
    add("--time-scale", type=float, default=0.0, help="emulated seconds that pass in one second; 0 = the profile's own")
    add("--prefill", type=int, default=1, help="instances (default 1)")
    add("--decode", type=int, default=1, help="instances (default 1)")
    add("--requests", type=int, default=30, help="of the calm tenant in a round (default 30)")
    add("--without", type=int, default=3, help="the same in a flood of its own, where each waits for long (default 3)")
    add("--seed", type=int, default=1, help="of prompts and times (default 1)")


if __name__ == "__main__":
    run("fairness", measure, flags=flags)
