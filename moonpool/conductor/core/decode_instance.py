"""A decode instance as the conductor knows it: its answers and its memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from moonpool.base.scheduling.latency import Speeds, decode_step_seconds, prefill_seconds
from moonpool.base.scheduling.state_machine import digest_of
from moonpool.conductor.core.health_monitor import HealthMonitor
from moonpool.conductor.core.instances import InstanceFacts, LoadFacts
from moonpool.conductor.core.kv_links import KVLink
from moonpool.conductor.core.output_lengths import Stratum
from moonpool.conductor.core.prefill_instance import PrefillInstanceState
from moonpool.conductor.core.tpot_model import TpotModel
from moonpool.conductor.placement.base import DecodeLoad, make

TYPICAL_BATCH, TYPICAL_CONTEXT = 4, 2048
"""Sequences and context tokens of the step by which an instance's speed is judged."""


@dataclass(slots=True)
class DecodeInstanceState:
    """One decode instance.

    Attributes:
        speeds: as the instance reports them; learns from the instance's steps.
        answers: answers that this conductor has placed here, by claim.
        tpot: what answers took here.
        prompts: the instance's prompts, if it is in the role both; None for plain decode.
        unreported, unreported_blocks: sequences and blocks of these that no report includes.
        prompts_s: predicted seconds of this conductor's prompts that plain decode computes, until their first tokens.
        own_sequences, own_context_tokens: totals over all these answers.
        sequences: sequences in the last report and answers that the report does not include; at least `own_sequences`.
        context_tokens: total over all sequences. Tokens of this conductor's answers since they were placed are in
            reports only.
        available_blocks: blocks that could be reserved.
    """

    facts: InstanceFacts
    slot: int
    speeds: Speeds
    load: LoadFacts
    turn: int = 0
    answers: dict[int, PlacedAnswer] = field(default_factory=dict)
    health: HealthMonitor = field(default_factory=HealthMonitor)
    tpot: TpotModel = field(init=False)
    link: KVLink = field(default_factory=KVLink)
    prompts: PrefillInstanceState | None = None
    prompts_s: float = 0.0
    own_sequences: int = 0
    unreported: int = 0  # of these, those that no report includes
    unreported_blocks: int = 0
    own_context_tokens: int = 0
    sequences: int = field(init=False)
    context_tokens: int = field(init=False)
    available_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        self.tpot = TpotModel(decode_step_seconds(self.speeds, 1, TYPICAL_CONTEXT))
        self.count()

    @property
    def busy(self) -> bool:
        """Whether an answer of this conductor is here."""
        return bool(self.answers)

    @property
    def there(self) -> DecodeLoad:
        blocks = self.available_blocks, self.facts.total_blocks
        return make(DecodeLoad, (self.sequences, self.context_tokens, *blocks, self.turn))

    @property
    def least_chunk_s(self) -> float:
        """Seconds by which prompts that wait here lengthen a step at least: of one block; 0 if none waits."""
        prompts, shape = self.prompts, self.facts.shape
        if prompts is None or shape is None or not (prompts.prompts or prompts.load.queued_tokens):
            return 0.0
        return prefill_seconds(self.speeds, shape.block_size, 0, begins=False)

    def count(self) -> None:
        """Count sequences, context and memory anew: the last report, and answers that the report does not include."""
        load = self.load
        self.sequences = max(load.running + load.waiting + self.unreported, self.own_sequences)
        self.context_tokens = max(load.context_tokens, self.own_context_tokens)
        self.available_blocks = load.free_blocks + load.cached_blocks - load.promised_blocks - self.unreported_blocks

    def claim(self, number: int, answer: PlacedAnswer) -> None:
        """Count an answer, or several together, from now on."""
        self.answers[number] = answer
        self.own_sequences += answer.sequences
        self.unreported += answer.sequences
        self.unreported_blocks += answer.blocks
        self.own_context_tokens += answer.context_tokens
        self.prompts_s += answer.prompt_s
        self.count()

    def grew(self, number: int, tokens: int, now: float) -> None:
        """Note that an answer has `tokens` tokens now: its prompt is computed."""
        answer = self.answers[number]
        answer.generated, answer.reported_at = tokens, now
        self._drop_prompt(answer)

    def _drop_prompt(self, answer: PlacedAnswer) -> None:
        if answer.prompt_s:
            answer.prompt_s = 0.0
            self.prompts_s = sum([other.prompt_s for other in self.answers.values()])

    def acknowledged(self, claim: int, number: int) -> None:
        """The instance has reserved memory for a claim, as the `number`-th reservation.

        The last report may include the reservation already.
        """
        answer = self.answers[claim]
        answer.number = number
        if 0 < number <= self.load.taken and not answer.covered:
            self._cover(answer)
            self.count()

    def release(self, number: int) -> None:
        answer = self.answers.pop(number)
        self._drop_prompt(answer)
        self.own_sequences -= answer.sequences
        self.own_context_tokens -= answer.context_tokens
        if not answer.covered:
            self._cover(answer)
        self.count()

    def report(self, load: LoadFacts, now: float, slow_factor: float) -> None:
        """Take a load report, which includes the first `taken` reservations of the instance."""
        self.load = load
        if load.speeds is not None:
            seconds = decode_step_seconds(load.speeds, TYPICAL_BATCH, TYPICAL_CONTEXT)
            idle = not load.running + load.waiting
            speeds = self.health.report(load.speeds, seconds, now, slow_factor, idle=idle)
            if speeds != self.speeds:  # equal speeds stay the same object, by which ranks know them
                self.speeds = speeds
        if self.unreported:
            for answer in self.answers.values():
                if not answer.covered and answer.number is not None and answer.number <= load.taken:
                    self._cover(answer)
        self.count()

    def _cover(self, answer: PlacedAnswer) -> None:
        answer.covered = True
        self.unreported -= answer.sequences
        self.unreported_blocks -= answer.blocks

    def digest(self) -> bytes:
        reported = self.facts, self.slot, self.speeds, self.load
        return digest_of(*reported, self.turn, self.answers, self.health, self.tpot.state, self.link)

    def check_invariants(self) -> None:
        """Assert that the sums are those of the answers."""
        counted = self.sequences, self.context_tokens, self.available_blocks
        self.count()
        assert counted == (self.sequences, self.context_tokens, self.available_blocks)
        open_ones = [answer for answer in self.answers.values() if not answer.covered]
        assert self.own_sequences == sum(answer.sequences for answer in self.answers.values())
        assert self.unreported == sum(answer.sequences for answer in open_ones)
        assert self.unreported_blocks == sum(answer.blocks for answer in open_ones)
        assert self.own_context_tokens == sum(answer.context_tokens for answer in self.answers.values())
        assert abs(self.prompts_s - sum(answer.prompt_s for answer in self.answers.values())) < 1e-6


@dataclass(slots=True)
class PlacedAnswer:
    """An answer, or several to one prompt, that this conductor has placed at a decode instance.

    Attributes:
        context_tokens, blocks: of all answers together, as they were placed.
        sequences: number of answers.
        stratum: stratum whose forecasts for answer lengths apply.
        reported_at: time of `generated`; time at which the answer is expected to begin while that is 0.
        generated: tokens so far.
        number: the instance's own number of the reservation; 0 = the instance gives no number, None = not known yet.
        covered: the last report includes the answer, so the answer's blocks are not counted any more.
        prompt_s: predicted seconds for which plain decode computes the prompt; 0 = elsewhere, or done.
    """

    context_tokens: int
    blocks: int
    sequences: int = 1
    stratum: Stratum = ()
    reported_at: float = 0.0
    generated: int = 0
    number: int | None = None
    covered: bool = False
    prompt_s: float = 0.0
