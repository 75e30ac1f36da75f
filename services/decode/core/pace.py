"""The promised times between tokens: which of them bind a step, who leaves the batch for them, and who may join it."""

from moonpool.cost import SpeedTracker, decode_step_seconds, prefill_seconds
from services.decode.core.batch import Batch
from services.decode.core.config import CoreConfig
from services.decode.core.request import Request


class Pace:
    """No step is longer than a promise of its members that can be kept.

    A promise can be kept where a step over its request alone would keep it. For others no batch is small enough, so
    nobody who was promised a time himself leaves for them. Those who were promised nothing leave for any promise.

    Args:
        config: of the core.
        batch: that takes the steps.
        tracker: predicts the engine's times.
    """

    def __init__(self, config: CoreConfig, batch: Batch, tracker: SpeedTracker) -> None:
        self._config = config
        self._batch = batch
        self._tracker = tracker

    def step_s(self, sequences: int, context: int) -> float:
        """Predicted seconds of a step."""
        return decode_step_seconds(self._tracker.speeds, sequences, context)

    def chunk_s(self, catching: list[Request], tokens: int = 1) -> float:
        """Predicted seconds of so many tokens of those who catch up; 0 where nobody does."""
        longest = max((member.computed for request in catching for member in request.members), default=0)
        return prefill_seconds(self._tracker.speeds, tokens, longest) if catching else 0.0

    @property
    def _now_s(self) -> float:
        return self.step_s(len(self._batch), self._batch.context)

    @property
    def limit_s(self) -> float:
        """The strictest promise in the batch that can be kept; 0 = there is none."""
        strictest = self._batch.tbt_slo_s
        if not strictest or self._now_s <= strictest:
            return strictest
        return self._strictest(self._batch.requests)

    def _strictest(self, requests: list[Request]) -> float:
        return min((request.tbt_slo_s for request in requests if self._can_keep(request)), default=0.0)

    def _can_keep(self, request: Request) -> bool:
        """Whether it was promised a time that a step over it alone keeps."""
        alone_s = self.step_s(len(request.members), self._batch.context_of(request))
        return bool(request.tbt_slo_s) and alone_s <= request.tbt_slo_s

    def leaves(self) -> Request | None:
        """Who leaves the batch because its step is too long; None when nobody need.

        Those who were promised nothing go first, then those who were; each time last come of the lowest priority first.
        """
        strictest = self._batch.tbt_slo_s
        if not strictest or self._now_s <= strictest:
            return None
        requests = self._batch.requests
        free = [request for request in requests if not request.tbt_slo_s]
        limit = self._strictest(requests)
        leaving = free or (requests if limit and self._now_s > limit else [])
        return max(leaving, key=lambda request: request.turn, default=None)

    def may_join(self, request: Request, catching: list[Request]) -> bool:
        """Whether the times between tokens leave room for one more request in the batch.

        One that was promised a time does not ask those who would leave for it: who came later, or was promised nothing.
        """
        batch = self._batch
        count, context = len(request.members), batch.context_of(request)
        if not request.tbt_slo_s:
            step_s = self.step_s(len(batch) + count, batch.context + context) + self.chunk_s(catching)
            return not batch.tbt_slo_s or step_s <= batch.tbt_slo_s
        before = [it for it in batch.requests if it.tbt_slo_s and it.turn < request.turn] if batch.tbt_slo_s else []
        limit = self._strictest([*before, request])
        count += sum(len(it.members) for it in before)
        return not limit or self.step_s(count, context + sum(map(batch.context_of, before))) <= limit

    def chunk_tokens(self, catching: list[Request]) -> int:
        """Tokens that are computed beside the batch: fewer where its time was promised, none if that leaves no room."""
        tokens, strictest, step_s = self._config.step_tokens, self._batch.tbt_slo_s, self._now_s
        while strictest and tokens > 1 and step_s + self.chunk_s(catching, tokens) > strictest:
            tokens //= 2
        limit = self.limit_s
        return 0 if limit and step_s + self.chunk_s(catching, tokens) > limit else tokens
