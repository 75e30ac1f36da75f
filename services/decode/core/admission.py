"""Admission: a request is accepted if its expected blocks fit and the promised time between tokens can be kept."""

import math
from collections.abc import Collection, Iterator
from typing import NamedTuple

from moonpool.scheduling.latency import SpeedTracker, decode_step_seconds
from moonpool.scheduling.state_machine import thin_out
from services.decode.core.batch_planner import MEDIAN_PERCENTILE, BatchPlanner, OutputLengths
from services.decode.core.block_budget import BlockBudget
from services.decode.core.events import ReserveBlocks
from services.decode.core.request import DecodeRequest, RequestStatus
from services.decode.core.settings import DecodeSettings


class RequestForecast(NamedTuple):
    """What is expected of a request. Steps are counted from now on."""

    begins: float
    """Its first step."""
    ends: float
    """Its last step."""
    sequences: int
    context: int
    """Tokens of all its sequences in its first step; each has one more with each further one."""


def peak_steps(lives: list[RequestForecast], watched: RequestForecast) -> Iterator[tuple[int, int]]:
    """Sequences and tokens of the steps in which somebody's last one is, while `watched` is there.

    No other step is longer than all of these: between two ends all that is there grows, and others only come.
    """
    coming, sequences, at_zero = sorted(lives, reverse=True), 0, 0.0
    for life in sorted(lives, key=lambda life: life.ends):
        while coming and coming[-1].begins <= life.ends:
            come = coming.pop()
            sequences, at_zero = sequences + come.sequences, at_zero + come.context - come.begins * come.sequences
        if watched.begins <= life.ends <= watched.ends:
            yield sequences, math.ceil(at_zero + life.ends * sequences)
        sequences, at_zero = sequences - life.sequences, at_zero - life.context + life.begins * life.sequences


MAX_FORECAST_TIMES = 8
"""Times at which a forecast looks at most, beside the start of what is asked about."""


