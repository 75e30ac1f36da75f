"""The contracts of placement policies, and what they decide by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

make = tuple.__new__
"""Makes a named tuple of a class and the values, in half the time that the constructor takes."""


class PlacementPolicy(Protocol):
    """How the prefill instance of a request is chosen. A policy keeps no state: equal arguments give equal answers.

    Attributes:
        stores: kvstores and other instances' pools count. A prefix is loaded from there if loading is predicted to be
            quicker than computing, and new blocks are written to kvstores. Otherwise instances use their own blocks.
    """

    @property
    def stores(self) -> bool: ...

    def order(self, candidates: Candidates, limit: int) -> Sequence[PrefillChoice]:
        """Return the best of the candidates, best first; at least one, and not many more than `limit`.

        The first one is taken. The others are kept for `explain`.
        """
        ...


class Candidates(ABC):
    """The prefill instances that a request may go to, and predictions of the prompt on each.

    Attributes:
        now: seconds on `RankedInstance.load`'s clock; the load is the time at which an instance will be free.
        request: what is placed.
        arrivals: what was placed lately.
    """

    now: float
    request: PlacementRequest
    arrivals: Arrivals

    @property
    @abstractmethod
    def holders(self) -> Sequence[StoredPrefix]:
        """Kvstores and other instances that the prompt's prefix may be loaded from, where the policy wants them."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[RankedInstance]:
        """Return all instances, in a fixed order: when each will be free, when each was chosen last, and the name."""

    @abstractmethod
    def draw(self, limit: int, counter: int) -> int:
        """An integer in [0, limit), random by the conductor's seed, the number of this decision and `counter`."""

    @abstractmethod
    def predict(self, instance: RankedInstance) -> PrefillChoice:
        """Predict the prompt on an instance, in some microseconds."""

    @abstractmethod
    def least(
        self, limit: int, by: Callable[[PrefillChoice], float], cost: Callable[[PrefillCost], float]
    ) -> list[PrefillChoice]:
        """Return the predictions with the least seconds, best first, without a look at each instance.

        Equal predictions are ordered by: narrower pipeline (a wide pipeline is worth more to a long prompt), idle
        longest, chosen least recently. A starved instance, which has served nothing while others were preferred for
        long, is considered as well.

        Args:
            limit: predictions wanted; there may be one more.
            by: the seconds.
            cost: the seconds on an idle instance; `by` must be `cost` and the wait, or the wait alone.
        """

    @abstractmethod
    def wait(self, choice: PrefillChoice, delay_s: float) -> QueueWait:
        """Return the prompt's wait at an instance if the prompt stands `delay_s` behind its arrival in the queue there.

        Args:
            choice: the prediction for the instance.
            delay_s: prompts of the same tenant go first that arrived, with their own delays, before this time. Not
                negative.
        """

    @abstractmethod
    def keeping(self, choices: Sequence[PrefillChoice]) -> Sequence[PrefillChoice]:
        """Return the same choices; the first that keeps the request's TTFT limit goes before those that do not."""


class SessionFacts(NamedTuple):
    """The session that a request is a turn of, as this conductor knows the session.

    Attributes:
        turns: earlier turns that were placed.
        prefill: instance to which the last of them went; "" = there was none.
        last: the client has said that no further turn follows.
    """

    turns: int = 0
    prefill: str = ""
    last: bool = False


class PlacementRequest(NamedTuple):
    """The request that is placed.

    Attributes:
        prompt_tokens: to compute or to find: the prompt and, of a continued answer, the tokens generated before.
        prompt_blocks: KV blocks of these tokens.
        answer_tokens: expected from decode, of each answer.
        tenant: the request's tenant.
        priority: among the tenant's requests; lower ones go first.
        limit_s: seconds from now within which the first token is wanted; None = no limit was told.
        session: what is known of the request's session; None = the request names none.
    """

    prompt_tokens: int
    prompt_blocks: int
    answer_tokens: int = 0
    tenant: str = ""
    priority: int = 0
    limit_s: float | None = None
    session: SessionFacts | None = None


