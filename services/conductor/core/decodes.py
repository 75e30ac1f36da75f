"""The decode instances: how much runs on each, and which is best for an answer."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from moonpool.core.digest import digest_of
from moonpool.cost import Speeds, decode_step_seconds
from moonpool.frozen import frozen
from services.conductor.core.company import FOREVER, Span
from services.conductor.core.cost import DecodeChoice, DecodeModel, step_load_s
from services.conductor.core.facts import Demand, InstanceFacts, LoadFacts
from services.conductor.core.lengths import Stratum
from services.conductor.core.pace import Pace
from services.conductor.core.pool import Pool, blocks_at
from services.conductor.core.ranks import SHORTLIST, RankClass, Ranks
from services.conductor.core.reads import Link
from services.conductor.core.vigil import Vigil

SPEED_NOISE = 1.5
"""Factor by which measured speeds of identical instances differ on noisy machines; also the width of a class."""
TYPICAL_BATCH, TYPICAL_CONTEXT = 4, 2048
"""Of the step by which an instance's quickness is judged."""
TRANSFER_BYTES = 1 << 28
"""Transfers are compared by the seconds that so much KV takes."""


@dataclass(slots=True)
class Answer:
    """An answer that we have placed, or several to one prompt: context when it was placed, and blocks.

    `made` are its tokens at `told_at`; as long as they are 0, that is when it is expected to begin. `stratum` says how
    long it may become.
    `number` is the instance's own of the promise, 0 if it gives none, None while we have not heard of one. `covered`:
    the last report includes it, so its blocks are not counted any more. `tokens` is how long it is expected to become.
    """

    context_tokens: int
    blocks: int
    sequences: int = 1
    stratum: Stratum = ()
    told_at: float = 0.0
    made: int = 0
    number: int | None = None
    covered: bool = False
    tokens: float = 0.0

    def span(self, now: float, step_s: float) -> Span:
        """When it is expected to run, with steps that take so long; one that is longer than expected ends soon."""
        begin_s = 0.0 if self.made else max(self.told_at - now, 0.0)
        since_s = min(self.told_at - now, 0.0) if self.made else begin_s
        return Span(begin_s, max(since_s + (self.tokens - self.made) * step_s, begin_s + step_s))


