"""Links over which instances read KV: what is on its way, and how fast the links are."""

from dataclasses import dataclass, field
from typing import NamedTuple

from moonpool.base.scheduling.speed_tracker import learnt_rate
from moonpool.conductor.placement.base import PrefillChoice

RATE_WEIGHT = 0.2
"""One read's weight in a link's learned rate."""
RATE_FRESH_S = 60.0
"""Seconds after the last read for which a learned rate counts: a link that seems slow gets another chance."""


class LinkRead(NamedTuple):
    """One read: predicted seconds (0 if the link is shared), and the share from SSD."""

    seconds: float = 0.0
    cold: float = 0.0

    @classmethod
    def of(cls, choice: PrefillChoice) -> "LinkRead":
        """Return a choice's read from the source."""
        return cls(choice.read_s, choice.cold_blocks / max(1, choice.used_blocks - choice.local_blocks))


NO_READ = LinkRead()


@dataclass(slots=True)
class LearnedRate:
    """A learned rate: `bytes_per_s`, 0 before any read, as of `learned_at`."""

    bytes_per_s: float = 0.0
    learned_at: float = 0.0

    def known(self, now: float) -> float:
        """Return the bytes per second; 0 = not known, or too old."""
        return self.bytes_per_s if now - self.learned_at < RATE_FRESH_S else 0.0

    def learn(self, before: float, nbytes: float, seconds: float, now: float) -> None:
        """Learn from a read of `nbytes` in `seconds`; `before` was the rate until then."""
        self.bytes_per_s, self.learned_at = learnt_rate(before, nbytes, seconds, RATE_WEIGHT), now


@dataclass(slots=True)
class KVLink:
    """An instance's outgoing link: others read blocks over the link, and prefill sends KV to decode.

    Attributes:
        memory, ssd: learned rates, by where blocks are.
        free_at: time at which this conductor's reads are predicted to end.
        reads: reads of this conductor, by claim.
    """

    memory: LearnedRate = field(default_factory=LearnedRate)
    ssd: LearnedRate = field(default_factory=LearnedRate)
    free_at: float = 0.0
    reads: dict[int, LinkRead] = field(default_factory=dict)

    def wait_s(self, now: float) -> float:
        """Return the seconds until the reads end."""
        return max(self.free_at - now, 0.0) if self.reads else 0.0

    def claim(self, number: int, read: LinkRead, now: float) -> None:
        """Count a read from now on."""
        # Reads side by side share the link: none of them tells the link's rate.
        alone = not self.reads
        for other in self.reads:
            self.reads[other] = NO_READ
        self.free_at = self.wait_s(now) + now + read.seconds
        self.reads[number] = read if alone else NO_READ

    def learn(self, read: LinkRead, nbytes: int, seconds: float, now: float) -> None:
        """Learn the rate from a read of `nbytes` in `seconds`, for the tier that gave most bytes."""
        usual = nbytes / read.seconds
        rates = [rate.known(now) or usual for rate in (self.memory, self.ssd)]
        sizes = [nbytes * (1.0 - read.cold), nbytes * read.cold]
        foreseen = [size / rate for size, rate in zip(sizes, rates, strict=True)]
        most = int(2 * read.cold > 1.0)  # one time cannot tell two rates apart: the larger part learns
        part_s = seconds * foreseen[most] / sum(foreseen)
        (self.memory, self.ssd)[most].learn(rates[most], sizes[most], part_s, now)


class ReadsInFlight:
    """Reads of this conductor's prompts by claim, and the KV they send to decode over the same links."""

    def __init__(self) -> None:
        self._links: dict[int, KVLink] = {}
        self._sends: dict[int, KVLink] = {}

    def __len__(self) -> int:
        """Reads under way."""
        return len(self._links)

    def claim(self, number: int, link: KVLink, read: LinkRead, now: float) -> None:
        """Count a read from now on."""
        self._links[number] = link
        link.claim(number, read, now)

    def send(self, number: int, link: KVLink, seconds: float, now: float) -> None:
        """Count KV sent to decode, beside the claim's read from elsewhere."""
        self._sends[number] = link
        link.claim(number, LinkRead(seconds), now)

    def measured(self, number: int, link: KVLink, nbytes: int, seconds: float, now: float) -> None:
        """Learn from a read over a link; a read not counted on this link teaches nothing."""
        if self._links.get(number) is link and link.reads[number].seconds and nbytes:
            link.learn(link.reads[number], nbytes, seconds, now)

    def release(self, number: int) -> None:
        """Stop counting a read; unknown claims are fine."""
        for links in (self._links, self._sends):
            link = links.pop(number, None)
            if link is not None:
                del link.reads[number]

    def check_invariants(self) -> None:
        """Assert that links and claims agree."""
        both = [*self._links.items(), *self._sends.items()]
        assert all(number in link.reads for number, link in both)
        assert all(link in (self._links.get(read), self._sends.get(read)) for _, link in both for read in link.reads)
