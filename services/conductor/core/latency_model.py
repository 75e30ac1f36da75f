"""Predicted latencies.

Time to first token, time per output token, transfers and output lengths, corrected by what was measured.

`PrefillLatencyModel` is Algorithm 1 of the Mooncake paper, with a choice of loading or recomputing a prefix.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, inf, log
from typing import NamedTuple

from moonpool.frozen import frozen
from moonpool.scheduling.latency import (
    DEFAULT_BYTES_PER_S,
    PrefillWork,
    Regression,
    Speeds,
    decode_step_seconds,
    learnt_rate,
    overlapped_seconds,
    pipelined_seconds,
    transfer_seconds,
    work_of,
    work_seconds,
)
from moonpool.scheduling.state_machine import digest_of
from services.conductor.placement.base import LatencyParts, PrefillChoice, PrefillCost

RATE_WEIGHT = 0.2
"""Weight of one read in the learned rate of a link."""
RATE_FRESH_S = 60.0
"""Seconds after the last read for which a learned rate counts: a link that seems slow gets another chance."""


class PrefixHolder(NamedTuple):
    """An instance that a request can load a prefix from.

    Attributes:
        id: of the instance.
        blocks: leading blocks of the request's chain that it holds.
        wait_s: seconds that reads of this conductor still take there.
        bytes_per_s: learned rate of its link; 0 = not known.
        peer: the instance is an engine, not a kvstore.
        warm: leading blocks in its memory; the others may be on its SSD only. None = all, as far as is known.
        cold_bytes_per_s: learned rate of its SSD; 0 = not known.
    """

    id: str
    blocks: int
    wait_s: float = 0.0
    bytes_per_s: float = 0.0
    peer: bool = False
    warm: int | None = None
    cold_bytes_per_s: float = 0.0

    def cold_blocks(self, local_blocks: int) -> int:
        """Blocks on its SSD only that an instance with `local_blocks` leading blocks would read."""
        return 0 if self.warm is None else max(0, self.blocks - max(self.warm, local_blocks))

    def rate(self, speeds: Speeds) -> float:
        """Bytes per second at which an instance of these speeds reads from memory: the slower end decides."""
        rate = (speeds.peer_bytes_per_s if self.peer else 0.0) or speeds.load_bytes_per_s or DEFAULT_BYTES_PER_S
        return min(rate, self.bytes_per_s) if self.bytes_per_s else rate

    def read_s(self, rate: float, nbytes: int, cold_bytes: int = 0) -> float:
        """Predicted seconds of reading `nbytes` at this rate; `cold_bytes` of them are on SSD only."""
        if not (cold_bytes and self.cold_bytes_per_s):
            return nbytes / rate
        cold_bytes = min(cold_bytes, nbytes)
        return (nbytes - cold_bytes) / rate + cold_bytes / min(rate, self.cold_bytes_per_s)


class LinkRead(NamedTuple):
    """One read: predicted seconds, 0 if it shares the link with others, and the share from SSD."""

    seconds: float = 0.0
    cold: float = 0.0

    @classmethod
    def of(cls, choice: PrefillChoice) -> "LinkRead":
        """The read of a choice from its source."""
        return cls(choice.read_s, choice.cold_blocks / max(1, choice.used_blocks - choice.local_blocks))


NO_READ = LinkRead()


@dataclass(slots=True)
class LearnedRate:
    """A learned rate: `bytes_per_s`, 0 before any read, as of `learned_at`."""

    bytes_per_s: float = 0.0
    learned_at: float = 0.0

    def known(self, now: float) -> float:
        """Bytes per second; 0 = not known, or too old."""
        return self.bytes_per_s if now - self.learned_at < RATE_FRESH_S else 0.0

    def learn(self, before: float, nbytes: float, seconds: float, now: float) -> None:
        """Learns from a read of `nbytes` in `seconds`; `before` was the rate until then."""
        self.bytes_per_s, self.learned_at = learnt_rate(before, nbytes, seconds, RATE_WEIGHT), now


@dataclass(slots=True)
class KVLink:
    """Outgoing link of an instance: others read its blocks over it, and prefill sends KV to decode.

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
        """Seconds until the reads end."""
        return max(self.free_at - now, 0.0) if self.reads else 0.0

    def claim(self, number: int, read: LinkRead, now: float) -> None:
        """Counts a read from now on."""
        alone = not self.reads
        for other in self.reads:
            self.reads[other] = NO_READ
        self.free_at = self.wait_s(now) + now + read.seconds
        self.reads[number] = read if alone else NO_READ

    def learn(self, read: LinkRead, nbytes: int, seconds: float, now: float) -> None:
        """Learns from a read of `nbytes` in `seconds`, about the tier from which most of it came."""
        usual = nbytes / read.seconds
        rates = [rate.known(now) or usual for rate in (self.memory, self.ssd)]
        sizes = [nbytes * (1.0 - read.cold), nbytes * read.cold]
        foreseen = [size / rate for size, rate in zip(sizes, rates, strict=True)]
        most = int(2 * read.cold > 1.0)
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
        """Counts a read from now on."""
        self._links[number] = link
        link.claim(number, read, now)

    def send(self, number: int, link: KVLink, seconds: float, now: float) -> None:
        """Counts KV sent to decode, beside the claim's read from elsewhere."""
        self._sends[number] = link
        link.claim(number, LinkRead(seconds), now)

    def measured(self, number: int, link: KVLink, nbytes: int, seconds: float, now: float) -> None:
        """Learns from a read over a link; a read that was not counted on this link teaches nothing."""
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


