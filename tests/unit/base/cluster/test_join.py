"""An instance tells a conductor of its keys while they change."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from moonpool.base.cluster import HeldKeys, InstanceReport, JoinAgent
from moonpool.base.kv.blocks import KeyChanges, NetChanges
from moonpool.base.rpc.channels import Channels
from moonpool.base.transport.async_utils import wait_within
from moonpool.conductor.core.prefix_index import KeyEventResult, PrefixIndex
from moonpool.v1 import conductor_pb2, kv_pb2

PARTS = 8
KEYS = [bytes([number]) * 32 for number in range(64)]


class Listener:
    """A conductor that does nothing but listen to one instance, and asks once for everything again."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.hellos = 0
        self.messages = 0
        self.snapshots = 0
        self.heard = asyncio.Event()

    def handler(self) -> grpc.GenericRpcHandler:
        method = grpc.stream_stream_rpc_method_handler(
            self.join, conductor_pb2.JoinRequest.FromString, conductor_pb2.JoinResponse.SerializeToString
        )
        return grpc.method_handlers_generic_handler("moonpool.v1.ConductorService", {"Join": method})

    async def join(
        self, requests: AsyncIterator[conductor_pb2.JoinRequest], context: object
    ) -> AsyncIterator[conductor_pb2.JoinResponse]:
        async for request in requests:
            if request.HasField("hello"):
                self.hellos += 1
                self.index.add_instance("it", reports_ssd=True)
                yield conductor_pb2.JoinResponse(welcome=conductor_pb2.JoinWelcome(heartbeat_s=10))
            if request.HasField("events"):
                events = request.events
                self.messages += 1
                self.snapshots += events.snapshot_end
                stored, removed = split(events.stored_keys), split(events.removed_keys)
                applied = self.index.apply(
                    "it",
                    events.sequence,
                    stored,
                    removed,
                    split(events.cooled_keys),
                    snapshot_begin=events.snapshot_begin,
                    snapshot_end=events.snapshot_end,
                )
                assert applied is KeyEventResult.DONE
                self.heard.set()
                if events.snapshot_end and self.snapshots == 1:
                    yield conductor_pb2.JoinResponse(resync=conductor_pb2.ResyncOrder())

    def knows(self) -> tuple[set[bytes], set[bytes]]:
        """What the instance holds, and what of it is cold."""
        keys = {key for key in KEYS if self.index.holds("it", key)}
        return keys, {key for key in keys if self.index.match([key]) and not self._warm(key)}

    def _warm(self, key: bytes) -> bool:
        return any(mask >> self.index.memory("it") & 1 for _, mask in self.index.match([key]))


def split(keys: bytes) -> list[bytes]:
    return [keys[at : at + 32] for at in range(0, len(keys), 32)]


class Instance:
    """Keys that come and go with every look at them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.keys = set(self.random.sample(KEYS, 32))
        self.cold: set[bytes] = set()
        self.told = NetChanges()
        self.looks: list[bool] = []
        self.agent: JoinAgent | None = None

    def change(self) -> None:
        for key in self.random.sample(KEYS, 6):
            if key in self.keys - self.cold and self.random.random() < 0.5:
                self.cold |= {key}
                self.told.note(cooled=[key])
                continue
            self.keys ^= {key}
            self.cold -= {key}
            self.told.note(*([key], []) if key in self.keys else ([], [key]))

    def part(self, number: int) -> list[bytes]:
        assert self.agent is not None
        self.looks.append(self.agent.follows)
        self.change()
        return sorted(key for key in self.keys if key[0] % PARTS == number)

    def take(self) -> KeyChanges:
        return self.told.take()

    def cold_of(self, keys: Iterable[bytes]) -> list[bytes]:
        return [key for key in keys if key in self.cold]


@asynccontextmanager
async def joined(listener: Listener, instance: Instance, flush_s: float) -> AsyncIterator[JoinAgent]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((listener.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with Channels() as channels:
        hello = conductor_pb2.JoinHello(instance=kv_pb2.Instance(id="it", epoch=1))
        agent = instance.agent = JoinAgent(
            channels,
            f"127.0.0.1:{port}",
            InstanceReport(
                hello, conductor_pb2.LoadReport, HeldKeys(PARTS, instance.part, instance.cold_of), instance.take
            ),
            flush_s=flush_s,
            keys_per_message=3,
        )
        assert not agent.follows
        stopping = asyncio.Event()
        running = asyncio.ensure_future(agent.run(stopping))
        try:
            async with asyncio.timeout(60):
                yield agent
        finally:
            stopping.set()
            await running
            await server.stop(None)


@pytest.mark.parametrize("seed", range(4))
async def test_a_snapshot_in_steps_between_changes(seed: int) -> None:
    listener, instance = Listener(), Instance(seed)
    async with joined(listener, instance, flush_s=0.0) as agent:
        while listener.snapshots < 2 or listener.knows() != (instance.keys, instance.cold):
            listener.heard.clear()
            agent.notify()
            await listener.heard.wait()
    assert instance.looks == [True] * 2 * PARTS
    assert (listener.hellos, listener.snapshots) == (1, 2)
    assert listener.messages > 2 * PARTS
    assert not agent.follows
    listener.index.check_invariants()


async def test_what_is_wanted_soon_does_not_wait_for_more_changes() -> None:
    listener, instance = Listener(), Instance(0)
    async with joined(listener, instance, flush_s=3600.0) as agent:
        while listener.snapshots < 2:
            listener.heard.clear()
            agent.notify(soon=True)
            await wait_within(0.1, listener.heard)  # the order for the second snapshot may come after the notification
        instance.change()
        agent.notify()
        agent.notify(soon=True)
        while listener.knows() != (instance.keys, instance.cold):
            listener.heard.clear()
            await listener.heard.wait()