class Arrivals(NamedTuple):
    """Placements of this conductor over the last minute, and the queues. Means over the instances.

    Attributes:
        prompts_per_s: prompts placed at an instance, per second.
        busy_share: predicted seconds of work placed at an instance, per second; above 1, queues grow.
        backlog_s: seconds until an instance is free.
        usual_backlog_s: the same, over the last ten minutes.
        sole_share: share of the prompts' blocks that one instance alone held. With about this probability a block that
            leaves a cache is asked for again, and is nowhere else.
    """

    prompts_per_s: float
    busy_share: float
    backlog_s: float
    usual_backlog_s: float = 0.0
    sole_share: float = 0.0


class StoredPrefix(NamedTuple):
    """A kvstore or another instance that holds a prefix of the prompt.

    Attributes:
        id: the store's or instance's id.
        blocks: leading blocks held.
        memory_blocks: those of them in memory; the others are on SSD.
        peer: a prefill or decode instance.
    """

    id: str
    blocks: int
    memory_blocks: int
    peer: bool


class QueueWait(NamedTuple):
    """A place in an instance's queue: predicted seconds until the place is reached, and how many prompts are behind."""

    seconds: float
    behind: int


class InstanceLoad(NamedTuple):
    """What is at an instance besides the prompt.

    Attributes:
        prompts: running and waiting, of all conductors.
        tokens: prompt tokens that have no KV yet.
        busy_share: predicted seconds of work that this conductor placed there over the last minute, per second.
        free_blocks, total_blocks: of the pool; cached blocks count as used.
        stages: the pipeline's stages.
    """

    prompts: int = 0
    tokens: int = 0
    busy_share: float = 0.0
    free_blocks: int = 0
    total_blocks: int = 0
    stages: int = 1


NOTHING_THERE = InstanceLoad()


class RankedInstance(NamedTuple):
    """An instance's rank within the class: least load first, then least recently chosen, then by name."""

    load: float
    turn: int
    name: str
    slot: int


class PrefillChoice(NamedTuple):
    """A prompt's prediction on one prefill instance. Times are seconds.

    Attributes:
        id: the instance's id.
        local_blocks: leading blocks held there now, or when prompts in flight are computed.
        used_blocks: leading blocks that need no computing, loaded blocks included.
        queue_s: wait for earlier prompts: all present prompts, or those before the place chosen by the policy.
        load_s: loading the prefix, as far as computing does not hide the load.
        prefill_s: computing.
        busy_s: delay that this prompt causes for the next; less than the prompt's own time if pipeline stages overlap.
        source: instance to load from; "" = none.
        excluded: why the instance cannot be used; "" = usable.
        overhead_s: calls, tokenising, tokens on their way.
        others: prompts that were at the instance.
        growing_s: part of `prefill_s` that grows with tokens, by the speeds that the instance reports.
        rest_s: the other seconds at the instance, queue and loading among them.
        read_s: time for which the source's link is busy.
        tail_s: later prompts in the step in which this one ends.
        cold_blocks: blocks to read that are on the source's SSD only.
        there: what else is at the instance.
        work_s: `busy_s` by the speeds that the instance reports. What the conductor has learnt of identical instances
            differs by chance; a term that is many times the work must not grow with that.
        delay_s: the prompt stands this many seconds behind its arrival in the queue there, and `queue_s` is the wait
            for that place; None = first come, first served. A policy sets both (`with_place`).
    """

    id: str
    local_blocks: int
    used_blocks: int
    queue_s: float
    load_s: float
    prefill_s: float
    busy_s: float
    source: str = ""
    excluded: str = ""
    overhead_s: float = 0.0
    others: int = 0
    growing_s: float = 0.0
    rest_s: float = 0.0
    read_s: float = 0.0
    tail_s: float = 0.0
    cold_blocks: int = 0
    there: InstanceLoad = NOTHING_THERE
    work_s: float = 0.0
    delay_s: float | None = None

    def with_place(self, delay_s: float, wait: QueueWait) -> PrefillChoice:
        """Return the choice with a place in the instance's queue, as `Candidates.wait` predicts the place."""
        rest_s = self.rest_s - self.queue_s + wait.seconds
        # Done for each candidate: `_replace` takes five times as long.
        return tuple.__new__(PrefillChoice, (*self[:3], wait.seconds, *self[4:12], rest_s, *self[13:18], delay_s))

    @property
    def alone_s(self) -> float:
        """Predicted TTFT on an idle instance."""
        return self.overhead_s + self.load_s + self.prefill_s

    @property
    def known_s(self) -> float:
        """Predicted TTFT without later prompts: used for comparing instances."""
        return self.queue_s + self.alone_s

    @property
    def ttft_s(self) -> float:
        """Predicted TTFT with later prompts: used for checking limits."""
        return self.known_s + self.tail_s


