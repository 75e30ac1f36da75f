"""A fault storm: clients send requests while faults are injected into services, then answers and services are checked.

`schedule` draws faults and requests from a seed, `stack` injects the faults, `report` says what happened.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from moonpool.base.errors import DeadlineExceeded, MoonpoolError, Overloaded, Unavailable
from moonpool.base.sampling_params import SamplingParams
from moonpool.base.transport.fault_injection import BREAK_CONNECTIONS, CONNECTION_BROKEN, CORRUPT_FRAMES, FRAME_DAMAGED
from moonpool.base.transport.fault_injection import SEED as FAULT_SEED
from moonpool.cli.check import GaugeReading, wait_at_rest
from moonpool.cli.stack import StackPlan
from moonpool.client import AsyncClient
from tests.faults.disturbances import Disturbances
from tests.faults.proxy import FaultProxies
from tests.faults.report import REQUEST_TIMEOUT_S, Outcome, Report, StormPlan
from tests.faults.schedule import Ask, Asks, Fault, kinds_for, plan_faults
from tests.faults.stack import StormStack, wait_gone

HEARTBEAT_S = 0.5
SILENCE_S = 3 * HEARTBEAT_S
LATE_S = 5.0
"""A call may end so much later than its deadline: two cores are shared with everything else."""
RECOVERY_S = 8.0
"""After a fault's end a service is as before within so long: two cores are shared with everything else."""
NEEDS = ("conductor", "prefill", "decode")
"""Kinds of services without which no request is served."""
REST_TIMEOUT_S = 90.0
TYPED = (Unavailable, Overloaded, DeadlineExceeded)
"""What a client may be told instead of an answer (see `AsyncClient.generate`)."""
AFTER, ROUNDS = 6, 5
"""Requests at once after the storm, and rounds of them at most, per service; all of them must be answered. So many
rounds find every pair of services that has still to connect."""
STILL_ROUNDS = 2
"""Consecutive rounds in which no service may have more tasks than before."""
TRIES = 4
"""Further attempts for each of those requests while frames are damaged."""


class Judge(Protocol):
    """Knows what the right tokens are."""

    def wrong(self, prompt: Sequence[int], output: Sequence[int], seed: int | None) -> str:
        """What is wrong with an answer, or with its beginning; "" when nothing is."""
        ...


def storm_stack_plan(base: StackPlan, plan: StormPlan) -> StackPlan:
    """A stack with short leases and heartbeats, so that a storm's end can be waited for."""
    extra: dict[str, Sequence[str]] = dict(base.extra)
    for kind, flags in {
        "conductor": ["--set", f"heartbeat_s={HEARTBEAT_S:g}"],
        "prefill": ["--set", "verdict_timeout_s=8"],
        "decode": ["--set", "lease_s=6"],
        "kvstore": ["--set", "transfer_timeout_s=10"],
    }.items():
        transports = [] if kind == "conductor" else ["--kv-transports", plan.transports]
        extra[kind] = [*extra.get(kind, []), *flags, *transports]
    return replace(base, extra=extra)


