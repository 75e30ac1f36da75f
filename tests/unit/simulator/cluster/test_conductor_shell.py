"""The conductor's shell, on an event loop in virtual time, decides as the simulator's conductor does.

The simulator serves a small seeded trace, loses instances in it, and notes what its conductor's core was told and what
it answered. The service's own servicer, dispatcher, driver and journal get the same requests at the same times, as
token ids, and instances join, report, answer its calls and make tokens as they did there, in the contract's messages.
Every decision is the same at the same time: where requests go, which are refused or fail, what is tried again, and what
is resumed that was another conductor's.
"""

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moonpool.bundled import model_dir
from moonpool.errors import DeadlineExceeded, Overloaded, Unavailable
from moonpool.kv.keys import chain_root, namespace
from moonpool.kv.layout import KVLayout
from moonpool.scheduling.state_machine import IoEnded
from moonpool.telemetry.prometheus import PrometheusMetrics
from moonpool.telemetry.spans import Recorder
from moonpool.v1 import conductor_pb2
from services.conductor.config import ConductorConfig
from services.conductor.core.events import (
    AnnouncePlacement,
    ClientGone,
    CompleteRequest,
    DecodeReservation,
    FailRequest,
    Failure,
    FailureKind,
    InstanceJoined,
    KeysChanged,
    LoadReported,
    Rehash,
    Rehashed,
    RequestArrived,
    ResumeState,
    StalePlacement,
    StartDecode,
    TakeOverSequence,
)
from services.conductor.registry import Checkpoint
from services.conductor.service import assembled
from services.conductor.servicer import ConductorServicer
from simulator.clock import ps
from simulator.cluster.admission import FOREVER_S, limits_of
from simulator.cluster.clients import RETRY_S
from simulator.cluster.cluster import Cluster
from simulator.cluster.conductor import Conductor
from simulator.cluster.config import ClusterConfig, Runs, SloTargets
from simulator.network import CallDelays
from simulator.traces.mooncake import TraceRequest
from tests.unit.simulator.cluster.asked import Asked, Coming, asked
from tests.unit.simulator.cluster.instances import Heard, InProcess, Instances
from tests.unit.simulator.cluster.rig import PROFILE
from tests.unit.simulator.cluster.scripts import BT, SEED, Noted, assert_same, decided, journalled, requests
from tests.unit.simulator.cluster.virtual_loop import run_virtually, virtual_loop

TINY = model_dir()
LAYOUT = KVLayout(layers=4, kv_heads=1, head_dim=4, block_tokens=16, dtype="float32")
NAMESPACE = namespace(bytes(32), LAYOUT)
CHECKPOINT = Checkpoint.load(str(TINY))
[END] = CHECKPOINT.config.eos_token_ids
SERVED = CHECKPOINT.served()
MODEL = conductor_pb2.ModelInfo(
    name=SERVED.name,
    namespace=NAMESPACE,
    config_hash=SERVED.config_hash,
    vocab_size=SERVED.vocab_size,
    max_tokens=8192,
    layout=LAYOUT.to_proto(),
    emulated="round",
)
CONFIG = ClusterConfig(
    profile=replace(PROFILE, token_bytes=LAYOUT.token_bytes), prefill=3, decode=3, kvstore=1,
    block_tokens=LAYOUT.block_tokens, step_tokens=64, pool_blocks=40, max_batch=8, slo=SloTargets(0.6, 0.03),
    admission="promised", seed=SEED,
)  # fmt: skip


@dataclass(frozen=True)
class Break:
    """A client loses its connection alone and comes again; its conductor has `seen` that, or has its request still."""

    at_s: float
    id: str
    seen: bool


@dataclass
class Script:
    """What a simulated conductor heard and decided, and the requests that came to it, by their numbers there.

    `again` are those whose clients have come again while they were there, and when.
    """

    noted: list[Noted]
    comings: dict[int, Coming]
    again: list[tuple[float, Coming]]


def simulated(
    config: ClusterConfig, wanted: list[Asked], losses: list[tuple[float, str]], breaks: Sequence[Break]
) -> Script:
    """Of the last conductor of a simulated cluster, which loses instances and other conductors at some times."""
    cluster = Cluster(config, lambda _: None, runs=Runs(1))
    conductor, by_id = cluster.conductors[-1], {one.id: one for one in wanted}
    script = Script(list(_joining(cluster, conductor)), {}, [])

    def hear(now: float, event: Any, actions: list[Any]) -> None:
        script.noted.append(Noted(now, event, list(actions)))
        if isinstance(event, RequestArrived):
            one = by_id[event.spec.id]
            had = tuple([answer.made for answer in one.request.answers])
            script.comings[event.spec.number] = Coming(one, event.spec, had)

    conductor.host.heard = hear
    for one in wanted:
        cluster.world.at(one.request.arrived, cluster.clients.arrive, one.request)
    for at_s, name in losses:
        cluster.world.at(ps(at_s), lambda name: cluster.crash(name, 1.0), name)
    for lost in breaks:
        cluster.world.at(ps(lost.at_s), partial(_break, cluster, script, by_id[lost.id]), lost)
    cluster.run()
    cluster.check_at_rest()
    return script


