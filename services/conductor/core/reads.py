"""Reads of KV from an instance: what of ours is under way, until when that keeps its link busy, and how quick it is.

Instances tell how quickly they load; how quickly one can be read from is learnt here, from reads that had it to
themselves. What other conductors have read there is not known, and shows in what instances tell.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from moonpool.cost import DEFAULT_BYTES_PER_S, Speeds, learnt_rate

WEIGHT = 0.2
"""Of one read, when the rate of a link is learnt."""
FRESH_S = 60.0
"""What was learnt of a link counts for so long after the last read: a link that seems slow gets another chance."""


class Source(NamedTuple):
    """An instance that a prefix can be loaded from, as a request sees it.

    `blocks` are the leading blocks of the request's chain that it holds. `wait_s` are the seconds that reads of ours
    still take there, `bytes_per_s` is what was learnt of its link, 0 before. `peer`: it is an engine instance. The
    first `warm` blocks are in its memory (None = all, as far as is known); others may be on its SSD only, from which
    reading was learnt to have `cold_bytes_per_s`, 0 before.
    """

    id: str
    blocks: int
    wait_s: float = 0.0
    bytes_per_s: float = 0.0
    peer: bool = False
    warm: int | None = None
    cold_bytes_per_s: float = 0.0

    def cold_blocks(self, local_blocks: int) -> int:
        """Blocks on its SSD only, of those that an instance with so many leading blocks would read."""
        return 0 if self.warm is None else max(0, self.blocks - max(self.warm, local_blocks))

    def rate(self, speeds: Speeds) -> float:
        """Bytes per second at which an instance of these speeds reads what is in memory: the slower end decides."""
        rate = (speeds.peer_bytes_per_s if self.peer else 0.0) or speeds.load_bytes_per_s or DEFAULT_BYTES_PER_S
        return min(rate, self.bytes_per_s) if self.bytes_per_s else rate

    def read_s(self, rate: float, nbytes: int, cold_bytes: int = 0) -> float:
        """Predicted seconds of reading so much at this rate; `cold_bytes` of it are on SSD only."""
        if not (cold_bytes and self.cold_bytes_per_s):
            return nbytes / rate
        cold_bytes = min(cold_bytes, nbytes)
        return (nbytes - cold_bytes) / rate + cold_bytes / min(rate, self.cold_bytes_per_s)


class Read(NamedTuple):
    """One read: its predicted seconds, 0 for one that did not have the link to itself, and its share from SSD."""

    seconds: float = 0.0
    cold: float = 0.0


NOTHING = Read()


@dataclass(slots=True)
class Rate:
    """How quick reads were: `bytes_per_s`, 0 before any, learnt at `told_at`."""

    bytes_per_s: float = 0.0
    told_at: float = 0.0

    def known(self, now: float) -> float:
        """Bytes per second, as far as that is known; 0 = it is not."""
        return self.bytes_per_s if now - self.told_at < FRESH_S else 0.0

    def learn(self, before: float, nbytes: float, seconds: float, now: float) -> None:
        """So much was read in so long, where `before` was believed."""
        self.bytes_per_s, self.told_at = learnt_rate(before, nbytes, seconds, WEIGHT), now


@dataclass(slots=True)
class Link:
    """The way out of one instance, over which others read its blocks, and a prefill instance sends to decode.

    `memory` and `ssd` are what was learnt, by where blocks were. `free_at` is when our reads are predicted to be over.
    `reads`: our claims.
    """

    memory: Rate = field(default_factory=Rate)
    ssd: Rate = field(default_factory=Rate)
    free_at: float = 0.0
    reads: dict[int, Read] = field(default_factory=dict)

    def wait_s(self, now: float) -> float:
        """Seconds until our reads are over."""
        return max(self.free_at - now, 0.0) if self.reads else 0.0

    def claim(self, number: int, read: Read, now: float) -> None:
        """Counts a read from now on."""
        alone = not self.reads
        for other in self.reads:
            self.reads[other] = NOTHING
        self.free_at = self.wait_s(now) + now + read.seconds
        self.reads[number] = read if alone else NOTHING

    def learn(self, read: Read, nbytes: int, seconds: float, now: float) -> None:
        """A read of so much has taken so long: that is about the tier from which most of it came."""
        usual = nbytes / read.seconds
        rates = [rate.known(now) or usual for rate in (self.memory, self.ssd)]
        sizes = [nbytes * (1.0 - read.cold), nbytes * read.cold]
        foreseen = [size / rate for size, rate in zip(sizes, rates, strict=True)]
        most = int(2 * read.cold > 1.0)
        part_s = seconds * foreseen[most] / sum(foreseen)
        (self.memory, self.ssd)[most].learn(rates[most], sizes[most], part_s, now)


class Reads:
    """All our reads, by claim, and what our prompts send to decode: that goes over the same links."""

    def __init__(self) -> None:
        self._links: dict[int, Link] = {}
        self._sends: dict[int, Link] = {}

    def __len__(self) -> int:
        """Reads under way."""
        return len(self._links)

    def claim(self, number: int, link: Link, read: Read, now: float) -> None:
        """Counts a read from now on."""
        self._links[number] = link
        link.claim(number, read, now)

    def send(self, number: int, link: Link, seconds: float, now: float) -> None:
        """Counts KV that goes to decode, beside the claim's read from elsewhere."""
        self._sends[number] = link
        link.claim(number, Read(seconds), now)

    def told(self, number: int, link: Link, nbytes: int, seconds: float, now: float) -> None:
        """What a read over a link has taken; one that was counted on another link, or not at all, teaches nothing."""
        if self._links.get(number) is link and link.reads[number].seconds and nbytes:
            link.learn(link.reads[number], nbytes, seconds, now)

    def release(self, number: int) -> None:
        """Stops counting a read; unknown claims are fine."""
        for links in (self._links, self._sends):
            link = links.pop(number, None)
            if link is not None:
                del link.reads[number]

    def check_invariants(self) -> None:
        """Asserts that links and claims agree."""
        both = [*self._links.items(), *self._sends.items()]
        assert all(number in link.reads for number, link in both)
        assert all(link in (self._links.get(it), self._sends.get(it)) for _, link in both for it in link.reads)
