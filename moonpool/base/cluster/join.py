"""An instance's side of Join: reports the instance, load and KV to every conductor, for the instance's life.

An agent connects, sends a snapshot of the instance's keys, then changes and load. If the conductor asks, the agent
sends another snapshot. If the stream breaks or the conductor restarts, the agent connects again. The instance is the
authority on the instance's own state, so conductors need not agree.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from moonpool.base import world
from moonpool.base.cluster.kv_events import KEYS_PER_MESSAGE, HeldKeys, KVEventLog, snapshot_messages
from moonpool.base.cluster.tenant_activity import TenantActivityBoard
from moonpool.base.errors import DeadlineExceeded, InvalidRequest, Mismatch, MoonpoolError, StreamBroken
from moonpool.base.kv.blocks import KeyChanges
from moonpool.base.rpc.channels import Channels
from moonpool.base.telemetry.logs import get_logger
from moonpool.base.transport.async_utils import wait_within
from moonpool.base.transport.client_stream import ClientStream
from moonpool.base.version import commit, installed_version
from moonpool.v1 import conductor_pb2, kv_pb2
from moonpool.v1.conductor_pb2_grpc import ConductorServiceStub

log = get_logger(__name__)
FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 2.0
REPORTS = 4
"""Load reports per heartbeat without changes."""
MIN_LOAD_INTERVAL_S = 0.05
"""Least distance between load reports, seconds."""


class Notify(Protocol):
    """Says that load or keys have changed; `soon`: conductors need the change before their next placement."""

    def __call__(self, *, soon: bool = False) -> None: ...


class AgentWake:
    """What an agent waits for between two messages."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.soon = asyncio.Event()

    def ring(self, *, soon: bool = False) -> None:
        """Something has changed; `soon`: do not wait for more changes."""
        self.changed.set()
        if soon:
            self.soon.set()

    def clear(self) -> None:
        """What has changed is being told."""
        self.changed.clear()
        self.soon.clear()


RoleTaker = Callable[[kv_pb2.InstanceKind.ValueType], None]


def keep_role(kind: kv_pb2.InstanceKind.ValueType) -> None:
    """For instances that keep the role that they have."""
    log.warning("order to change the role ignored: this instance has no other", kind=kv_pb2.InstanceKind.Name(kind))


class _JoinCall(ClientStream[conductor_pb2.JoinRequest, conductor_pb2.JoinResponse]):
    """One call: orders go to the agent."""

    def __init__(
        self,
        channels: Channels,
        address: str,
        hello: conductor_pb2.JoinHello,
        timeout_s: float,
        obey: Callable[[conductor_pb2.JoinResponse], None],
        notify: Callable[[], None],
    ) -> None:
        request = conductor_pb2.JoinRequest(hello=hello)
        request.hello.version, request.hello.commit = hello.version or installed_version(), hello.commit or commit()
        super().__init__(
            f"conductor {address}",
            lambda: ConductorServiceStub(channels.get(address)).Join(),
            request,
            connect_timeout_s=timeout_s,
            stall_s=timeout_s,
        )
        self.welcome: conductor_pb2.JoinWelcome | None = None
        self._obey = obey
        self._notify = notify

    def on_message(self, message: conductor_pb2.JoinResponse, payload: memoryview) -> None:
        """The welcome, then orders."""
        if self.welcome is not None:
            self._obey(message)
        elif message.HasField("welcome"):
            self.welcome = message.welcome
            self.ready()
        else:
            raise StreamBroken("the conductor's first message is no welcome")

    def on_broken(self, error: Exception) -> None:
        """The agent looks at once."""
        self._notify()

    def failure(self, error: MoonpoolError) -> Exception:
        """The conductor's own words: some refusals are final."""
        return error


@dataclass(frozen=True, slots=True)
class InstanceReport:
    """An instance's reports to conductors, and how the instance carries out orders.

    All callbacks are called on the event loop and must not block.

    Attributes:
        hello: the joining instance. The instance must already be served at its address: the conductor probes the
            address.
        load: gives the load now.
        held: gives every key, for snapshots.
        take_events: takes the net changes of keys since the last call.
        on_drain: called when the conductor orders to drain (may be called more than once).
        on_replicate: called when the conductor wants blocks to be copied here.
        on_role: called when the conductor orders to change the role.
        on_session: called when the conductor tells what is known about a session.
    """

    hello: conductor_pb2.JoinHello
    load: Callable[[], conductor_pb2.LoadReport]
    held: HeldKeys
    take_events: Callable[[], KeyChanges] = KeyChanges
    on_drain: Callable[[], None] = lambda: None
    on_replicate: Callable[[conductor_pb2.ReplicateOrder], None] = lambda _: None
    on_role: RoleTaker = keep_role
    on_session: Callable[[conductor_pb2.SessionOrder], None] = lambda _: None