class PrefillCost(NamedTuple):
    """Seconds for a prompt on an idle instance, and the prefix used; fields as in `PrefillChoice`."""

    load_s: float
    prefill_s: float
    busy_s: float
    used_blocks: int
    source: str
    read_s: float = 0.0
    fixed_s: float = 0.0
    cold_blocks: int = 0

    @property
    def alone_s(self) -> float:
        """Time to first token."""
        return self.load_s + self.prefill_s


class DecodePolicy(Protocol):
    """How the decode instances of a request are ordered.

    A policy keeps no state: equal arguments give equal answers.
    """

    def order(self, candidates: DecodeCandidates, limit: int) -> Sequence[DecodeChoice]:
        """The best of the candidates, best first, about `limit`; none if there are none. They are asked in turn."""
        ...


class DecodeCandidates(ABC):
    """Decode instances that a request may go to. Instances with free memory are told apart from the others.

    Attributes:
        request: what is placed.
    """

    request: PlacementRequest

    @abstractmethod
    def __iter__(self) -> Iterator[RankedInstance]:
        """Return all instances, in a fixed order; `load` is the seconds that what runs there adds to a step."""

    @abstractmethod
    def predict(self, instance: RankedInstance) -> DecodeChoice:
        """Predict the answer on an instance, in some microseconds."""

    @abstractmethod
    def least(self, limit: int) -> list[DecodeChoice]:
        """Return the predictions of the instances where the answer is expected to end soonest, without a look at each.

        A starved instance, which has served nothing while others were preferred for long, is considered as well.
        """


class DecodeLoad(NamedTuple):
    """What is at a decode instance besides the request.

    Attributes:
        sequences: running and waiting, of all conductors.
        context_tokens: total over all of these.
        available_blocks: could be reserved now.
        total_blocks: the pool's blocks.
        turn: when the instance was chosen last, as in `RankedInstance`.
    """

    sequences: int = 0
    context_tokens: int = 0
    available_blocks: int = 0
    total_blocks: int = 0
    turn: int = 0


NOTHING_RUNS = DecodeLoad()


class DecodeChoice(NamedTuple):
    """A request's prediction on one decode instance. Times are seconds.

    Attributes:
        id: the instance's id.
        tbt_s: between tokens.
        finish_s: until the request has ended there.
        blocks: that the request is expected to need there.
        held_blocks: leading blocks of the prompt that the instance holds.
        compared_s: `finish_s`, or less for an instance that has long served nothing.
        others_s: what all sequences that run there lose by the request together.
        there: what else is at the instance.
    """

    id: str
    tbt_s: float
    finish_s: float
    blocks: int = 0
    held_blocks: int = 0
    compared_s: float = 0.0
    others_s: float = 0.0
    there: DecodeLoad = NOTHING_RUNS
