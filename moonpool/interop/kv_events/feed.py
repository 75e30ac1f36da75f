"""One rank's stream of event batches, without gaps: asks for lost batches, and notices an engine restart.

An engine numbers batches from 0 and keeps the last batches for replay. Each replay starts at the last applied batch, so
that the replay's first batch proves that the numbers mean the same engine.
"""

from dataclasses import dataclass, field

from moonpool.base.frozen import frozen
from moonpool.interop.kv_events.events import EventBatch

MAX_HELD = 8192
"""Batches that wait for the end of a replay; when there are more, the oldest are dropped, and asked for again."""


@frozen
class BatchArrived:
    """A batch came. `batch` None: not readable."""

    number: int
    batch: EventBatch | None


@frozen
class BatchReplayed:
    """A batch of a replay came; `replay` is the number of the order."""

    replay: int
    number: int
    batch: EventBatch | None


@frozen
class ReplayEnded:
    """A replay is over; not `complete`: the rest did not come in time."""

    replay: int
    complete: bool


@frozen
class Interrupted:
    """The connection was lost and is there again: batches may be missing, or the engine is another one."""


@frozen
class AskReplay:
    """Order: ask the engine for all batches from a number on."""

    replay: int
    start: int


@frozen
class ApplyBatch:
    """Order: apply a batch."""

    batch: EventBatch


@frozen
class ForgetBlocks:
    """Order: forget all held blocks. `restarted`: the engine is another one."""

    restarted: bool


FeedEvent = BatchArrived | BatchReplayed | ReplayEnded | Interrupted
FeedAction = AskReplay | ApplyBatch | ForgetBlocks


@dataclass(slots=True)
class EventFeed:
    """One rank's batches, in order.

    Attributes:
        gaps: times that batches were missing.
        lost: times that not all missing batches could be had again.
    """

    gaps: int = 0
    lost: int = 0
    _next: int | None = None  # number of the batch that comes next; None = any
    _last: tuple[int, float] | None = None  # number and time of the batch applied last
    _replay: int = 0  # number of the last replay
    _replaying: bool = False
    _replayed: bool = False  # whether a batch of the replay has come
    _held: list[BatchArrived] = field(default_factory=list)

    @property
    def settled(self) -> bool:
        """Whether no replay is under way."""
        return not self._replaying

    def start(self) -> list[FeedAction]:
        """Begin: ask for all that the engine still has."""
        return [self._ask()]

    def handle(self, event: FeedEvent) -> list[FeedAction]:
        """Take an event; return the resulting orders."""
        match event:
            case BatchArrived() if self._replaying:
                # Live batches wait: the replay may show that the numbers are another engine's.
                self._held.append(event)
                del self._held[:-MAX_HELD]
                return []
            case BatchArrived():
                return self._arrived(event)
            # Answers to an earlier order are ignored: the last order asks for the same batches again.
            case BatchReplayed() if self._replaying and event.replay == self._replay:
                return self._take_replayed(event)
            case ReplayEnded() if self._replaying and event.replay == self._replay:
                return self._replay_ended(complete=event.complete)
            case Interrupted():
                return [self._ask()]
        return []

    def _ask(self) -> AskReplay:
        self._replay += 1
        self._replaying, self._replayed = True, False
        # From the last applied batch on, not the next: its time proves that the engine is the same (ADR 60).
        return AskReplay(self._replay, 0 if self._last is None else self._last[0])

    def _arrived(self, event: BatchArrived) -> list[FeedAction]:
        if self._next is None or event.number == self._next:
            return self._apply(event.number, event.batch)
        if event.number < self._next and self._told_before(event.batch):
            return []
        # A smaller number with a later time comes from an engine that counts anew.
        restarted = event.number < self._next
        self.gaps += not restarted
        orders = self._forget(restarted=True) if restarted else []
        self._held = [event]
        return [*orders, self._ask()]

    def _told_before(self, batch: EventBatch | None) -> bool:
        """Whether a batch with a smaller number is an old batch, not from a restarted engine."""
        return batch is not None and self._last is not None and batch.time <= self._last[1]

    def _take_replayed(self, event: BatchReplayed) -> list[FeedAction]:
        first, self._replayed = not self._replayed, True
        if not first or self._last is None:
            # Nothing is known yet, so the replay may begin anywhere; what follows must have no gap.
            if first or event.number == self._next:
                return self._apply(event.number, event.batch)
            return self._missed(event)
        number, time = self._last
        if event.number != number:
            return self._missed(event)
        if event.batch is not None and event.batch.time == time:
            return []  # the batch that was applied last: the numbers mean the same engine
        return [*self._forget(restarted=True), self._ask()]

    def _missed(self, event: BatchReplayed) -> list[FeedAction]:
        """The engine has not kept all that is missing: what is held is learnt anew from here on."""
        self.lost += 1
        return [*self._forget(restarted=False), *self._apply(event.number, event.batch)]

    def _replay_ended(self, *, complete: bool) -> list[FeedAction]:
        if complete and not self._replayed and self._last is not None:  # the last applied batch is unknown there
            return [*self._forget(restarted=True), self._ask()]
        orders: list[FeedAction] = []
        if not complete:
            self.lost += 1
            orders = self._forget(restarted=False)
        elif not self._replayed:  # the engine has published nothing yet
            self._next = 0
        self._replaying = False
        held, self._held = self._held, []
        for event in held:
            orders += self.handle(event)
        return orders

    def _apply(self, number: int, batch: EventBatch | None) -> list[FeedAction]:
        self._next = number + 1
        if batch is None:  # the batch's content is unknown
            self.lost += 1
            return self._forget(restarted=False, then=self._next)
        self._last = number, batch.time
        return [ApplyBatch(batch)]

    def _forget(self, *, restarted: bool, then: int | None = None) -> list[FeedAction]:
        self._next, self._last = then, None
        return [ForgetBlocks(restarted)]
