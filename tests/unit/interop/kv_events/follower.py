"""An adapter's core at a model engine: feeds, caches, and replays that are answered at once."""

from moonpool.base.kv.keys import BlockKey, block_keys, chain_root
from moonpool.interop.kv_events.cache import EngineCache
from moonpool.interop.kv_events.events import ExtraKeys, read_batch
from moonpool.interop.kv_events.feed import (
    ApplyBatch,
    AskReplay,
    BatchArrived,
    BatchReplayed,
    EventFeed,
    FeedAction,
    FeedEvent,
    ForgetBlocks,
    ReplayEnded,
)
from tests.unit.interop.adapter.model_engine import ModelEngine

NAMESPACE = b"n" * 32


def root_of(extra: ExtraKeys | None, lora: str) -> BlockKey | None:
    """The chain of a salt is that of the tenant of this name."""
    if extra is None or len(extra) > 1:
        return None
    return BlockKey(chain_root(NAMESPACE, str(extra[0]) if extra else "", "", lora.encode()))


class Follower:
    """Follows one engine."""

    def __init__(self, engine: ModelEngine, max_names: int = 64) -> None:
        self.engine = engine
        self.cache = EngineCache(engine.block_size, root_of, max_names)
        self.feed = EventFeed()
        self.told: set[bytes] = set()
        """What conductors know."""
        self.carry_out(self.feed.start())

    def handle(self, event: FeedEvent) -> None:
        self.carry_out(self.feed.handle(event))
        stored, removed, _ = self.cache.take_changes()
        stored, removed = set(stored), set(removed)
        assert not stored & removed
        self.told = (self.told | stored) - removed
        assert self.told == set(self.cache.held)
        self.cache.check_invariants()

    def carry_out(self, actions: list[FeedAction]) -> None:
        for action in actions:
            match action:
                case ApplyBatch(batch):
                    for event in batch.events:
                        self.cache.rank(0).apply(event)
                case ForgetBlocks(restarted):
                    (self.cache.rank(0).restart if restarted else self.cache.rank(0).clear)()
                case AskReplay(number, start):
                    for at, message in self.engine.replay(start):
                        self.carry_out(self.feed.handle(BatchReplayed(number, at, read_batch(message))))
                    self.carry_out(self.feed.handle(ReplayEnded(number, complete=True)))

    def receive(self, batch: tuple[int, object]) -> None:
        """A batch arrives."""
        self.handle(BatchArrived(batch[0], read_batch(batch[1])))

    def match(self, tokens: list[int], tenant: str = "") -> int:
        """Leading blocks of a prompt that are told."""
        keys = block_keys(chain_root(NAMESPACE, tenant), tokens, self.engine.block_size)
        return self.cache.matched_blocks(keys)[0]
