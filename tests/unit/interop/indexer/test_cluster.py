"""A cluster's own KV: queried over HTTP, and published as vLLM publishes KV events."""

import asyncio
import contextlib
import random
import socket
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from moonpool.base.checkpoint.lora import read_adapter
from moonpool.base.kv.keys import block_keys, chain_root
from moonpool.base.kv.media import MediaItem, media_digest
from moonpool.interop.indexer.config import IndexerConfig
from moonpool.interop.indexer.core.cluster import ClusterKV, ClusterModel
from moonpool.interop.indexer.core.index import Scope, TieredIndex, salt_root, sequence_keys
from moonpool.interop.indexer.indexer import Indexer
from moonpool.interop.kv_events.events import BlockRemoved, BlockStored, EventBatch, read_batch
from moonpool.v1 import conductor_pb2, kv_pb2
from tests.unit.base.checkpoint.test_lora import write
from tests.unit.conductor.fakes import BLOCK_SIZE, decode, prefill, store
from tests.unit.conductor.stack import stack
from tests.unit.interop.indexer.test_http import WAIT_S, Indexed, hit, indexer, rolling_hashes

NAMESPACE = b"n" * 32


class Subscriber:
    """A subscriber of KV events, as a router has one."""

    def __init__(self, context: zmq.asyncio.Context, source: dict[str, str]) -> None:
        self.socket = context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        self.socket.connect(source["endpoint"])
        self.replays = context.socket(zmq.DEALER)
        self.replays.connect(source["replay_endpoint"])

    async def replay(self, start: int) -> list[tuple[int, EventBatch]]:
        await self.replays.send_multipart([b"", start.to_bytes(8, "big")])
        found = list[tuple[int, EventBatch]]()
        while True:
            *_, number, payload = await self.replays.recv_multipart()
            if not payload:
                assert int.from_bytes(number, "big", signed=True) == -1
                return found
            found.append((int.from_bytes(number, "big"), read_batch(msgspec.msgpack.decode(payload))))

    async def replay_until(self, token_ids: list[int]) -> list[tuple[int, EventBatch]]:
        """Everything so far, once a block that ends so is told: blocks are published after queries find them."""
        async with asyncio.timeout(WAIT_S):
            while True:
                batches = await self.replay(0)
                told = [event for _, batch in batches for event in batch.events if isinstance(event, BlockStored)]
                if any(list(event.token_ids)[-len(token_ids) :] == token_ids for event in told):
                    return batches


async def sources_of(index: Indexed, *wanted: str) -> dict[str, dict[str, str]]:
    """Where events are published, once the wanted instances' are: that is after queries find their blocks."""
    async with asyncio.timeout(WAIT_S):
        while True:
            sources: dict[str, dict[str, str]] = await index.get("/kv_event_sources")
            if set(wanted) <= set(sources):
                return sources


def keys_of(tokens: list[int], tenant: str = "") -> list[Any]:
    return block_keys(chain_root(NAMESPACE, tenant), tokens, BLOCK_SIZE)