class KeyChangeFeed:
    """One instance's stream of key changes, with a log for each subscriber.

    A log has the net effect per key since the subscriber took the last message. While a subscriber does not follow, the
    subscriber's log stays empty: the subscriber begins with a snapshot.
    """

    def __init__(self, take: Callable[[], KeyChanges]) -> None:
        """Read from `take`, which tells each change once."""
        self._take = take
        self._subscribers: list[tuple[Callable[[], bool], KVEventLog]] = []

    def subscribe(self, follows: Callable[[], bool]) -> KVEventLog:
        """A log of all changes that come while `follows()` is true."""
        events = KVEventLog()
        self._subscribers.append((follows, events))
        return events

    def pull(self) -> None:
        """Take what has changed since the last call."""
        self.changed(self._take())

    def changed(self, news: KeyChanges) -> None:
        """Note changes in the logs of all subscribers that follow."""
        lists = [list(keys) for keys in news]
        for follows, events in self._subscribers:
            if follows():
                events.note(*lists)
            else:
                events.forget()


class InstanceBoard:
    """What the agents of one instance share: changes of keys, and what conductors tell each other.

    Attributes:
        keys: changes of keys.
        activity: what conductors have told of their tenants.
        conductors: to which the instance reports.
    """

    def __init__(self, keys: KeyChangeFeed, conductors: int) -> None:
        self.keys = keys
        self.activity = TenantActivityBoard(world.monotonic)
        self.conductors = conductors


class JoinAgent:
    """Keeps one instance joined to one conductor."""

    def __init__(
        self,
        channels: Channels,
        conductor_address: str,
        report: InstanceReport,
        *,
        wake: AgentWake | None = None,
        board: InstanceBoard | None = None,
        flush_s: float = 0.02,
        call_timeout_s: float = 10.0,
        keys_per_message: int = KEYS_PER_MESSAGE,
    ) -> None:
        """Has no effect before `run`.

        Args:
            channels: gives the channel to the conductor.
            conductor_address: "host:port".
            report: what the instance reports.
            wake: rung when load or keys have changed, if other code than the agent's caller notices the change.
            board: what several agents share; None = the agent is the only one.
            flush_s: seconds between event messages.
            call_timeout_s: how long connecting, the welcome and each write may take, seconds.
            keys_per_message: keys in one message at most.
        """
        self._channels = channels
        self._address = conductor_address
        self._report = report
        self._flush_s = flush_s
        self._call_timeout_s = call_timeout_s
        self._keys_per_message = keys_per_message
        self._board = board or InstanceBoard(KeyChangeFeed(report.take_events), 1)
        self._feed = self._board.keys
        self._events = self._feed.subscribe(lambda: self.follows)
        self._conductor = kv_pb2.Instance()
        self._activity_told = 0  # as `TenantActivityBoard.news` numbers
        self._wake = wake or AgentWake()
        self._resync = False
        self._heartbeat_s = 1.0
        self.joined = asyncio.Event()
        self._was_joined = False
        """Set while the conductor has this instance."""
        self.follows = False
        """Whether a snapshot was started on this stream: from then on no change may be lost."""

    def notify(self, *, soon: bool = False) -> None:
        """Say that load or keys have changed; cheap, coalesced, callable at any time on the event loop."""
        self._wake.ring(soon=soon)

    async def run(self, stopping: asyncio.Event) -> None:
        """Stay joined until `stopping` is set.

        Raises:
            Mismatch: the conductor serves something else; trying again cannot help. Exit with code 3.
            InvalidRequest: the conductor finds the hello wrong.
        """
        stop = asyncio.ensure_future(stopping.wait())
        backoff = FIRST_BACKOFF_S
        try:
            while not stop.done():
                try:
                    await self._stay(stop)
                except (Mismatch, InvalidRequest) as error:
                    log.error("the conductor refuses this instance", conductor=self._address, error=str(error))
                    raise
                except MoonpoolError as error:
                    known = self._was_joined or self.joined.is_set()  # certificates fitted
                    cause = "" if known else await self._channels.trouble(self._address)
                    log.warning("not joined", conductor=self._address, error=cause or str(error), retry_s=backoff)
                if self.joined.is_set():
                    self.joined.clear()
                    self._was_joined = True
                    backoff = FIRST_BACKOFF_S
                await asyncio.wait({stop}, timeout=backoff)
                backoff = min(backoff * 2, LAST_BACKOFF_S)
        finally:
            self.joined.clear()
            stop.cancel()

    async def _stay(self, stop: asyncio.Task[Literal[True]]) -> None:
        """One stream, from hello to end."""
        call = _JoinCall(
            self._channels, self._address, self._report.hello, self._call_timeout_s, self._obey, self.notify
        )
        life = asyncio.ensure_future(self._report_changes(call))
        try:
            await asyncio.wait({life, stop}, return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                life.result()
        finally:
            self.follows = False
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)
            await call.aclose()

    async def _report_changes(self, call: _JoinCall) -> None:
        """Connect, then report all changes; raise what breaks the stream."""
        await call.start()
        assert call.welcome is not None, "a stream that started has its welcome"
        self._heartbeat_s = call.welcome.heartbeat_s or 1.0
        self._conductor, self._activity_told = call.welcome.conductor, 0
        self._resync = True  # a conductor forgets what an instance holds when the stream ends
        log.info("joined", conductor=call.welcome.conductor.id, address=self._address)
        try:
            await self._write(call)
        except StreamBroken:
            await call.broken()  # raises why the stream ended; that a write failed then is no news

    def _obey(self, answer: conductor_pb2.JoinResponse) -> None:
        match answer.WhichOneof("message"):
            case "resync":
                self._resync = True
                self.notify()
            case "drain":
                self._report.on_drain()
                self.notify()
            case "replicate":
                self._report.on_replicate(answer.replicate)
            case "role":
                self._report.on_role(answer.role.kind)
            case "session":
                self._report.on_session(answer.session)
            case "activity":
                self._board.activity.take(self._conductor, answer.activity)
            case other:
                log.warning("unknown order from the conductor ignored", order=other)

    async def _write(self, call: _JoinCall) -> None:
        """Send changes soon, loads regularly."""
        loop = asyncio.get_running_loop()
        load_allowed_at = float("-inf")
        while call.error is None:
            self._wake.clear()
            if self._resync:
                self._resync = False
                await self._send_snapshot(call)
            await self._send_changes(call)
            if loop.time() >= load_allowed_at or not self.joined.is_set():
                await self._send(call, conductor_pb2.JoinRequest(load=self._load()))
                now = loop.time()
                load_allowed_at, due = now + MIN_LOAD_INTERVAL_S, now + self._heartbeat_s / REPORTS
            else:
                due = load_allowed_at
            self.joined.set()
            await self._pause(due - loop.time())
        raise call.error

    def _load(self) -> conductor_pb2.LoadReport:
        load = self._report.load()
        load.conductors = self._board.conductors
        activities, self._activity_told = self._board.activity.news(self._conductor, self._activity_told)
        del load.activities[:]
        load.activities.extend(activities)
        return load

    async def _pause(self, until_load_s: float) -> None:
        """Wait until something changed (but at least the flush distance) or a load report is due."""
        try:
            async with asyncio.timeout(max(until_load_s, 0.0)):
                await self._wake.changed.wait()
        except TimeoutError:
            return
        await wait_within(self._flush_s, self._wake.soon)  # a distance between messages, unless changes are wanted soon

    async def _send_snapshot(self, call: _JoinCall) -> None:
        """Send a snapshot, and between the snapshot's steps the changes meanwhile."""
        self.follows = True
        self._feed.pull()
        self._events.forget()
        for step in snapshot_messages(self._report.held, self._keys_per_message):
            for message in self._events.numbered(step):
                await self._send(call, conductor_pb2.JoinRequest(events=message))
            await self._send_changes(call)

    async def _send_changes(self, call: _JoinCall) -> None:
        self._feed.pull()
        while (message := self._events.next_message(self._keys_per_message)) is not None:
            await self._send(call, conductor_pb2.JoinRequest(events=message))

    async def _send(self, call: _JoinCall, message: conductor_pb2.JoinRequest) -> None:
        """Send a message and wait until the message is being written, so that a snapshot does not pile up."""
        call.send_queue.post(message)
        try:
            async with asyncio.timeout(self._call_timeout_s):
                await call.send_queue.at_most(0)
        except TimeoutError:
            raise DeadlineExceeded(f"the conductor did not read for {self._call_timeout_s} s") from None