def _break(cluster: Cluster, script: Script, asked: Asked, one: Break) -> None:
    """Breaks a client's connection, and notes how it comes again."""
    serving = cluster.clients.disconnect(asked.request, seen=one.seen)
    had = tuple([answer.made for answer in asked.request.answers])

    def again(_: object) -> None:
        if serving is not None and serving.rejoined and not serving.away and not asked.request.outcome:
            assert serving.sequence is not None
            fence = serving.fence + serving.rejoined
            resumed = ResumeState(0, fence, serving.sequence.id, serving.target)
            coming = Coming(asked, replace(serving.ask, resumed=resumed), had)
            script.again.append((cluster.world.seconds, coming))

    cluster.world.after(ps(RETRY_S), again)


def _joining(cluster: Cluster, conductor: Conductor) -> Iterator[Noted]:
    """How all joined, when the cluster was made."""
    everybody: list[Any] = [*cluster.prefills, *cluster.decodes, *cluster.stores]
    for one in everybody:
        yield Noted(0.0, InstanceJoined(conductor.members.facts(one.name, one.incarnation)), [])
        yield Noted(0.0, KeysChanged(one.name, 1, (), (), snapshot_begin=True, snapshot_end=True), [])
        yield Noted(0.0, LoadReported(one.name, one.load()), [])


def settings_of(config: ClusterConfig, journal: Path) -> ConductorConfig:
    """The same for the service."""
    return ConductorConfig(
        id="conductor-0", model=str(TINY), generation_config="none", journal_dir=journal, journal_bytes=1 << 30,
        heartbeat_s=60.0, request_timeout_s=config.deadline_s or FOREVER_S, policy=config.policy,
        policy_seed=config.seed + config.conductors - 1, decode_prompt_tokens=config.decode_prompt_tokens,
        balancing_threshold=config.threshold, peers=config.peers,
        copy_share=config.copy_share, slow_factor=config.slow_factor, retries=config.retries,
        recovery_s=config.recovery_s, room_wait_s=config.room_wait_s or FOREVER_S,
        reserve_timeout_s=config.reserve_timeout_s, admission=limits_of(config).admission,
    )  # fmt: skip


async def play(config: ClusterConfig, script: Script, journal: Path) -> None:
    """Tells the shell what comes from outside; the rest happens by itself."""
    loop = virtual_loop()
    settings, channels = settings_of(config, journal), InProcess(script.noted)
    parts = settings, CHECKPOINT, channels, Recorder("conductor-0", None), PrometheusMetrics(settings.service())
    clients: dict[int, Client] = {}
    at_once = loop.create_future()
    at_once.set_result(None)
    async with assembled(*parts, loop.time) as servicer:
        instances = Instances(servicer, script.noted, channels, script.comings, MODEL)
        timed = [*((noted.now, noted.event) for noted in script.noted), *script.again]
        for now, event in sorted(timed, key=lambda it: it[0]):
            await loop.until(ps(now))
            if isinstance(event, RequestArrived):
                ask = event.spec
                loop.jobs.extend([at_once] * (1 if ask.resumed is None else 2))  # hashing; spelling what there is
                clients[ask.number] = Client(servicer, script.comings[ask.number], now)
            elif isinstance(event, Coming):
                clients[event.ask.number] = Client(servicer, event, now, clients[event.ask.number])
            elif isinstance(event, ClientGone):
                clients[event.request].leave()
            else:
                instances.tell(event)
            await loop.settled()
        await asyncio.wait([it.call for it in clients.values()], timeout=1.0)  # who waits for more: see the journal
        assert not any(it.failed for it in clients.values())
    await instances.leave()


class Client:
    """A client's call; `before` is its call before, whose connection was lost."""

    def __init__(self, servicer: ConductorServicer, coming: Coming, now: float, before: "Client | None" = None) -> None:
        self._context = Heard(coming.ask.deadline - now, None if before is None else before.told)
        message = coming.message(self.told)
        self.call = asyncio.create_task(self._ask(servicer, message))

    @property
    def told(self) -> conductor_pb2.ResumePoint | None:
        """By which it may resume its request."""
        return self._context.point

    @property
    def failed(self) -> bool:
        """Whether it was told something that is not in the journal."""
        return self.call.done() and not self.call.cancelled() and self.call.exception() is not None

    def leave(self) -> None:
        """Its connection is lost, and its conductor knows that."""
        self.call.cancel()

    async def _ask(self, servicer: ConductorServicer, message: conductor_pb2.GenerateRequest) -> None:
        context: Any = self._context
        with suppress(DeadlineExceeded, Overloaded, Unavailable):  # the core's answer is in the journal
            await servicer.Generate(message, context)


