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
    still take there, `bytes_per_s` is what was learnt of its link, 0 before. `peer`: it is an engine instance.
    """

    id: str
    blocks: int
    wait_s: float = 0.0
    bytes_per_s: float = 0.0
    peer: bool = False

    def read_s(self, speeds: Speeds, nbytes: int) -> float:
        """Predicted seconds of reading so much, by an instance of these speeds: the slower end decides."""
        rate = (speeds.peer_bytes_per_s if self.peer else 0.0) or speeds.load_bytes_per_s or DEFAULT_BYTES_PER_S
        return nbytes / (min(rate, self.bytes_per_s) if self.bytes_per_s else rate)


@dataclass(slots=True)
class Link:
    """The way out of one instance, over which others read its blocks, and a prefill instance sends to decode.

    `bytes_per_s` is what was learnt, 0 before, and `told_at` when. `free_at` is when our reads are predicted to be
    over. `reads`: our claims, with the predicted seconds of each, 0 for one that did not have the link to itself.
    """

    bytes_per_s: float = 0.0
    told_at: float = 0.0
    free_at: float = 0.0
    reads: dict[int, float] = field(default_factory=dict)

    def wait_s(self, now: float) -> float:
        """Seconds until our reads are over."""
        return max(self.free_at - now, 0.0) if self.reads else 0.0

    def claim(self, number: int, seconds: float, now: float) -> None:
        """Counts a read from now on."""
        alone = not self.reads
        for other in self.reads:
            self.reads[other] = 0.0
        self.free_at = self.wait_s(now) + now + seconds
        self.reads[number] = seconds if alone else 0.0

    def rate(self, now: float) -> float:
        """Bytes per second, as far as that is known; 0 = it is not."""
        return self.bytes_per_s if now - self.told_at < FRESH_S else 0.0


class Reads:
    """All our reads, by claim, and what our prompts send to decode: that goes over the same links."""

    def __init__(self) -> None:
        self._links: dict[int, Link] = {}
        self._sends: dict[int, Link] = {}

    def __len__(self) -> int:
        """Reads under way."""
        return len(self._links)

    def claim(self, number: int, link: Link, seconds: float, now: float) -> None:
        """Counts a read that takes so many seconds from now on."""
        self._links[number] = link
        link.claim(number, seconds, now)

    def send(self, number: int, link: Link, seconds: float, now: float) -> None:
        """Counts KV that goes to decode, beside the claim's read from elsewhere."""
        self._sends[number] = link
        link.claim(number, seconds, now)

    def told(self, number: int, link: Link, nbytes: int, seconds: float, now: float) -> None:
        """What a read over a link has taken; one that was counted on another link, or not at all, teaches nothing."""
        if self._links.get(number) is link and (predicted_s := link.reads[number]):
            known = link.rate(now) or nbytes / predicted_s
            link.bytes_per_s, link.told_at = learnt_rate(known, nbytes, seconds, WEIGHT), now

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