class DecodeChoice(NamedTuple):
    """The prediction of a request on one decode instance.

    Attributes:
        id: of the instance.
        tbt_s: seconds between tokens.
        finish_s: seconds until the request has ended there.
        blocks: blocks that the request is expected to need there.
    """

    id: str
    tbt_s: float
    finish_s: float
    blocks: int = 0


_LoadableSource = tuple[PrefixHolder, int, PrefillWork]
"""A prefix that may be loaded, its blocks, and the work behind it."""
_RatedSource = tuple[PrefixHolder, int, PrefillWork, float, float]
"""The same at some speeds: also the work's seconds, and bytes per second of reading."""


@frozen
class Demand:
    """Tokens and blocks that a request needs.

    Attributes:
        prompt_tokens: to compute.
        prompt_blocks: for the prompt at prefill.
        total_blocks: for the prompt and the longest answers at decode.
        decode_tokens: expected from decode, in each of `choices` answers.
        choices: answers that run together.
    """

    prompt_tokens: int
    prompt_blocks: int
    total_blocks: int
    decode_tokens: int
    choices: int = 1


@frozen
class KVShape:
    """Sizes of the served KV. `emulated`: all engines emulate compute."""

    block_tokens: int
    token_bytes: int
    layers: int
    emulated: bool = False

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens take."""
        return -(-tokens // self.block_tokens)

    def reused_tokens(self, tokens: int, blocks: int) -> int:
        """Tokens of a prompt that need not be computed if its first `blocks` blocks are there.

        The last token is always computed: its logits give the first token of the answer.
        """
        return min(blocks * self.block_tokens, tokens - 1)

    def blocks_for_choices(self, tokens: int, answer_tokens: int, choices: int) -> int:
        """Blocks of `choices` answers that share the full blocks of the `tokens` they begin with."""
        shared = tokens // self.block_tokens
        return shared + choices * (self.blocks_for(tokens + answer_tokens) - shared)


class PrefillLatencyModel:
    """Predicts the prompt of one request on any instance.

    Args:
        demand: of the request.
        shape: of the KV.
        sources: a few instances that a prefix may be loaded from.
        threshold: a prefix elsewhere must be this many times longer than the instance's own.
    """

    def __init__(self, demand: Demand, shape: KVShape, sources: Sequence[PrefixHolder], threshold: float) -> None:
        self._tokens = demand.prompt_tokens
        self._shape = shape
        self._sources = sources
        self._block_bytes = shape.block_tokens * shape.token_bytes
        self._threshold = threshold
        self._works: dict[tuple[int, int], PrefillWork] = {}
        self._asked: tuple[Speeds | None, int] = None, 0
        self._loads: list[_RatedSource] = []
        self._loadable_at: dict[int, list[_LoadableSource]] = {}

    def cost(self, speeds: Speeds, stages: int, step_tokens: int, local_blocks: int) -> PrefillCost:
        """The prediction for an instance of these speeds that holds `local_blocks` leading blocks itself."""
        if self._asked[0] is not speeds or self._asked[1] != step_tokens:  # those of a class are asked about in a row
            self._asked, self._loads = (speeds, step_tokens), self._loads_at(speeds, step_tokens)
        local = self._works.get((local_blocks, step_tokens)) or self._work(local_blocks, step_tokens)
        compute_s = least_s = work_seconds(speeds, *local)
        best, least_blocks, shape = None, max(local_blocks, self._threshold * local_blocks), self._shape
        for load in self._loads:
            source, blocks, rest, rest_s, rate = load
            if blocks > least_blocks:
                nbytes = (rest.prefix_tokens - local.prefix_tokens) * shape.token_bytes
                load_s = source.read_s(rate, nbytes, source.cold_blocks(local_blocks) * self._block_bytes)
                both_s = overlapped_seconds(source.wait_s + load_s, rest_s, shape.layers)
                if both_s < least_s and load_s:
                    best, least_s, read_s = load, both_s, load_s
        if best is None:
            own_s = compute_s if stages == 1 else pipelined_seconds(compute_s, steps=local.steps, stages=stages)
            fixed_s = fixed_seconds(speeds, local, compute_s, own_s)
            return PrefillCost(0.0, own_s, compute_s / stages, local_blocks, "", 0.0, fixed_s)
        source, blocks, rest, compute_s, _ = best
        own_s, busy_s = compute_s, max(compute_s / stages, read_s)
        if stages > 1:
            own_s = pipelined_seconds(own_s, steps=rest.steps, stages=stages)
            least_s = overlapped_seconds(source.wait_s + read_s, own_s, shape.layers)
        fixed_s, cold = fixed_seconds(speeds, rest, compute_s, own_s), source.cold_blocks(local_blocks)
        return PrefillCost(least_s - own_s, own_s, busy_s, blocks, source.id, read_s, fixed_s, cold)

    def alone_s(self, speeds: Speeds, stages: int, step_tokens: int, blocks: int) -> float:
        """Seconds to the first token on an idle instance that holds `blocks` leading blocks and loads nothing."""
        work = self._works.get((blocks, step_tokens)) or self._work(blocks, step_tokens)
        compute_s = work_seconds(speeds, *work)
        return compute_s if stages == 1 else pipelined_seconds(compute_s, steps=work.steps, stages=stages)

    def _loads_at(self, speeds: Speeds, step_tokens: int) -> list[_RatedSource]:
        """What an instance of these speeds could load."""
        loadable = self._loadable_at.get(step_tokens)
        if loadable is None:
            loadable = [(it, it.blocks, self._work(it.blocks, step_tokens)) for it in self._sources]
            self._loadable_at[step_tokens] = loadable
        return [
            (source, blocks, rest, work_seconds(speeds, *rest), source.rate(speeds))
            for source, blocks, rest in loadable
        ]

    def _work(self, blocks: int, step_tokens: int) -> PrefillWork:
        """Work left behind `blocks` leading blocks."""
        prefix = self._shape.reused_tokens(self._tokens, blocks)
        new = self._tokens - prefix
        work = self._works[blocks, step_tokens] = work_of(new, prefix, steps_of(new, step_tokens))
        return work


def fixed_seconds(speeds: Speeds, work: PrefillWork, compute_s: float, own_s: float) -> float:
    """Fixed part of the seconds that work takes in a pipeline; `compute_s` is the work stage after stage."""
    return work.steps * speeds.prefill_base_s * (own_s / compute_s) if compute_s else 0.0


def steps_of(tokens: int, step_tokens: int) -> int:
    """Steps that `tokens` tokens take; `step_tokens` 0 = all in one step."""
    return -(-tokens // step_tokens) if step_tokens else 1


class DecodeLatencyModel:
    """Predicts one request's answer on any decode instance."""

    def __init__(self, demand: Demand, shape: KVShape) -> None:
        self._prompt_tokens = demand.prompt_tokens
        self._tokens = demand.decode_tokens
        self._choices = demand.choices
        self._context_tokens = demand.prompt_tokens * demand.choices
        self._total_blocks = demand.total_blocks
        self._shape = shape
        self._lacking: dict[int, int] = {}
        self._needs: dict[int, int] = {}

    def blocks(self, answer_tokens: int) -> int:
        """Blocks that the request is expected to need if answers are expected to have `answer_tokens` tokens."""
        blocks = self._needs.get(answer_tokens)
        if blocks is None:
            need = MemoryNeed(self._prompt_tokens, self._total_blocks, self._choices)
            blocks = expected_blocks(self._shape, need, answer_tokens)
            self._needs[answer_tokens] = blocks
        return blocks

    def fixed_s(self, speeds: Speeds, held_blocks: int) -> float:
        """Seconds of the request on an idle instance: receiving the KV it lacks, and its own share of steps."""
        receive_s = transfer_seconds(speeds, self._lacking_bytes(held_blocks))
        return receive_s + self._tokens * decode_step_seconds(speeds, self._choices, self._context_tokens)

    def load_s(self, step_load_s: float) -> float:
        """Seconds added by what runs there already, which makes each step longer by `step_load_s`."""
        return self._tokens * step_load_s

    def choice(
        self, name: str, speeds: Speeds, sequences: int, context_tokens: int, held_blocks: int, blocks: int
    ) -> DecodeChoice:
        """The prediction for an instance with this load; `blocks` is the expected memory of the request."""
        tbt_s = decode_step_seconds(speeds, sequences + self._choices, context_tokens + self._context_tokens)
        receive_s = transfer_seconds(speeds, self._lacking_bytes(held_blocks))
        return DecodeChoice(name, tbt_s, receive_s + self._tokens * tbt_s, blocks)

    def _lacking_bytes(self, held_blocks: int) -> int:
        nbytes = self._lacking.get(held_blocks)
        if nbytes is None:
            held = min(held_blocks * self._shape.block_tokens, self._prompt_tokens)
            nbytes = self._lacking[held_blocks] = (self._prompt_tokens - held) * self._shape.token_bytes
        return nbytes