@contextlib.contextmanager
def damaged_frames(plan: StormPlan, setenv: Callable[[str, str], None]) -> Iterator[None]:
    """Lets the services of a storm damage what they send, and break their transports."""
    setenv(CORRUPT_FRAMES, str(plan.corrupt))
    setenv(BREAK_CONNECTIONS, str(plan.break_connections))
    setenv(FAULT_SEED, str(plan.seed))
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
        self._injected: list[Fault] = []
        self._seen: list[Fault] = []
        self._disturbances = Disturbances(stack.services)

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
        report = Report(self.plan, outcomes, faults, injected=self._injected, seen=self._seen)
        report.up_share = self._disturbances.up_share(self._began, self._began + self.plan.seconds, NEEDS)
        self._calm(report, asks)
        self._judge_all(report)
        report.restarted = self._stack.restarted
        report.frames_damaged = self._stack.count_in_logs(FRAME_DAMAGED)
        report.connections_broken = self._stack.count_in_logs(CONNECTION_BROKEN)
        report.transports_opened = self._stack.count_in_logs(f"transport={self.plan.transports}")
        self._say(report.summary())
        return report

    async def _storm(self, faults: Sequence[Fault], asks: Iterator[Ask]) -> list[Outcome]:
        self._began = time.monotonic()
        over = asyncio.Event()
        async with AsyncClient(self._stack.addresses, timeout_s=REQUEST_TIMEOUT_S) as client:
            async with asyncio.TaskGroup() as group:
                injection = group.create_task(self._inject(faults, over))
                clients = [group.create_task(_ask_until(client, asks, over)) for _ in range(self.plan.clients)]
            injection.result()
            return sorted((o for task in clients for o in task.result()), key=lambda o: o.ask.number)

    async def _inject(self, faults: Sequence[Fault], over: asyncio.Event) -> None:
        """Injects faults at their times, one at a time per service; a fault that finds its service busy is left out."""
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
        self._injected.append(fault)
        began = time.monotonic()
        try:
            if await asyncio.to_thread(self._stack.hit, fault, self._healed):
                self._seen.append(fault)
        finally:
            self._disturbances.add([fault.target], began, time.monotonic() + RECOVERY_S)
        if fault.kind != "reset":
            self._say(f"{self._now():7.2f} s  {fault.kind} {fault.target} is over")

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _calm(self, report: Report, asks: Iterator[Ask]) -> None:
        """Every service is back, everything is at rest, and requests are served as before the storm."""
        failures = report.failures
        for name in self._stack.dead():
            failures.append(f"{name} ended without a fault\n{self._stack.services[name].log_tail()}")
        if failures:
            return
        try:
            self._stack.wait_joined(REST_TIMEOUT_S)
            began = time.monotonic()
            wait_at_rest(self._stack.addresses, REST_TIMEOUT_S)
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
        for _ in range(ROUNDS * len(self._stack.services)):
            tasks = {each.instance: each.value for each in self._round(report, asks) if each.name == "tasks"}
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

    def _round(self, report: Report, asks: Iterator[Ask]) -> list[GaugeReading]:
        after = asyncio.run(self._after(asks))
        report.outcomes += after
        report.failures += [
            f"request {outcome.ask.number} after the storm: {outcome.ended} {outcome.error}"
            for outcome in after
            if outcome.ended != "complete"
        ]
        return wait_at_rest(self._stack.addresses, REST_TIMEOUT_S)

    async def _after(self, asks: Iterator[Ask]) -> list[Outcome]:
        async with AsyncClient(self._stack.addresses, timeout_s=REQUEST_TIMEOUT_S) as client:
            staying = [replace(next(asks), ending="run") for _ in range(AFTER)]
            return list(await asyncio.gather(*(self._insist(client, ask) for ask in staying)))

    async def _insist(self, client: AsyncClient, ask: Ask) -> Outcome:
        """A request after the storm. Frames are still damaged, so one request may fail in all of its attempts."""
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
            if outcome.ended in (Unavailable.__name__, Overloaded.__name__):
                why = self._disturbances.explain(outcome.began, outcome.began + outcome.seconds, NEEDS)
                if not self.plan.may_fail(outcome, why):
                    found = why or "no fault explains it"
                    report.failures.append(
                        f"{who} was lost after {len(outcome.tokens)} tokens, {found}: {outcome.error}"
                    )
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
            await asyncio.sleep(0.05)  # a refused client waits before its next request
    return outcomes


async def _ask(client: AsyncClient, ask: Ask) -> Outcome:
    outcome = Outcome(ask)
    if ask.ending == "deadline":
        outcome.timeout_s = ask.limit
    began = outcome.began = time.monotonic()
    following = asyncio.create_task(_follow(client, ask, outcome))
    try:
        if ask.ending == "cancel-time":
            await asyncio.wait((following,), timeout=ask.limit)
            following.cancel()
        # A client that hangs must not keep the storm from its end; its time shows that it hung.
        await asyncio.wait((following,), timeout=outcome.timeout_s + 2 * LATE_S)
        following.cancel()
        await following
    except asyncio.CancelledError:
        if (client_task := asyncio.current_task()) is not None and client_task.cancelling():
            raise  # the storm itself has failed
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
        outcome.placements = len(stream.result.placements) + stream.result.resumes
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
    plan = replace(plan, kinds=kinds_for(base.engine, plan.kinds))
    with damaged_frames(plan, setenv), FaultProxies() as proxies:
        stack = StormStack(storm_stack_plan(base, plan), proxies)
        with stack:
            report = Storm(plan, stack, judge, say).run()
            stack.look_around()
            statuses = stack.stop()
        report.failures += [f"{name} ended with {status}" for name, status in statuses.items() if status != 0]
        report.failures += [f"process {pid} is still there" for pid in wait_gone(sorted(stack.pids), 10.0)]
    return report
