"""Predicted latencies.

Time to first token, time per output token, transfers and output lengths, corrected by what was measured.

`PrefillLatencyModel` is the Mooncake paper's Algorithm 1, with a choice between loading and recomputing a prefix.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log
from typing import NamedTuple

from moonpool.base.frozen import frozen
from moonpool.base.scheduling.latency import (
    DEFAULT_BYTES_PER_S,
    PrefillWork,
    Speeds,
    decode_step_seconds,
    overlapped_seconds,
    pipelined_seconds,
    prompt_work,
    transfer_seconds,
    work_seconds,
)
from moonpool.base.scheduling.regression import Regression
from moonpool.base.scheduling.speed_tracker import learnt_rate
from moonpool.base.scheduling.state_machine import digest_of
from moonpool.conductor.placement.base import DecodeChoice, DecodeLoad, PrefillChoice, PrefillCost

make = tuple.__new__
"""Makes a named tuple of its class and values, in half the time that its constructor takes."""
RATE_WEIGHT = 0.2
"""One read's weight in a link's learned rate."""
RATE_FRESH_S = 60.0
"""Seconds after the last read for which a learned rate counts: a link that seems slow gets another chance."""


class PrefixHolder(NamedTuple):
    """An instance that a request can load a prefix from.

    Attributes:
        id: the instance's id.
        blocks: leading blocks of the request's chain held there.
        wait_s: seconds that reads of this conductor still take there.
        bytes_per_s: the link's learned rate; 0 = not known.
        peer: the instance is an engine, not a kvstore.
        warm: leading blocks in memory; the others may be on SSD only. None = all, as far as is known.
        cold_bytes_per_s: the SSD's learned rate; 0 = not known.
    """

    id: str
    blocks: int
    wait_s: float = 0.0
    bytes_per_s: float = 0.0
    peer: bool = False
    warm: int | None = None
    cold_bytes_per_s: float = 0.0

    def cold_blocks(self, local_blocks: int) -> int:
        """Blocks on SSD only that an instance with `local_blocks` leading blocks would read."""
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
    """One read: predicted seconds (0 if the link is shared), and the share from SSD."""

    seconds: float = 0.0
    cold: float = 0.0

    @classmethod
    def of(cls, choice: PrefillChoice) -> "LinkRead":
        """A choice's read from the source."""
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
        """Learns the rate from a read of `nbytes` in `seconds`, for the tier that gave most bytes."""
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
        """Learns from a read over a link; a read not counted on this link teaches nothing."""
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


@frozen
class Demand:
    """Tokens and blocks that a request needs.

    Attributes:
        prompt_tokens: to compute.
        prompt_blocks: for the prompt at prefill.
        total_blocks: for the prompt and the longest answers at decode.
        decode_tokens: expected from decode, in each of `choices` answers.
        choices: answers that run together.
        needs: sampling options that the instances must have.
    """

    prompt_tokens: int
    prompt_blocks: int
    total_blocks: int
    decode_tokens: int
    choices: int = 1
    needs: tuple[str, ...] = ()


