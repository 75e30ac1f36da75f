"""A storm: clients ask, services are hit, and afterwards everything that was promised is looked after.

Owns the run of one storm and its judgement. What goes wrong and what is asked comes from `schedule`, how from `stack`.
"""

import asyncio
import collections
import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from moonpool.cli.check import Reading, wait_at_rest
from moonpool.cli.stack import StackPlan
from moonpool.client import AsyncClient, SamplingParams
from moonpool.errors import DeadlineExceeded, MoonpoolError, Overloaded, Unavailable
from tests.faults.proxy import FaultProxies
from tests.faults.schedule import FAULTS, Ask, Asks, Fault, FaultKind, plan_faults
from tests.faults.stack import StormStack, wait_gone

HEARTBEAT_S = 0.5
SILENCE_S = 3 * HEARTBEAT_S
REQUEST_TIMEOUT_S = 40.0
LATE_S = 5.0
"""A call may end so much later than its deadline: two cores are shared with everything else."""
REST_TIMEOUT_S = 90.0
TYPED = (Unavailable, Overloaded, DeadlineExceeded)
"""What a client may be told instead of an answer (see `AsyncClient.generate`)."""
AFTER, ROUNDS = 6, 12
"""Requests at once after the storm, so many times at most; all of them must be answered."""
STILL_ROUNDS = 2
"""Rounds one after the other in which no service has more tasks than before: it leaves none behind."""
TRIES = 4
"""A request of those may be tried so many times more while frames are damaged."""


class Judge(Protocol):
    """Knows what the right tokens are."""

    def wrong(self, prompt: Sequence[int], output: Sequence[int], seed: int | None) -> str:
        """What is wrong with an answer, or with its beginning; "" when nothing is."""
        ...


@dataclass(frozen=True, slots=True)
class StormPlan:
    """One storm.

    Attributes:
        seed: of everything that is drawn.
        seconds: how long faults happen.
        kinds: faults that may happen.
        targets: kinds of services that may be hit.
        clients: requests at once.
        corrupt: share of KV frames that are damaged.
        gap_s: mean seconds between two faults.
        longest_prompt, longest_answer: tokens.
    """

    seed: int
    seconds: float
    kinds: Sequence[FaultKind] = FAULTS
    targets: Sequence[str] = ("prefill", "decode", "kvstore", "conductor")
    clients: int = 6
    corrupt: float = 0.05
    gap_s: float = 2.0
    longest_prompt: int = 400
    longest_answer: int = 60


@dataclass(slots=True)
class Outcome:
    """What became of a request."""

    ask: Ask
    tokens: list[int] = field(default_factory=list)
    ended: str = ""
    """ "complete", "cancelled", or the error's type."""
    error: str = ""
    seconds: float = 0.0
    timeout_s: float = REQUEST_TIMEOUT_S
    placements: int = 0
    loaded: bool = False


@dataclass(slots=True)
class Report:
    """What a storm came to; `failures` is empty when every promise was kept."""

    plan: StormPlan
    outcomes: list[Outcome]
    faults: list[Fault]
    failures: list[str]
    rest_s: float = 0.0

    def summary(self) -> str:
        """Some lines for people."""
        ends = collections.Counter(outcome.ended for outcome in self.outcomes)
        kinds = collections.Counter(fault.kind for fault in self.faults)
        again = sum(outcome.placements > 1 for outcome in self.outcomes)
        loaded = sum(outcome.loaded for outcome in self.outcomes)
        tokens = sum(len(outcome.tokens) for outcome in self.outcomes)
        told = collections.Counter(re.sub(r"[0-9a-f]{16}|[0-9]+", "#", o.error)[:200] for o in self.outcomes if o.error)
        slowest = max((outcome.seconds for outcome in self.outcomes), default=0.0)
        return (
            f"storm seed {self.plan.seed}, {self.plan.seconds:g} s: {len(self.outcomes)} requests {dict(ends)}, "
            f"{again} placed more than once, {loaded} with a prefix from a kvstore, {tokens} tokens checked, "
            f"slowest {slowest:.1f} s; "
            f"{len(self.faults)} faults {dict(kinds)}; at rest after {self.rest_s:.1f} s; "
            f"{len(self.failures)} failures"
            + "".join(f"\n  {count:4} x {error}" for error, count in told.most_common())
        )


def storm_stack_plan(base: StackPlan, plan: StormPlan) -> StackPlan:
    """A stack with short leases and heartbeats, so that a storm's end can be waited for."""
    extra: dict[str, Sequence[str]] = dict(base.extra)
    for kind, flags in {
        "conductor": ["--heartbeat-s", f"{HEARTBEAT_S:g}"],
        "prefill": ["--verdict-timeout-s", "8"],
        "decode": ["--lease-s", "6"],
        "kvstore": ["--session-timeout-s", "10"],
    }.items():
        extra[kind] = [*extra.get(kind, []), *flags]
    return replace(base, extra=extra)