class MemoryNeed(NamedTuple):
    """What the memory of a request depends on: tokens now, blocks with its longest answers, number of answers."""

    tokens: int
    longest: int
    choices: int = 1


def expected_blocks(shape: KVShape, need: MemoryNeed, answer_tokens: int) -> int:
    """Blocks that a request is expected to need.

    Args:
        shape: of the KV.
        need: of the request.
        answer_tokens: length that the decode instance expects of an answer; 0 = not reported: the longest.
    """
    if not answer_tokens:
        return need.longest
    return min(shape.blocks_for_choices(need.tokens, answer_tokens, need.choices), need.longest)


def step_load_s(speeds: Speeds, sequences: int, context_tokens: int) -> float:
    """Seconds that what runs on a decode instance adds to each step."""
    return speeds.decode_per_sequence_s * sequences + speeds.decode_per_context_token_s * context_tokens


class BusySpan(NamedTuple):
    """When something computes, in seconds from now."""

    begin_s: float
    end_s: float


ALWAYS_BUSY = BusySpan(0.0, inf)


def contended_seconds(work_s: float, busy_spans: Sequence[BusySpan], slow: float) -> tuple[float, float]:
    """Seconds that work takes beside other engines of its host, and the share of it done while they compute.

    Args:
        work_s: seconds of the work alone.
        busy_spans: when other engines compute; may overlap.
        slow: factor by which work takes longer while they compute.
    """
    at, left_s, shared_s = 0.0, work_s, 0.0
    for begin_s, end_s in sorted(busy_spans):
        alone_s = max(0.0, begin_s - at)
        if alone_s >= left_s:
            break
        at, left_s = at + alone_s, left_s - alone_s
        with_s = min(left_s * slow, max(0.0, end_s - at))
        at, left_s, shared_s = at + with_s, left_s - with_s / slow, shared_s + with_s / slow
    return at + left_s, shared_s / work_s if work_s else 0.0


