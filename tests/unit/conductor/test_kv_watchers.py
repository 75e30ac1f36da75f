"""Watchers of the cluster's KV: all that is held, then each change, until they are stopped or read too slowly."""

from array import array
from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from moonpool.base.cluster.proto_conversion import media_from_proto
from moonpool.base.errors import Overloaded
from moonpool.base.kv.keys import tokens_to_bytes
from moonpool.base.kv.media import MediaItem
from moonpool.conductor import kv_watchers
from moonpool.conductor.core.prefix_index import PrefixIndex
from moonpool.conductor.kv_watchers import KVWatchers
from moonpool.v1 import conductor_pb2, kv_pb2

Watch = AsyncGenerator[conductor_pb2.WatchKVResponse, None]
KEYS = [bytes([n]) * 32 for n in range(4)]
MODEL = conductor_pb2.ModelInfo(name="tiny")


def instance(name: str) -> kv_pb2.Instance:
    return kv_pb2.Instance(id=name, epoch=1)


def index_of(**held: list[bytes]) -> PrefixIndex:
    index = PrefixIndex(100)
    for name, keys in held.items():
        index.add_instance(name)
        index.apply(name, 1, keys, [], snapshot_begin=True, snapshot_end=True)
    return index


async def told(watch: Watch) -> list[str]:
    """Kinds of messages up to the one that says that the watcher knows all."""
    kinds: list[str] = [(await anext(watch)).WhichOneof("message") or ""]
    while kinds[-1] != "synced":
        kinds.append((await anext(watch)).WhichOneof("message") or "")
    return kinds


async def test_a_watcher_hears_what_is_held_and_then_each_change() -> None:
    watchers = KVWatchers()
    watch = watchers.watch([(instance("a"), MODEL), (instance("b"), None)], index_of(a=KEYS[:3], b=[]))
    joined = [(await anext(watch)).joined for _ in range(2)]
    assert [(instance.instance.id, instance.model.name) for instance in joined] == [("a", "tiny"), ("b", "")]
    held = (await anext(watch)).changed
    assert held.instance_id == "a"
    assert {held.events.stored_keys[at : at + 32] for at in range(0, 96, 32)} == set(KEYS[:3])
    assert (await anext(watch)).synced
    assert len(watchers) == 1

    watchers.joined(instance("c"), MODEL)
    assert (await anext(watch)).joined.instance.id == "c"
    watchers.changed("c", kv_pb2.KVEvents(removed_keys=KEYS[0]))
    change = (await anext(watch)).changed
    assert (change.instance_id, change.events.removed_keys) == ("c", KEYS[0])
    watchers.named("ann", "salt", array("i", [7, 8]), kv_pb2.LoraAdapter(id=KEYS[1], name="sql"))
    chain = (await anext(watch)).chain
    assert (chain.tenant, chain.cache_salt, chain.token_ids) == ("ann", "salt", tokens_to_bytes([7, 8]))
    assert (chain.lora.id, chain.lora.name) == (KEYS[1], "sql")
    picture = MediaItem(0, 1, KEYS[2], b"file")
    watchers.named("", "", array("i", [7, 8]), None, [picture])
    assert media_from_proto((await anext(watch)).chain.media, "media", 2) == (replace(picture, content=b""),)
    watchers.left("c")
    assert (await anext(watch)).left == "c"
    watchers.stop()
    assert [message async for message in watch] == []
    assert len(watchers) == 0


async def test_messages_of_an_instance_whose_blocks_were_dropped_wait_for_its_snapshot() -> None:
    watchers = KVWatchers()
    watch = watchers.watch([], index_of())
    assert await told(watch) == ["synced"]
    watchers.dropped("a")
    assert (await anext(watch)).changed.events.snapshot_begin
    watchers.changed("a", kv_pb2.KVEvents(sequence=2))
    watchers.changed("b", kv_pb2.KVEvents(sequence=3))
    watchers.changed("a", kv_pb2.KVEvents(sequence=4, snapshot_begin=True))
    watchers.changed("a", kv_pb2.KVEvents(sequence=5))
    watchers.dropped("a")
    watchers.left("a")
    watchers.changed("a", kv_pb2.KVEvents(sequence=6))
    watchers.dropped("a")
    watchers.joined(instance("a"), MODEL)
    watchers.changed("a", kv_pb2.KVEvents(sequence=7))
    watchers.stop()
    changes = [
        message.changed.events for message in [message async for message in watch] if message.HasField("changed")
    ]
    assert [change.sequence for change in changes if change.sequence] == [3, 4, 5, 6, 7]


async def test_who_reads_too_slowly_is_told_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_watchers, "MAX_WAITING", 3)
    watchers = KVWatchers()
    slow, quick = (watchers.watch([], index_of()) for _ in range(2))
    assert await told(slow) == await told(quick) == ["synced"]
    for number in range(4):
        watchers.left(f"it-{number}")
        assert (await anext(quick)).left == f"it-{number}"
    with pytest.raises(Overloaded) as refused:
        await anext(slow)
    assert refused.value.reason == "watcher_slow"
    assert len(watchers) == 1
    await quick.aclose()
    assert len(watchers) == 0


async def test_a_conductor_that_leaves_ends_a_watcher_in_the_middle_of_what_is_held() -> None:
    watchers = KVWatchers()
    watch = watchers.watch([(instance("a"), MODEL)], index_of(a=KEYS))
    await anext(watch)
    watchers.stop()
    assert [message.WhichOneof("message") async for message in watch] == ["changed"]
    assert len(watchers) == 0