async def test_blocks_of_the_clusters_instances_are_found_and_published(tmp_path: Path) -> None:
    draw = random.Random(9)
    tokens = [draw.randrange(1000) for _ in range(4 * BLOCK_SIZE)]
    instance, two, kept = prefill(), decode(), store()
    instance.keys = list(keys_of(tokens))
    kept.keys = list(keys_of(tokens)[:3])
    settings = {"events": f"ipc://{tmp_path}/e", "replay_events": f"ipc://{tmp_path}/r"}
    async with stack(instance, two, kept) as running:
        await running.until(lambda: running.servicer.core.cluster.index.held("kvstore-0") == 3)
        async with indexer(conductor=running.address, **settings) as index:
            query = {"model": running.checkpoint.name, "token_ids": tokens}
            stored = {"longest_matched": 3 * BLOCK_SIZE, "DP": {"0": 3 * BLOCK_SIZE}, "GPU": 0}
            stored |= {"CPU": 3 * BLOCK_SIZE, "DISK": 0}
            wanted = {"prefill-0": hit(4 * BLOCK_SIZE), "kvstore-0": stored}
            await index.until("/query", query, {"default": wanted})
            assert (await index.post("/query", {**query, "tenant_id": "ann"}))[1] == {"ann": {}}

            more = [*tokens, *[draw.randrange(1000) for _ in range(BLOCK_SIZE)]]
            instance.store(list(keys_of(more)[4:]))
            answered = await running.client.generate(token_ids=[*more, 5])  # its tokens are told with the request
            assert answered.token_ids
            by_hash = {"model": running.checkpoint.name, "seq_hashes": rolling_hashes(more)}
            wanted["prefill-0"] = hit(5 * BLOCK_SIZE)
            await index.until("/query_by_hash", by_hash, {"default": wanted})

            sources = await sources_of(index, "prefill-0", "kvstore-0")
            assert set(sources) == {"prefill-0", "kvstore-0"}
            context = zmq.asyncio.Context()
            try:
                subscriber = Subscriber(context, sources["prefill-0"])
                batches = await subscriber.replay_until(more[-BLOCK_SIZE:])
                assert [number for number, _ in batches] == list(range(len(batches)))
                told = [event for _, batch in batches for event in batch.events]
                assert all(isinstance(event, BlockStored) for event in told)
                assert [token for event in told for token in event.token_ids] == more  # type: ignore[union-attr]
                assert [hash_ for event in told for hash_ in event.hashes] == rolling_hashes(more)  # type: ignore[union-attr]
                [first] = [event for event in told if isinstance(event, BlockStored) and event.parent is None]
                assert (first.medium, first.block_size, first.kind) == ("GPU", BLOCK_SIZE, "full_attention")
                other = Subscriber(context, sources["kvstore-0"])
                [(_, last)] = (await other.replay_until(tokens[2 * BLOCK_SIZE : 3 * BLOCK_SIZE]))[-1:]
                assert {event.medium for event in last.events} == {"CPU"}  # type: ignore[union-attr]
            finally:
                context.destroy(linger=0)


async def test_a_conductor_that_comes_late_or_is_lost_is_followed_once_it_is_there() -> None:
    tokens = list(range(3 * BLOCK_SIZE))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    async with indexer(conductor=address) as index:
        for _ in range(2):
            instance = prefill()
            instance.keys = list(keys_of(tokens))
            async with stack(instance, listen=address) as running:
                query = {"model": running.checkpoint.name, "token_ids": tokens}
                await index.until("/query", query, {"default": {"prefill-0": hit(3 * BLOCK_SIZE)}})
            await index.until("/query", query, {"default": {}})


async def test_published_events_feed_another_indexer(tmp_path: Path) -> None:
    tokens, instance = list(range(3 * BLOCK_SIZE)), prefill()
    instance.keys = list(keys_of(tokens, "ann"))
    settings = {"events": f"ipc://{tmp_path}/e", "replay_events": f"ipc://{tmp_path}/r"}
    async with stack(instance, decode()) as running, indexer(conductor=running.address, **settings) as ours:
        query = {"model": running.checkpoint.name, "token_ids": tokens, "tenant_id": "ann"}
        await ours.until("/query", query, {"ann": {"prefill-0": hit(3 * BLOCK_SIZE)}})
        source = (await sources_of(ours, "prefill-0"))["prefill-0"]
        async with indexer() as theirs:
            body = {**source, "modelname": "m", "instance_id": "x", "block_size": BLOCK_SIZE, "type": "moonpool"}
            assert (await theirs.post("/register", body))[0] == 200
            salted = {"model": "m", "token_ids": tokens, "cache_salt": "ann:"}
            await theirs.until("/query", salted, {"default": {"x": hit(3 * BLOCK_SIZE)}})
            assert (await theirs.post("/query", {**salted, "cache_salt": ""}))[1] == {"default": {}}


