"""An instance joined to several conductors: each hears of every key, whenever it comes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from moonpool.base.cluster import ClusterMembership, HeldKeys, InstanceReport
from moonpool.base.cluster.join import KeyChangeFeed
from moonpool.base.cluster.kv_events import KVEventLog
from moonpool.base.errors import Mismatch
from moonpool.base.kv.blocks import KeyChanges
from moonpool.base.rpc.channels import Channels
from moonpool.base.rpc.server import serving
from moonpool.v1 import conductor_pb2, kv_pb2
from tests.unit.fakes.conductor import FakeConductor

WAIT_S = 60.0
KEYS = [bytes([number]) * 32 for number in range(8)]
SERVICE = conductor_pb2.DESCRIPTOR.services_by_name["ConductorService"]


class Instance:
    """Keys that a test changes."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.changes: dict[bytes, bool] = {}

    def change(self, *keys: bytes, here: bool = True) -> None:
        self.keys = self.keys | set(keys) if here else self.keys - set(keys)
        self.changes |= dict.fromkeys(keys, here)

    def take(self) -> KeyChanges:
        changes, self.changes = self.changes, {}
        stored, removed = ([key for key, here in changes.items() if here is wanted] for wanted in (True, False))
        return KeyChanges(stored, removed)


@asynccontextmanager
async def joined(instance: Instance, *addresses: str) -> AsyncIterator[ClusterMembership]:
    hello = conductor_pb2.JoinHello(instance=kv_pb2.Instance(id="it", epoch=1))
    held = HeldKeys(1, lambda _: sorted(instance.keys))
    async with Channels() as channels:
        joining = ClusterMembership(
            channels, addresses, InstanceReport(hello, conductor_pb2.LoadReport, held, instance.take)
        )
        stopping = asyncio.Event()
        running = asyncio.ensure_future(joining.run(stopping))
        try:
            yield joining
        finally:
            stopping.set()
            await running


async def until_known(joining: ClusterMembership, conductor: FakeConductor, keys: set[bytes]) -> None:
    async with asyncio.timeout(WAIT_S):
        while conductor.keys != keys:
            conductor.has_load.clear()
            joining.notify()
            await conductor.has_load.wait()


async def test_each_conductor_hears_of_every_key_also_one_that_comes_later() -> None:
    instance, first, second = Instance(), FakeConductor(), FakeConductor()
    instance.change(KEYS[0])
    async with serving("127.0.0.1:0", [(SERVICE, first)], grace_s=0.0) as server:
        async with serving("127.0.0.1:0", [(SERVICE, FakeConductor())], grace_s=0.0) as place:
            later = place.address
        async with joined(instance, server.address, later) as joining:
            await until_known(joining, first, {KEYS[0]})
            instance.change(KEYS[1], KEYS[2])
            instance.change(KEYS[0], here=False)
            await until_known(joining, first, {KEYS[1], KEYS[2]})
            async with serving(later, [(SERVICE, second)], grace_s=0.0):
                async with asyncio.timeout(WAIT_S):
                    await second.has_snapshot.wait()
                instance.change(KEYS[3])
                for conductor in (first, second):
                    await until_known(joining, conductor, {KEYS[1], KEYS[2], KEYS[3]})


async def test_a_conductor_that_serves_something_else_is_an_error_though_another_does_not() -> None:
    other = FakeConductor(refusal=Mismatch("model.name", "another one"))
    async with (
        serving("127.0.0.1:0", [(SERVICE, FakeConductor())], grace_s=0.0) as good,
        serving("127.0.0.1:0", [(SERVICE, other)], grace_s=0.0) as bad,
    ):
        hello = conductor_pb2.JoinHello(instance=kv_pb2.Instance(id="it", epoch=1))
        async with Channels() as channels, asyncio.timeout(WAIT_S):
            held = HeldKeys(1, lambda _: [])
            addresses = good.address, bad.address
            joining = ClusterMembership(
                channels, addresses, InstanceReport(hello, conductor_pb2.LoadReport, held, Instance().take)
            )
            with pytest.raises(Mismatch, match="another one"):
                await joining.run(asyncio.Event())


def test_who_does_not_follow_keeps_nothing_and_who_does_gets_the_net_effect() -> None:
    instance = Instance()
    news, following = KeyChangeFeed(instance.take), {"late": False}
    early, late = news.subscribe(lambda: True), news.subscribe(lambda: following["late"])

    def told(events: KVEventLog) -> tuple[bytes, bytes, bytes] | None:
        """The next message: keys stored, removed and cooled."""
        news.pull()
        message = events.next_message()
        return None if message is None else (message.stored_keys, message.removed_keys, message.cooled_keys)

    instance.change(KEYS[0])
    assert told(early) == (KEYS[0], b"", b"")
    following["late"] = True
    instance.change(KEYS[1])
    assert told(early) == (KEYS[1], b"", b"")
    instance.change(KEYS[1], here=False)
    instance.change(KEYS[2])
    assert told(early) == (KEYS[2], KEYS[1], b"")
    assert told(late) == (KEYS[2], KEYS[1], b""), "once, as it ended"
    assert told(late) is None
    following["late"] = False
    news.changed(KeyChanges([KEYS[0]], [KEYS[2]], [KEYS[1]]))
    following["late"] = True
    news.changed(KeyChanges([KEYS[2]], [], [KEYS[0]]))
    assert told(early) == (KEYS[2] + KEYS[0], b"", KEYS[1] + KEYS[0])
    assert told(late) == (KEYS[2], b"", KEYS[0])
