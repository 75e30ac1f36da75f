"""Promised times between tokens (TBT): who may join the batch, who leaves it, and how much is computed beside it."""

from moonpool.base.scheduling.latency import decode_step_seconds, prefill_seconds
from moonpool.engine.decode.core.batch import RunningBatch
from moonpool.engine.decode.core.request import DecodeRequest
from moonpool.engine.decode.core.state import DecodeState
from moonpool.engine.decode.core.tenant_shares import TenantUse, several_tenants, tenant_use


class TbtLimiter:
    """Keeps each step within the promised times between tokens.

    A promise can be kept if a step with this request alone would keep the promise. Otherwise no batch is small enough,
    so a request with a promise does not leave for such a request. A request without promise leaves for any promise.

    Args:
        state: shared state of the scheduler.
        batch: takes the steps.
    """

    def __init__(self, state: DecodeState, batch: RunningBatch) -> None:
        self._state = state
        self._batch = batch

    def step_s(self, sequences: int, context: int) -> float:
        """Return a step's predicted seconds."""
        return decode_step_seconds(self._state.tracker.speeds, sequences, context)

    def chunk_s(self, recomputing: list[DecodeRequest], tokens: int = 1) -> float:
        """Return predicted seconds for `tokens` recomputed tokens; 0 if no request recomputes."""
        longest = max((sequence.computed for request in recomputing for sequence in request.sequences), default=0)
        return prefill_seconds(self._state.tracker.speeds, tokens, longest) if recomputing else 0.0

    @property
    def _now_s(self) -> float:
        return self.step_s(len(self._batch), self._batch.context)

    @property
    def limit_s(self) -> float:
        """The strictest promise in the batch that can be kept, seconds; 0 = none."""
        strictest = self._batch.tbt_slo_s
        if not strictest or self._now_s <= strictest:
            return strictest
        return self._strictest(self._batch.requests)

    def _strictest(self, requests: list[DecodeRequest]) -> float:
        return min((request.tbt_slo_s for request in requests if self._can_keep(request)), default=0.0)

    def _can_keep(self, request: DecodeRequest) -> bool:
        """Return whether the request has a promise that a step with this request alone keeps."""
        alone_s = self.step_s(len(request.sequences), self._batch.context_of(request))
        return bool(request.tbt_slo_s) and alone_s <= request.tbt_slo_s

    def next_to_leave(self) -> DecodeRequest | None:
        """Return the request that leaves the batch because the step is too long; None if no request need leave.

        Requests without promise leave first, then requests with a promise. Each time, the tenant whose requests take
        most step time per weight gives up the last request.
        """
        strictest = self._batch.tbt_slo_s
        if not strictest or self._now_s <= strictest:
            return None
        requests = self._batch.requests
        free = [request for request in requests if not request.tbt_slo_s]
        limit = self._strictest(requests)
        leaving = free or (requests if limit and self._now_s > limit else [])
        use = tenant_use(requests, self._own_s) if several_tenants(leaving) else TenantUse({})
        return max(leaving, key=use.order, default=None)

    def _own_s(self, request: DecodeRequest) -> float:
        """Return seconds that a request adds to a step."""
        return self.step_s(len(request.sequences), self._batch.context_of(request)) - self.step_s(0, 0)

    def may_join(self, request: DecodeRequest, recomputing: list[DecodeRequest]) -> bool:
        """Return whether one more request fits into the batch within the promised times.

        A request with a promise may displace requests that would leave: later requests, and requests without a promise.
        """
        batch = self._batch
        count, context, key = len(request.sequences), batch.context_of(request), request.order_key
        if not request.tbt_slo_s:
            step_s = self.step_s(len(batch) + count, batch.context + context) + self.chunk_s(recomputing)
            return not batch.tbt_slo_s or step_s <= batch.tbt_slo_s
        earlier = (other for other in batch.requests if other.tbt_slo_s and other.order_key < key)
        before = list(earlier) if batch.tbt_slo_s else []
        limit = self._strictest([*before, request])
        count += sum(len(other.sequences) for other in before)
        return not limit or self.step_s(count, context + sum(map(batch.context_of, before))) <= limit

    def chunk_tokens(self, recomputing: list[DecodeRequest]) -> int:
        """Return tokens recomputed beside the batch in a step: fewer if times were promised, 0 if no token fits."""
        tokens, strictest, step_s = self._state.settings.chunked_prefill_size, self._batch.tbt_slo_s, self._now_s
        while strictest and tokens > 1 and step_s + self.chunk_s(recomputing, tokens) > strictest:
            tokens //= 2
        limit = self.limit_s
        return 0 if limit and step_s + self.chunk_s(recomputing, tokens) > limit else tokens
