"""The decode instances: what runs on each, what will run there later, and which is best for an answer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from moonpool.base.frozen import frozen
from moonpool.base.scheduling.latency import Speeds, decode_step_seconds
from moonpool.base.scheduling.state_machine import digest_of, thin_out
from moonpool.conductor.core.instances import (
    SHORTLIST,
    HealthMonitor,
    InstanceFacts,
    InstancePool,
    LoadFacts,
    LoadRanking,
    blocks_at,
)
from moonpool.conductor.core.latency_model import (
    DecodeLatencyModel,
    Demand,
    KVLink,
    OutputLengthModel,
    Stratum,
    TpotModel,
    step_load_s,
)
from moonpool.conductor.core.prefix_index import slots_in
from moonpool.conductor.placement.base import (
    DecodeCandidates,
    DecodeChoice,
    DecodeLoad,
    DecodePolicy,
    PlacementRequest,
    RankedInstance,
    make,
)
from moonpool.conductor.placement.decode_policies import DECODE_POLICIES, DEFAULT_DECODE_POLICY

CLASS_WIDTH = 1.5
"""Factor by which measured speeds of identical instances differ on noisy machines."""
TYPICAL_BATCH, TYPICAL_CONTEXT = 4, 2048
"""Sequences and context tokens of the step by which an instance's speed is judged."""
TRANSFER_BYTES = 1 << 28
"""Bytes of KV by which transfers are compared."""


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
    """

    context_tokens: int
    blocks: int
    sequences: int = 1
    stratum: Stratum = ()
    reported_at: float = 0.0
    generated: int = 0
    number: int | None = None
    covered: bool = False


@dataclass(slots=True)
class DecodeInstanceState:
    """One decode instance.

    Attributes:
        speeds: as the instance reports them; learns from the instance's steps.
        answers: answers that this conductor has placed here, by claim.
        tpot: what answers took here.
        unreported, unreported_blocks: sequences and blocks of these that no report includes.
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
        """What is here."""
        blocks = self.available_blocks, self.facts.total_blocks
        return make(DecodeLoad, (self.sequences, self.context_tokens, *blocks, self.turn))

    def count(self) -> None:
        """Counts sequences, context and memory anew: the last report, and answers that the report does not include."""
        load = self.load
        self.sequences = max(load.running + load.waiting + self.unreported, self.own_sequences)
        self.context_tokens = max(load.context_tokens, self.own_context_tokens)
        self.available_blocks = load.free_blocks + load.cached_blocks - load.promised_blocks - self.unreported_blocks

    def claim(self, number: int, answer: PlacedAnswer) -> None:
        """Counts an answer, or several together, from now on."""
        self.answers[number] = answer
        self.own_sequences += answer.sequences
        self.unreported += answer.sequences
        self.unreported_blocks += answer.blocks
        self.own_context_tokens += answer.context_tokens
        self.count()

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
        """Stops counting an answer."""
        answer = self.answers.pop(number)
        self.own_sequences -= answer.sequences
        self.own_context_tokens -= answer.context_tokens
        if not answer.covered:
            self._cover(answer)
        self.count()

    def report(self, load: LoadFacts, now: float, slow_factor: float) -> None:
        """Takes a load report, which includes the first `taken` reservations of the instance."""
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
        """Hash of the state."""
        reported = self.facts, self.slot, self.speeds, self.load
        return digest_of(*reported, self.turn, self.answers, self.health, self.tpot.state, self.link)

    def check_invariants(self) -> None:
        """Asserts that the sums are those of the answers."""
        counted = self.sequences, self.context_tokens, self.available_blocks
        self.count()
        assert counted == (self.sequences, self.context_tokens, self.available_blocks)
        open_ones = [answer for answer in self.answers.values() if not answer.covered]
        assert self.own_sequences == sum(answer.sequences for answer in self.answers.values())
        assert self.unreported == sum(answer.sequences for answer in open_ones)
        assert self.unreported_blocks == sum(answer.blocks for answer in open_ones)
        assert self.own_context_tokens == sum(answer.context_tokens for answer in self.answers.values())


