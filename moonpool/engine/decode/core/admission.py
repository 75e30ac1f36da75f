"""Admission: a request is accepted if the expected blocks fit and the promised time between tokens can be kept."""

import math
from collections.abc import Collection, Iterator
from typing import NamedTuple

from moonpool.base.scheduling.latency import decode_step_seconds
from moonpool.base.scheduling.state_machine import thin_out
from moonpool.engine.decode.core.batch_planner import BatchPlanner
from moonpool.engine.decode.core.events import ReserveBlocks
from moonpool.engine.decode.core.output_lengths import MEDIAN_PERCENTILE, OutputLengths
from moonpool.engine.decode.core.request import DecodeRequest, RequestStatus
from moonpool.engine.decode.core.state import DecodeState
from moonpool.engine.decode.core.tenant_shares import block_use, by_tenant, several_tenants, tenant_use
from moonpool.engine.decode.core.windows import expected_window_blocks

MAX_FORECAST_TIMES = 8
"""Most times that a forecast looks at, besides the start of the new request."""


class DecodeAdmission:
    """Accepts or refuses requests.

    Args:
        state: shared state of the scheduler.
        planner: has the batch and the waiting requests.
        lengths: predicts the length of answers.
    """

    def __init__(self, state: DecodeState, planner: BatchPlanner, lengths: OutputLengths) -> None:
        self._state = state
        self._planner = planner
        self._lengths = lengths

    def predicted_tbt_s(self, event: ReserveBlocks, others: Collection[DecodeRequest]) -> float:
        """Return seconds per step with this request and all others, running or promised, in the batch.

        If the request says when it starts, only the requests expected to be here at that time count. If promised
        requests start later and overlap, the longest step of these times counts.
        """
        batch, now = self._planner.batch, self._state.now
        running = RequestStatus.RUNNING  # a local name: most of many requests are in the batch
        apart = [request for request in others if request.status is not running and request not in batch]
        context = batch.context + event.request.tokens * event.request.width + sum(map(batch.context_of, apart))
        sequences = len(batch) + event.request.width + sum(request.num_seqs for request in apart)
        step_s = self._step_s(sequences, context)
        if not event.starts_in_s or not step_s:
            return step_s
        starts_at, most = now + event.starts_in_s, event.total_tokens - event.request.tokens
        later = [request.starts_at for request in apart if not request.is_started and request.starts_at > starts_at]
        times = [
            at
            for at in thin_out(later, MAX_FORECAST_TIMES)
            if not self._has_ended(0, most, (at - starts_at) / step_s, event.request.expected_tokens)
        ]
        return max([self._step_at(at, others, (sequences, context), step_s) for at in (starts_at, *times)])

    def _step_at(self, at: float, others: Collection[DecodeRequest], total: tuple[int, int], step_s: float) -> float:
        """Return seconds per step at time `at`, for what is expected to be here of the `total` sequences and tokens."""
        batch, (sequences, context) = self._planner.batch, total
        away = [request for request in others if self._is_away(request, at, step_s)]
        sequences -= sum([request.num_seqs for request in away])
        return self._step_s(sequences, context - sum(map(batch.context_of, away)))

    def _step_s(self, sequences: int, context: int) -> float:
        return decode_step_seconds(
            self._state.tracker.speeds, min(sequences, self._state.settings.max_num_seqs), context
        )

    def _is_away(self, request: DecodeRequest, at: float, step_s: float) -> bool:
        """Return whether a request has not started by time `at`, or its only sequence is expected to have ended."""
        now = self._state.now
        starts_at = now if request.is_started else max(request.starts_at, now)
        if at < starts_at or request.spec.width > 1:
            return at < starts_at
        tokens = self._planner.batch.context_of(request)
        made = max(0, tokens - request.spec.prompt_tokens)
        steps, told = (at - starts_at) / step_s, request.spec.expected_tokens
        return self._has_ended(made, request.total_tokens - tokens, steps, told)

    def _has_ended(self, made: int, most: int, steps: float, told: int) -> bool:
        """Return whether an answer is expected to end within some steps, with at most `most` further tokens."""
        return min(most, self._lengths.expected(made, MEDIAN_PERCENTILE, told=told) - made) <= steps

    def refuse(
        self, event: ReserveBlocks, request: DecodeRequest, tbt_s: float, others: Collection[DecodeRequest]
    ) -> tuple[str, str] | None:
        """Promise blocks for the prompt and return None; if refused, returns a reason and a sentence."""
        if event.max_queue_s is not None and (drain_s := self._planner.prompts.drain_s(others)) > event.max_queue_s:
            # The conductor did not know of other conductors' prompts: it plans again with the real queue (ADR 35).
            return "stale", f"the prompts here take {drain_s:.4g} s, at most {event.max_queue_s:.4g} s were expected"
        breaks = self._breaks_tbt(event, tbt_s, others) if event.tbt_slo_s else None
        return breaks or self._admit(request, others)

    def _breaks_tbt(
        self, event: ReserveBlocks, tbt_s: float, others: Collection[DecodeRequest]
    ) -> tuple[str, str] | None:
        """Return why a time between tokens could not be kept that the new or an earlier request was promised."""
        taken, most = self._planner.slots.num_running + self._planner.slots.num_kept, self._state.settings.max_num_seqs
        if taken + event.request.width > most:
            return "tbt_slo", f"{taken} of the {most} batch slots are taken, {event.request.width} are needed"
        limit = min([event.tbt_slo_s, *(request.tbt_slo_s for request in others if request.tbt_slo_s)])
        if tbt_s <= limit:  # contexts grow: checked with those of today alone, promises were broken (ADR 7)
            tbt_s = self._longest_step_s(event, tbt_s, others)
        if tbt_s > limit:
            return "tbt_slo", f"a token every {tbt_s:.4g} s is predicted, {limit:.4g} s is wanted or promised to others"
        return None

    def _longest_step_s(self, event: ReserveBlocks, step_s: float, others: Collection[DecodeRequest]) -> float:
        """Return seconds of the longest step while a request is here, if all grow and end as expected."""
        planner, now = self._planner, self._state.now
        steps_in = event.starts_in_s / step_s if step_s else 0.0
        spec = event.request
        growth = self._growth(spec.tokens - spec.prompt_tokens, event.total_tokens - spec.tokens, spec.expected_tokens)
        asked = RequestForecast(steps_in, steps_in + growth, spec.width, spec.tokens * spec.width)
        forecasts = [asked]
        for request in others:
            tokens, context = max(map(planner.batch.tokens_of, request.sequences)), planner.batch.context_of(request)
            waits = 0.0 if request.is_started or not step_s else max(0.0, request.starts_at - now) / step_s
            made, told = tokens - request.spec.prompt_tokens, request.spec.expected_tokens
            growth = self._growth(made, request.total_tokens - tokens, told)
            forecasts.append(RequestForecast(waits, waits + growth, request.num_seqs, context))
        worst = max([self._step_s(*size) for size in peak_steps(forecasts, asked)])
        return worst + planner.least_chunk_s

    def _growth(self, made: int, most: int, told: int) -> int:
        """Return steps that an answer with at most `most` further tokens is expected to be here for."""
        made = max(0, made)
        return max(0, min(most, self._lengths.expected(made, told=told) - made) - 1)

    def _admit(self, request: DecodeRequest, others: Collection[DecodeRequest]) -> tuple[str, str] | None:
        """Promise blocks for the prompt if the blocks expected later fit, too; else says why not."""
        [sequence], budget = request.sequences, self._state.budget
        settings, whole_from = self._state.settings, self._state.settings.first_windowed_block(sequence.tokens)
        reuse = request.asked.reuse
        held = budget.blocks.match_behind(sequence.keys, sequence.tokens // settings.block_size) if reuse else []
        new = settings.blocks_for(sequence.tokens) - len(held)
        cost = budget.cost(held, new)
        sequence.table.blocks, request.promised = held, new
        self._planner.update_expected(request)
        # Alone, a request may take the whole pool: nobody else is expected to need the rest.
        reserve = budget.watermark + self._expected_beside(request, others) if others else 0
        if budget.available < cost + reserve:
            needed = cost + request.expected_growth
            budget.expect(request, 0)
            return "no_decode_room", (
                f"no room for {needed} blocks, {budget.available} are free and not promised, "
                f"{max(0, reserve - request.expected_growth)} of them expected to be needed"
            )
        if (lacking := self._lacking_window_blocks(request, whole_from, others)) > 0:
            budget.expect(request, 0)
            return "no_decode_room", f"no room: {lacking} more window blocks would have to be free and not expected"
        budget.promise(request, held, new, whole_from)
        return None

    def _lacking_window_blocks(self, request: DecodeRequest, whole_from: int, others: Collection[DecodeRequest]) -> int:
        """Missing window blocks: for a prompt, and for what this request and others are expected to need later."""
        settings, budget = self._state.settings, self._state.budget
        if not settings.window_blocks:
            return 0
        [sequence] = request.sequences
        held, blocks = sequence.table.blocks, len(sequence.table.blocks) + request.promised
        needed = blocks - max(len(held), whole_from) + sum(map(budget.blocks.is_spare, held[whole_from:]))
        if others:
            most = request.num_seqs * (settings.window_blocks + 1) - (blocks - whole_from)
            needed += max(0, min(request.expected_growth, most))
            needed += sum(expected_window_blocks(other, settings) for other in others)
        return needed - budget.window_blocks_available

    def _expected_beside(self, request: DecodeRequest, others: Collection[DecodeRequest]) -> int:
        """Return blocks that an admission leaves free, because requests are expected to need the blocks later.

        If the request's tenant stays within the tenant's pool share, blocks that another tenant expects beyond that
        other tenant's share do not count. A tenant without blocks is left as many blocks as the tenant's largest
        preempted request needs: tenants that keep to their shares would never leave as many.
        """
        budget, requests = self._state.budget, [*others, request]
        if not several_tenants(requests):
            return budget.expected
        use = block_use(requests, self._state.settings.num_blocks)
        growth = tenant_use(requests, lambda other: other.expected_growth)
        if use.of(request) + growth.of(request) > use.level:
            return budget.expected
        counted = 0.0
        for tenant, queue in by_tenant(requests).items():
            growths = [other.expected_growth for other in queue]
            wanted, left = sum(growths), max(0.0, use.level - use.taken[tenant]) * queue[-1].spec.weight
            if not use.taken[tenant]:
                left = max(left, max(growths))
            counted += wanted if tenant == request.spec.tenant else min(wanted, left)
        return math.ceil(counted)


class RequestForecast(NamedTuple):
    """What a request is expected to add to the batch.

    Attributes:
        begins: first step, counted from now.
        ends: last step.
        sequences: number of sequences.
        context: tokens in all sequences at the first step; each further step adds a token to each sequence.
    """

    begins: float
    ends: float
    sequences: int
    context: int


def peak_steps(forecasts: list[RequestForecast], watched: RequestForecast) -> Iterator[tuple[int, int]]:
    """Return sequences and tokens of the steps in which a request ends, while `watched` is in the batch.

    The longest step is among these: between two ends every request grows and others only come.
    """
    incoming, sequences, at_zero = sorted(forecasts, reverse=True), 0, 0.0
    for forecast in sorted(forecasts, key=lambda forecast: forecast.ends):
        while incoming and incoming[-1].begins <= forecast.ends:
            come = incoming.pop()
            sequences, at_zero = sequences + come.sequences, at_zero + come.context - come.begins * come.sequences
        if watched.begins <= forecast.ends <= watched.ends:
            yield sequences, math.ceil(at_zero + forecast.ends * sequences)
        sequences -= forecast.sequences
        at_zero = at_zero - forecast.context + forecast.begins * forecast.sequences
