"""What a Moonpool cluster's own instances hold, in words that others know: hashes over tokens, tiers, events.

Instances tell keys. What a key stands for is learnt from the tokens of prompts, answers and queries.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from moonpool.base.frozen import frozen
from moonpool.base.kv.keys import BlockKey, block_keys, chain_root
from moonpool.base.kv.media import MediaItem, overlapping
from moonpool.interop.indexer.core.index import Holder, Scope, TieredIndex, number_of, salt_root, sequence_keys
from moonpool.interop.kv_events.events import AllBlocksCleared, BlockRemoved, BlockStored, EngineEvent

DEFAULT_TENANT = "default"
"""What others call the tenant without a name."""
GPU, HOST, DISK = range(3)
MAX_LORAS = 1024
"""LoRA adapters of which the name is remembered."""
MEDIA = ("GPU", "CPU", "STORAGE")
"""vLLM's words for the tiers."""


class Lora(NamedTuple):
    """A LoRA adapter; without a name, the base model."""

    name: str = ""
    id: bytes = b""


@frozen
class BlockName:
    """What a key stands for.

    Attributes:
        scope: model, tenant and block size.
        key: the block's hash.
        parent: hash of the block before; None = a chain's first block.
        token_ids: the block's tokens.
        salt: of the chain; "" = none. Told with a chain's first block.
        lora: name of the LoRA adapter that computed the block; "" = the base model.
        apart: mask that keeps hashes of tenants apart in one stream of events, which has no place for tenants.
        media: digest of each picture with tokens in the block, in hex, and where the picture begins behind the block's
            first token.
    """

    scope: Scope
    key: BlockKey
    parent: BlockKey | None
    token_ids: "array[int]"
    salt: str
    lora: str
    apart: int
    media: tuple[tuple[str, int], ...] = ()

    @property
    def number(self) -> int:
        """The hash that events tell."""
        return number_of(self.key) ^ self.apart

    @property
    def parent_number(self) -> int | None:
        """The hash of the block before."""
        return None if self.parent is None else number_of(self.parent) ^ self.apart


@dataclass(slots=True)
class _Instance:
    """`held`: tier by key. `told`: names of those that are in the index."""

    holder: Holder
    tier: int
    held: dict[BlockKey, int] = field(default_factory=dict)
    told: dict[BlockKey, BlockName] = field(default_factory=dict)


@frozen
class ClusterModel:
    """What the cluster's engines serve."""

    name: str
    namespace: bytes
    block_size: int