@frozen
class KVShape:
    """Sizes of the served KV.

    Attributes:
        emulated: all engines emulate compute.
        token_bytes: bytes of a token in layers whose KV travels for all tokens.
        window_blocks: blocks whose windowed slices must be there where a prompt is continued; 0 = all slices are
            there wherever a block is.
        window_bytes: bytes of one block's windowed slices, which are not in `token_bytes`.
    """

    block_size: int
    token_bytes: int
    layers: int
    emulated: bool = False
    window_blocks: int = 0
    window_bytes: int = 0

    def moved_bytes(self, tokens: int, held: int) -> int:
        """Bytes that travel if of `tokens` tokens the first `held` are there: of windowed slices the last blocks'."""
        nbytes = max(0, tokens - held) * self.token_bytes
        if not self.window_bytes:
            return nbytes
        blocks = self.blocks_for(tokens) - held // self.block_size
        return nbytes + max(0, min(blocks, self.window_blocks + 1)) * self.window_bytes

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens take."""
        return -(-tokens // self.block_size)

    def reused_tokens(self, tokens: int, blocks: int) -> int:
        """Prompt tokens that need no computing if the first `blocks` blocks are there.

        The last token is always computed: its logits give the answer's first token.
        """
        return min(blocks * self.block_size, tokens - 1)

    def blocks_for_choices(self, tokens: int, answer_tokens: int, choices: int) -> int:
        """Blocks for `choices` answers that share the full blocks of their first `tokens` tokens."""
        shared = tokens // self.block_size
        return shared + choices * (self.blocks_for(tokens + answer_tokens) - shared)


class PrefillLatencyModel:
    """Predicts one request's prompt on any instance.

    Args:
        demand: the request's.
        shape: KV shape.
        sources: a few instances that a prefix may be loaded from.
        threshold: a prefix elsewhere must be this many times longer than the instance's own.
    """

    def __init__(self, demand: Demand, shape: KVShape, sources: Sequence[PrefixHolder], threshold: float) -> None:
        self._tokens = demand.prompt_tokens
        self._shape = shape
        self.sources = sources
        self._block_bytes = shape.block_size * shape.token_bytes
        self._layers = shape.layers or 1
        self._threshold = threshold
        self._works: dict[tuple[int, int], PrefillWork] = {}
        self._loads: dict[int, list[tuple[PrefixHolder, int, PrefillWork]]] = {}
        """By tokens of a step: prefixes that may be loaded, their blocks, and the work after each."""

    def cost(
        self, speeds: Speeds, stages: int, max_num_batched_tokens: int, local_blocks: int, *, loads: bool = True
    ) -> PrefillCost:
        """The prediction for an instance with these speeds and `local_blocks` leading blocks.

        `loads`: the instance can load a longer prefix from others.
        """
        local = self._works.get((local_blocks, max_num_batched_tokens)) or self._work(
            local_blocks, max_num_batched_tokens
        )
        # Asked some twenty times for each request: what is short stands here in full, and constructors are passed by.
        base_s, token_s, pair_s = speeds.prefill_base_s, speeds.prefill_per_token_s, speeds.prefill_per_pair_s
        prompt_s, cached_s = speeds.prefill_per_prompt_s, speeds.prefill_per_cached_token_s
        steps, new, pairs, prefix = local
        compute_s = least_s = (prompt_s + cached_s * prefix) + (steps * base_s + token_s * new + pair_s * pairs)
        best, shape, threshold = None, self._shape, self._threshold
        least_blocks = threshold * local_blocks if threshold > 1.0 else local_blocks
        rate_here = speeds.load_bytes_per_s or DEFAULT_BYTES_PER_S
        peer_rate_here = speeds.peer_bytes_per_s or rate_here
        for load in self._loads.get(max_num_batched_tokens) or self._loadable(max_num_batched_tokens) if loads else ():
            source, blocks, (steps, new, pairs, longer) = load
            if blocks <= least_blocks:
                continue
            rest_s = (prompt_s + cached_s * longer) + (steps * base_s + token_s * new + pair_s * pairs)
            if rest_s >= least_s:
                continue  # a load takes at least the work after its prefix
            nbytes = shape.moved_bytes(longer, prefix) if shape.window_bytes else (longer - prefix) * shape.token_bytes
            _, _, wait_s, rate_there, peer, warm, _ = source
            rate = peer_rate_here if peer else rate_here  # as `PrefixHolder.rate`
            if rate_there and rate_there < rate:
                rate = rate_there
            if warm is None:
                load_s = nbytes / rate
            else:
                load_s = source.read_s(rate, nbytes, source.cold_blocks(local_blocks) * self._block_bytes)
            busy_s = wait_s + load_s
            if busy_s >= least_s:
                continue  # nor less than the load
            shorter_s, longer_s = (busy_s, rest_s) if busy_s < rest_s else (rest_s, busy_s)
            both_s = longer_s + shorter_s / self._layers  # as `overlapped_seconds`
            if both_s < least_s and load_s:
                best, least_s, best_s, read_s = load, both_s, rest_s, load_s
        if best is None:
            steps = local.steps
            own_s = compute_s if stages == 1 else pipelined_seconds(compute_s, steps=steps, stages=stages)
            fixed_s = steps * base_s * (own_s / compute_s) if compute_s else 0.0
            return make(PrefillCost, (0.0, own_s, compute_s / stages, local_blocks, "", 0.0, fixed_s, 0))
        source, blocks, rest = best
        own_s, busy_s = best_s, max(best_s / stages, read_s)
        if stages > 1:
            own_s = pipelined_seconds(own_s, steps=rest.steps, stages=stages)
            least_s = overlapped_seconds(source.wait_s + read_s, own_s, shape.layers)
        fixed_s = rest.steps * base_s * (own_s / best_s) if best_s else 0.0
        cold = source.cold_blocks(local_blocks) if source.warm is not None else 0
        return make(PrefillCost, (least_s - own_s, own_s, busy_s, blocks, source.id, read_s, fixed_s, cold))

    def alone_s(self, speeds: Speeds, stages: int, max_num_batched_tokens: int, blocks: int) -> float:
        """Seconds to the first token on an idle instance with `blocks` leading blocks, loading nothing."""
        work = self._works.get((blocks, max_num_batched_tokens)) or self._work(blocks, max_num_batched_tokens)
        compute_s = work_seconds(speeds, *work)
        return compute_s if stages == 1 else pipelined_seconds(compute_s, steps=work.steps, stages=stages)

    def _loadable(self, max_num_batched_tokens: int) -> list[tuple[PrefixHolder, int, PrefillWork]]:
        """The prefixes that may be loaded."""
        found = self._loads[max_num_batched_tokens] = [
            (it, it.blocks, self._work(it.blocks, max_num_batched_tokens)) for it in self.sources
        ]
        return found

    def _work(self, blocks: int, max_num_batched_tokens: int) -> PrefillWork:
        """Work left behind `blocks` leading blocks."""
        prefix = self._shape.reused_tokens(self._tokens, blocks)
        work = self._works[blocks, max_num_batched_tokens] = prompt_work(self._tokens, prefix, max_num_batched_tokens)
        return work


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
        """Seconds for the request on an idle instance: receiving missing KV, and the request's own share of steps."""
        receive_s = transfer_seconds(speeds, self._lacking_bytes(held_blocks))
        return receive_s + self._tokens * decode_step_seconds(speeds, self._choices, self._context_tokens)

    def load_s(self, step_load_s: float) -> float:
        """Seconds added by what runs there already, which makes each step longer by `step_load_s`."""
        return self._tokens * step_load_s

    def choice(
        self, name: str, speeds: Speeds, there: DecodeLoad, held_blocks: int, blocks: int, optimism: float = 1.0
    ) -> DecodeChoice:
        """The prediction for an instance with this load.

        Args:
            name: the instance's name.
            speeds: the instance's speeds.
            there: what else is at the instance.
            held_blocks: leading blocks of the prompt that are there.
            blocks: expected memory of the request.
            optimism: factor of the time by which instances are compared.
        """
        # Asked for each candidate: `decode_step_seconds` stands here in full.
        sequences, context_tokens, tokens = there.sequences, there.context_tokens, self._tokens
        base_s, sequence_s = speeds.decode_base_s, speeds.decode_per_sequence_s
        context_s = speeds.decode_per_context_token_s
        more, longer = sequences + self._choices, context_tokens + self._context_tokens
        tbt_s = base_s + sequence_s * more + context_s * longer
        finish_s = transfer_seconds(speeds, self._lacking_bytes(held_blocks)) + tokens * tbt_s
        longer_s = tbt_s - (base_s + sequence_s * sequences + context_s * context_tokens) if sequences else 0.0
        others_s = sequences * tokens * longer_s
        return make(DecodeChoice, (name, tbt_s, finish_s, blocks, held_blocks, finish_s * optimism, others_s, there))

    def _lacking_bytes(self, held_blocks: int) -> int:
        nbytes = self._lacking.get(held_blocks)
        if nbytes is None:
            held = min(held_blocks * self._shape.block_size, self._prompt_tokens)
            nbytes = self._lacking[held_blocks] = self._shape.moved_bytes(self._prompt_tokens, held)
        return nbytes