LOAD_BUCKETS = 5
"""Load buckets by other requests on the host: 0, 1, 2-3, 4-7, 8 and more. Each is learned apart."""
OVERHEAD_SAMPLES = 15
"""Samples whose median is the overhead: a few long ones do not count, and it follows the load of the machine."""
FIRST_SLOWDOWN, SLOWDOWN_SPREAD = 1.5, 0.5
"""Prior for the slowdown while other engines of the host compute: mean, standard deviation."""
MAX_SLOWDOWN = 6.0
CHANGE_SAMPLES = 16
"""Prompts in a row beyond the gate that are taken for a change."""
LEARNING_DRIFT = 5e-3
"""Drift of the coefficients: if times differ by a third, the last twenty prompts count most."""
MIN_ERROR_S = 0.005
"""Errors of shorter predictions count as if the prediction were this long, seconds."""


def load_bucket(others: int) -> int:
    """The load bucket of `others` other requests on the host."""
    return min(others.bit_length(), LOAD_BUCKETS - 1)


def nearest_bucket(bucket: int, known: list[bool]) -> int | None:
    """The nearest bucket for which something is known; None = there is none."""
    return min((it for it in range(LOAD_BUCKETS) if known[it]), key=lambda it: (abs(it - bucket), it), default=None)


class OverheadModel:
    """Seconds that requests take beside the predicted work: medians by load bucket."""

    __slots__ = ("_latest", "_medians")

    def __init__(self) -> None:
        self._latest: list[tuple[float, ...]] = [()] * LOAD_BUCKETS
        self._medians = [0.0] * LOAD_BUCKETS

    def seconds(self, others: int) -> float:
        """The median with `others` other requests; if nothing was measured, that of the nearest bucket."""
        return self._medians[load_bucket(others)]

    def observe(self, others: int, seconds: float) -> None:
        """Learns the overhead of a request."""
        bucket = load_bucket(others)
        self._latest[bucket] = (*self._latest[bucket][-OVERHEAD_SAMPLES + 1 :], max(seconds, 0.0))
        known = [bool(latest) for latest in self._latest]
        near = [self._latest[it] for bucket in range(LOAD_BUCKETS) if (it := nearest_bucket(bucket, known)) is not None]
        self._medians = [sorted(latest)[len(latest) // 2] for latest in near]

    @property
    def state(self) -> tuple[tuple[float, ...], ...]:
        """Everything that later predictions depend on."""
        return tuple(self._latest)


class BucketedRegression:
    """A regression for each load bucket. It begins with the coefficients of the nearest bucket.

    Args:
        first: coefficients before anything was measured.
        spreads: how uncertain each is.
    """

    __slots__ = ("_first", "_regressions", "_spreads")

    def __init__(self, first: Sequence[float], spreads: Sequence[float]) -> None:
        self._first, self._spreads = tuple(first), tuple(spreads)
        self._regressions: list[Regression | None] = [None] * LOAD_BUCKETS

    def coefficients(self, others: int) -> tuple[float, ...]:
        """The coefficients with `others` other requests; if nothing was measured, those of the nearest bucket."""
        near = nearest_bucket(load_bucket(others), [one is not None for one in self._regressions])
        found = None if near is None else self._regressions[near]
        return self._first if found is None else found.coefficients

    def observe(self, others: int, sizes: Sequence[float], seconds: float, known_s: float = 0.0) -> None:
        """See `Regression.observe`."""
        bucket = load_bucket(others)
        one = self._regressions[bucket]
        if one is None:
            first = self.coefficients(others)
            one = Regression(first, self._spreads, change=CHANGE_SAMPLES, drift=LEARNING_DRIFT, least_s=MIN_ERROR_S)
            self._regressions[bucket] = one
        one.observe(sizes, seconds, known_s)

    @property
    def state(self) -> tuple[object, ...]:
        """Everything that later predictions depend on."""
        return tuple(None if one is None else one.state for one in self._regressions)


class SlowdownModel:
    """Factor by which work takes longer while other engines of its host compute, by load bucket.

    Args:
        first: factor before anything was measured. 1 = other engines cost nothing, as of emulated engines: it stays 1.
    """

    __slots__ = ("_learnt",)

    def __init__(self, first: float = FIRST_SLOWDOWN) -> None:
        self._learnt = BucketedRegression((first,), (SLOWDOWN_SPREAD if first > 1.0 else 0.0,))

    def of(self, others: int) -> float:
        """The factor with `others` other requests; if nothing was measured, that of the nearest bucket."""
        return min(max(self._learnt.coefficients(others)[0], 1.0), MAX_SLOWDOWN)

    def observe(self, others: int, beside_s: float, alone_s: float, seconds: float) -> None:
        """Learns from work of `beside_s` beside other engines and `alone_s` without them, both as they take alone."""
        self._learnt.observe(others, (beside_s,), seconds, alone_s)

    @property
    def state(self) -> tuple[object, ...]:
        """Everything that later predictions depend on."""
        return self._learnt.state


LATER_SHARE = 0.25
"""Prior for the tail: share of a full step that later prompts take of the step in which a waiting prompt ends."""
FIRST_FACTORS = LatencyParts(tail=LATER_SHARE)
FACTOR_SPREADS = LatencyParts(queue=0.2, load=0.2, fixed=0.2, growing=0.2, tail=0.25)
"""Standard deviations of the factors before anything was measured."""
SHARED_HOST_SPREADS = FACTOR_SPREADS._replace(fixed=0.3, growing=0.5)
"""The same if other programs may use the cores: an instance reports its speed with all of them."""


class PrefillCorrections:
    """Speeds of a prefill instance: those that it reports, corrected by what its prompts took.

    A prompt's time at its instance, from arrival to first token, is the sum of `LatencyParts`, each times its factor.
    The factors begin with 1. All are learned together: with a regression of their own, waiting prompts would keep a
    factor that one misleading idle prompt taught.

    - `growing` and `fixed`: if other programs use the cores, work that grows with tokens takes longer, the rest hardly.
    - `tail`: later prompts fill the step in which a waiting prompt ends, whatever the length of the queue.
    - `overheads`: what is left of the time that the conductor measures: calls, tokenising, tokens on their way.
    - `slowdown_model`: a prompt takes longer while other engines of its host compute, the more so the more requests the
      host has. Only prompts that were expected to run beside others teach it.

    An instance learns from each of its steps, too, and reports that. The factors are about what it cannot see. They
    learn slowly: otherwise both would learn one slow moment, and it would count twice.

    Args:
        reported: the speeds that the instance reports.
        alone: the instance takes no cores from others, nor they from it, as emulated engines.

    Attributes:
        overheads: seconds beside the predicted work.
        factors: of each part.
        slowdown_model: slowdown beside other engines.
    """

    __slots__ = ("_learnt", "_reported", "_speeds", "factors", "overheads", "slowdown_model")

    def __init__(self, reported: Speeds, *, alone: bool = False) -> None:
        self._reported = reported
        self.overheads = OverheadModel()
        self._learnt = Regression(
            FIRST_FACTORS,
            FACTOR_SPREADS if alone else SHARED_HOST_SPREADS,
            change=CHANGE_SAMPLES,
            drift=LEARNING_DRIFT,
            least_s=MIN_ERROR_S,
        )
        self.slowdown_model = SlowdownModel(1.0 if alone else FIRST_SLOWDOWN)
        self._speeds: Speeds | None = None
        self.factors = FIRST_FACTORS

    @property
    def speeds(self) -> Speeds:
        """The corrected speeds; the same object until something changes."""
        if self._speeds is None:
            _, load, fixed, growing, _ = self.factors
            same = load == fixed == growing == 1.0
            self._speeds = self._reported if same else self._reported.slowed_prefill(growing, load, fixed)
        return self._speeds

    def report(self, speeds: Speeds) -> None:
        """Takes the speeds that the instance reports. The learned factors stay."""
        if speeds != self._reported:
            self._reported, self._speeds = speeds, None

    def slowdown(self, work: PrefillWork) -> float:
        """Factor by which some work takes longer than by the reported speeds."""
        reported_s = work_seconds(self._reported, *work)
        return work_seconds(self.speeds, *work) / reported_s if reported_s else self.factors.growing

    def observe(
        self,
        foreseen: LatencyParts,
        by: LatencyParts,
        there_s: float,
        shared: float | None = None,
        others: int = 0,
    ) -> None:
        """Learns from the seconds between a prompt's arrival at its instance and its first token.

        Args:
            foreseen: predicted seconds of each part.
            by: the factors in the prediction.
            there_s: seconds measured by the instance.
            shared: share of the work expected beside other engines; None = the host has none.
            others: requests on the host when the prompt was placed.
        """
        sizes = LatencyParts(*[seconds / factor for seconds, factor in zip(foreseen, by, strict=True)])
        if shared:
            whole_s = self._learnt.seconds(sizes)
            self.slowdown_model.observe(others, shared * whole_s, (1.0 - shared) * whole_s, there_s)
            there_s /= 1.0 + shared * (self.slowdown_model.of(others) - 1.0)
        self._learnt.observe(sizes, there_s)
        self.factors, self._speeds = LatencyParts(*self._learnt.coefficients), None

    @property
    def state(self) -> tuple[object, ...]:
        """Everything that later predictions depend on."""
        return self._reported, *self._learnt.state, *self.slowdown_model.state, *self.overheads.state


class TpotForecast(NamedTuple):
    """Forecast of an answer's time per output token (TPOT), seconds.

    Attributes:
        tbt_s: time between tokens that decode predicted when it reserved memory; 0 = none.
        tpot_s: mean over the answer; 0 = no forecast.
        others: requests on the host when the answer was placed.
    """

    tbt_s: float = 0.0
    tpot_s: float = 0.0
    others: int = 0


NO_TPOT_FORECAST = TpotForecast()
FIRST_TPOT = (0.01, 1.0, 0.0)
"""Prior: seconds once, factor of steps as predicted at the reservation, factor of steps as at the instance's start."""
TPOT_SPREADS = (0.05, 0.5, 1.0)
"""Standard deviations of the prior."""


class TpotModel:
    """Learns how long answers take at a decode instance.

    Three terms: seconds once, a factor of the steps as predicted at the reservation, and a factor of the steps as they
    took at the instance's start. The prediction follows the load of the moment; what slows steps down later does not.

    Args:
        step_s: seconds of a step of one sequence, as the instance reported at its start.
    """

    __slots__ = ("_learnt", "_step_s")

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._learnt = BucketedRegression(FIRST_TPOT, TPOT_SPREADS)

    def forecast(self, tbt_s: float, steps: float, others: int, *, joins: bool) -> TpotForecast:
        """Forecast for an answer of `steps` tokens after the first; `joins`: prefill computes the first, not decode."""
        once_s, *factors = self._learnt.coefficients(others)
        step_s = factors[0] * tbt_s + factors[1] * self._step_s
        return TpotForecast(tbt_s, step_s + (once_s / max(steps, 1.0) if joins else 0.0), others)

    def observe(self, foreseen: TpotForecast, steps: int, seconds: float) -> None:
        """Learns from the seconds between an answer's first token and its last, `steps` later."""
        sizes = 1.0, steps * foreseen.tbt_s, steps * self._step_s
        self._learnt.observe(foreseen.others, sizes, seconds)

    @property
    def state(self) -> tuple[object, ...]:
        """Everything that later predictions depend on."""
        return self._step_s, self._learnt.state


def _length_bounds() -> tuple[int, ...]:
    exact = (2 ** (quarter / 4) for quarter in range(81))
    return tuple(sorted({round(bound) for bound in exact}))


LENGTH_BOUNDS = _length_bounds()
"""The last length of each interval: 1, 2, 3, 4, 5, 6, 7, 8, 10, ... 1,048,576 tokens."""
PRIOR_ANSWERS = 8.0
"""Weight of the parent stratum's probability, in answers."""
LENGTH_WINDOW = 1024
"""Answers after which the counts of a stratum are halved, so that old answers fade."""
MAX_STRATA = 4096
"""Most strata; those that began an answer least recently are forgotten."""
MIN_LOG_SURVIVAL = -30.0
"""Logarithm of the least probability of outliving an interval: a product of such is still a number."""
CURVE_REFRESH = 32
"""A curve is computed anew after a share of 1 / `CURVE_REFRESH` more answers have ended, at least one."""
Stratum = tuple[str, ...]
"""() is all requests, (tenant,) a tenant, (tenant, bucket) a tenant's prompts of similar length."""


def stratum_of(tenant: str, prompt_tokens: int) -> Stratum:
    """The stratum of a request; lengths of prompts within a factor of four are alike."""
    return tenant, str((prompt_tokens.bit_length() + 1) // 2)


@dataclass(slots=True)
class _LengthCounts:
    """Answers by interval; `total`: all that have ended."""

    ended: list[float] = field(default_factory=lambda: [0.0] * len(LENGTH_BOUNDS))
    outlived: list[float] = field(default_factory=lambda: [0.0] * len(LENGTH_BOUNDS))
    total: int = 0
    recent: float = 0.0

    def end(self, interval: int) -> None:
        self.ended[interval] += 1.0
        self.total += 1
        self.recent += 1.0
        if self.recent >= LENGTH_WINDOW:
            self.recent /= 2
            self.ended = [count / 2 for count in self.ended]
            self.outlived = [count / 2 for count in self.outlived]


@dataclass(slots=True)
class _RunningAnswer:
    stratum: Stratum
    interval: int = 0


class OutputLengthModel:
    """Forecasts lengths of answers from those that have ended.

    Args:
        assumed: mean length before any has ended.
    """

    def __init__(self, assumed: int = 256) -> None:
        widths = [bound - before for before, bound in zip((0, *LENGTH_BOUNDS), LENGTH_BOUNDS, strict=False)]
        self._prior = tuple([max(-width / assumed, MIN_LOG_SURVIVAL) for width in widths])
        self._counts: OrderedDict[Stratum, _LengthCounts] = OrderedDict({(): _LengthCounts()})
        self._running: dict[int, _RunningAnswer] = {}
        self._curves: dict[Stratum, tuple[int, tuple[float, ...]]] = {}

    def __len__(self) -> int:
        """Answers that are followed."""
        return len(self._running)

    # --- what is seen -----------------------------------------------------------------------------------------------

    def begin(self, number: int, stratum: Stratum) -> None:
        """An answer has its first token; an answer that is followed already is fine."""
        if number in self._running:
            return
        self._running[number] = _RunningAnswer(stratum)
        for one in _with_parents(stratum):
            if one not in self._counts:
                self._counts[one] = _LengthCounts()
            self._counts.move_to_end(one)
        while len(self._counts) > MAX_STRATA:
            forgotten, _ = self._counts.popitem(last=False)
            self._curves.pop(forgotten, None)

    def grew(self, number: int, tokens: int) -> None:
        """An answer has `tokens` tokens and goes on, as far as is known; unknown numbers are fine."""
        running = self._running.get(number)
        if running is None or tokens <= LENGTH_BOUNDS[running.interval]:
            return
        reached = min(bisect_left(LENGTH_BOUNDS, tokens), len(LENGTH_BOUNDS) - 1)
        for counts in self._of(running.stratum):
            for interval in range(running.interval, reached):
                counts.outlived[interval] += 1.0
        running.interval = reached

    def ended(self, number: int, tokens: int) -> None:
        """An answer has ended by itself after `tokens` tokens; unknown numbers are fine."""
        self.grew(number, tokens)
        running = self._running.pop(number, None)
        if running is not None:
            for counts in self._of(running.stratum):
                counts.end(running.interval)

    def removed(self, number: int) -> None:
        """An answer was cut off or given up, so its length is not known; unknown numbers are fine."""
        self._running.pop(number, None)

    def _of(self, stratum: Stratum) -> list[_LengthCounts]:
        return [self._counts[one] for one in _with_parents(stratum) if one in self._counts]

    # --- what is expected -------------------------------------------------------------------------------------------

    def outlives(self, stratum: Stratum, tokens: float, so_far: float = 0.0) -> float:
        """Probability that an answer that has more than `so_far` tokens has more than `tokens`."""
        curve = self._curve(stratum)
        return exp(min(_curve_at(curve, tokens) - _curve_at(curve, so_far), 0.0))

    def expected(self, stratum: Stratum, longest: int, least: int = 0) -> float:
        """Mean length of an answer that has at least `least` tokens and is cut off at `longest`."""
        curve, before = self._curve(stratum), min(least, longest)
        mean, known, share = float(before), _curve_at(curve, before), 1.0
        for bound in LENGTH_BOUNDS[bisect_left(LENGTH_BOUNDS, before + 1) :]:
            if before >= longest:
                break
            end, share_before = min(bound, longest), share
            share = exp(_curve_at(curve, end) - known)
            mean += (end - before) * (share_before + share) / 2
            before = end
        return mean

    def _curve(self, stratum: Stratum) -> tuple[float, ...]:
        """Logarithm of the probability of outliving each bound, and 0 before the first."""
        while stratum not in self._counts:
            stratum = stratum[:-1]
        total = self._counts[()].total
        known = self._curves.get(stratum)
        if known is not None and total - known[0] < max(1, known[0] // CURVE_REFRESH):
            return known[1]
        steps = self._prior
        for one in reversed(_with_parents(stratum)):
            steps = self._steps(one, steps) if one in self._counts else steps
        curve, height = [0.0], 0.0
        for step in steps:
            height += step
            curve.append(height)
        self._curves[stratum] = total, tuple(curve)
        return tuple(curve)

    def _steps(self, stratum: Stratum, parent: tuple[float, ...]) -> tuple[float, ...]:
        """Logarithms of the probabilities of outliving each interval, once it is reached."""
        counts = self._counts[stratum]
        three = zip(counts.ended, counts.outlived, parent, strict=True)
        return tuple(
            [
                log((outlived + PRIOR_ANSWERS * exp(above)) / (ended + outlived + PRIOR_ANSWERS))
                for ended, outlived, above in three
            ]
        )

    def digest(self) -> bytes:
        """Hash of the state."""
        return digest_of(self._counts, self._running, self._curves)

    def check_invariants(self) -> None:
        """Asserts that the root stratum is the sum of all tenants, as long as none was forgotten or has faded."""
        root = self._counts[()]
        assert all(count >= 0.0 for count in (*root.ended, *root.outlived))
        if root.total < LENGTH_WINDOW and len(self._counts) < MAX_STRATA:
            tenants = [counts for stratum, counts in self._counts.items() if len(stratum) == 1]
            assert root.total == sum(counts.total for counts in tenants)
        assert set(self._curves) <= set(self._counts)
        assert len(self._counts) <= MAX_STRATA


def _with_parents(stratum: Stratum) -> list[Stratum]:
    """The stratum and its parents, up to the root."""
    return [stratum[:length] for length in range(len(stratum), -1, -1)]


def _curve_at(curve: tuple[float, ...], tokens: float) -> float:
    """The curve between its borders: straight in the logarithm."""
    if tokens <= 0.0:
        return 0.0
    place = bisect_left(LENGTH_BOUNDS, tokens)
    if place >= len(LENGTH_BOUNDS):
        return curve[-1]
    before = LENGTH_BOUNDS[place - 1] if place else 0
    share = (tokens - before) / (LENGTH_BOUNDS[place] - before)
    return curve[place] + share * (curve[place + 1] - curve[place])


@frozen
class SloLimits:
    """What a request expects, seconds; None = no limit.

    `queue_s`: so long it waits at the conductor rather than being refused, which does not count in `ttft_s`.
    """

    ttft_s: float | None = None
    tbt_s: float | None = None
    queue_s: float = 0.0