class DecodePool(InstancePool[DecodeInstanceState]):
    """All decode instances, ranked by what runs on them.

    Args:
        policy: orders those that may take a request.
    """

    def __init__(self, policy: DecodePolicy = DECODE_POLICIES[DEFAULT_DECODE_POLICY]) -> None:
        super().__init__(LoadRanking(CLASS_WIDTH, TypicalDecodeSeconds()))
        self._policy = policy

    def rank(self, instance: DecodeInstanceState) -> None:
        """Ranks an instance anew, after a change in load or speeds."""
        sequences, context = instance.sequences, instance.context_tokens
        self.ranks.put(
            instance.slot,
            instance.speeds,
            lambda speeds: step_load_s(speeds, sequences, context),
            instance.turn,
            instance.facts.id,
        )

    def available_of(self, decode: str) -> tuple[int, int]:
        """Blocks that an instance could reserve now, and all the instance's blocks; (0, 0) if not taking requests."""
        instance = self.get(decode)
        if instance is None or instance.load.draining:
            return 0, 0
        return instance.available_blocks, instance.facts.total_blocks

    def answer_tokens(self, decode: str) -> int:
        """Tokens that an instance expects a new answer to have; 0 = not reported."""
        instance = self.get(decode)
        return instance.load.answer_tokens if instance is not None else 0

    def choose(
        self,
        demand: Demand,
        model: DecodeLatencyModel,
        prefixes: Sequence[tuple[int, int]],
        suspects: int,
        request: PlacementRequest,
        domain: str,
    ) -> list[DecodeChoice]:
        """A few instances of a KV domain that could take the request, best first; none if no instance is large enough.

        Instances without free memory by their last report come after the others: the report may be stale, and
        `CallReserve` decides. Memory is counted for the answer that each instance expects, not for the longest.
        Instances of the mask `suspects`, which failed this request before, come last.
        """
        able = self.eligible_mask(demand.total_blocks, demand.needs, self.domain_mask(domain))
        choices: list[DecodeChoice] = []
        for allowed in (able & ~suspects, able & suspects):
            for roomy in (True, False):
                if allowed and len(choices) < SHORTLIST:
                    candidates = PoolDecodeCandidates(self, model, prefixes, request, allowed, roomy)
                    choices += self._policy.order(candidates, SHORTLIST - len(choices))
        return choices


@frozen
class PoolDecodeCandidates(DecodeCandidates):
    """Instances of a pool that are large enough and take requests, with free memory or without: `allowed`, a mask."""

    _pool: DecodePool
    _model: DecodeLatencyModel
    _prefixes: Sequence[tuple[int, int]]
    request: PlacementRequest
    _allowed: int
    _roomy: bool

    def __iter__(self) -> Iterator[RankedInstance]:
        return (self._pool.ranks.place(slot) for slot in slots_in(self._allowed) if self._fits(slot))

    def predict(self, instance: RankedInstance) -> DecodeChoice:
        return self._predict(instance.slot, blocks_at(self._prefixes, instance.slot))

    def least(self, limit: int) -> list[DecodeChoice]:
        model, pool = self._model, self._pool
        found = pool.ranks.search(
            self._allowed,
            self._prefixes,
            lambda found, blocks: model.fixed_s(found.speeds, blocks),
            model.load_s,
            limit,
            self._fits,
        )
        places = [(one.place.slot, one.blocks) for one in found]
        starved = pool.starved_slot(self._allowed)
        if starved is not None and self._fits(starved) and all(slot != starved for slot, _ in places):
            places.append((starved, blocks_at(self._prefixes, starved)))
        return [self._predict(slot, blocks) for slot, blocks in places]

    def _fits(self, slot: int) -> bool:
        one = self._pool.by_slot[slot]
        return (one.available_blocks >= self._model.blocks(one.load.answer_tokens)) is self._roomy

    def _predict(self, slot: int, held_blocks: int) -> DecodeChoice:
        one = self._pool.by_slot[slot]
        need = self._model.blocks(one.load.answer_tokens)
        optimism = self._pool.optimism_factor(one)
        return self._model.choice(one.facts.id, one.speeds, one.there, held_blocks, need, optimism)


@frozen
class TypicalDecodeSeconds:
    """Seconds by which decode instances are compared: a small step, a large one, and a transfer.

    A class rather than a function, so that a journal can hold the value.
    """

    def __call__(self, speeds: Speeds) -> tuple[float, float, float]:
        send_s = TRANSFER_BYTES / speeds.transfer_bytes_per_s if speeds.transfer_bytes_per_s else 0.0
        return decode_step_seconds(speeds, 1, 2048), decode_step_seconds(speeds, 64, 131072), send_s


@frozen
class LoadForecast:
    """Sequences and context tokens expected to run; means, so not whole."""

    sequences: float
    context_tokens: float


NO_LOAD = LoadForecast(0.0, 0.0)
FORECAST_POINTS = 8
"""Later times at which a forecast looks at most."""