async def test_blocks_that_only_a_query_names_are_published(tmp_path: Path) -> None:
    tokens = list(range(2 * BLOCK_SIZE))
    config = IndexerConfig(id="i", events=f"ipc://{tmp_path}/e", replay_events=f"ipc://{tmp_path}/r")
    async with asyncio.timeout(WAIT_S), contextlib.AsyncExitStack() as exit_stack:
        index = Indexer(config, exit_stack)
        index.cluster.joined("p", ClusterModel("m", NAMESPACE, BLOCK_SIZE))
        index.cluster.changed("p", keys_of(tokens), ())
        publishing = asyncio.create_task(index.publish())
        await asyncio.sleep(0)  # nothing has a name: nothing is published
        assert not index.published
        index.learn("m", "default", "", tokens)
        while not index.published:
            await asyncio.sleep(0)
            assert not publishing.done()
        endpoints = {"endpoint": f"ipc://{tmp_path}/e", "replay_endpoint": f"ipc://{tmp_path}/r"}
        context = zmq.asyncio.Context()
        exit_stack.callback(context.destroy, linger=0)
        subscriber = Subscriber(context, endpoints)
        assert len(await subscriber.replay_until(tokens[BLOCK_SIZE:])) == 1
        publishing.cancel()
        await asyncio.wait([publishing])


async def test_blocks_of_a_lora_adapter_are_told_with_its_name(tmp_path: Path) -> None:
    write(tmp_path / "sql", {})
    lora, instance, tokens = read_adapter(tmp_path / "sql"), prefill(), list(range(2 * BLOCK_SIZE))
    adapted = block_keys(chain_root(NAMESPACE, "", "s", lora.id), tokens, BLOCK_SIZE)
    settings = {"events": f"ipc://{tmp_path}/e", "replay_events": f"ipc://{tmp_path}/r"}
    async with (
        stack(instance, decode(), lora_modules=f"sql={tmp_path / 'sql'}") as running,
        indexer(conductor=running.address, **settings) as ours,
    ):
        instance.store(list(adapted))
        query = {"model": running.checkpoint.name, "token_ids": tokens, "cache_salt": "s", "lora_name": "sql"}
        assert (await ours.post("/query", query))[1] == {"default": {}}  # nobody has told what "sql" is
        await running.client.generate(token_ids=[*tokens, 5], model="sql", cache_salt="s")
        await ours.until("/query", query, {"default": {"prefill-0": hit(2 * BLOCK_SIZE)}})
        assert (await ours.post("/query", {**query, "lora_name": None}))[1] == {"default": {}}
        source = (await sources_of(ours, "prefill-0"))["prefill-0"]
        async with indexer() as theirs:
            body = {**source, "modelname": "m", "instance_id": "x", "block_size": BLOCK_SIZE, "type": "moonpool"}
            assert (await theirs.post("/register", body))[0] == 200
            await theirs.until("/query", {**query, "model": "m"}, {"default": {"x": hit(2 * BLOCK_SIZE)}})


def test_a_walk_of_changes_keeps_index_and_events_true() -> None:
    draw = random.Random(11)
    index = TieredIndex()
    cluster = ClusterKV(index, max_names=40)
    follower: dict[str, dict[int, str]] = {}  # what a subscriber knows: medium by hash
    model = ClusterModel("m", NAMESPACE, 4)
    chains = [[draw.randrange(9) for _ in range(4 * draw.randrange(1, 9))] for _ in range(12)]
    truth: dict[str, dict[bytes, str]] = {}
    for _ in range(3000):
        name, chain = draw.choice(("p", "d", "s")), draw.choice(chains)
        keys = block_keys(chain_root(NAMESPACE, ""), chain, 4)
        match draw.randrange(8):
            case 0:
                cluster.joined(name, None if name == "s" else model)
                truth[name] = {}
            case 1:
                cluster.left(name)
                truth.pop(name, None)
            case 2 | 3 | 4:
                anew, medium = draw.random() < 0.1, "CPU" if name == "s" else "GPU"
                cooled = [key for key in keys if name == "s" and draw.random() < 0.3]
                cluster.changed(name, keys, (), cooled, anew=anew)
                if name in truth:
                    truth[name] = {} if anew else truth[name]
                    truth[name] |= {key: "STORAGE" if key in cooled else medium for key in keys}
            case 5:
                gone = [key for key in keys if draw.random() < 0.5]
                cluster.changed(name, (), gone)
                for key in gone:
                    truth.get(name, {}).pop(key, None)
            case _:
                cluster.named("", "", chain)
                if cluster.model is not None:
                    known = [holder for holder, held in truth.items() if keys and keys[0] in held]
                    shown = sequence_keys(salt_root(""), chain, 4)
                    found = index.match(Scope("m", "default", 4), shown)
                    assert sorted(found) == sorted(known)
                    for holder in known:
                        lacking = (at for at, key in enumerate(keys) if key not in truth[holder])
                        assert found[holder].longest == 4 * next(lacking, len(keys))
        cluster.check_invariants()
        for instance, events in cluster.take_events().items():
            known_there = follower.setdefault(instance, {})
            for event in events:
                match event:
                    case BlockStored():
                        known_there |= dict.fromkeys(event.hashes, event.medium)  # type: ignore[arg-type]
                    case BlockRemoved():
                        for block in event.hashes:
                            assert known_there.pop(block) == event.medium  # type: ignore[arg-type]
                    case _:
                        known_there.clear()
        for instance, blocks in follower.items():
            assert set(blocks.values()) <= {*truth.get(instance, {}).values(), "GPU", "CPU", "STORAGE"}
            assert len(blocks) <= len(truth.get(instance, {}))