class ChangeBell:
    """Wakes all waiters for a change."""

    def __init__(self) -> None:
        self._wakes: list[AgentWake] = []

    def add(self) -> AgentWake:
        """A wake-up for one agent."""
        wake = AgentWake()
        self._wakes.append(wake)
        return wake

    def ring(self, *, soon: bool = False) -> None:
        """Something has changed; cheap, callable at any time on the event loop. See `Notify`."""
        for wake in self._wakes:
            wake.ring(soon=soon)


class ClusterMembership:
    """Keeps one instance joined to all listed conductors."""

    def __init__(
        self, channels: Channels, conductors: Sequence[str], report: InstanceReport, *, bell: ChangeBell | None = None
    ) -> None:
        """Has no effect before `run`. `bell` rings when load or keys have changed.

        If `report` takes no events, call `changed` for each change of keys.
        """
        self._bell = bell or ChangeBell()
        self._changes = KeyChangeFeed(report.take_events)
        self._agents: list[JoinAgent] = []
        board = InstanceBoard(self._changes, len(conductors))
        for address in conductors:
            agent = JoinAgent(channels, address, report, wake=self._bell.add(), board=board)
            self._agents.append(agent)

    def changed(self, news: KeyChanges) -> None:
        """Keys have changed; cheap, callable at any time on the event loop."""
        self._changes.changed(news)
        self._bell.ring()

    def notify(self, *, soon: bool = False) -> None:
        """Say that load or keys have changed; see `JoinAgent.notify`."""
        self._bell.ring(soon=soon)

    async def run(self, stopping: asyncio.Event) -> None:
        """Stay joined until `stopping` is set.

        Raises:
            Mismatch: a conductor serves something else; trying again cannot help.
            InvalidRequest: a conductor finds the hello wrong.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for agent in self._agents:
                    group.create_task(agent.run(stopping))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