class ClusterKV:
    """The cluster's instances.

    Args:
        index: holds what is told.
        max_names: keys whose meaning is remembered at most, beside those that are told.
    """

    def __init__(self, index: TieredIndex, max_names: int) -> None:
        self._index, self._max_names = index, max_names
        self._instances: dict[str, _Instance] = {}
        self._names: dict[BlockKey, BlockName] = {}  # the oldest first
        self._events: dict[str, list[EngineEvent]] = {}
        self._loras: dict[str, Lora] = {"": Lora()}  # by name
        self.model: ClusterModel | None = None

    def __len__(self) -> int:
        return len(self._instances)

    def take_events(self) -> dict[str, list[EngineEvent]]:
        """Return what has happened since the last call, by instance."""
        events, self._events = self._events, {}
        return events

    def joined(self, instance_id: str, model: ClusterModel | None) -> None:
        """An instance has joined, without blocks; `model` None = a kvstore."""
        self.left(instance_id)
        # Keys of another model's namespace stand for other tokens.
        if model is not None and model != self.model:
            self._names.clear()
            self.model = model
        self._instances[instance_id] = _Instance(Holder(instance_id, 0), GPU if model is not None else HOST)

    def left(self, instance_id: str) -> None:
        """An instance has left."""
        if instance_id in self._instances:
            self._clear(self._instances[instance_id])
            del self._instances[instance_id]

    def forget(self) -> None:
        """All instances have left."""
        for instance_id in list(self._instances):
            self.left(instance_id)

    def changed(
        self,
        instance_id: str,
        stored: Iterable[BlockKey],
        removed: Iterable[BlockKey],
        cooled: Iterable[BlockKey] = (),
        *,
        anew: bool = False,
    ) -> None:
        """What an instance holds has changed; `cooled` are on SSD only; `anew`: all before is forgotten."""
        instance = self._instances.get(instance_id)
        if instance is None:
            return
        if anew:
            self._clear(instance)
        cold, gone = set(cooled), set(removed)
        moved = [key for key in cold - gone if key in instance.held]
        # A block that changes its tier is told anew: index and events know each block by tier.
        self._forget(instance, [*gone, *moved])
        new = [key for key in stored if key not in gone]
        warmer = [key for key in new if instance.held.get(key, instance.tier) != instance.tier]
        self._forget(instance, warmer)
        for key in (*new, *moved):
            instance.held[key] = DISK if key in cold else instance.tier
        self._tell(instance, [*new, *moved])

    def learn_lora(self, lora: Lora) -> None:
        """An adapter has this name from now on."""
        if lora.name:
            self._loras[lora.name] = lora
            # The first is the base model's, which stays.
            for name in list(self._loras)[1 : max(1, len(self._loras) - MAX_LORAS)]:
                del self._loras[name]

    def named(
        self,
        tenant: str,
        cache_salt: str,
        token_ids: Sequence[int],
        lora_name: str = "",
        media: Sequence[MediaItem] = (),
    ) -> None:
        """Tokens tell what the keys of their chain stand for, unless the adapter is unknown. `tenant`: Moonpool's.

        `media`: pictures among the tokens.
        """
        model, lora = self.model, self._loras.get(lora_name)
        if model is None or lora is None:
            return
        root, size = chain_root(model.namespace, tenant, cache_salt, lora.id), model.block_size
        salt, apart = f"{tenant}:{cache_salt}" if tenant else cache_salt, number_of(salt_root(tenant))
        scope = Scope(model.name, tenant or DEFAULT_TENANT, size)
        keys, tokens = block_keys(root, token_ids, size, media), array("i", token_ids)
        shown_keys = sequence_keys(salt_root(cache_salt), tokens, size, lora.name, media)
        parent: BlockKey | None = None
        for at, (key, shown) in enumerate(zip(keys, shown_keys, strict=True)):
            name, own = self._names.pop(key, None), tokens[at * size : (at + 1) * size]
            extra = [
                (item.digest.hex(), item.begin - at * size) for item in overlapping(media, at * size, (at + 1) * size)
            ]
            self._names[key] = name or BlockName(scope, shown, parent, own, salt, lora.name, apart, tuple(extra))
            parent = shown
        for key in list(self._names)[: max(0, len(self._names) - self._max_names)]:
            del self._names[key]
        # Instances tell keys before anybody says what the keys stand for (ADR 73).
        for instance in self._instances.values():
            self._tell(instance, keys)

    def _tell(self, instance: _Instance, keys: Iterable[BlockKey]) -> None:
        """Put those blocks into the index that are held, have a name, and are not told yet."""
        new = list[tuple[BlockName, int]]()
        for key in keys:
            name, tier = self._names.get(key), instance.held.get(key)
            if name is not None and tier is not None and key not in instance.told:
                instance.told[key] = name
                self._index.add(name.scope, instance.holder, tier, [name.key])
                new.append((name, tier))
        self._note(instance, [_stored(run) for run in _runs(new)])

    def _forget(self, instance: _Instance, keys: Iterable[BlockKey]) -> None:
        gone: dict[int, list[int]] = {}
        for key in keys:
            tier, name = instance.held.pop(key, None), instance.told.pop(key, None)
            if name is not None and tier is not None:
                self._index.remove(name.scope, instance.holder, tier, [name.key])
                gone.setdefault(tier, []).append(name.number)
        self._note(instance, [BlockRemoved(tuple(hashes), MEDIA[tier]) for tier, hashes in gone.items()])

    def _clear(self, instance: _Instance) -> None:
        for key, name in instance.told.items():
            self._index.remove(name.scope, instance.holder, instance.held[key], [name.key])
        if instance.told:
            self._note(instance, [AllBlocksCleared()])
        instance.held.clear()
        instance.told.clear()

    def _note(self, instance: _Instance, events: Sequence[EngineEvent]) -> None:
        if events:
            self._events.setdefault(instance.holder.instance, []).extend(events)

    def check_invariants(self) -> None:
        """Assert that all that is told is held."""
        self._index.check_invariants()
        for instance in self._instances.values():
            assert instance.told.keys() <= instance.held.keys()
            for key, name in instance.told.items():
                match = self._index.match(name.scope, [name.key])[instance.holder.instance]
                assert match.tiers[instance.held[key]]


def _runs(blocks: Sequence[tuple[BlockName, int]]) -> list[list[tuple[BlockName, int]]]:
    """Blocks that continue each other in one tier, together."""
    runs: list[list[tuple[BlockName, int]]] = []
    for name, tier in blocks:
        before = runs[-1][-1] if runs else None
        if before is not None and before[1] == tier and before[0].scope == name.scope and before[0].key == name.parent:
            runs[-1].append((name, tier))
        else:
            runs.append([(name, tier)])
    return runs


def _stored(run: Sequence[tuple[BlockName, int]]) -> BlockStored:
    first, tier = run[0]
    # In the order of vLLM: adapter, pictures, salt.
    adapter: tuple[object, ...] = (first.lora,) if first.lora else ()
    extra: list[tuple[object, ...]] = [(*adapter, *(("mm", *picture) for picture in name.media)) for name, _ in run]
    if first.parent is None and first.salt:
        extra[0] = (*extra[0], first.salt)
    return BlockStored(
        tuple([name.number for name, _ in run]),
        first.parent_number,
        [token for name, _ in run for token in name.token_ids],
        first.scope.block_size,
        MEDIA[tier],
        tuple(extra),
        first.lora,
        kind="full_attention",
    )
