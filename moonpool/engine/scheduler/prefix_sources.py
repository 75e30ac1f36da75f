"""Where prefixes of prompts are loaded from: kvstores and other instances, with their speed and their failures.

A failing source is skipped for a while: the failure delays one request by one deadline, not every request.
"""

from moonpool.base.frozen import frozen
from moonpool.base.scheduling.latency import Speeds, load_seconds
from moonpool.base.scheduling.speed_tracker import SpeedTracker
from moonpool.base.scheduling.state_machine import digest_of

FAILED_SOURCE_PAUSE_S = 2.0
LOAD_SLACK = 4.0
"""A load may take this many times the predicted seconds, plus the configured timeout."""


@frozen
class KVSource:
    """A kvstore, or another engine instance, that a prefix may be loaded from.

    Attributes:
        name: equal names mean the same instance in the same epoch.
        blocks: leading blocks that are believed to be there.
        peer: the source is an engine instance, and blocks are read from the instance's pool.
    """

    name: str
    blocks: int
    peer: bool = False


@frozen
class LoadBlocks:
    """Read blocks from one of the request's sources into the pool, layers in order.

    Attributes:
        source: index in the request's sources.
        first: the first block's index in the sequence.
        timeout_s: longest time for the whole load.
    """

    io: int
    id: int
    source: int
    first: int
    blocks: tuple[int, ...]
    timeout_s: float


@frozen
class LoadEnded:
    """A load has ended; no writes into the blocks follow.

    Attributes:
        blocks: leading blocks that are whole in all layers.
        missing: first block that the source has lost or, if a peer, does not lend.
        failed: the source did not answer properly, and is skipped for a while.
        windowed: the source has lost only the missing block's slices of layers with a window.
    """

    blocks: int
    missing: int | None = None
    failed: bool = False
    seconds: float = 0.0
    windowed: bool = False


@frozen
class PrefixMiss:
    """A kvstore lacked a block that the scheduler believed to be there.

    Attributes:
        source: index in the request's sources.
        block: index in the sequence; the kvstore held the blocks before.
        windowed: the block was there, without the slices of layers with a window.
    """

    source: int
    block: int
    windowed: bool = False


@frozen
class PrefixLoaded:
    """A source sent all blocks asked for. `source`: index in the request's sources."""

    source: int
    blocks: int
    seconds: float


class KVSources:
    """What is known of the sources.

    Args:
        tracker: the engine's measured speeds, with those of loads.
        load_timeout_s: seconds a load may take beyond what is predicted.

    Attributes:
        failures: loads that failed for another reason than missing or damaged blocks.
    """

    def __init__(self, tracker: SpeedTracker, load_timeout_s: float) -> None:
        self._tracker = tracker
        self._load_timeout_s = load_timeout_s
        self._paused: dict[str, float] = {}
        self.failures = 0

    def speeds(self, source: KVSource) -> Speeds:
        """Return the instance's speeds, with the load rate for this kind of source."""
        speeds = self._tracker.speeds
        return speeds.loading_from_peers() if source.peer else speeds

    def timeout_s(self, source: KVSource, nbytes: int) -> float:
        """Return longest time for reading `nbytes`, seconds."""
        return self._load_timeout_s + LOAD_SLACK * load_seconds(self.speeds(source), nbytes)

    def is_paused(self, source: KVSource, now: float) -> bool:
        """Return whether a source is paused after a failure."""
        return self._paused.get(source.name, 0.0) > now

    def learn(self, source: KVSource, nbytes: int, blocks: int, result: LoadEnded, now: float) -> None:
        """Learn from a read of `blocks` blocks; pause a source that failed."""
        if result.failed:
            self.failures += 1
            self._paused = {name: at for name, at in self._paused.items() if at > now}
            self._paused[source.name] = now + FAILED_SOURCE_PAUSE_S
        elif result.blocks == blocks:
            self._tracker.observe_load(nbytes, result.seconds, peer=source.peer)

    def digest(self) -> bytes:
        """Return a hash of the paused sources and the failures."""
        return digest_of(self._paused, self.failures)
