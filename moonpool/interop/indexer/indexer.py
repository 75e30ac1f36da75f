"""An indexer: the index, the registered publishers, the cluster, and where the cluster's events are published."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import zmq.asyncio

from moonpool.base.cluster.proto_conversion import media_from_proto
from moonpool.base.errors import InvalidRequest, MoonpoolError, Overloaded
from moonpool.base.kv.keys import tokens_from_bytes, unpack_keys
from moonpool.base.rpc.channels import Channels
from moonpool.base.telemetry.logs import get_logger
from moonpool.interop.indexer.config import IndexerConfig
from moonpool.interop.indexer.core.cluster import DEFAULT_TENANT, ClusterKV, ClusterModel, Lora
from moonpool.interop.indexer.core.index import TieredIndex
from moonpool.interop.indexer.core.publishers import Publisher, PublisherCache
from moonpool.interop.kv_events.publisher import EventPublisher, publishing
from moonpool.interop.kv_events.stream import EventSource, EventStream
from moonpool.v1 import conductor_pb2
from moonpool.v1.conductor_pb2_grpc import ConductorServiceStub

RETRY_S = 0.5
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Followed:
    """A registered publisher that is followed."""

    cache: PublisherCache
    stream: EventStream
    task: "asyncio.Task[None]"


class Indexer:
    """All that is known, and all that is followed.

    Attributes:
        index: who holds what.
        cluster: what the cluster's instances hold.
        published: publisher of each instance of the cluster.
        queries: answered so far.
    """

    def __init__(self, config: IndexerConfig, exit_stack: contextlib.AsyncExitStack) -> None:
        self.index = TieredIndex()
        self.cluster = ClusterKV(self.index, config.max_blocks)
        self.published: dict[str, EventPublisher] = {}
        self.queries = 0
        self._config, self._exit = config, exit_stack
        self._followed: dict[Publisher, _Followed] = {}
        self._context = zmq.asyncio.Context()
        self._news = asyncio.Event()  # the cluster may have events to publish
        exit_stack.callback(self._context.destroy, linger=0)

    @property
    def publishers(self) -> Sequence[Publisher]:
        return list(self._followed)

    @property
    def gaps(self) -> int:
        """Times that registered publishers' events were missing."""
        return sum([followed.stream.feed.gaps for followed in self._followed.values()])

    # --- registered publishers ----------------------------------------------------------------------------------------

    def register(self, publisher: Publisher) -> None:
        """Begin to follow a publisher.

        Raises:
            InvalidRequest: one is registered under the same instance, tenant and rank.
            Overloaded: as many are followed as may be.
        """
        if any(known.name == publisher.name for known in self._followed):
            raise InvalidRequest("instance_id", f"{'|'.join(map(str, publisher.name))} is registered already")
        if len(self._followed) >= self._config.max_publishers:
            raise Overloaded("as many publishers are registered as may be", reason="max_publishers", retry_after_s=0.0)
        cache = PublisherCache(publisher, self.index)
        source = EventSource(publisher.holder.rank, publisher.endpoint, publisher.replay_endpoint)
        stream = EventStream(source, cache, asyncio.Event())
        self._followed[publisher] = _Followed(cache, stream, asyncio.create_task(stream.run()))

    async def unregister(self, instance: str, model: str, tenant: str | None, rank: int | None) -> Sequence[Publisher]:
        """Forget publishers, and what they told; `tenant` and `rank` None = all. Returns the forgotten publishers."""
        removed = [
            publisher
            for publisher in self._followed
            if (publisher.holder.instance, publisher.scope.model) == (instance, model)
            and tenant in (None, publisher.scope.tenant)
            and rank in (None, publisher.holder.rank)
        ]
        for publisher in removed:
            followed = self._followed.pop(publisher)
            followed.task.cancel()
            # Else a last batch would come into the index behind `restart`.
            await asyncio.wait([followed.task])
            followed.cache.restart()
        return removed

    async def aclose(self) -> None:
        """Follow no publisher any more."""
        tasks = [followed.task for followed in self._followed.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- the cluster --------------------------------------------------------------------------------------------------

    def serves(self, model: str, tenant: str) -> bool:
        """Whether blocks of this model and tenant may come."""
        own = self.cluster.model is not None and self.cluster.model.name == model
        return own or any(publisher.scope[:2] == (model, tenant) for publisher in self._followed)

    def learn(self, model: str, tenant: str, cache_salt: str, token_ids: Sequence[int], lora: str = "") -> None:
        """A query's tokens tell what keys of the cluster stand for. Raises InvalidRequest if a token is no int32."""
        if self.cluster.model is not None and self.cluster.model.name == model:
            self.cluster.named("" if tenant == DEFAULT_TENANT else tenant, cache_salt, token_ids, lora)
            self._news.set()

    async def follow(self, channels: Channels) -> None:
        """Follow the conductor's cluster until cancelled."""
        told = ""
        while True:
            stub: Any = ConductorServiceStub(channels.get(self._config.conductor))
            call = stub.WatchKV(conductor_pb2.WatchKVRequest())
            try:
                async for message in call:
                    self._take(message)
                    self._news.set()
                    told = ""
            except MoonpoolError as error:
                if (why := str(error)) != told:
                    told = why
                    log.warning("the conductor's KV is not followed (yet)", error=told)
            finally:
                call.cancel()
            # What changes without a stream is not told; the next stream begins with snapshots.
            self.cluster.forget()
            self._news.set()
            await asyncio.sleep(RETRY_S)

    def _take(self, message: conductor_pb2.WatchKVResponse) -> None:
        match message.WhichOneof("message"):
            case "joined":
                served, model = message.joined.model, None
                if message.joined.HasField("model"):
                    model = ClusterModel(served.name, served.namespace, served.layout.block_size)
                self.cluster.joined(message.joined.instance.id, model)
            case "left":
                self.cluster.left(message.left)
            case "changed":
                events = message.changed.events
                keys = [unpack_keys(packed) for packed in (events.stored_keys, events.removed_keys, events.cooled_keys)]
                self.cluster.changed(message.changed.instance_id, *keys, anew=events.snapshot_begin)
            case "chain":
                chain = message.chain
                self.cluster.learn_lora(Lora(chain.lora.name, chain.lora.id))
                tokens = tokens_from_bytes(chain.token_ids)
                media = media_from_proto(chain.media, "chain.media", len(tokens))
                self.cluster.named(chain.tenant, chain.cache_salt, tokens, chain.lora.name, media)

    async def publish(self) -> None:
        """Publish the events of the cluster's instances until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            for instance, events in self.cluster.take_events().items():
                if self._config.events:
                    await (await self._publisher(instance)).publish(events)

    async def _publisher(self, instance: str) -> EventPublisher:
        if instance not in self.published:
            number, model = len(self.published), self.cluster.model
            replay = self._config.replay_events and _at(self._config.replay_events, number)
            topic = f"kv@{instance}@{model.name if model is not None else ''}"
            publisher = publishing(self._context, _at(self._config.events, number), replay, topic)
            self.published[instance] = await self._exit.enter_async_context(publisher)
            log.info("publishing KV events", instance=instance, endpoint=self.published[instance].endpoint)
        return self.published[instance]


def _at(endpoint: str, number: int) -> str:
    """The endpoint of an instance with this number."""
    if endpoint.startswith("ipc://"):
        return f"{endpoint}.{number}" if number else endpoint
    place, _, port = endpoint.rpartition(":")
    return f"{place}:{int(port) + number}" if port.isdigit() and port != "0" else endpoint