async def test_a_watcher_that_comes_late_learns_everything_and_each_change() -> None:
    kept = store()
    kept.keys = [bytes([at]) * 32 for at in range(3)]
    async with stack(kept) as running, asyncio.timeout(WAIT_S):
        await running.until(lambda: running.servicer.core.cluster.index.held("kvstore-0") == 3)
        stream: Any = running.servicer.WatchKV(conductor_pb2.WatchKVRequest(), None)
        joined, held, synced = [await anext(stream) for _ in range(3)]
        assert joined.joined.instance.id == "kvstore-0"
        assert sorted(held.changed.events.stored_keys) == sorted(b"".join(kept.keys))
        assert synced.synced
        kept.store([b"x" * 32])
        news = await anext(stream)
        assert (news.changed.instance_id, news.changed.events.stored_keys) == ("kvstore-0", b"x" * 32)
        running.cluster.watchers.dropped("kvstore-0")  # the index has lost a message
        cleared = await anext(stream)
        assert cleared.changed.events == kv_pb2.KVEvents(snapshot_begin=True)
        await stream.aclose()
        assert not len(running.cluster.watchers)
        stream = running.servicer.WatchKV(conductor_pb2.WatchKVRequest(), None)
        assert (await anext(stream)).HasField("joined")
        running.cluster.watchers.stop()  # the conductor is leaving
        rest = [message.WhichOneof("message") async for message in stream]
        assert set(rest) <= {"changed", "synced"}


def test_blocks_with_pictures_are_told_in_the_form_of_vllm_and_apart_from_others() -> None:
    tokens, size = list(range(4 * BLOCK_SIZE)), BLOCK_SIZE
    cat, dog = (MediaItem(size + 3, 2 * size + 5, media_digest(name, ()), b"") for name in (b"cat", b"dog"))
    cluster = ClusterKV(TieredIndex(), 100)
    cluster.joined("prefill-0", ClusterModel("m", NAMESPACE, size))
    root, told = chain_root(NAMESPACE, ""), list[BlockStored]()
    for media in ([], [cat], [dog]):
        cluster.named("", "", tokens, media=media)
        cluster.changed("prefill-0", block_keys(root, tokens, size, media), [])
        told += [event for event in cluster.take_events()["prefill-0"] if isinstance(event, BlockStored)]
    numbers = [number for event in told for number in event.hashes]
    assert len(set(numbers)) == len(numbers) == 4 + 3 + 3, "the block before the picture is told once"
    extra = [event.extra_keys for event in told]
    shown = [(("mm", item.digest.hex(), 3),) for item in (cat, dog)]
    goes_on = [(("mm", item.digest.hex(), 3 - size),) for item in (cat, dog)]
    assert extra == [((), (), (), ()), (shown[0], goes_on[0], ()), (shown[1], goes_on[1], ())]
    cluster.check_invariants()