def in_its_words(value: Any, key_of: dict[bytes, bytes]) -> Any:
    """An event or an action with the addresses and the keys of blocks that the shell has for the simulator's."""
    match value:
        case bytes():
            return key_of.get(value, value)
        case tuple() if type(value) is tuple:
            return tuple(in_its_words(one, key_of) for one in value)
        case TakeOverSequence() | ResumeState():
            return value  # from the client, who has no address
        case DecodeReservation(decode, address="", transfer_id=number) if number:
            return replace(value, address=f"{decode}:1")
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{it.name: in_its_words(getattr(value, it.name), key_of) for it in fields(value)})
    return value


def without_words(noted: list[Noted]) -> list[Noted]:
    """Without what is said for people of failures: of connections the two have different words."""
    return [
        replace(one, actions=[
            replace(it, failure=replace(it.failure, message="")) if isinstance(it, Rehash | FailRequest) else it
            for it in one.actions
        ])
        for one in noted
    ]  # fmt: skip


def trace_of(count: int) -> list[TraceRequest]:
    """So many requests of one answer each."""
    return requests(count, random.Random(SEED), blocks=10, shared=9)


def several_of(count: int) -> list[TraceRequest]:
    """So many requests of up to three answers.

    Their prompts have a block at least: the first block's key chooses between stores, and the simulator has its own
    keys of blocks with tokens of an answer.
    """
    rng = random.Random(SEED)
    return [replace(one, choices=rng.randint(1, 3), input_length=max(BT, one.input_length)) for one in trace_of(count)]


def decides_alike(
    config: ClusterConfig,
    trace: list[TraceRequest],
    losses: list[tuple[float, str]],
    journal: Path,
    breaks: Sequence[Break] = (),
) -> list[Noted]:
    """What the simulator's conductor heard and decided of a trace's requests; the shell's has decided the same."""
    wanted = asked(trace, chain_root(NAMESPACE, ""), config.block_tokens, END)
    key_of = {key: other for one in wanted for key, other in one.key_of.items()}
    script = simulated(config, wanted, losses, breaks)
    script.noted = expected = [
        Noted(one.now, in_its_words(one.event, key_of), [in_its_words(it, key_of) for it in one.actions])
        for one in script.noted
    ]
    assert len(script.again) > 5 or not breaks
    run_virtually(play(config, script, journal))
    assert_same(decided(without_words(journalled(journal)), IoEnded), decided(without_words(expected), IoEnded))
    return expected


def numbers(
    noted: list[Noted], *kinds: type[TakeOverSequence | AnnouncePlacement | CompleteRequest | StartDecode | Rehash]
) -> list[set[int]]:
    """Of the requests that had actions of each kind."""
    actions = [action for one in noted for action in one.actions]
    return [{it.request for it in actions if isinstance(it, kind)} for kind in kinds]


def test_places_and_refuses_as_the_simulator_does(tmp_path: Path) -> None:
    """More comes than is served in time, and than there is room for. One prompt's rest is computed at decode.

    Prompts that are shorter than a block have no key but their own, which decides between the stores. These hold few
    blocks in memory, and tell which are on SSD only.
    """
    print(f"seed {SEED}")
    stores = replace(CONFIG, kvstore=2, store_bytes=8 * LAYOUT.block_bytes, disk_bytes=1 << 20, disk_bytes_per_s=1e6)
    noted = decides_alike(replace(stores, decode_prompt_tokens=40), trace_of(60), [], tmp_path)
    assert any(isinstance(one.event, KeysChanged) and one.event.cooled for one in noted)
    actions = [action for one in noted for action in one.actions]
    placed = [action for action in actions if isinstance(action, AnnouncePlacement)]
    assert len(placed) > 40
    assert any(it.plan.sources for it in placed)
    short = {one.event.spec.number for one in noted if isinstance(one.event, RequestArrived) and not one.event.keys}
    assert len({it.plan.write_back for it in placed if it.request in short}) > 1
    assert any(it.compute for it in actions if isinstance(it, StartDecode))
    assert {it.failure.reason for it in actions if isinstance(it, FailRequest)} == {"ttft_slo", "no_decode_room"}