class MemoryNeed(NamedTuple):
    """What a request's memory depends on: tokens now, blocks with the longest answers, number of answers."""

    tokens: int
    longest: int
    choices: int = 1


def expected_blocks(shape: KVShape, need: MemoryNeed, answer_tokens: int) -> int:
    """Blocks that a request is expected to need.

    Args:
        shape: KV shape.
        need: the request's.
        answer_tokens: length that the decode instance expects of an answer; 0 = not reported: the longest.
    """
    if not answer_tokens:
        return need.longest
    return min(shape.blocks_for_choices(need.tokens, answer_tokens, need.choices), need.longest)


def step_load_s(speeds: Speeds, sequences: int, context_tokens: int) -> float:
    """Seconds that what runs on a decode instance adds to each step."""
    return speeds.decode_per_sequence_s * sequences + speeds.decode_per_context_token_s * context_tokens


LOAD_BUCKETS = 5
"""Load buckets by prompts at the prefill instance: 0, 1, 2-3, 4-7, 8 and more. Each is learned apart."""
OVERHEAD_SAMPLES = 15
"""Samples whose median is the overhead: a few long samples do not count, and the median follows the machine's load."""
CHANGE_SAMPLES = 16
"""Prompts in a row beyond the gate that are taken for a change."""
LEARNING_DRIFT = 5e-3
"""Drift of the coefficients: if times differ by a third, the last twenty prompts count most."""
MIN_ERROR_S = 0.005
"""Errors of shorter predictions count as if the prediction were this long, seconds."""


