"""What a registered publisher's engine holds, by its events."""

from collections.abc import Callable, Sequence

from moonpool.base.frozen import frozen
from moonpool.base.kv.keys import BlockKey
from moonpool.base.kv.media import MediaItem
from moonpool.interop.indexer.core.index import Holder, Scope, TieredIndex, salt_root, sequence_keys
from moonpool.interop.kv_events.cache import DEVICE_MEDIA, DISK_MEDIA, HOST_MEDIA, RankCache
from moonpool.interop.kv_events.events import EngineEvent, ExtraKeys

MEDIA_OF_TIERS = (DEVICE_MEDIA, HOST_MEDIA, DISK_MEDIA)
MAX_NAMES = 1 << 18
"""Hashes of blocks that are not held, of which the meaning is remembered."""


@frozen
class Publisher:
    """A publisher of KV events, as registered.

    Attributes:
        holder: the instance and rank whose blocks it tells.
        scope: model, tenant and block size.
        endpoint, replay_endpoint: of the sockets; "" = no replay.
        salt: of all chains whose events tell none.
        lora: name of the LoRA adapter of all chains whose events tell none; "" = the base model.
    """

    holder: Holder
    scope: Scope
    endpoint: str
    replay_endpoint: str = ""
    salt: str = ""
    lora: str = ""

    @property
    def name(self) -> tuple[str, str, int]:
        """One publisher at most has this name."""
        return self.holder.instance, self.scope.tenant, self.holder.rank


class PublisherCache:
    """One publisher's blocks, kept in the index; see `EventSink`."""

    def __init__(self, publisher: Publisher, index: TieredIndex) -> None:
        self._publisher, self._index = publisher, index
        self._tiers = [
            RankCache(publisher.scope.block_size, self._root_of, self._changer(tier), MAX_NAMES, media, self._keys_of)
            for tier, media in enumerate(MEDIA_OF_TIERS)
        ]

    @property
    def opaque(self) -> bool:
        """Whether the engine caches in an unknown way: then none of its blocks count."""
        return any(tier.opaque for tier in self._tiers)

    def apply(self, event: EngineEvent) -> None:
        for tier in self._tiers:
            tier.apply(event)

    def clear(self) -> None:
        for tier in self._tiers:
            tier.clear()

    def restart(self) -> None:
        """Forget all that was learnt."""
        for tier in self._tiers:
            tier.restart()

    def _root_of(self, extra: ExtraKeys | None, lora: str) -> BlockKey | None:
        salts = extra or (self._publisher.salt,)
        return salt_root(salts[0]) if len(salts) == 1 and isinstance(salts[0], str) else None

    def _keys_of(
        self, parent: bytes, token_ids: Sequence[int], block_size: int, lora: str, media: Sequence[MediaItem]
    ) -> Sequence[BlockKey]:
        return sequence_keys(parent, token_ids, block_size, lora or self._publisher.lora, media)

    def _changer(self, tier: int) -> Callable[[Sequence[BlockKey], Sequence[BlockKey]], None]:
        def changed(stored: Sequence[BlockKey], removed: Sequence[BlockKey]) -> None:
            place = self._publisher.scope, self._publisher.holder, tier
            self._index.add(*place, stored)
            self._index.remove(*place, removed)

        return changed