def test_tries_again_as_the_simulator_does(tmp_path: Path) -> None:
    """Instances and messages are lost; prompts come to instances that have more to do than was known."""
    print(f"seed {SEED}")
    config = replace(CONFIG, seed=7, delays=CallDelays(drop_share=0.02))
    noted = decides_alike(config, trace_of(40), [(0.6, "d1"), (0.9, "p0"), (1.2, "s0")], tmp_path)
    again = [action.failure.kind for one in noted for action in one.actions if isinstance(action, Rehash)]
    assert len(again) > 10
    assert sum(isinstance(one.event, Rehashed) and one.event.tokens > 1 for one in noted) > 2  # in the midst of answers
    assert set(again) == {FailureKind.STREAM, FailureKind.UNAVAILABLE, FailureKind.TRANSFER}
    assert sum(isinstance(one.event, IoEnded) and isinstance(one.event.result, StalePlacement) for one in noted) > 1


def test_fails_late_requests_as_the_simulator_does(tmp_path: Path) -> None:
    """Nobody is refused, and more comes than is served in time: in queues, at prefill, in answers, and after losses."""
    print(f"seed {SEED}")
    delays = CallDelays(drop_share=0.02)
    config = replace(CONFIG, admission="all", deadline_s=1.0, pool_blocks=24, delays=delays)
    noted = decides_alike(config, trace_of(60), [(0.6, "d1")], tmp_path)
    due = {one.event.spec.number: one.event.spec.deadline for one in noted if isinstance(one.event, RequestArrived)}
    failed = [(one.now, it) for one in noted for it in one.actions if isinstance(it, FailRequest)]
    assert {it.failure.kind for _, it in failed} == {FailureKind.DEADLINE}
    assert [now for now, _ in failed] == [pytest.approx(due[it.request]) for _, it in failed]
    late, placed, begun, again = (
        {it.request for _, it in failed},
        *numbers(noted, AnnouncePlacement, StartDecode, Rehash),
    )
    assert min(map(len, (late - placed, (late & placed) - begun, late & begun, late & again))) > 1


def test_several_answers_as_in_the_simulator(tmp_path: Path) -> None:
    """They get room and end together, and go on after losses. A start also comes to decode when its room is gone."""
    print(f"seed {SEED}")
    config = replace(CONFIG, pool_blocks=200, delays=CallDelays(drop_share=0.02))
    noted = decides_alike(config, several_of(60), [(0.6, "d1"), (0.9, "p0")], tmp_path)
    several = {
        one.event.spec.number for one in noted if isinstance(one.event, RequestArrived) and one.event.spec.choices > 1
    }
    ends, again = numbers(noted, CompleteRequest, Rehash)
    assert len(several & ends) > 15
    assert len(several & again & ends) > 5
    failures = [one.event.result for one in noted if isinstance(one.event, IoEnded)]
    assert {it.kind for it in failures if isinstance(it, Failure) and "no such transfer" in it.message} == {
        FailureKind.TRANSFER
    }


@pytest.mark.parametrize(
    ("losses", "before"), [([(1.0, "c0"), (1.9, "d2")], False), ([(0.6, "d1"), (2.9, "c0")], True)]
)
def test_resumes_as_the_simulator_does(losses: list[tuple[float, str]], before: bool, tmp_path: Path) -> None:
    """Clients come from a conductor that is lost. So is what has some of their answers, also before they come."""
    print(f"seed {SEED}")
    config = replace(CONFIG, conductors=2, admission="all", pool_blocks=80, deadline_s=30.0)
    noted = decides_alike(config, several_of(60), losses, tmp_path)
    asks = [one.event.spec for one in noted if isinstance(one.event, RequestArrived)]
    resumed = {it.number for it in asks if it.resumed is not None}
    several = {it.number for it in asks if it.choices > 1}
    placed, adopted, again, ends = numbers(noted, AnnouncePlacement, TakeOverSequence, Rehash, CompleteRequest)
    assert resumed <= ends
    assert len((several & adopted) - placed) > 3
    assert len(resumed - adopted if before else several & adopted & again & placed) > 1


def test_clients_that_lose_their_connections_alone_come_again_as_in_the_simulator(tmp_path: Path) -> None:
    """Where the conductor has not seen it, nothing changes; else the request ends, and what decode has said is read.

    Some lose theirs twice, and some also the instance that has their answers.
    """
    print(f"seed {SEED}")
    config = replace(CONFIG, admission="all", pool_blocks=200, deadline_s=30.0)
    breaks = [Break(0.4 + 0.05 * number, f"r{number}", seen=number % 2 == 0) for number in range(1, 55)]
    breaks += [Break(it.at_s + 1.5, it.id, seen=True) for it in breaks[::3]]
    noted = decides_alike(config, several_of(60), [(1.1, "d1")], tmp_path, breaks)
    left = {one.event.request for one in noted if isinstance(one.event, ClientGone)}
    resumed = {
        one.event.spec.number for one in noted if isinstance(one.event, RequestArrived) and one.event.spec.resumed
    }
    adopted, again, ends = numbers(noted, TakeOverSequence, Rehash, CompleteRequest)
    assert min(map(len, (left - ends, resumed & adopted & ends, resumed & adopted & again))) > 10