def load_now(instance: DecodeInstanceState) -> LoadForecast:
    """What runs now, without sequences that are still being prefilled."""
    to_come = [answer for answer in instance.answers.values() if not answer.generated]
    sequences = instance.sequences - sum([answer.sequences for answer in to_come])
    context = instance.context_tokens - sum([answer.context_tokens for answer in to_come])
    return LoadForecast(max(sequences, 0), max(context, 0))


def load_at(instance: DecodeInstanceState, lengths: OutputLengthModel, now: float, at: float) -> LoadForecast:
    """What is expected to run at the time `at`.

    An answer from this conductor counts by the probability that the answer still runs then. Answers of other conductors
    are known from reports only, and are taken to stay. Tokens come at the mean of the step time now and the step time
    then.
    """
    now_s = forecast_step_seconds(instance, load_now(instance)) or 1.0
    then_s = forecast_step_seconds(instance, _load_at(instance, lengths, now, at, now_s)) or 1.0
    return _load_at(instance, lengths, now, at, (now_s + then_s) / 2)


def _load_at(
    instance: DecodeInstanceState, lengths: OutputLengthModel, now: float, at: float, step_s: float
) -> LoadForecast:
    sequences = float(instance.sequences - instance.own_sequences)
    context = float(max(instance.context_tokens - instance.own_context_tokens, 0))
    for answer in instance.answers.values():
        tokens, share = _answer_at(answer, lengths, now, at, step_s)
        sequences += share * answer.sequences
        context += share * (answer.context_tokens + answer.sequences * tokens)
    return LoadForecast(sequences, context)


def _answer_at(
    answer: PlacedAnswer, lengths: OutputLengthModel, now: float, at: float, step_s: float
) -> tuple[float, float]:
    """Tokens that an answer will have, and the probability that the answer runs then."""
    since = (
        answer.reported_at if answer.generated else max(answer.reported_at, now)
    )  # the answer cannot have begun without our knowing
    if at < since:
        return 0.0, 0.0
    tokens = answer.generated + (at - since) / step_s
    so_far = answer.generated + (now - since) / step_s if answer.generated else 0.0
    return tokens, lengths.outlives(answer.stratum, tokens, so_far)


def forecast_step_seconds(
    instance: DecodeInstanceState, forecast: LoadForecast, joining: LoadForecast = NO_LOAD
) -> float:
    """Seconds for a step over the forecast and the joining load."""
    return decode_step_seconds(
        instance.speeds,
        forecast.sequences + joining.sequences,
        forecast.context_tokens + joining.context_tokens,
    )


class LoadForecaster:
    """Forecasts for all decode instances.

    Args:
        decodes: the instances.
        assumed: mean length of answers before any has ended.
    """

    def __init__(self, decodes: DecodePool, assumed: int) -> None:
        self.lengths = OutputLengthModel(assumed)
        """How long answers become."""
        self._decodes = decodes

    def tbt_now(self, decode: str, joining: LoadForecast = NO_LOAD) -> float:
        """Seconds between tokens if `joining` joined what runs there now."""
        instance = self._decodes.get(decode)
        return forecast_step_seconds(instance, load_now(instance), joining) if instance is not None else 0.0

    def tbt_at(self, decode: str, joining: LoadForecast, stratum: Stratum, now: float, at: float) -> float:
        """Seconds between tokens if `joining` joins what is expected to run there at the time `at`.

        The longest over `at` and the later times at which sequences with a reservation begin: these would become too
        slow if only the time `at` counted. `joining` counts there by the probability that the load still runs, as an
        answer from the stratum.
        """
        instance = self._decodes.get(decode)
        if instance is None:
            return 0.0
        then = load_at(instance, self.lengths, now, at)
        step_s = forecast_step_seconds(instance, then, joining)
        later = [it.reported_at for it in instance.answers.values() if not it.generated and it.reported_at > at]
        for time in thin_out(later, FORECAST_POINTS) if step_s else ():
            share = self.lengths.outlives(stratum, (time - at) / step_s)
            left = LoadForecast(share * joining.sequences, share * joining.context_tokens)
            step_s = max(step_s, forecast_step_seconds(instance, load_at(instance, self.lengths, now, time), left))
        return step_s

    def digest(self) -> bytes:
        """Hash of the learned lengths."""
        return self.lengths.digest()

    def check_invariants(self) -> None:
        """Asserts that the learned lengths are consistent."""
        self.lengths.check_invariants()