@contextlib.contextmanager
def damaged_frames(plan: StormPlan, setenv: Callable[[str, str], None]) -> Iterator[None]:
    """Lets the services of a storm damage what they send."""
    setenv("MOONPOOL_FAULT_CORRUPT_FRAMES", str(plan.corrupt))
    setenv("MOONPOOL_FAULT_SEED", str(plan.seed))
    yield


class Storm:
    """Runs one storm on a stack."""

    def __init__(self, plan: StormPlan, stack: StormStack, judge: Judge, say: Callable[[str], None] = print) -> None:
        self.plan = plan
        self._stack = stack
        self._judge = judge
        self._say = say
        self._healed = threading.Event()
        self._began = 0.0

    def run(self) -> Report:
        """The storm, the calm after it, and the judgement."""
        targets = sorted(name for name, s in self._stack.services.items() if s.kind in self.plan.targets)
        faults = plan_faults(
            self.plan.seed,
            self.plan.seconds,
            targets,
            kinds=self.plan.kinds,
            gap_s=self.plan.gap_s,
            silence_s=SILENCE_S,
        )
        self._say(f"storm: {self.plan}")
        for fault in faults:
            self._say(f"  {fault}")
        asks = Asks(
            self.plan.seed,
            vocab_size=256,
            longest_prompt=self.plan.longest_prompt,
            longest_answer=self.plan.longest_answer,
        )
        outcomes = asyncio.run(self._storm(faults, asks))
        report = Report(self.plan, outcomes, faults, [])
        self._calm(report, asks)
        self._judge_all(report)
        self._say(report.summary())
        return report

    async def _storm(self, faults: Sequence[Fault], asks: Iterator[Ask]) -> list[Outcome]:
        self._began = time.monotonic()
        over = asyncio.Event()
        async with AsyncClient(self._stack.address, timeout_s=REQUEST_TIMEOUT_S) as client:
            async with asyncio.TaskGroup() as group:
                weather = group.create_task(self._weather(faults, over))
                clients = [group.create_task(_ask_until(client, asks, over)) for _ in range(self.plan.clients)]
            weather.result()
            return sorted((o for task in clients for o in task.result()), key=lambda o: o.ask.number)

    async def _weather(self, faults: Sequence[Fault], over: asyncio.Event) -> None:
        """Faults at their times; one service suffers one at a time, and what is late for that is left out."""
        busy: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            for fault in faults:
                await asyncio.sleep(max(0.0, fault.at_s - self._now()))
                running = busy.get(fault.target)
                if running is not None and not running.done():
                    self._say(f"{self._now():7.2f} s  left out: {fault} ({fault.target} has not recovered)")
                    continue
                busy[fault.target] = group.create_task(self._hit(fault))
            await asyncio.sleep(max(0.0, self.plan.seconds - self._now()))
            self._healed.set()
        over.set()

    async def _hit(self, fault: Fault) -> None:
        self._say(f"{self._now():7.2f} s  {fault.kind} {fault.target}")
        await asyncio.to_thread(self._stack.hit, fault, self._healed)
        if fault.kind != "reset":
            self._say(f"{self._now():7.2f} s  {fault.kind} {fault.target} is over")

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _calm(self, report: Report, asks: Iterator[Ask]) -> None:
        """Everybody is back, everything is at rest, and requests are served as if nothing had been."""
        failures = report.failures
        for name in self._stack.dead():
            failures.append(f"{name} ended by itself\n{self._stack.services[name].log_tail()}")
        if failures:
            return
        try:
            self._stack.wait_joined(REST_TIMEOUT_S)
            began = time.monotonic()
            wait_at_rest(self._stack.address, REST_TIMEOUT_S)
            report.rest_s = time.monotonic() - began
        except MoonpoolError as error:
            failures.append(f"after the storm: {error}")
            return
        try:
            failures += self._more_tasks(report, asks)
        except MoonpoolError as error:
            failures.append(f"after the requests that followed the storm: {error}")

    def _more_tasks(self, report: Report, asks: Iterator[Ask]) -> list[str]:
        """Instances whose tasks become more with every few requests. They may become more while peers connect."""
        most: dict[str, float] = {}
        growing: list[str] = []
        still = 0
        for _ in range(ROUNDS):
            tasks = {one.instance: one.value for one in self._round(report, asks) if one.name == "tasks"}
            growing = [
                f"{name}: {most[name]:g} tasks became {count:g}, and they go on becoming more"
                for name, count in tasks.items()
                if count > most.get(name, count)
            ]
            still = 0 if growing or not most else still + 1
            if still == STILL_ROUNDS:
                break
            most = {name: max(count, most.get(name, 0)) for name, count in tasks.items()}
        return growing

    def _round(self, report: Report, asks: Iterator[Ask]) -> list[Reading]:
        after = asyncio.run(self._after(asks))
        report.outcomes += after
        report.failures += [
            f"request {outcome.ask.number} after the storm: {outcome.ended} {outcome.error}"
            for outcome in after
            if outcome.ended != "complete"
        ]
        return wait_at_rest(self._stack.address, REST_TIMEOUT_S)

    async def _after(self, asks: Iterator[Ask]) -> list[Outcome]:
        async with AsyncClient(self._stack.address, timeout_s=REQUEST_TIMEOUT_S) as client:
            staying = [replace(next(asks), ending="run") for _ in range(AFTER)]
            return list(await asyncio.gather(*(self._insist(client, ask) for ask in staying)))

    async def _insist(self, client: AsyncClient, ask: Ask) -> Outcome:
        """A request in calm weather. Frames are still damaged: a share of requests has no luck in all its attempts."""
        for _ in range(1 + (TRIES if self.plan.corrupt else 0)):
            outcome = await _ask(client, ask)
            if outcome.ended == "complete":
                break
        return outcome

    def _judge_all(self, report: Report) -> None:
        for outcome in report.outcomes:
            ask, who = outcome.ask, f"request {outcome.ask.number} ({outcome.ask.ending}, {outcome.ended})"
            if outcome.seconds > outcome.timeout_s + LATE_S:
                report.failures.append(f"{who} took {outcome.seconds:.1f} s of {outcome.timeout_s:g}")
            if outcome.ended not in ("complete", "cancelled", *(kind.__name__ for kind in TYPED)):
                report.failures.append(f"{who}: {outcome.error}")
            if outcome.ended == "complete" and len(outcome.tokens) != ask.max_tokens:
                report.failures.append(f"{who} has {len(outcome.tokens)} of {ask.max_tokens} tokens")
            if outcome.tokens and (wrong := self._judge.wrong(ask.prompt, outcome.tokens, ask.seed)):
                report.failures.append(f"{who}: wrong token: {wrong}")
        report.failures += [f"in a log:\n{text}" for text in self._stack.trouble()]