@dataclass(slots=True)
class Decode:
    """One instance; `speeds` are as it tells them: it learns from its steps.

    `sequences` are what the last report says and what it did not include, at least our own; `context_tokens` the
    context of all of them, where what our own generated since they were placed shows in reports only; `room_blocks`
    the blocks that could be promised; `others` sequences
    that were not ours by the last report; `pace` what answers took here.
    """

    facts: InstanceFacts
    slot: int
    speeds: Speeds
    load: LoadFacts
    turn: int = 0
    answers: dict[int, Answer] = field(default_factory=dict)
    vigil: Vigil = field(default_factory=Vigil)
    pace: Pace = field(init=False)
    link: Link = field(default_factory=Link)
    own_sequences: int = 0
    unreported: int = 0  # of these, those that no report includes
    unreported_blocks: int = 0
    own_context_tokens: int = 0
    others: int = 0
    sequences: int = field(init=False)
    context_tokens: int = field(init=False)
    room_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        self.pace = Pace(decode_step_seconds(self.speeds, 1, TYPICAL_CONTEXT))
        self.count()

    @property
    def busy(self) -> bool:
        """Whether an answer of ours is here."""
        return bool(self.answers)

    def spans(self, now: float) -> list[Span]:
        """When sequences are expected to run; what others have placed there is taken to stay."""
        if self.others:
            return [FOREVER]
        step_s = decode_step_seconds(self.speeds, self.sequences, self.context_tokens)
        return [answer.span(now, step_s) for answer in self.answers.values()]

    def count(self) -> None:
        """Counts what is there anew: by the last report, and what it did not include."""
        load = self.load
        self.sequences = max(load.running + load.waiting + self.unreported, self.own_sequences)
        self.context_tokens = max(load.context_tokens, self.own_context_tokens)
        self.room_blocks = load.free_blocks + load.cached_blocks - load.promised_blocks - self.unreported_blocks

    def claim(self, number: int, answer: Answer) -> None:
        """Counts an answer, or several together, from now on."""
        self.answers[number] = answer
        self.own_sequences += answer.sequences
        self.unreported += answer.sequences
        self.unreported_blocks += answer.blocks
        self.own_context_tokens += answer.context_tokens
        self.count()

    def known(self, claim: int, number: int) -> None:
        """Notes that the instance has promised room, as its how many-th; the last report may include it already."""
        answer = self.answers[claim]
        answer.number = number
        if 0 < number <= self.load.taken and not answer.covered:
            self._cover(answer)
            self.count()

    def release(self, number: int) -> None:
        """Stops counting an answer."""
        answer = self.answers.pop(number)
        self.own_sequences -= answer.sequences
        self.own_context_tokens -= answer.context_tokens
        if not answer.covered:
            self._cover(answer)
        self.count()

    def report(self, load: LoadFacts, now: float, slow_factor: float) -> None:
        """Takes a report, which includes the answers that the instance has promised room for."""
        self.load = load
        if load.speeds is not None:
            seconds = decode_step_seconds(load.speeds, TYPICAL_BATCH, TYPICAL_CONTEXT)
            idle = not load.running + load.waiting
            believed = self.vigil.hear(load.speeds, seconds, now, slow_factor, idle=idle)
            if believed != self.speeds:  # an equal one stays the same object, by which ranks know it
                self.speeds = believed
        if self.unreported:
            for answer in self.answers.values():
                if not answer.covered and answer.number is not None and answer.number <= load.taken:
                    self._cover(answer)
        ours = sum([answer.sequences for answer in self.answers.values() if answer.covered])
        self.others = max(load.running + load.waiting - ours, 0)
        self.count()

    def _cover(self, answer: Answer) -> None:
        answer.covered = True
        self.unreported -= answer.sequences
        self.unreported_blocks -= answer.blocks

    def digest(self) -> bytes:
        """Hash of the state."""
        told = self.facts, self.slot, self.speeds, self.load
        return digest_of(*told, self.turn, self.answers, self.vigil, self.pace.state, self.link)

    def check_invariants(self) -> None:
        """Asserts that the sums are those of the answers."""
        counted = self.sequences, self.context_tokens, self.room_blocks
        self.count()
        assert counted == (self.sequences, self.context_tokens, self.room_blocks)
        open_ones = [answer for answer in self.answers.values() if not answer.covered]
        assert self.own_sequences == sum(answer.sequences for answer in self.answers.values())
        assert self.unreported == sum(answer.sequences for answer in open_ones)
        assert self.unreported_blocks == sum(answer.blocks for answer in open_ones)
        assert self.own_context_tokens == sum(answer.context_tokens for answer in self.answers.values())


