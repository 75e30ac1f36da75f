"""Those who watch the cluster's KV: what the instances hold, and what blocks stand for."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Sequence

from moonpool.base.cluster.proto_conversion import media_to_proto
from moonpool.base.errors import Overloaded
from moonpool.base.kv.keys import pack_keys, tokens_to_bytes
from moonpool.base.kv.media import MediaItem
from moonpool.conductor.core.prefix_index import PrefixIndex
from moonpool.v1 import conductor_pb2, kv_pb2

SNAPSHOT_PLACES = 1 << 13
"""Places of the index that are read in one turn of the event loop: some 5 ms."""
MAX_WAITING = 1 << 14
"""Messages that may wait for a watcher."""

Member = tuple[kv_pb2.Instance, conductor_pb2.ModelInfo | None]


class _Watcher:
    """Messages for one watcher; `lost`: the watcher has read too slowly."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[conductor_pb2.WatchKVResponse | None] = asyncio.Queue()
        self.lost = False

    def put(self, message: conductor_pb2.WatchKVResponse) -> None:
        self.lost = self.lost or self.messages.qsize() >= MAX_WAITING
        if not self.lost:
            self.messages.put_nowait(message)

    async def next(self) -> conductor_pb2.WatchKVResponse | None:
        """Return the next message, None at the end; raises Overloaded once messages were dropped."""
        if self.lost:
            raise Overloaded("the watcher reads too slowly", reason="watcher_slow", retry_after_s=0.0)
        return await self.messages.get()


class KVWatchers:
    """All watchers. What is told to none costs nothing."""

    def __init__(self) -> None:
        self._watchers: dict[_Watcher, None] = {}
        self._dropped: set[str] = set()  # instances whose next message must begin a snapshot

    def __len__(self) -> int:
        return len(self._watchers)

    def joined(self, instance: kv_pb2.Instance, model: conductor_pb2.ModelInfo | None) -> None:
        """An instance has joined, without blocks."""
        self._dropped.discard(instance.id)
        self._tell(_joined(instance, model))

    def left(self, instance_id: str) -> None:
        self._dropped.discard(instance_id)
        self._tell(conductor_pb2.WatchKVResponse(left=instance_id))

    def dropped(self, instance_id: str) -> None:
        """The index has dropped an instance's blocks until the next snapshot."""
        self._dropped.add(instance_id)
        self._tell(_changed(instance_id, kv_pb2.KVEvents(snapshot_begin=True)))

    def changed(self, instance_id: str, events: kv_pb2.KVEvents) -> None:
        """An instance's message, which the index has taken."""
        if events.snapshot_begin:
            self._dropped.discard(instance_id)
        if instance_id not in self._dropped:
            self._tell(_changed(instance_id, events))

    def named(
        self,
        tenant: str,
        cache_salt: str,
        tokens: array[int],
        lora: kv_pb2.LoraAdapter | None,
        media: Sequence[MediaItem] = (),
    ) -> None:
        """What a chain's blocks stand for; `lora` computes them, or the base model. `media`: pictures in it."""
        chain = conductor_pb2.TokenChain(
            tenant=tenant,
            cache_salt=cache_salt,
            token_ids=tokens_to_bytes(tokens),
            lora=lora,
            media=media_to_proto(media, content=False),
        )
        self._tell(conductor_pb2.WatchKVResponse(chain=chain))

    def stop(self) -> None:
        """End all streams: the conductor is leaving."""
        for watcher in self._watchers:
            watcher.messages.put_nowait(None)

    async def watch(
        self, members: Sequence[Member], index: PrefixIndex
    ) -> AsyncGenerator[conductor_pb2.WatchKVResponse, None]:
        """All that is held, then each change, until closed or stopped.

        Raises:
            Overloaded: the watcher reads too slowly.
        """
        watcher = _Watcher()
        self._watchers[watcher] = None
        try:
            for instance, model in members:
                watcher.put(_joined(instance, model))
            for part in index.parts(SNAPSHOT_PLACES):
                for instance_id, (held, cold) in part.items():
                    events = kv_pb2.KVEvents(stored_keys=pack_keys(held), cooled_keys=pack_keys(cold))
                    watcher.put(_changed(instance_id, events))
                while not watcher.messages.empty():
                    message = await watcher.next()
                    if message is None:
                        return
                    yield message
            watcher.put(conductor_pb2.WatchKVResponse(synced=True))
            while (message := await watcher.next()) is not None:
                yield message
        finally:
            del self._watchers[watcher]

    def _tell(self, message: conductor_pb2.WatchKVResponse) -> None:
        for watcher in self._watchers:
            watcher.put(message)


def _joined(instance: kv_pb2.Instance, model: conductor_pb2.ModelInfo | None) -> conductor_pb2.WatchKVResponse:
    return conductor_pb2.WatchKVResponse(joined=conductor_pb2.KVHolder(instance=instance, model=model))


def _changed(instance_id: str, events: kv_pb2.KVEvents) -> conductor_pb2.WatchKVResponse:
    return conductor_pb2.WatchKVResponse(changed=conductor_pb2.HeldKVChange(instance_id=instance_id, events=events))