async def _ask_until(client: AsyncClient, asks: Iterator[Ask], over: asyncio.Event) -> list[Outcome]:
    outcomes = []
    while not over.is_set():
        outcomes.append(await _ask(client, next(asks)))
        if outcomes[-1].ended not in ("complete", "cancelled"):
            await asyncio.sleep(0.05)  # a client that was refused at once does not come back at once
    return outcomes


async def _ask(client: AsyncClient, ask: Ask) -> Outcome:
    outcome = Outcome(ask)
    if ask.ending == "deadline":
        outcome.timeout_s = ask.limit
    began = time.monotonic()
    following = asyncio.create_task(_follow(client, ask, outcome))
    try:
        if ask.ending == "cancel-time":
            await asyncio.wait((following,), timeout=ask.limit)
            following.cancel()
        # A client that hangs must not keep the storm from its end; it is told by its time.
        await asyncio.wait((following,), timeout=outcome.timeout_s + 2 * LATE_S)
        following.cancel()
        await following
    except asyncio.CancelledError:
        outcome.ended = outcome.ended or "cancelled"
    except MoonpoolError as error:
        kind = next((kind for kind in TYPED if isinstance(error, kind)), type(error))
        outcome.ended, outcome.error = kind.__name__, f"{type(error).__name__}: {error}"
    except Exception as error:
        outcome.ended, outcome.error = type(error).__name__, repr(error)
    outcome.seconds = time.monotonic() - began
    return outcome


async def _follow(client: AsyncClient, ask: Ask, outcome: Outcome) -> None:
    sampling = SamplingParams(
        max_tokens=ask.max_tokens, temperature=0.0 if ask.seed is None else 1.0, seed=ask.seed, ignore_eos=True
    )
    async with client.stream(token_ids=ask.prompt, sampling=sampling, timeout_s=outcome.timeout_s) as stream:
        async for event in stream:
            outcome.tokens += event.token_ids
            if ask.ending == "cancel-tokens" and len(outcome.tokens) >= ask.limit:
                outcome.ended = "cancelled"
                return
        assert stream.result is not None
        assert stream.result.token_ids == outcome.tokens
        outcome.placements = len(stream.result.placements)
        outcome.loaded = bool(stream.result.placement.kvstore)
        outcome.ended = "complete"


def run_storm(
    plan: StormPlan,
    base: StackPlan,
    judge: Judge,
    setenv: Callable[[str, str], None],
    say: Callable[[str], None] = print,
) -> Report:
    """A storm on a stack of its own, from its start to the end of its last process."""
    with damaged_frames(plan, setenv), FaultProxies() as proxies:
        stack = StormStack(storm_stack_plan(base, plan), proxies)
        with stack:
            report = Storm(plan, stack, judge, say).run()
            stack.look_around()
            statuses = stack.stop()
        report.failures += [f"{name} ended with {status}" for name, status in statuses.items() if status != 0]
        report.failures += [f"process {pid} is still there" for pid in wait_gone(sorted(stack.pids), 10.0)]
    return report