class Decodes(Pool[Decode]):
    """All decode instances, ranked by what runs on them."""

    def __init__(self) -> None:
        super().__init__(Ranks(SPEED_NOISE, TypicalSeconds()))
        self._by_host: dict[str, dict[str, Decode]] = {}

    def add(self, instance: Decode) -> None:
        """Takes an instance in."""
        super().add(instance)
        self._by_host.setdefault(instance.facts.host, {})[instance.facts.id] = instance

    def remove(self, instance: Decode) -> None:
        """Takes an instance out."""
        super().remove(instance)
        there = self._by_host[instance.facts.host]
        del there[instance.facts.id]
        if not there:
            del self._by_host[instance.facts.host]

    def company(self, host: str, now: float) -> list[Span] | None:
        """When instances of a host are expected to compute; None = none is known to be there."""
        there = self._by_host.get(host) if host else None
        return [span for one in there.values() for span in one.spans(now)] if there else None

    def rank(self, instance: Decode) -> None:
        """Ranks an instance anew, after its load or speeds have changed."""
        sequences, context = instance.sequences, instance.context_tokens
        self.ranks.put(
            instance.slot,
            instance.speeds,
            lambda speeds: step_load_s(speeds, sequences, context),
            instance.turn,
            instance.facts.id,
        )

    def room_of(self, decode: str) -> tuple[int, int]:
        """Blocks that an instance could promise now, and all its blocks; (0, 0) when it takes no requests."""
        instance = self.get(decode)
        if instance is None or instance.load.draining:
            return 0, 0
        return instance.room_blocks, instance.facts.total_blocks

    def answer_tokens(self, decode: str) -> int:
        """Tokens that an instance expects a new answer to have; 0 = not told."""
        instance = self.get(decode)
        return instance.load.answer_tokens if instance is not None else 0

    def choose(
        self, demand: Demand, model: DecodeModel, prefixes: Sequence[tuple[int, int]], suspects: int
    ) -> list[DecodeChoice]:
        """The instances that could take the request, best first, a few only; none when none is large enough.

        Those without room by their last report come after the others: the report may be stale, and Reserve decides.
        Room is for what each expects an answer to need, as it is admitted there, and not for the longest.
        Those of the mask `suspects`, which failed this request before, come last.
        """
        able = self.able(demand.total_blocks)

        def roomy(slot: int) -> bool:
            one = self.by_slot[slot]
            return one.room_blocks >= model.blocks(one.load.answer_tokens)

        def crowded(slot: int) -> bool:
            return not roomy(slot)

        choices: list[DecodeChoice] = []
        for allowed in (able & ~suspects, able & suspects):
            for fits in (roomy, crowded):
                if allowed and len(choices) < SHORTLIST:
                    found = self.ranks.search(
                        allowed,
                        prefixes,
                        lambda found, blocks: _cost(model, found, blocks),
                        model.load_s,
                        SHORTLIST - len(choices),
                        fits,
                    )
                    places = [(one.place.slot, one.blocks) for one in found]
                    overlooked = self.overlooked(allowed)
                    if overlooked is not None and fits(overlooked) and all(slot != overlooked for slot, _ in places):
                        places.append((overlooked, blocks_at(prefixes, overlooked)))
                    choices += self._ordered(model, places)
        return choices

    def _ordered(self, model: DecodeModel, found: Sequence[tuple[int, int]]) -> list[DecodeChoice]:
        """By their own speeds. Where these differ by less than noise, the one with fewer sequences is better.

        Otherwise the luckiest measurement at start would draw all light load to one instance.
        """
        rated = []
        for slot, blocks in found:
            one = self.by_slot[slot]
            sequences = one.sequences
            need = model.blocks(one.load.answer_tokens)
            choice = model.choice(one.facts.id, one.speeds, sequences, one.context_tokens, blocks, need)
            rated.append((sequences, choice.finish_s * self.belief(one), one.turn, choice))
        near_s = SPEED_NOISE * min([finish_s for _, finish_s, _, _ in rated], default=0.0)
        order = [
            (sequences if finish_s <= near_s else sys.maxsize, finish_s, turn, choice.id, choice)
            for sequences, finish_s, turn, choice in rated
        ]
        return [choice for *_, choice in sorted(order)]


def _cost(model: DecodeModel, found: RankClass, blocks: int) -> float:
    return model.fixed_s(found.speeds, blocks)


@frozen
class TypicalSeconds:
    """Seconds by which decode instances are compared: a small step, a large one, and a transfer.

    A class and not a function, so that a journal can hold it.
    """

    def __call__(self, speeds: Speeds) -> tuple[float, float, float]:
        send_s = TRANSFER_BYTES / speeds.transfer_bytes_per_s if speeds.transfer_bytes_per_s else 0.0
        return decode_step_seconds(speeds, 1, 2048), decode_step_seconds(speeds, 64, 131072), send_s
