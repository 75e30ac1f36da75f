"""The conductor's state: registry, picture, decisions and the streams to decode instances.

Wakes requests that wait for a change, and fails those whose instance is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from moonpool.errors import StreamBroken
from moonpool.kv.keys import unpack_keys
from moonpool.rpc.channels import Channels
from moonpool.telemetry.logs import get_logger
from moonpool.v1 import conductor_pb2, kv_pb2
from services.conductor.config import ConductorConfig
from services.conductor.core.picture import Picture
from services.conductor.explain import Decisions
from services.conductor.facts import instance_facts, load_facts
from services.conductor.inbox import Inbox
from services.conductor.registry import Member, Registry, ServedModel
from services.conductor.steps import StepsPool

log = get_logger(__name__)

MAX_EVENT_KEYS = 1 << 13
"""Keys stored, or removed, in one message: one message is applied without a pause of the event loop."""


class Cluster:
    """Everything the conductor knows of its instances."""

    def __init__(self, config: ConductorConfig, served: ServedModel, channels: Channels) -> None:
        self.channels = channels
        self.registry = Registry(served)
        self.picture = Picture(config.max_index_keys, config.balancing_threshold, config.kvstore_replicas)
        self.decisions = Decisions(config.explain_history)
        self.steps = StepsPool(channels)
        self.room_queue = asyncio.Lock()
        """Held by the request that looks for room at decode; the others wait in order of arrival."""
        self._changed = asyncio.Event()
        self._watched: dict[tuple[str, int], set[Inbox]] = {}

    @property
    def watched(self) -> int:
        """Instances that some request watches for loss."""
        return len(self._watched)

    def join(self, hello: conductor_pb2.JoinHello, now: float) -> Member:
        """Take an instance in (see `Registry.join`)."""
        earlier = self.registry.get(hello.instance.id)
        member = self.registry.join(hello)
        if earlier is not None and earlier.instance.incarnation != member.instance.incarnation:
            self._fail_requests(earlier, "was restarted")
            self.steps.lost(earlier.instance)
        self.picture.join(instance_facts(hello), now)
        self._note_change()
        return member

    def leave(self, member: Member, *, lost: bool) -> None:
        """Remove a member; with `lost` its requests fail now instead of with their streams."""
        if self.registry.leave(member):
            self.picture.leave(member.id)
        if lost:
            self._fail_requests(member, "is lost")
            self.steps.lost(member.instance)
        else:
            self.steps.left(member.instance)
        self._note_change()

    def is_member(self, member: Member) -> bool:
        """Whether the member has neither left nor been replaced."""
        return self.registry.get(member.id) is member

    def report(self, member: Member, load: conductor_pb2.LoadReport, now: float) -> None:
        member.load = load
        self.picture.report(member.id, load_facts(load), now)
        self._note_change()

    def events(self, member: Member, events: kv_pb2.KVEvents) -> bool:
        """Take KV events; True when a resync is wanted."""
        self._note_change()
        return self.picture.events(
            member.id,
            events.sequence,
            unpack_keys(events.stored_keys, "events.stored_keys", max_keys=MAX_EVENT_KEYS),
            unpack_keys(events.removed_keys, "events.removed_keys", max_keys=MAX_EVENT_KEYS),
            snapshot_begin=events.snapshot_begin,
            snapshot_end=events.snapshot_end,
        )

    @contextmanager
    def watching(self, instance: kv_pb2.Instance, inbox: Inbox) -> Iterator[None]:
        """While the body runs, the loss of `instance` fails `inbox`."""
        key = instance.id, instance.incarnation
        self._watched.setdefault(key, set()).add(inbox)
        try:
            yield
        finally:
            watchers = self._watched[key]
            watchers.discard(inbox)
            if not watchers:
                del self._watched[key]

    def released(self) -> None:
        """Wake requests that wait for room: some may be free."""
        self._note_change()

    def next_change(self) -> asyncio.Event:
        """Return an event that is set when members, loads or room change."""
        return self._changed

    def _note_change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _fail_requests(self, member: Member, why: str) -> None:
        for inbox in self._watched.get((member.id, member.instance.incarnation), ()):
            inbox.fail(StreamBroken(f"{member.id} {why}"))


class BackgroundTasks:
    """Tasks that outlive their request, each for a bounded time; closed together."""

    def __init__(self, limit_s: float = 5.0) -> None:
        self._limit_s = limit_s
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def adopt(self, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Run `work` to its end or limit; a failure is logged."""
        task = asyncio.create_task(self._run(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Cancel all tasks."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                await work()
        except TimeoutError:
            log.debug("background task cancelled", limit_s=self._limit_s)
        except Exception as error:
            log.debug("background task failed", error=str(error))