def load_bucket(others: int) -> int:
    """The load bucket of a prefill instance with `others` prompts."""
    return min(others.bit_length(), LOAD_BUCKETS - 1)


class OverheadModel:
    """Seconds that requests take beside the predicted work: the median of the latest."""

    __slots__ = ("_latest", "seconds")

    def __init__(self) -> None:
        self._latest: tuple[float, ...] = ()
        self.seconds = 0.0

    def observe(self, seconds: float) -> None:
        """Learns the overhead of a request."""
        self._latest = (*self._latest[-OVERHEAD_SAMPLES + 1 :], max(seconds, 0.0))
        self.seconds = sorted(self._latest)[len(self._latest) // 2]

    @property
    def state(self) -> tuple[float, ...]:
        """Everything that later predictions depend on."""
        return self._latest


GROWING_SPREAD, SHARED_HOST_SPREAD = 0.2, 0.5
"""Standard deviation of the factor before anything was measured; the second if other programs may use the cores."""


class PrefillCorrections:
    """A prefill instance's speeds: reported, and corrected by what prompts took.

    - `growing`: factor of computing that grows with tokens. If other programs use the cores, prompts take longer than
      the instance reports, which assumes all the instance's cores; the fixed part of a step and the queue hardly do.
    - `overhead`: what is left of the time that the conductor measures: calls, tokenising, tokens on their way.

    An instance learns from each step, too, and reports the speeds. The factor covers what the instance cannot see. The
    factor
    is learnt slowly: otherwise both would learn one slow moment, which would count twice.

    Args:
        reported: the speeds that the instance reports.
        alone: the instance neither takes cores from others nor loses cores to them, as emulated engines.

    Attributes:
        overhead: seconds beside the predicted work.
    """

    __slots__ = ("_learnt", "_reported", "_speeds", "overhead")

    def __init__(self, reported: Speeds, *, alone: bool = False) -> None:
        self._reported = self._speeds = reported
        self.overhead = OverheadModel()
        self._learnt = Regression(
            (1.0,),
            (GROWING_SPREAD if alone else SHARED_HOST_SPREAD,),
            change=CHANGE_SAMPLES,
            drift=LEARNING_DRIFT,
            least_s=MIN_ERROR_S,
        )

    @property
    def growing(self) -> float:
        """Factor of what grows with tokens."""
        return self._learnt.coefficients[0]

    @property
    def speeds(self) -> Speeds:
        """The corrected speeds; the same object until something changes."""
        return self._speeds

    def report(self, speeds: Speeds) -> None:
        """Takes the speeds that the instance reports. The learned factor stays."""
        if speeds != self._reported:
            self._reported = speeds
            self._correct()

    def slowdown(self, work: PrefillWork) -> float:
        """Factor by which some work takes longer than by the reported speeds."""
        reported_s = work_seconds(self._reported, *work)
        return work_seconds(self._speeds, *work) / reported_s if reported_s else self.growing

    def observe(self, growing_s: float, rest_s: float, there_s: float) -> None:
        """Learns from the seconds between a prompt's arrival at the instance and the first token.

        Args:
            growing_s: predicted by the reported speeds: what grows with tokens.
            rest_s: predicted: all else.
            there_s: measured by the instance.
        """
        self._learnt.observe((growing_s,), there_s, rest_s)
        self._correct()

    def _correct(self) -> None:
        factor = self.growing
        self._speeds = self._reported if factor == 1.0 else self._reported.slowed_prefill(factor, fixed_factor=1.0)

    @property
    def state(self) -> tuple[object, ...]:
        """Everything that later predictions depend on."""
        return self._reported, *self._learnt.state, *self.overhead.state


class TpotForecast(NamedTuple):
    """Forecast of an answer's time per output token (TPOT), seconds.

    Attributes:
        tbt_s: time between tokens that decode predicted when reserving memory; 0 = none.
        tpot_s: mean over the answer; 0 = no forecast.
        others: prompts that were at the prefill instance when the answer was placed.
    """

    tbt_s: float = 0.0
    tpot_s: float = 0.0
    others: int = 0


NO_TPOT_FORECAST = TpotForecast()
TPOT_SPREAD = 1.0
"""Standard deviation of the steps that are added, before anything was measured."""


class TpotModel:
    """Learns by how much answers take longer at a decode instance than their reserved steps.

    The time between tokens at the reservation follows the load of the moment. Later load adds a multiple of `step_s`,
    learnt for each load bucket. A bucket begins with the nearest bucket's multiple, the first bucket with 0.

    Args:
        step_s: seconds for a step over one sequence, as reported at the start.
    """

    __slots__ = ("_added", "_step_s")

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._added: list[Regression | None] = [None] * LOAD_BUCKETS

    def forecast(self, tbt_s: float, others: int) -> TpotForecast:
        """Forecast for an answer with reserved steps of `tbt_s`, and `others` prompts at the prefill instance."""
        return TpotForecast(tbt_s, tbt_s + self._steps(others) * self._step_s, others)

    def observe(self, foreseen: TpotForecast, steps: int, seconds: float) -> None:
        """Learns from the seconds between an answer's first token and the last token, `steps` later."""
        bucket = load_bucket(foreseen.others)
        learnt = self._added[bucket]
        if learnt is None:
            first = (self._steps(foreseen.others),)
            learnt = Regression(first, (TPOT_SPREAD,), change=CHANGE_SAMPLES, drift=LEARNING_DRIFT, least_s=MIN_ERROR_S)
            self._added[bucket] = learnt
        learnt.observe((steps * self._step_s,), seconds, steps * foreseen.tbt_s)

    def _steps(self, others: int) -> float:
        bucket = load_bucket(others)
        known = [(abs(it - bucket), it, learnt) for it, learnt in enumerate(self._added) if learnt is not None]
        return min(known)[2].coefficients[0] if known else 0.0

    @property
    def state(self) -> tuple[object, ...]:
        """Everything that later predictions depend on."""
        return self._step_s, *[None if learnt is None else learnt.state for learnt in self._added]


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
"""Logarithm of the least probability for outliving an interval: a product of such is still a number."""
CURVE_REFRESH = 32
"""A curve is computed anew after 1 / `CURVE_REFRESH` more answers have ended, at least one."""
Stratum = tuple[str, ...]
"""() is all requests, (tenant,) a tenant."""


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
        """An answer has a first token; an answer that is followed already is fine."""
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
        """An answer has ended normally after `tokens` tokens; unknown numbers are fine."""
        self.grew(number, tokens)
        running = self._running.pop(number, None)
        if running is not None:
            for counts in self._of(running.stratum):
                counts.end(running.interval)

    def removed(self, number: int) -> None:
        """An answer was cut off or given up, so the full length is unknown; unknown numbers are fine."""
        self._running.pop(number, None)

    def _of(self, stratum: Stratum) -> list[_LengthCounts]:
        return [self._counts[one] for one in _with_parents(stratum) if one in self._counts]

    # --- what is expected -------------------------------------------------------------------------------------------

    def outlives(self, stratum: Stratum, tokens: float, so_far: float = 0.0) -> float:
        """Probability that an answer that has more than `so_far` tokens has more than `tokens`."""
        curve = self._curve(stratum)
        return exp(min(_curve_at(curve, tokens) - _curve_at(curve, so_far), 0.0))

    def _curve(self, stratum: Stratum) -> tuple[float, ...]:
        """Logarithm of the probability for outliving each bound, and 0 before the first."""
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
        """Logarithms of the probabilities for outliving each interval, once reached."""
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
    """The stratum and all parents, up to the root."""
    return [stratum[:length] for length in range(len(stratum), -1, -1)]


def _curve_at(curve: tuple[float, ...], tokens: float) -> float:
    """The curve between two borders: straight in the logarithm."""
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

    `queue_s`: longest wait at the conductor before a refusal, not counted in `ttft_s`.
    """

    ttft_s: float | None = None
    tbt_s: float | None = None
    queue_s: float = 0.0