class DecodeAdmission:
    """Admits requests, or says why not.

    Args:
        config: of the core.
        room: counts blocks.
        planner: knows the batch and those who wait.
        tracker: predicts the engine's times.
        lengths: says how long answers become.
    """

    def __init__(
        self,
        config: DecodeSettings,
        room: BlockBudget,
        planner: BatchPlanner,
        tracker: SpeedTracker,
        lengths: OutputLengths,
    ) -> None:
        self._config = config
        self._room = room
        self._planner = planner
        self._tracker = tracker
        self._lengths = lengths

    def predicted_tbt_s(self, event: ReserveBlocks, others: Collection[DecodeRequest], now: float) -> float:
        """Seconds per step with this request in the batch, and all that are here or were promised room.

        Where it is told when the request starts: with those that are expected to be here then; or the longest, while
        this one is expected to be here, when others start that were promised room before and come later.
        """
        batch = self._planner.batch
        running = RequestStatus.RUNNING  # a local name: there are many, and few are not in the batch
        apart = [request for request in others if request.state is not running and request not in batch]
        context = batch.context + event.tokens * event.width + sum(map(batch.context_of, apart))
        sequences = len(batch) + event.width + sum(request.places for request in apart)
        step_s = self._step_s(sequences, context)
        if not event.starts_in_s or not step_s:
            return step_s
        starts_at, most = now + event.starts_in_s, event.total_tokens - event.tokens
        later = [request.starts_at for request in apart if not request.is_started and request.starts_at > starts_at]
        times = [
            at for at in thin_out(later, MAX_FORECAST_TIMES) if not self._has_ended(0, most, (at - starts_at) / step_s)
        ]
        return max([self._step_at(at, others, (sequences, context), now, step_s) for at in (starts_at, *times)])

    def _step_at(
        self, at: float, others: Collection[DecodeRequest], everybody: tuple[int, int], now: float, step_s: float
    ) -> float:
        """Seconds per step at a time over those of everybody who are expected to be here then."""
        batch, (sequences, context) = self._planner.batch, everybody
        away = [request for request in others if self._is_away(request, at, now, step_s)]
        sequences -= sum([request.places for request in away])
        return self._step_s(sequences, context - sum(map(batch.context_of, away)))

    def _step_s(self, sequences: int, context: int) -> float:
        return decode_step_seconds(self._tracker.speeds, min(sequences, self._config.max_batch), context)

    def _is_away(self, request: DecodeRequest, at: float, now: float, step_s: float) -> bool:
        """Whether a request has not started by a time, or its only sequence is expected to have ended by then."""
        starts_at = now if request.is_started else max(request.starts_at, now)
        if at < starts_at or request.width > 1:
            return at < starts_at
        tokens = self._planner.batch.context_of(request)
        made = max(0, tokens - request.prompt_tokens)
        return self._has_ended(made, request.total_tokens - tokens, (at - starts_at) / step_s)

    def _has_ended(self, made: int, most: int, steps: float) -> bool:
        """Whether an answer is expected to end within some steps, of which `most` more tokens are wanted at most."""
        return min(most, self._lengths.expected(made, MEDIAN_PERCENTILE) - made) <= steps

    def refuse(
        self, event: ReserveBlocks, request: DecodeRequest, tbt_s: float, others: Collection[DecodeRequest], now: float
    ) -> tuple[str, str] | None:
        """Promises blocks for the prompt; or returns why not, as a reason and in words."""
        breaks = self._breaks_tbt(event, tbt_s, others, now) if event.tbt_slo_s else None
        return breaks or self._admit(request, alone=not others)

    def _breaks_tbt(
        self, event: ReserveBlocks, tbt_s: float, others: Collection[DecodeRequest], now: float
    ) -> tuple[str, str] | None:
        """Why a promised time between tokens could not be kept: the new request's, or an earlier one's."""
        taken, places = self._planner.places_taken + sum(self._planner.seats_kept.values()), self._config.max_batch
        if taken + event.width > places:
            return "tbt_slo", f"{taken} of the {places} places of a step are taken, {event.width} are needed"
        limit = min([event.tbt_slo_s, *(request.tbt_slo_s for request in others if request.tbt_slo_s)])
        if tbt_s <= limit:
            tbt_s = self._longest_step_s(event, tbt_s, others, now)
        if tbt_s > limit:
            return "tbt_slo", f"a token every {tbt_s:.4g} s is predicted, {limit:.4g} s is wanted or promised to others"
        return None

    def _longest_step_s(
        self, event: ReserveBlocks, step_s: float, others: Collection[DecodeRequest], now: float
    ) -> float:
        """Seconds of the longest step while a request is here, if all grow and end as is expected."""
        planner = self._planner
        steps_in = event.starts_in_s / step_s if step_s else 0.0
        growth = self._growth(event.tokens - event.prompt_tokens, event.total_tokens - event.tokens)
        asked = RequestForecast(steps_in, steps_in + growth, event.width, event.tokens * event.width)
        lives = [asked]
        for request in others:
            tokens, context = max(map(planner.batch.tokens_of, request.members)), planner.batch.context_of(request)
            waits = 0.0 if request.is_started or not step_s else max(0.0, request.starts_at - now) / step_s
            growth = self._growth(tokens - request.prompt_tokens, request.total_tokens - tokens)
            lives.append(RequestForecast(waits, waits + growth, request.places, context))
        worst = max([self._step_s(*size) for size in peak_steps(lives, asked)])
        return worst + planner.least_chunk_s

    def _growth(self, made: int, most: int) -> int:
        """Steps that an answer is expected to be here for, of which `most` more tokens are wanted at most."""
        made = max(0, made)
        return max(0, min(most, self._lengths.expected(made) - made) - 1)

    def _admit(self, request: DecodeRequest, *, alone: bool) -> tuple[str, str] | None:
        """Promises blocks for the prompt if what is expected to be needed later fits as well; else says why not."""
        [member], room = request.members, self._room
        held = room.blocks.match(member.keys)
        new = self._config.blocks_for(member.tokens) - len(held)
        cost = room.cost(held, new)
        member.table, request.promised = held, new
        self._planner.expect(request)
        reserve = 0 if alone else room.watermark + room.claims
        if room.spare < cost + reserve:
            needed = cost + request.claim
            room.claim(request, 0)
            return "no_decode_room", (
                f"no room for {needed} blocks, {room.spare} are free and not promised, "
                f"{max(0, reserve - request.claim)} of them expected to be needed"
            )
        room.promise(request, held, new)
        return None
